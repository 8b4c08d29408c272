"""The wall of prints, and the upload."""

from __future__ import annotations

from django.core.files.uploadedfile import UploadedFile
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBadRequest, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from darkroom.gallery.models import LONGEST_NAME, Photograph
from darkroom.gallery.tasks import develop
from pgqueue.contrib.django import TaskResultDoesNotExist


def wall(request: HttpRequest) -> HttpResponse:
    """Every photograph, with its print or with what has become of its job."""
    return render(request, "gallery/wall.html", {"photographs": [described(one) for one in photographs()]})


def state(request: HttpRequest) -> JsonResponse:
    """The same for programs."""
    return JsonResponse({"photographs": [described(one) for one in photographs()]})


@csrf_exempt  # for curl
@require_POST
def upload(request: HttpRequest) -> HttpResponse:
    """Store a photograph and enqueue its job. The request is one transaction (ATOMIC_REQUESTS): both, or neither."""
    file = request.FILES.get("photograph")
    if not isinstance(file, UploadedFile):
        return HttpResponseBadRequest(
            "Send the picture as the file `photograph` of a form.\n", content_type="text/plain"
        )
    photograph = Photograph.objects.create(name=(file.name or "photograph")[:LONGEST_NAME], negative=file.read())
    photograph.job = develop.enqueue(photograph.pk).id
    photograph.save(update_fields=["job"])
    if request.POST.get("then") == "fail":
        raise Http404("something else of this request went wrong")
    return redirect("wall")


def show(request: HttpRequest, pk: int) -> HttpResponse:
    """A print."""
    photograph = get_object_or_404(Photograph, pk=pk, print__isnull=False)
    return HttpResponse(bytes(photograph.print or b""), content_type="image/jpeg")


def photographs() -> list[Photograph]:
    """Newest first, without the pictures themselves."""
    return list(Photograph.objects.order_by("-pk").only("pk", "name", "job", "fence"))


def described(photograph: Photograph) -> dict[str, object]:
    """A photograph and what the task framework says of its job: nothing any more, when the archive has forgotten it."""
    known = {"pk": photograph.pk, "name": photograph.name, "developed": photograph.fence > 0}
    try:
        result = develop.get_result(photograph.job)
    except TaskResultDoesNotExist:
        return {**known, "status": "FORGOTTEN", "attempts": 0, "error": ""}
    error = result.errors[-1].traceback.strip().splitlines()[-1] if result.errors else ""
    return {**known, "status": str(result.status), "attempts": result.attempts, "error": error}

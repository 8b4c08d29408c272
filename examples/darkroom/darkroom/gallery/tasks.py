"""What workers do. Django's own decorator would do as well: ours takes retries, timeouts and keys."""

from __future__ import annotations

import io

from PIL import Image, ImageOps

import pgqueue
from darkroom.gallery.models import Photograph
from pgqueue.contrib.django import task

SIZE = 320


@task(queue_name="photographs", max_attempts=3, retry=pgqueue.Delays(0.2, 0.4), timeout=60)
def develop(photograph_id: int) -> str:
    """Make the print of a photograph.

    It may run twice, when a worker dies before it could say that it is done. So it gives the same result again, and writes
    with the fencing token of its run: a worker that hung, and wakes up when another one has the job, changes nothing.
    """
    photograph = Photograph.objects.get(pk=photograph_id)
    made = developed(bytes(photograph.negative))
    token = pgqueue.current_job().token
    Photograph.objects.filter(pk=photograph_id, fence__lt=token).update(print=made, fence=token)
    return f"{len(made)} bytes"


def developed(negative: bytes) -> bytes:
    """The picture upright, in shades of grey, as a JPEG."""
    with Image.open(io.BytesIO(negative)) as picture:
        ImageOps.exif_transpose(picture, in_place=True)
        grey = ImageOps.grayscale(picture)
        grey.thumbnail((SIZE, SIZE))
    output = io.BytesIO()
    grey.save(output, "JPEG", quality=90)
    return output.getvalue()

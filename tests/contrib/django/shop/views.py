"""Pages that enqueue."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse

from tests.contrib.django.shop.models import Order
from tests.contrib.django.shop.tasks import send_receipt


def order(request: HttpRequest, number: int) -> HttpResponse:
    """An order and its job."""
    Order.objects.create(number=number)
    return HttpResponse(send_receipt.enqueue(number).id)


def broken(request: HttpRequest, number: int) -> HttpResponse:
    """The same, and then something goes wrong."""
    order(request, number)
    raise RuntimeError("after the enqueue")

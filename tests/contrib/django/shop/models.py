"""What the shop keeps."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """An order, and how often its receipt was sent."""

    number = models.IntegerField(unique=True)
    receipts = models.IntegerField(default=0)

    def __str__(self) -> str:
        return f"order {self.number}"


class Note(models.Model):
    """Something that a task has left behind."""

    text = models.TextField()

    def __str__(self) -> str:
        return self.text

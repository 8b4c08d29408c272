"""A photograph, and the print that is made of it."""

from __future__ import annotations

from django.db import models

LONGEST_NAME = 200


class Photograph(models.Model):
    """`job` is the id of the job that develops it; `fence` the token of the run whose print is stored."""

    name = models.CharField(max_length=LONGEST_NAME)
    negative = models.BinaryField()
    print = models.BinaryField(null=True)
    job = models.CharField(max_length=64)
    fence = models.BigIntegerField(default=0)
    uploaded_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.name

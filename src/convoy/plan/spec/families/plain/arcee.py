"""Arcee."""

from __future__ import annotations

from convoy.plan.spec.family import Family

ROWS = (Family("arcee", counted=True, plain_attention=True),)

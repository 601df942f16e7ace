"""Granite."""

from __future__ import annotations

from convoy.plan.spec.family import Family

ROWS = (Family("granite", counted=True, plain_attention=True),)

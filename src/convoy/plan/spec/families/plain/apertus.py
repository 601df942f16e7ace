"""Apertus."""

from __future__ import annotations

from convoy.plan.spec.family import Family

ROWS = (Family("apertus", counted=True),)

"""Fixtures of the cluster room."""

from __future__ import annotations

from support.odd_hub import hub, manifest, model

__all__ = ["hub", "manifest", "model"]

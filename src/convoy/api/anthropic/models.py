"""Describe the served models in Anthropic's form."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from convoy.api.anthropic.shapes import ModelInfo, ModelPage
from convoy.api.service import ServedModel


def model_info(model: ServedModel) -> ModelInfo:
    """Return one model. Prompt and answer share its context, so both have the same limit."""
    created = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ModelInfo(model.name, model.name, created, model.max_context, model.max_context)


def model_page(models: Sequence[ServedModel]) -> ModelPage:
    """Return all models."""
    names = [model.name for model in models]
    return ModelPage(
        [model_info(model) for model in models], *((names[0], names[-1]) if names else (None, None))
    )

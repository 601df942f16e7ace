"""Describe the served models in Anthropic's form."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from convoy.api.anthropic.shapes import ModelInfo, ModelPage, page_of
from convoy.api.service import ServedModel


def model_info(model: ServedModel) -> ModelInfo:
    """Return one model. Prompt and answer share its context, so both have the same limit."""
    created = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ModelInfo(model.name, model.name, created, model.max_context, model.max_context)


def model_page(models: Sequence[ServedModel]) -> ModelPage:
    """Return all models."""
    return page_of([model_info(model) for model in models])

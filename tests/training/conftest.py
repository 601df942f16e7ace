"""The generators live beside the package, in training/, and the shipped files inside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def models() -> Path:
    """Return the folder of the bundled models."""
    return ROOT / "src" / "convoy" / "models"


@pytest.fixture(scope="session")
def shipped(models: Path) -> list[dict[str, Any]]:
    """Return the lines of questions.jsonl."""
    return [
        json.loads(line) for line in (models / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    ]

"""`convoy verify` for a tiny model of every family. Not named test_*: `make test-verify` runs it."""

from __future__ import annotations

import pytest

from convoy.cli import main
from convoy.model.selfcheck import EXACT, PLAIN, W8A8
from support.tiny_models import KINDS, Models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_family_has_its_certificate(models: Models, kind: str) -> None:
    assert main.run(["verify", str(models.directory(kind)), "--kernel", EXACT, "--threads", "1"]) == 0


@pytest.mark.parametrize("kernel", [PLAIN, W8A8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_family_has_its_certificate_under_other_kernels(models: Models, kind: str, kernel: str) -> None:
    few = ["--cuts", "1", "--prompts", "2", "--threads", "1"]
    assert main.run(["verify", str(models.directory(kind)), "--kernel", kernel, *few]) == 0


@pytest.mark.parametrize("model", ["demo-mini", "demo"])
def test_a_bundled_model_has_its_certificate(model: str) -> None:
    assert main.run(["verify", model, "--threads", "1"]) == 0

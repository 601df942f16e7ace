"""`convoy verify` for a tiny model of every family. Not named test_*: `make test-verify` runs it."""

from __future__ import annotations

import pytest

from convoy.cli import main
from convoy.config.kernels import EXACT, PLAIN
from convoy.plan.spec.registry import FAMILIES
from support.cases import cases
from support.tiny_models import KINDS, Models

# over a tile, under a block, and one token; their chunks reach over blocks and windows
SOME = ["--prompts", "3", "--tokens", "4", "--threads", "1"]
# Two prompts, and one cut of each kind: into two and three, in both layouts.
FEW = ["--prompts", "2", "--tokens", "3", "--threads", "1", "--cuts", "1"]
# The cuts alone that Convoy makes for two and three equal members.
PLANNED = [*FEW[:-1], "0"]
WHOLE_LAYERS = {
    *("qwen3_5", "qwen3_5 nested", "qwen3_5_moe", "deepseek_v4"),
    *("cohere", "olmo2", "olmo3", "olmoe"),
}
# Variants of a family, and families whose layers are built as those of others.
ALIKE = {
    *("phi4", "gemma3 capped", "gemma3 nested", "qwen3_5 nested", "qwen2", "mistral"),
    *(kind for kind in KINDS if kind in FAMILIES and FAMILIES[kind].counted),
}
DISTINCT = [kind for kind in KINDS if kind not in ALIKE]
# Experts, other residuals, and an activation with numbers of its own.
SHARED_OUT = [*DISTINCT, "mixtral", "granite", "apertus", *sorted(WHOLE_LAYERS - {*DISTINCT})]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


# the longest comes first, so that no worker waits for it at the end
@pytest.mark.parametrize("model", ["demo", "demo-mini"])
def test_a_bundled_model_has_its_certificate(model: str) -> None:
    assert main.run(["verify", model, *SOME]) == 0


@pytest.mark.parametrize("kind", cases(KINDS, DISTINCT.__contains__))
def test_a_family_has_its_certificate(models: Models, kind: str) -> None:
    assert main.run(["verify", str(models.directory(kind)), "--kernel", EXACT, *SOME]) == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in ALIKE])
def test_a_family_with_the_layers_of_another_has_its_certificate(models: Models, kind: str) -> None:
    assert main.run(["verify", str(models.directory(kind)), "--kernel", EXACT, *FEW]) == 0


def cuts_for(kind: str) -> list[str]:
    """Return the options of a certificate beside that of every cut: only one family has both layouts."""
    return FEW if kind == DISTINCT[0] else PLANNED


@pytest.mark.parametrize("kind", DISTINCT)
def test_a_family_has_its_certificate_under_the_plain_kernel(models: Models, kind: str) -> None:
    assert main.run(["verify", str(models.directory(kind)), "--kernel", PLAIN, *cuts_for(kind)]) == 0


@pytest.mark.parametrize("kind", SHARED_OUT)
def test_a_family_has_its_certificate_on_ranks_or_is_refused(
    models: Models, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main.run(
        ["verify", str(models.directory(kind)), "--kernel", EXACT, "--ranks", "2", *cuts_for(kind)]
    )
    assert (code != 0) == (kind in WHOLE_LAYERS)
    # a certificate that fails is shown as a table, and no error
    assert ("error: " in capsys.readouterr().err) == (kind in WHOLE_LAYERS)

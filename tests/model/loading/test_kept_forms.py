"""Matrices in the form of their file: the bits of the unpacked float32 model, in the memory of the file."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.linear import packed_available
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import StageAssignment
from support.tiny_models import KINDS, Chain, Models, Prompt

pytestmark = pytest.mark.skipif(not packed_available(), reason="no packed linears here")


def widened(source: ModelSource, path: Path) -> ModelSource:
    """Return a copy of a model in safetensors with every float in float32."""
    shutil.copytree(source.path, path)
    tensors = load_file(path / "model.safetensors")
    wide = {n: t.to(torch.float32) if t.is_floating_point() else t for n, t in tensors.items()}
    save_file(wide, path / "model.safetensors", metadata={"format": "pt"})
    config = (path / "config.json").read_text(encoding="utf-8")
    (path / "config.json").write_text(config.replace('"bfloat16"', '"float32"'), encoding="utf-8")
    return ModelSource.resolve(str(path))


def stages(source: ModelSource, *cuts: int) -> list[HostStage]:
    limits = [0, *cuts, source.spec.num_layers]
    pairs = list(itertools.pairwise(limits))
    return [
        HostStage.load(
            source,
            StageAssignment(f"m{i}", start, end, i == 0, i == len(pairs) - 1),
            StageOptions(require_tags=False),
        )
        for i, (start, end) in enumerate(pairs)
    ]


def assert_planned(stage: HostStage, source: ModelSource) -> None:
    """Compare the bytes that a plan predicts with those that the stage holds."""
    mine = stage.assignment
    planned = source.spec.weight_bytes(
        mine.start, mine.end, embed=mine.embed, output=mine.output, dtype=stage.options.kernel
    )
    assert stage.weight_bytes == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_two_byte_matrices_stay_and_give_the_bits_of_float32(
    models: Models, prompt: Prompt, tmp_path: Path, kind: str
) -> None:
    source = models.source(kind, dtype=torch.bfloat16)
    wide = widened(source, tmp_path / "wide")
    kept, expected = stages(source), stages(wide)
    tokens = prompt(40)
    (whole,) = Chain(expected).run((0, tokens))
    (found,) = Chain(kept).run((0, tokens))
    assert torch.equal(found, whole)
    assert_planned(kept[0], source)
    assert_planned(expected[0], wide)
    if kind == "even":
        # the outputs of the others fill no panels
        assert kept[0].weight_bytes < 0.51 * expected[0].weight_bytes

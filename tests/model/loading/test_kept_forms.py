"""Matrices in the form of their file: the bits of the unpacked float32 model, in the memory of the file."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from convoy.model.backends.host.native_layers import NativeLayers
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.native.library import native_library, why_no_native
from convoy.model.kernels.registry import own_form
from convoy.model.stage import StageOptions
from convoy.plan.span import Span
from convoy.plan.spec.sharding import Shard, rank_bytes
from convoy.wire.messages.control import StageAssignment
from support.compiled import nothing_compiled
from support.tiny_models import KINDS, Chain, Models, Prompt, Threads

pytestmark = pytest.mark.skipif(
    native_library() is None, reason=f"nothing is compiled here: {why_no_native()}"
)


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


def test_compiled_layers_take_stored_linears_with_the_bits_of_the_parts(
    models: Models, prompt: Prompt, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stage,) = stages(models.source("even", dtype=torch.bfloat16))
    ran: list[bool] = []
    run = NativeLayers.run

    def counted(native: NativeLayers, *given: Any) -> torch.Tensor | None:
        found = run(native, *given)
        ran.append(found is not None)
        return found

    def decode() -> list[torch.Tensor]:
        chain = Chain([stage])
        chain.run((0, prompt(40)), (1, prompt(9)))
        return [*chain.run((0, [1])), *chain.run((0, [2]), (1, [3]))]

    with monkeypatch.context() as without:
        without.setattr(NativeLayers, "run", lambda *_: None)
        expected = decode()
    monkeypatch.setattr(NativeLayers, "run", counted)
    for count in (1, 2):
        threads(count)
        assert all(map(torch.equal, decode(), expected))
    assert ran.count(True) == 4


def test_ranks_cut_kept_matrices_as_they_cut_tensors(models: Models, tmp_path: Path) -> None:
    source = models.source("even", dtype=torch.bfloat16)
    wide = widened(source, tmp_path / "wide")
    whole = StageAssignment("a", 0, source.spec.num_layers, True, True)
    span = Span(0, source.spec.num_layers, output=True)
    for rank in range(2):
        shard, options = Shard(rank, 2), StageOptions(require_tags=False)
        kept, expected = (HostStage.load(one, whole, options, shard=shard) for one in (source, wide))
        for mine, other in zip(kept.linears, expected.linears, strict=True):
            assert torch.equal(mine.dense()[0], other.dense()[0])
        assert kept.weight_bytes == rank_bytes(source.spec, span, "exact-f32", 2)


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


def test_without_compiled_code_a_stage_unpacks_to_the_same_bits_and_the_bytes_of_its_plan(
    models: Models, prompt: Prompt
) -> None:
    source, tokens = models.source("even", dtype=torch.bfloat16), prompt(40)
    (expected,) = Chain(stages(source, 2)).run((0, tokens))
    with nothing_compiled():
        unpacked, form = stages(source, 2), own_form("exact-f32")
        (found,) = Chain(unpacked).run((0, tokens))
    assert torch.equal(found, expected)
    for stage in unpacked:
        mine = stage.assignment
        held, kept = (
            source.spec.weight_bytes(mine.start, mine.end, embed=mine.embed, output=mine.output, dtype=word)
            for word in (form, "exact-f32")
        )
        assert stage.weight_bytes == held > 1.9 * kept
        assert stage.weight_share == 1.0

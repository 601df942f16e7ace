"""Weights that are rounded as they load: the bits, the bytes and the refusals of a written checkpoint."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from convoy.config.kernels import EXACT, QuantizeFormat
from convoy.errors import ModelError
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.linear import packed_available
from convoy.model.kernels.registry import own_form
from convoy.model.quantize.checkpoint import quantize
from convoy.model.stage import StageOptions
from convoy.plan.spec.sharding import Shard
from convoy.wire.messages.control import StageAssignment
from support.cases import cases
from support.compiled import nothing_compiled
from support.odd_models import make_odd_llama
from support.quantised_models import Writer, library_model, mlx, mxfp4, write, write_gguf
from support.thread_collective import RankStages
from support.tiny_models import Chain

pytestmark = pytest.mark.skipif(not packed_available(), reason="exact mode needs oneDNN's packed linears")


def as_it_is(_writer: Writer) -> None:
    """Round nothing."""


def make_source(kind: str, path: Path) -> ModelSource:
    """Return a tiny model: in float32, with packed stacks of experts, or as a GGUF file."""
    if kind == "gguf":
        return ModelSource.resolve(str(write_gguf(path, Writer(library_model("llama")), "Q8_0").quantised))
    if kind == "gpt_oss":
        return ModelSource.resolve(str(write(path, kind, mxfp4).quantised))
    if kind == "qwen3_moe":
        return ModelSource.resolve(str(write(path, kind, mlx(8, 64)).quantised))
    return ModelSource.resolve(str(write(path, kind, as_it_is).dense))


def stages(source: ModelSource, kernel: str, *cuts: int) -> list[HostStage]:
    pairs = list(itertools.pairwise([0, *cuts, source.spec.num_layers]))
    return [
        HostStage.load(
            source,
            StageAssignment(f"m{number}", start, end, number == 0, number == len(pairs) - 1),
            StageOptions(kernel=kernel, require_tags=False),
        )
        for number, (start, end) in enumerate(pairs)
    ]


def logits(chain: list[HostStage]) -> list[torch.Tensor]:
    """Return the logits of a chunk beside another one, and of a decode."""
    run = Chain(chain)
    return [*run.run((0, list(range(5, 30))), (1, [3, 4, 5])), *run.run((0, [7]), (1, [9]))]


KINDS = ("llama", "tied", "qwen3_moe", "gguf")
# Each kind and each form
QUICK = [("tied", "q4"), ("qwen3_moe", "q4"), ("gguf", "q8")]


@pytest.mark.parametrize(("kind", "form"), cases(itertools.product(KINDS, ("q4", "q8")), QUICK.__contains__))
def test_a_model_rounded_at_load_has_the_bits_of_the_checkpoint_that_quantize_writes(
    tmp_path: Path, kind: str, form: QuantizeFormat
) -> None:
    source = make_source(kind, tmp_path / "source")
    quantize(source, form, tmp_path / "out")
    written = stages(ModelSource.resolve(str(tmp_path / "out")), EXACT)
    whole, cut = stages(source, f"exact-{form}"), stages(source, f"exact-{form}", 1)
    expected = logits(written)
    assert all(map(torch.equal, expected, logits(whole)))
    assert all(map(torch.equal, expected, logits(cut)))
    assert not all(map(torch.equal, expected, logits(stages(source, EXACT))))
    kernel = own_form(f"exact-{form}")
    planned = source.spec.weight_bytes(0, source.spec.num_layers, embed=True, output=True, dtype=kernel)
    assert abs(planned - whole[0].weight_bytes) <= 0.01 * planned


def test_ranks_round_to_their_slices_of_the_written_checkpoint(tmp_path: Path) -> None:
    source = make_source("llama", tmp_path / "source")
    quantize(source, "q4", tmp_path / "out")
    whole = StageAssignment("m", 0, source.spec.num_layers, True, True)

    def ranks(of: ModelSource, kernel: str) -> list[HostStage]:
        options = StageOptions(kernel=kernel, require_tags=False)
        return [HostStage.load(of, whole, options, shard=Shard(rank, 2)) for rank in range(2)]

    rounded, written = ranks(source, "exact-q4"), ranks(ModelSource.resolve(str(tmp_path / "out")), EXACT)
    for mine, other in zip(rounded, written, strict=True):
        assert mine.weight_bytes == other.weight_bytes
        for one, like in zip(mine.linears, other.linears, strict=True):
            assert torch.equal(one.dense()[0], like.dense()[0])
    tokens = list(range(5, 30))
    (found,), (expected,) = (Chain([RankStages(them)]).run((0, tokens)) for them in (rounded, written))
    assert torch.equal(found, expected)
    (unsplit,) = Chain(stages(source, "exact-q4")).run((0, tokens))
    assert (found - unsplit).abs().max() <= 4e-5


def test_a_machine_without_compiled_code_rounds_to_the_same_weights(tmp_path: Path) -> None:
    source = make_source("llama", tmp_path)
    expected = logits(stages(source, "exact-q4"))
    with nothing_compiled():
        assert all(map(torch.equal, expected, logits(stages(source, "exact-q4"))))


def test_experts_that_no_file_holds_one_by_one_are_rounded_at_load(tmp_path: Path) -> None:
    source = make_source("gpt_oss", tmp_path)
    whole, unrounded = (stages(source, kernel) for kernel in ("exact-q8", EXACT))
    found, plain = logits(whole), logits(unrounded)
    assert all(map(torch.equal, found, logits(stages(source, "exact-q8", 1))))
    # a row that is rounded may go to another expert, so a position may be far off
    distance = (found[0] - plain[0]).abs().amax(-1).median()
    assert 0 < float(distance) < 0.1 * float(plain[0].abs().max())


def test_a_model_with_too_narrow_matrices_is_refused(tmp_path: Path) -> None:
    source = ModelSource.resolve(str(make_odd_llama(tmp_path / "narrow")))
    with pytest.raises(ModelError, match="narrow has no matrix with a multiple of 32 inputs"):
        stages(source, "exact-q4")


def test_a_value_that_is_no_number_is_refused_by_its_tensor_as_it_loads(tmp_path: Path) -> None:
    source = make_source("llama", tmp_path)
    path = next(source.path.glob("*.safetensors"))
    stored = load_file(path)
    stored["model.layers.1.mlp.down_proj.weight"][3, 5] = float("inf")
    save_file(stored, path)
    source = ModelSource.resolve(str(source.path))
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj\.weight holds a value that is not a"):
        stages(source, "exact-q4")

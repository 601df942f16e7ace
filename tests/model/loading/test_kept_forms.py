"""Matrices in the form of their file: the bits of the unpacked float32 model, in the memory of the file."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from convoy.errors import ModelError
from convoy.evaluate.verify import VerifyOptions, verify
from convoy.model.backends.host.checks.attention_check import attention_holds
from convoy.model.backends.host.checks.bits import bits_digest
from convoy.model.backends.host.native_layers import NativeLayers
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.native.build import AVX512
from convoy.model.kernels.native.library import instruction_sets, keeps_stored, why_no_native
from convoy.model.kernels.registry import own_form
from convoy.model.kv.packed import HeadShape
from convoy.model.stage import StageOptions
from convoy.plan.span import Span
from convoy.plan.spec.sharding import Shard, rank_bytes
from convoy.wire.messages.control import StageAssignment
from support.cases import cases
from support.compiled import nothing_compiled
from support.quantised_models import awq, fp8, gptq, mlx, write
from support.tiny_models import KINDS, Chain, Models, Prompt, Threads

pytestmark = pytest.mark.skipif(not keeps_stored(), reason=f"nothing is compiled here: {why_no_native()}")


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
    can_run = NativeLayers.can_run

    def counted(native: NativeLayers, *given: Any) -> bool:
        ran.append(can_run(native, *given))
        return ran[-1]

    def decode() -> list[torch.Tensor]:
        chain = Chain([stage])
        chain.run((0, prompt(40)), (1, prompt(9)))
        return [*chain.run((0, [1])), *chain.run((0, [2]), (1, [3]))]

    with monkeypatch.context() as without:
        without.setattr(NativeLayers, "can_run", lambda *_: False)
        expected = decode()
    monkeypatch.setattr(NativeLayers, "can_run", counted)
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


# Each way in which a layer joins, splits or shares matrices.
QUICK = ("even", "qwen3_5_moe", "gemma4", "deepseek_v4")


@pytest.mark.parametrize("kind", cases(sorted(KINDS), QUICK.__contains__))
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


def logits_digest(path: str) -> str:
    """Return a digest of the logits of a prefill, a decode and a chunk behind them."""
    (stage,) = stages(ModelSource.resolve(path))
    chain, digest = Chain([stage]), hashlib.sha256()
    for tokens in (list(range(1, 71)), [3], [4, 5]):
        for part in chain.run((0, tokens)):
            digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()


def certified(path: str) -> str:
    """Return what compiled code is for, the bits of a certificate, and those of the machine."""
    options = VerifyOptions("exact-f32", max_cuts=1, num_tokens=3, chunks=(7,))
    found = verify(ModelSource.resolve(path), [list(range(1, 20))], options)
    assert found.passed
    (stage,) = stages(ModelSource.resolve(path))
    # Whole layers are compiled, attention of decodes included.
    compiled: list[bool] = []
    for layer in stage.layers.values():
        # Compiled layers call it without inputs.
        layer.register_forward_hook(lambda _layer, given, _made: compiled.append(not given))
    Chain([stage]).run((0, [1]))
    assert compiled == [True] * len(stage.layers)
    assert attention_holds(HeadShape(4, 2, 32, 16, 100))
    return f"{found.compiled_for.partition(',')[0]} {found.bits} {bits_digest()}"


def every_kind(folder: Path, models: Models) -> list[Path]:
    """Return tiny models: one of each family, and one in each of seven stored forms."""
    written = [mlx(4, 32), mlx(8, 64), fp8((128, 128)), gptq(4, 32), awq(32)]
    paths = [write(folder / str(i), "llama", form).quantised for i, form in enumerate(written)]
    paths += [models.directory(kind) for kind in sorted(KINDS)]
    return paths + [models.directory("even", dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.long
@pytest.mark.skipif(AVX512 not in instruction_sets(), reason="this processor has no AVX-512")
def test_logits_are_the_same_where_nothing_is_compiled(tmp_path: Path, models: Models) -> None:
    paths = every_kind(tmp_path, models)
    expected = [logits_digest(str(path)) for path in paths]
    with nothing_compiled():
        found = [logits_digest(str(path)) for path in paths]
    pairs = zip(paths, expected, found, strict=True)
    assert [path.name for path, compiled, by_torch in pairs if compiled != by_torch] == []


@pytest.mark.long
@pytest.mark.skipif(AVX512 not in instruction_sets(), reason="this processor has no AVX-512")
def test_logits_and_digest_are_the_same_in_a_process_limited_to_avx2(tmp_path: Path, models: Models) -> None:
    paths, even = every_kind(tmp_path, models), models.directory("even")
    program = (
        "import sys; from model.loading.test_kept_forms import certified, logits_digest; "
        "from convoy.model.kernels.stored.packed import onednn_holds; "
        "print(onednn_holds(704, 128), certified(sys.argv[1]), *map(logits_digest, sys.argv[2:]))"
    )
    # MKL follows its setting on Intel's processors alone.
    limits = {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, (even, *paths))],
        env={**os.environ, **limits, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    # There oneDNN adds in another order, so float32 linears are compiled ones.
    assert done.stdout.split()[:2] == ["False", "AVX2"]
    assert certified(str(even)).split() == ["AVX-512", *done.stdout.split()[2:4]]
    found = zip(paths, done.stdout.split()[4:], strict=True)
    assert [path.name for path, digest in found if digest != logits_digest(str(path))] == []


def test_experts_under_names_that_the_library_does_not_join_are_refused(
    models: Models, tmp_path: Path
) -> None:
    shutil.copytree(models.source("deepseek_v4", dtype=torch.bfloat16).path, tmp_path / "other")
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    others = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    renamed = {}
    for name, tensor in tensors.items():
        leaf = name.split(".")[-2]
        is_expert = ".experts." in name and leaf in others
        renamed[name.replace(f".{leaf}.", f".{others[leaf]}.") if is_expert else name] = tensor
    save_file(renamed, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    source = ModelSource.resolve(str(tmp_path / "other"))
    with pytest.raises(ModelError, match=r"the checkpoint has no tensor model\.layers\..*experts"):
        stages(source)

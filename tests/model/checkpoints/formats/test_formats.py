"""Checkpoints that others quantised, against the same weights unpacked and saved as float32."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from convoy.evaluate.library_model import library_logits as judge_logits
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.checkpoint import map_tensor
from convoy.model.checkpoints.manifest import Manifest
from convoy.model.checkpoints.owned import owned_tensors
from convoy.model.checkpoints.read_tensor import read_tensor
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.store.digests import Hashing, make_manifest
from convoy.model.checkpoints.store.parts import ModelPart, PartFile
from convoy.model.checkpoints.store.received import ReceivedModel
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import StageAssignment
from support.cases import cases
from support.quantised_models import (
    Quantise,
    Written,
    awq,
    compressed,
    compressed_float8,
    compressed_mixed,
    compressed_powers,
    deepseek_v4,
    fp8,
    gptq,
    mlx,
    mlx_floats,
    mlx_gpt_oss,
    mlx_latents,
    mlx_mixtral,
    mxfp4,
    nf4,
    nvfp4,
    unpack,
    write,
)
from support.tiny_models import Chain, Prompt

TOLERANCE = 2e-5
CASES: dict[str, tuple[str, Quantise]] = {
    "mlx 4-bit": ("llama", mlx(4, 64)),
    "mlx tied": ("tied", mlx(4, 32)),
    "mlx mixed": (
        "llama",
        mlx(4, 64, {"mlp.down_proj": 8, "q_proj": 3, "k_proj": 6, "v_proj": 5, "o_proj": 2}),
    ),
    "mlx moe": ("qwen3_moe", mlx(4, 32)),
    "mlx mixtral": ("mixtral", mlx_mixtral),
    "mlx nvfp4": ("qwen3_moe", mlx_floats("nvfp4")),
    "mlx mxfp8": ("qwen3_moe", mlx_floats("mxfp8")),
    "mxfp4": ("gpt_oss", mxfp4),
    "fp8 squares": ("llama", fp8((128, 128))),
    "fp8 squares moe": ("qwen3_moe", fp8((32, 64))),
    "fp8 rows": ("llama", fp8(None, "row")),
    "fp8 matrix": ("llama", fp8(None, "matrix")),
    "compressed int4": ("llama", compressed(4, 32)),
    "compressed int4 zeros": ("llama", compressed(4, 64, symmetric=False)),
    "compressed int4 order": ("llama", compressed(4, 32, shuffled=True)),
    "compressed int8 rows": ("llama", compressed(8, None)),
    "compressed fp8": ("llama", compressed_float8),
    "compressed mxfp4": ("llama", compressed_powers("mxfp4")),
    "compressed mxfp8": ("llama", compressed_powers("mxfp8")),
    "compressed mixed": ("llama", compressed_mixed),
    "gptq 4-bit": ("llama", gptq(4, 64)),
    "gptq 4-bit order": ("llama", gptq(4, 32, shuffled=True)),
    "gptq 8-bit v2": ("llama", gptq(8, 32, version="gptq_v2")),
    "awq": ("llama", awq(32)),
    "mlx gpt_oss": ("gpt_oss", mlx_gpt_oss),
    "mlx deepseek": ("deepseek_v3", mlx_latents),
    "nvfp4": ("llama", nvfp4("modelopt")),
    "nvfp4 compressed": ("llama", nvfp4("compressed")),
    "nf4": ("llama", nf4(double=False)),
    "nf4 double": ("llama", nf4(double=True)),
    "deepseek v4": ("deepseek_v4", deepseek_v4),
}


class Checkpoints:
    """Write each case once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._written: dict[str, Written] = {}
        self._whole: dict[str, HostStage] = {}

    def whole(self, case: str) -> Chain:
        """Return a fresh chain of the one stage that all tests share."""
        if case not in self._whole:
            (self._whole[case],) = chain(self[case].quantised).stages
        return Chain([self._whole[case]])

    def __getitem__(self, case: str) -> Written:
        if case not in self._written:
            kind, quantise = CASES[case]
            self._written[case] = write(self._root / case.replace(" ", "-"), kind, quantise)
        return self._written[case]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("formats"))


def chain(directory: Path, *cuts: int, kernel: str = "exact-f32") -> Chain:
    source = ModelSource.resolve(str(directory))
    limits = [0, *cuts, source.spec.num_layers]
    return Chain(
        [
            HostStage.load(
                source,
                StageAssignment(f"m{i}", start, end, i == 0, i == len(limits) - 2),
                StageOptions(kernel=kernel, require_tags=False),
            )
            for i, (start, end) in enumerate(itertools.pairwise(limits))
        ]
    )


def library_logits(directory: Path, tokens: list[int]) -> torch.Tensor:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


# Of these, another case has the same format, width and layout, and more besides.
SLOW = (
    *("mlx 4-bit", "mlx mixed", "fp8 squares", "fp8 squares moe", "fp8 matrix", "compressed int4"),
    *("compressed int8 rows", "compressed fp8", "compressed mxfp8", "compressed mxfp4", "gptq 4-bit"),
    *("gptq 8-bit v2", "nvfp4 compressed", "nf4"),
)


@pytest.mark.parametrize("case", cases(CASES, lambda one: one not in SLOW))
def test_quantised_weights_give_the_logits_of_what_they_stand_for(
    checkpoints: Checkpoints, prompt: Prompt, case: str
) -> None:
    tokens = prompt(70)
    expected = library_logits(checkpoints[case].dense, tokens)
    (whole,) = checkpoints.whole(case).run((0, tokens))
    assert expected.abs().max() > 0.5
    assert (whole - expected).abs().max() <= TOLERANCE


# One case for each way to keep a matrix.
CUT = ("mlx mixed", "mxfp4", "fp8 rows", "compressed int4 order", "gptq 8-bit v2", "nf4 double")


# Experts that a file has one by one as well.
@pytest.mark.parametrize("case", cases(CASES, (*CUT, "mlx nvfp4").__contains__))
def test_quantised_weights_give_the_bits_of_their_values_in_less_memory(
    checkpoints: Checkpoints, prompt: Prompt, tmp_path: Path, case: str
) -> None:
    tokens, kept = prompt(70), checkpoints.whole(case)
    (whole,) = kept.run((0, tokens))
    unpack(ModelSource.resolve(str(checkpoints[case].quantised)), tmp_path / "float32")
    unpacked = chain(tmp_path / "float32")
    assert torch.equal(unpacked.run((0, tokens))[0], whole)
    assert kept.stages[0].weight_bytes < unpacked.stages[0].weight_bytes


@pytest.mark.parametrize("case", cases(CASES, CUT.__contains__))
def test_a_cut_model_has_the_bits_of_the_whole(checkpoints: Checkpoints, prompt: Prompt, case: str) -> None:
    tokens = prompt(70)
    (whole,) = checkpoints.whole(case).run((0, tokens))
    cut = chain(checkpoints[case].quantised, 1, 2)
    head, tail = cut.run((0, tokens[:33]))[0], cut.run((0, tokens[33:]))[0]
    assert torch.equal(torch.cat((head, tail)), whole)


@pytest.mark.parametrize(
    "case",
    [
        *("mlx tied", "mlx mixed", "mxfp4", "fp8 squares", "compressed int4", "compressed int4 order"),
        *("gptq 4-bit order", "gptq 8-bit v2", "awq", "mlx gpt_oss", "nvfp4", "nf4 double"),
    ],
)
def test_a_stage_reads_its_own_bytes_and_takes_what_the_plan_said(
    checkpoints: Checkpoints, case: str
) -> None:
    source = ModelSource.resolve(str(checkpoints[case].quantised))
    stage = HostStage.load(source, StageAssignment("a", 1, 2, False, False), StageOptions())
    own = [
        t
        for name, t in source.tensors.items()
        if ".layers.1." in name and not name.endswith(("_shape", "__nf4"))
    ]
    assert stage.bytes_read == sum(t.num_bytes for t in own if not t.name.endswith("input_scale"))
    planned = source.spec.weight_bytes(1, 2, embed=False, output=False, dtype="exact-f32")
    assert stage.weight_bytes == planned
    ends = HostStage.load(source, StageAssignment("a", 0, 0, True, True), StageOptions())
    planned = source.spec.weight_bytes(0, 0, embed=True, output=True, dtype="exact-f32")
    assert ends.weight_bytes == planned


@pytest.mark.parametrize("case", ["mlx tied", "mxfp4", "compressed int4 zeros", "awq"])
def test_a_member_without_files_gets_the_tensors_as_they_are_stored(
    checkpoints: Checkpoints, prompt: Prompt, tmp_path: Path, case: str
) -> None:
    source = ModelSource.resolve(str(checkpoints[case].quantised))
    manifest = make_manifest(source, Hashing())
    received = ReceivedModel(tmp_path, Manifest.decode(manifest.encoded, manifest.digest))
    with received.open(lambda: None):
        config = received.file("config.json")
        put(config, (source.path / "config.json").read_bytes())
        found = received.source("received", config)
        assert found.digest == source.digest
        for tensor in owned_tensors(found, {1}, embed=False, output=False):
            put(
                received.tensor(tensor.name),
                map_tensor(source.tensors[tensor.name]).reshape(-1).view(torch.uint8),
            )
    (whole,) = checkpoints.whole(case).run((0, prompt(40)))
    first = StageAssignment("m0", 0, 1, True, False)
    middle = StageAssignment("m1", 1, 2, False, False)
    last = StageAssignment("m2", 2, 3, False, True)
    options = StageOptions(require_tags=False)
    stages = [
        HostStage.load(of, mine, options) for of, mine in ((source, first), (found, middle), (source, last))
    ]
    (logits,) = Chain(stages).run((0, prompt(40)))
    assert torch.equal(logits, whole)


def put(part: ModelPart, data: bytes | torch.Tensor) -> None:
    with PartFile(part) as file:
        file.write(data if isinstance(data, bytes) else data.numpy().tobytes())
        assert file.finish()


def test_mxfp4_is_what_the_library_unpacks(checkpoints: Checkpoints) -> None:
    source = ModelSource.resolve(str(checkpoints["mxfp4"].quantised))
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.2.mlp.experts.down_proj"):
        blocks, scales = (map_tensor(source.tensors[f"{name}_{kind}"]) for kind in ("blocks", "scales"))
        expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert torch.equal(read_tensor(source, name), expected)


@pytest.mark.parametrize("all_cases", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_tensor_is_unpacked_in_pieces_of_any_size(checkpoints: Checkpoints, all_cases: bool) -> None:
    written = [case for case in CASES if all_cases or case not in SLOW]
    sources = [ModelSource.resolve(str(checkpoints[case].quantised)) for case in written]
    names = ["model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.experts.down_proj"]
    wanted = [(s, name) for s in sources for name in names if name in s.layout.made]
    at_once = [read_tensor(source, name) for source, name in wanted]
    for (source, name), whole in zip(wanted, at_once, strict=True):
        small = {name: replace(source.layout.made[name], piece_elements=5 * 192)}
        by_piece = replace(source, layout=replace(source.layout, made=small))
        assert torch.equal(read_tensor(by_piece, name), whole)


def test_the_certificates_judge_has_the_unpacked_weights(checkpoints: Checkpoints, prompt: Prompt) -> None:
    tokens = prompt(40)
    written = checkpoints["mlx moe"]
    (judged,) = judge_logits(ModelSource.resolve(str(written.quantised)), [tokens])
    assert (judged - library_logits(written.dense, tokens)).abs().max() <= 1e-5


@pytest.mark.parametrize("case", ["mlx tied", "awq", "fp8 squares"])
def test_a_device_gets_the_unpacked_weights_rounded_once(checkpoints: Checkpoints, case: str) -> None:
    weights = pytest.importorskip("convoy.model.backends.cuda.memory.weights")
    loaded = [
        weights.load_weights(
            ModelSource.resolve(str(path)),
            StageAssignment("a", 0, 3, True, True),
            torch.device("cpu"),
            None,
        )
        for path in (checkpoints[case].quantised, checkpoints[case].dense)
    ]
    ours, dense = ([*one.layers[1].tensors(), one.embedding, one.head] for one in loaded)
    assert all(torch.equal(a, b) for a, b in zip(ours, dense, strict=True))
    assert loaded[0].bytes_read < loaded[1].bytes_read


def test_eight_bit_products_are_made_of_the_files_codes(checkpoints: Checkpoints, prompt: Prompt) -> None:
    tokens = prompt(40)
    expected = library_logits(checkpoints["mlx 4-bit"].dense, tokens)
    (found,) = chain(checkpoints["mlx 4-bit"].quantised, kernel="int8-stored").run((0, tokens))
    assert 0 < (found - expected).abs().mean() < 0.1 * expected.abs().mean()

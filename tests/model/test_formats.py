"""Checkpoints that others quantised, against the same weights unpacked and saved as float32."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from convoy.model.source import ModelSource
from convoy.model.stage import Stage, StageOptions
from convoy.wire.messages import StageAssignment
from support.quantised_models import (
    Quantise,
    Written,
    awq,
    compressed,
    compressed_float8,
    fp8,
    gptq,
    mlx,
    mxfp4,
    write,
)
from support.tiny_models import Chain, Prompt

TOLERANCE = 2e-5
CASES: dict[str, tuple[str, Quantise]] = {
    "mlx 4-bit": ("llama", mlx(4, 64)),
    "mlx tied": ("tied", mlx(4, 32)),
    "mlx mixed": (
        "llama",
        mlx(4, 32, {"mlp.down_proj": 8, "q_proj": 3, "k_proj": 6, "v_proj": 5, "o_proj": 2}),
    ),
    "mlx moe": ("qwen3_moe", mlx(4, 32)),
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
    "gptq 4-bit": ("llama", gptq(4, 64)),
    "gptq 4-bit order": ("llama", gptq(4, 32, shuffled=True)),
    "gptq 8-bit v2": ("llama", gptq(8, 32, version="gptq_v2")),
    "awq": ("llama", awq(32)),
}


class Checkpoints:
    """Each case written once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._written: dict[str, Written] = {}

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
            Stage.load(
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


@pytest.mark.parametrize("case", CASES)
def test_quantised_weights_give_the_logits_of_what_they_stand_for(
    checkpoints: Checkpoints, prompt: Prompt, case: str
) -> None:
    tokens = prompt(70)
    expected = library_logits(checkpoints[case].dense, tokens)
    (whole,) = chain(checkpoints[case].quantised).run((0, tokens))
    assert expected.abs().max() > 0.5
    assert (whole - expected).abs().max() <= TOLERANCE
    cut = chain(checkpoints[case].quantised, 1, 2)
    head, tail = cut.run((0, tokens[:33]))[0], cut.run((0, tokens[33:]))[0]
    assert torch.equal(torch.cat((head, tail)), whole)

"""`convoy verify` for every form of files, and for 4 bits in many families. `make test-verify` runs it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from convoy.bench.forms.blocks import write_blocks
from convoy.bench.forms.codes import CodeLayout, Part, write_codes
from convoy.bench.forms.files import FORMS, write_form
from convoy.cli import main
from convoy.config.kernels import EXACT
from convoy.model.checkpoints.source import ModelSource
from convoy.model.quantize.checkpoint import quantize
from support.gguf_models import CASES, write_case
from support.quantised_models import compressed, gptq, mlx, mxfp4, nf4, nvfp4, write
from support.synthetic import write_config
from support.tiny_models import KINDS, build_model

SHORT = ["--kernel", EXACT, "--prompts", "2", "--tokens", "3", "--threads", "1", "--cuts", "1"]
# Rows that fill every block, and a head of 64 for the attention that compiled code has.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 3}
# Types of ggml beside those of `FORMS`, which a file may mix.
TYPES = ("F16", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q5_K", "Q6_K", "Q8_0")
# Forms beside those of `FORMS`, by what writes them.
RARE = {
    **{f"mlx of {bits} bits": mlx(bits, 64) for bits in (2, 3, 5, 6)},
    "gptq of 8 bits": gptq(8, 64),
    "gptq in act order": gptq(4, 64, shuffled=True),
    "compressed-tensors in act order": compressed(4, 32, shuffled=True),
    "compressed-tensors of 8 bits with zeros": compressed(8, 32, symmetric=False),
    "nvfp4": nvfp4("modelopt"),
    "nf4": nf4(double=True),
}
# Their experts have no form in which each is rounded by itself.
LEFT_OUT = {"gpt_oss", "gemma4"}
# Their matrices are joined, split and rounded as those of a family that is tried.
ALIKE = {
    *("arcee", "cohere2", "ernie4_5", "gemma", "glm4", "glm4_moe", "mistral", "olmo2", "olmo3", "olmoe"),
    *("qwen2", "qwen2_moe", "seed_oss", "smollm3"),
}
# One kind of each other family, with rows that fill groups of 32.
FAMILIES = {
    family: kind
    for kind, (family, options) in reversed(KINDS.items())
    if "text_config" not in options and kind not in LEFT_OUT | ALIKE
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "o_lora_rank": 32,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    config = write_config(tmp_path_factory.mktemp("wide"), **WIDE)
    return ModelSource.resolve(f"synthetic:{config}")


@pytest.mark.parametrize("form", FORMS)
def test_a_form_has_its_certificate(source: ModelSource, tmp_path: Path, form: str) -> None:
    assert main.run(["verify", str(write_form(source, form, tmp_path)), *SHORT]) == 0


@pytest.mark.parametrize("form", RARE)
def test_a_form_that_is_unpacked_by_tiles_has_its_certificate(tmp_path: Path, form: str) -> None:
    written = write(tmp_path, "llama", RARE[form])
    assert main.run(["verify", str(written.quantised), *SHORT]) == 0


def test_a_file_of_many_types_has_its_certificate(source: ModelSource, tmp_path: Path) -> None:
    turns = itertools.cycle(TYPES)
    write_blocks(source, tmp_path / "model.gguf", lambda *_: next(turns))
    assert main.run(["verify", str(tmp_path / "model.gguf"), *SHORT]) == 0


def test_bytes_with_a_scale_for_each_row_have_their_certificate(source: ModelSource, tmp_path: Path) -> None:
    layout = CodeLayout(
        (
            Part(".weight", "I8", lambda rows, width: (rows, width)),
            # The spread of whole numbers of 8 bits is 74.
            Part(
                ".weight_scale",
                "F32",
                lambda rows, _: (rows, 1),
                lambda shape, spread: torch.full(shape, spread / 74),
            ),
        ),
        "quantization_config",
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {
                "all": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                }
            },
        },
    )
    write_codes(source, tmp_path, layout)
    assert main.run(["verify", str(tmp_path), *SHORT]) == 0


@pytest.mark.parametrize("kind", FAMILIES.values())
def test_a_family_in_4_bits_has_its_certificate(tmp_path: Path, kind: str) -> None:
    has = KINDS[kind][1]
    sizes = {key: size for key, size in SIZES.items() if has.get(key) is not None}
    build_model(kind, **sizes).save_pretrained(tmp_path / "whole")
    quantize(ModelSource.resolve(str(tmp_path / "whole")), "q4", tmp_path / "q4")
    assert main.run(["verify", str(tmp_path / "q4"), *SHORT]) == 0


def test_gpt_oss_with_experts_in_mxfp4_has_its_certificate(tmp_path: Path) -> None:
    written = write(tmp_path, "gpt_oss", mxfp4)
    assert main.run(["verify", str(written.quantised), *SHORT]) == 0


def test_gemma_4_with_experts_in_q4_0_has_its_certificate(tmp_path: Path) -> None:
    sizes = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "moe_intermediate_size")}
    model = build_model("gemma4", vocab_size=128, **sizes)
    path = write_case(tmp_path / "model.gguf", CASES["gemma4_text"], model, "Q4_0", rounds=True)
    assert main.run(["verify", str(path), *SHORT]) == 0

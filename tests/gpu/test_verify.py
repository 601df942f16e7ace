"""The parity certificate over stages on a device: cut, chunked, decoded and batched, against the library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.kernels import why_not

if why_not() is not None or not torch.cuda.is_available():
    pytest.skip(why_not() or "no CUDA device", allow_module_level=True)

from convoy.config.kernels import CUDA_FP8
from convoy.evaluate.prompts import draw_prompts
from convoy.evaluate.verify import VerifyOptions, verify
from convoy.model.backends.cuda.options import CHECK_KERNEL, KERNEL
from convoy.model.checkpoints.source import ModelSource
from support.quantised_files import FILES
from support.tiny_models import build_model

pytestmark = pytest.mark.gpu
FAMILIES = ("gpt_oss", "gemma4", "qwen3_moe", "deepseek_v3", "deepseek_v3 flat", "qwen3_5", "qwen3_5_moe")


@pytest.mark.parametrize("kernel", [CHECK_KERNEL, KERNEL])
@pytest.mark.parametrize("kind", ["even", "qwen3", *FAMILIES])
def test_every_cut_on_a_device_computes_what_the_library_does(kind: str, kernel: str, tmp_path: Path) -> None:
    build_model(kind).to(torch.bfloat16).save_pretrained(tmp_path)
    source = ModelSource.resolve(str(tmp_path))
    options = VerifyOptions(kernel, device="cuda:0")
    found = verify(source, draw_prompts(source.spec, 3, 60), options)
    assert found.passed, [result.failures for result in found.results if result.failures]
    assert all(result.layers_once == source.spec.num_layers for result in found.results)


@pytest.mark.parametrize("kind", ["even", "qwen3", "mlx 8"])
def test_every_cut_holds_the_bounds_of_floats_of_8_bits(kind: str, tmp_path: Path) -> None:
    if kind in FILES:
        source = ModelSource.resolve(str(FILES[kind](tmp_path)))
    else:
        build_model(kind).to(torch.bfloat16).save_pretrained(tmp_path)
        source = ModelSource.resolve(str(tmp_path))
    found = verify(source, draw_prompts(source.spec, 3, 60), VerifyOptions(CUDA_FP8, device="cuda:0"))
    assert found.passed, [result.failures for result in found.results if result.failures]


@pytest.mark.parametrize("form", FILES)
def test_every_cut_of_a_quantised_file_holds_the_bounds_of_its_form(form: str, tmp_path: Path) -> None:
    source = ModelSource.resolve(str(FILES[form](tmp_path)))
    found = verify(source, draw_prompts(source.spec, 3, 60), VerifyOptions(KERNEL, device="cuda:0"))
    assert found.passed, [result.failures for result in found.results if result.failures]

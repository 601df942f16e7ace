"""The parity certificate over stages on a device: cut, chunked, decoded and batched, against the library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.kernels import why_not

if why_not() is not None or not torch.cuda.is_available():
    pytest.skip(why_not() or "no CUDA device", allow_module_level=True)

from convoy.evaluate.certificate import LIMITS, Limits
from convoy.evaluate.prompts import draw_prompts
from convoy.evaluate.verify import VerifyOptions, verify
from convoy.model.gpu.stage import CHECK_KERNEL, KERNEL, CudaStage
from convoy.model.source import ModelSource
from convoy.model.stage import Stage, StageOptions
from convoy.wire.messages import StageAssignment
from support.tiny_models import build_model

pytestmark = pytest.mark.gpu
# of bfloat16 and tiny models, whose logits reach 4: a few parts in a hundred
BF16_LIMITS = Limits(unsplit=0.3, library=0.3, median=0.3)


def load(
    source: ModelSource, assignment: StageAssignment, options: StageOptions, before: Stage | None
) -> Stage:
    """On the device, where the steps call the layers, so that they can be counted."""
    chosen = StageOptions(kernel=options.kernel, device="cuda", require_tags=False)
    stage = Stage.load(source, assignment, chosen, before=before)
    assert isinstance(stage, CudaStage)
    stage.captured = False
    return stage


@pytest.mark.parametrize("kind", ["even", "qwen3", "gpt_oss", "gemma4"])
def test_every_cut_on_a_device_computes_what_the_library_does(kind: str, tmp_path: Path) -> None:
    build_model(kind).save_pretrained(tmp_path)
    source = ModelSource.resolve(str(tmp_path))
    found = verify(source, draw_prompts(source.spec, 3, 60), VerifyOptions(CHECK_KERNEL), load=load)
    assert found.passed, [result.failures for result in found.results]
    assert all(result.layers_once == source.spec.num_layers for result in found.results)


@pytest.mark.parametrize("kind", ["even", "qwen3"])
def test_every_cut_in_bfloat16_stays_within_its_tolerance(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, KERNEL, BF16_LIMITS)
    build_model(kind).to(torch.bfloat16).save_pretrained(tmp_path)
    source = ModelSource.resolve(str(tmp_path))
    found = verify(source, draw_prompts(source.spec, 3, 60), VerifyOptions(KERNEL), load=load)
    # a near tie may draw another token in a batch than alone, which the certificate says
    distances = [result.library.greatest for result in found.results if result.library is not None]
    assert len(distances) == len(found.results)
    assert max(distances) <= BF16_LIMITS.library
    assert all(result.layers_once == source.spec.num_layers for result in found.results)

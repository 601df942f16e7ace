"""``auto`` chooses MLX on Apple silicon alone, if the layers pass a check there and MLX runs the model."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convoy.config.kernels import AUTO, EXACT, MLX_BF16
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import ConvoyError, PlanError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.device import HOST, MLX, choose_devices, deal_devices
from convoy.model.mlx_device import Platform, why_no_mlx, why_not_default, why_not_steady
from convoy.model.sampling.params import SamplingParams
from convoy.sdk.parity import device_and_kernel
from support.cluster import MEMBER, running_cluster
from support.quantised_models import fp8, write
from support.tiny_models import Models
from support.tiny_tokenizers import byte_level

MAC = Platform("Darwin", "arm64")
without = pytest.mark.skipif(bool(why_no_mlx()), reason=f"{why_no_mlx()}: `make test-mlx` installs it")


@pytest.mark.parametrize("here", [Platform("Linux", "x86_64"), Platform("Darwin", "x86_64")])
def test_other_machines_compute_on_the_host(here: Platform) -> None:
    reason = why_not_default(here, lambda: pytest.fail("no check is needed"))
    assert reason == "this machine is no Mac with Apple silicon"
    assert choose_devices(AUTO, why_not_mlx=lambda: reason) == (HOST,)


@without
def test_the_check_passes_here_and_a_mac_would_compute_on_mlx() -> None:
    assert not why_not_steady()
    assert not why_not_default(MAC)
    assert choose_devices(AUTO, why_not_mlx=lambda: why_not_default(MAC)) == (MLX,)
    # A kernel of hosts is asked for.
    assert choose_devices(AUTO, "exact-f32", why_not_mlx=lambda: "") == (HOST,)


@without
def test_a_mac_that_fails_the_check_computes_on_the_host_with_the_reason() -> None:
    reason = why_not_default(MAC, lambda: "its start-up check found 1 over a cut, expected at most 0")
    assert "over a cut" in reason
    assert choose_devices(AUTO, why_not_mlx=lambda: reason) == (HOST,)


@without
def test_the_check_compares_with_the_processor_and_finds_kernels_that_are_wrong_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from convoy.model.backends.mlx.layers.matrices import ACTIVATIONS
    from convoy.model.backends.mlx.selfcheck import why_not_steady

    # All runs on MLX agree with each other then.
    monkeypatch.setitem(ACTIVATIONS, "silu", lambda x: x)
    found = r"its start-up check found [0-9.]+ from the processor's float32, expected at most 0\.\d+"
    assert re.fullmatch(found, why_not_steady())


@pytest.fixture
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine be a Mac whose check passed."""
    monkeypatch.setattr("convoy.model.mlx_device.why_not_default", lambda: "")


def run(
    source: ModelSource, device: str, num_members: int = 2, **options: Any
) -> tuple[list[int], str, list[str], list[str]]:
    """Return tokens, why the better kernel is not used, and the devices and kernels of the stages."""
    byte_level().save(str(source.path / "tokenizer.json"))
    with running_cluster(source, num_members, member=replace(MEMBER, device=device), **options) as cluster:
        request = GenerationRequest(
            (5, 9, 30), SamplingParams(temperature=0.0), max_tokens=4, ignore_eos=True
        )
        tokens = list(generate(cluster.engine, request).token_ids)
        status = cluster.status()
    stages = status.stages
    return tokens, status.why_kernel, [one.device for one in stages], [one.kernel for one in stages]


@without
@pytest.mark.usefixtures("on_a_mac")
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("gemma2", "model type gemma2 has other layers than"),
        ("fp8", r"a form \(F8_E4M3\) that quantized_matmul"),
    ],
)
def test_a_model_that_mlx_does_not_run_is_computed_on_the_hosts_of_macs_with_the_reason(
    kind: str, why: str, models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "fp8":
        source = ModelSource.resolve(str(write(tmp_path, "llama", fp8((128, 128))).quantised))
    else:
        source = models.source(kind)
    tokens, reason, devices, kernels = run(source, AUTO)
    assert (devices, kernels) == ([HOST, HOST], [EXACT, EXACT])
    assert re.search(f"computes on cpu: .* does not run on mlx: .*{why}", reason)
    assert tokens == run(source, HOST)[0]
    # Each member says it, too.
    assert len(re.findall(f"this member computes on cpu: .*{why}", caplog.text)) == 2
    assert device_and_kernel(source, AUTO, AUTO, 1, 1) == (HOST, EXACT)
    # A person who asked for MLX hears why not.
    with pytest.raises(ConvoyError, match=why):
        run(source, MLX, 1)


@without
@pytest.mark.usefixtures("on_a_mac")
def test_a_model_that_mlx_runs_is_computed_on_it(models: Models) -> None:
    source = models.source("qwen3")
    _, reason, devices, kernels = run(source, AUTO)
    assert not reason
    assert kernels == [MLX_BF16, MLX_BF16]
    assert all(device.startswith("mlx (") for device in devices)
    assert device_and_kernel(source, AUTO, AUTO, 1, 1) == (MLX, MLX_BF16)
    # Members of one machine choose by the model each.
    assert deal_devices(AUTO, 2) == [AUTO, AUTO]


@without
def test_ranks_on_mlx_are_refused_by_name_before_weights_are_read(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoy.model.backends.mlx.stage.load_weights", lambda *_: pytest.fail("no refusal"))
    found = "alpha runs mlx-bf16, and ranks of a stage compute on CPUs"
    with pytest.raises(PlanError, match=found) as refused:
        run(models.source("qwen3"), MLX, parallel="tensor")
    assert refused.value.hint
    with pytest.raises(PlanError, match=found):
        run(models.source("qwen3"), MLX, spans={"alpha+beta": "0:3,output"})


@without
def test_the_words_and_forms_that_are_said_to_run_are_those_that_do() -> None:
    from convoy.model.backends.mlx import codes, supported
    from convoy.model.backends.mlx.layers.matrices import ACTIVATIONS

    assert ACTIVATIONS.keys() == supported.ACTIVATION_WORDS
    assert codes.BLOCKS.keys() == supported.BLOCK_FORMS

"""``auto`` chooses MLX on Apple silicon alone, if the layers pass a check there and MLX runs the model."""

from __future__ import annotations

import re

import pytest

from convoy.config.kernels import AUTO
from convoy.model.device import HOST, MLX, choose_devices
from convoy.model.mlx_device import Platform, why_no_mlx, why_not_default, why_not_steady

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


@without
def test_the_words_and_forms_that_are_said_to_run_are_those_that_do() -> None:
    from convoy.model.backends.mlx import codes, supported
    from convoy.model.backends.mlx.layers.matrices import ACTIVATIONS

    assert ACTIVATIONS.keys() == supported.ACTIVATION_WORDS
    assert codes.BLOCKS.keys() == supported.BLOCK_FORMS

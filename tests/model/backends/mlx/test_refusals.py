"""What MLX does not run is refused by name, before weights are read."""

from __future__ import annotations

import importlib.metadata

import pytest

from convoy.errors import ModelError, UsageError
from convoy.model import mlx_device
from convoy.model.backends.registry import load_stage
from convoy.model.device import MLX, choose_devices, deal_devices
from convoy.model.stage import StageOptions
from support.stage_conformance import SOURCE, WHOLE


def test_a_machine_without_mlx_is_told_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", lacks)
    with pytest.raises(UsageError, match="mlx is not installed") as refused:
        choose_devices(MLX)
    assert "convoy-llm[mlx]" in str(refused.value.hint)
    with pytest.raises(ModelError, match="mlx is not installed"):
        load_stage(SOURCE, WHOLE, StageOptions(device=MLX, kernel="mlx-f32"))


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0"])
def test_another_version_of_mlx_is_refused_with_both_bounds(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)
    assert mlx_device.why_no_mlx() == f"mlx is {version}, expected 0.32 or later and below 0.33"


@pytest.mark.parametrize("name", ["MLX_RANK", "MLX_HOSTFILE", "MLX_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"])
def test_a_process_that_mlx_launch_started_is_refused_because_its_links_are_in_clear(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "0.32.4")
    monkeypatch.setenv(name, "0")
    with pytest.raises(UsageError, match=rf"{name} is set: mlx.launch .* not encrypted") as refused:
        choose_devices(MLX)
    assert "start each member by itself" in str(refused.value.hint)
    with pytest.raises(ModelError, match="not encrypted"):
        load_stage(SOURCE, WHOLE, StageOptions(device=MLX, kernel="mlx-f32"))


def test_mlx_stands_alone_in_a_member_and_takes_no_kernel_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "0.32.4")
    assert choose_devices(MLX) == (MLX,)
    assert deal_devices("cpu,mlx", 2, "exact-f32") == ["cpu", MLX]
    for wish in ("mlx,cpu", "mlx+mlx", "mlx,cuda:0", "mlx:0"):
        with pytest.raises(UsageError, match="device is"):
            choose_devices(wish)
    with pytest.raises(UsageError, match="exact-f32 does not run on mlx"):
        choose_devices(MLX, "exact-f32")

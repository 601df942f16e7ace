"""Stages keep most of what Metal recommends to wire, and offer no more, with a Metal of tests."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from convoy.cluster.checkup.machine import check_devices
from convoy.model import mlx_device

RECOMMENDED = 20_000_000_000


class Metal(SimpleNamespace):
    """Stand for `mlx.core` on a Mac that recommends `RECOMMENDED`, and wires up to ``most`` bytes."""

    def __init__(self, most: int = RECOMMENDED, *, is_available: bool = True) -> None:
        super().__init__(metal=SimpleNamespace(is_available=lambda: is_available))
        self.most, self.wired = most, list[int]()

    def device_info(self) -> dict[str, str | int]:
        return {"device_name": "Apple M3", "max_recommended_working_set_size": RECOMMENDED}

    def set_wired_limit(self, limit: int) -> int:
        if limit > self.most:
            raise ValueError("[metal::set_wired_limit] Setting a wired limit larger than the maximum")
        self.wired.append(limit)
        return 0


def install(metal: Metal, monkeypatch: pytest.MonkeyPatch, *, free_bytes: int) -> None:
    monkeypatch.setitem(sys.modules, "mlx", SimpleNamespace(core=metal))
    monkeypatch.setitem(sys.modules, "mlx.core", metal)
    monkeypatch.setattr(mlx_device, "free_bytes", lambda: free_bytes)
    monkeypatch.setattr(mlx_device, "why_no_mlx", lambda: "")


def test_a_fifth_of_what_metal_recommends_stays_unwired_and_the_offer_agrees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metal = Metal()
    install(metal, monkeypatch, free_bytes=64_000_000_000)
    assert not mlx_device.set_wired_limit()
    assert metal.wired == [16_000_000_000]
    assert mlx_device.memory_bytes() == 16_000_000_000
    shown = [finding.what for finding in check_devices("cpu")]
    assert "mlx (Apple M3), 16.0 GB for a stage" in shown
    assert "stages keep up to 16.0 GB wired, of 20.0 GB that Metal recommends" in shown


def test_a_limit_that_metal_refuses_ends_nothing_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    install(Metal(most=1), monkeypatch, free_bytes=10_000_000_000)
    assert "Metal refused a wired limit of 16000000000 bytes" in mlx_device.set_wired_limit()
    # Other programs leave less than may be wired.
    assert mlx_device.memory_bytes() == 8_000_000_000
    (told,) = [finding for finding in check_devices("cpu") if finding.level == "warn"]
    assert "Metal refused" in told.what
    assert told.mend


def test_without_metal_nothing_is_wired_and_free_memory_bounds_a_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metal = Metal(is_available=False)
    install(metal, monkeypatch, free_bytes=100_000_000_000)
    assert not mlx_device.set_wired_limit()
    assert not metal.wired
    assert mlx_device.memory_bytes() == 80_000_000_000

"""Devices of one member's ranks: `cpu+cpu`, and what cannot be joined."""

from __future__ import annotations

import pytest
import torch

from convoy.errors import UsageError
from convoy.model.device import choose_devices, deal_devices, stage_device


def test_ranks_on_the_host_are_one_member_on_the_host() -> None:
    assert choose_devices("cpu+cpu") == ("cpu",)
    assert stage_device("cpu + cpu+cpu") == "cpu+cpu+cpu"
    assert stage_device("cpu") == "cpu"
    assert deal_devices("cpu+cpu", 2) == ["cpu+cpu", "cpu+cpu"]


@pytest.mark.parametrize(
    "wish", ["cpu+cuda:0", "cpu+cpu,cpu", "cuda:0+cuda:1,cuda:2", "cpu+", "+".join(["cpu"] * 17)]
)
def test_what_cannot_be_joined_is_refused_before_anything_is_loaded(wish: str) -> None:
    with pytest.raises(UsageError, match="ranks of one member are joined on the host"):
        choose_devices(wish)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="they are here")
def test_devices_that_are_not_here_are_not_joined() -> None:
    with pytest.raises(UsageError, match=r"device is cuda:0\+cuda:1, "):
        stage_device("cuda:0+cuda:1")


def test_ranks_on_devices_are_one_member_on_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.model.device.why_no_cuda", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_devices("cuda:0 + cuda:1") == ("cuda:0", "cuda:1")
    assert stage_device("cuda+cuda:1") == "cuda:0+cuda:1"
    with pytest.raises(UsageError, match="names a device twice"):
        stage_device("cuda:0+cuda:0")


def test_a_kernel_of_other_devices_is_refused() -> None:
    with pytest.raises(UsageError, match="does not run on cpu"):
        choose_devices("cpu+cpu", "cuda-bf16")

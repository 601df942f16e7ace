"""Real members, each a process, on hosts and devices, over sealed links."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from support.kernels import why_not

if why_not() is not None or not torch.cuda.is_available():
    pytest.skip(why_not() or "no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu
_NUM_TOKENS = 24


def answer(device: str, members: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "convoy", "run", "demo", "--device", device, "--members", str(members)]
    # what exact mode would say depends on the host, and plain float32 is near enough here
    command += ["--kernel", "plain-f32"] if "cpu" in device else []
    command += ["--prompt", "What is the capital of France?", "--max-tokens", str(_NUM_TOKENS), "--json"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    facts: dict[str, Any] = json.loads(found.stdout)
    return facts


@pytest.fixture(scope="module")
def on_host() -> dict[str, Any]:
    return answer("cpu", 2)


@pytest.mark.parametrize("device", ["cpu,cuda", "cuda,cpu"])
def test_a_route_of_host_and_device_says_what_hosts_say(device: str, on_host: dict[str, Any]) -> None:
    found = answer(device, 2)
    assert found["kernel"] == "mixed"
    assert sorted(stage["kernel"] for stage in found["stages"]) == ["cuda-bf16", "plain-f32"]
    assert [stage["device"][:4] for stage in found["stages"]] == [
        one[:4].rstrip(",") for one in device.split(",")
    ]
    assert found["sealed_bytes"] > 0
    # trained, so that its tokens are far apart: bfloat16 changes none of them here
    assert found["token_ids"] == on_host["token_ids"]


@pytest.mark.parametrize(
    ("device", "members"), [("cuda", 1), ("cuda,cuda", 2), ("cuda:0,cuda:1", 1), ("cuda:0+cuda:1", 1)]
)
def test_devices_alone_say_what_hosts_say(device: str, members: int, on_host: dict[str, Any]) -> None:
    if device.count(":") > 1 and torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    found = answer(device, members)
    assert found["kernel"] == "cuda-bf16"
    assert found["token_ids"] == on_host["token_ids"]


def test_a_device_that_is_not_there_is_named_before_anything_starts() -> None:
    command = [sys.executable, "-m", "convoy", "run", "demo", "--device", "cuda:77", "--prompt", "hello"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 2
    assert "cuda:77" in found.stderr

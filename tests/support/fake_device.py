"""A fake device: a stage of the host with delayed results in bfloat16, as CUDA has them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from convoy.config.kernels import PLAIN
from convoy.model.backends.host.stage import HostStage
from convoy.model.backends.registry import BACKENDS, Backend
from convoy.model.checkpoints.source import ModelSource
from convoy.model.device import CUDA, HOST
from convoy.model.sampling.output_rows import SampleJob, SampleTask
from convoy.model.stage import LoadedStage, StageOptions
from convoy.wire.messages.control import StageAssignment, Step

DEVICE = "cuda:0"


class Later:
    """Compute a result at the time of waiting, on the thread that waits."""

    def __init__(self, stage: FakeDeviceStage, tensor: torch.Tensor) -> None:
        self._stage, self._tensor = stage, tensor

    def wait(self) -> torch.Tensor:
        self._stage.waited_on.add(threading.current_thread().name)
        if self._stage.broken:
            raise RuntimeError("an illegal memory access was encountered")
        return self._tensor


class FakeDeviceStage:
    """Mimic `model.backends.cuda.stage.CudaStage` over a host `HostStage`."""

    overlaps = True
    num_devices = 1

    def __init__(self, stage: HostStage) -> None:
        self._stage = stage
        self.waited_on: set[str] = set()
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def run(self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
        return self._stage.run(step, hidden, tokens).bfloat16()

    def start(
        self,
        step: Step,
        hidden: torch.Tensor | None,
        tokens: torch.Tensor | None,
        *,
        selects: bool = False,
    ) -> Later:
        out = self.run(step, hidden, tokens)
        return Later(self, self._stage.select(step, out) if selects else out)

    def sample(self, hidden: torch.Tensor, jobs: Sequence[SampleJob]) -> SampleTask:
        return self._stage.sample(hidden, jobs)


def pretend_device(monkeypatch: pytest.MonkeyPatch) -> list[FakeDeviceStage]:
    """Give members that ask for "cuda" the fake, and return the list of stages as it grows."""
    made: list[FakeDeviceStage] = []

    def choose(wish: str, _kernel: str = "auto") -> tuple[str, ...]:
        return (DEVICE,) if wish.startswith("cuda") else (HOST,)

    def load(
        source: ModelSource,
        assignment: StageAssignment,
        options: StageOptions,
        progress: object,
        before: object,
    ) -> LoadedStage:
        assert options.kernel == "cuda-bf16"
        stage = HostStage.load(source, assignment, replace(options, device=HOST, kernel=PLAIN))
        made.append(FakeDeviceStage(stage))
        return made[-1]

    monkeypatch.setattr("convoy.cluster.offer.choose_devices", choose)
    monkeypatch.setattr("convoy.model.device.choose_devices", choose)
    monkeypatch.setattr("convoy.cluster.offer.device_memory_bytes", lambda _devices: 1 << 32)
    monkeypatch.setattr("convoy.cluster.offer.describe_devices", _describe)
    backends = {**BACKENDS, CUDA: Backend(load, None)}
    monkeypatch.setattr("convoy.model.backends.registry.BACKENDS", backends)
    return made


def _describe(devices: tuple[str, ...]) -> str:
    return HOST if devices == (HOST,) else f"{devices[0]} (fake)"

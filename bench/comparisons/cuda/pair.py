"""Measure two devices of one process, a stage on each, with several micro-batches between them.

Neither link nor sealing is involved: only the host's memory lies between the devices. So this is the
reference for members on two devices. Run it with ``python -m comparisons.cuda.pair FILE``.
"""

from __future__ import annotations

import argparse
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from comparisons.cuda.single import BLOCK_SIZE, CONTEXT, Findings, measure_decode, measure_machine
from convoy.model.backends.cuda.memory.pending import PendingResult
from convoy.model.backends.cuda.options import KERNEL
from convoy.model.backends.cuda.stage import CudaStage
from convoy.model.checkpoints.source import ModelSource
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step

_WAIT_S = 60.0
_SPARE_TOKENS = 256
_WARM_STEPS = 6
_STEPS = 80

# Micro-batch, step, token ids or hidden states.
_Passed = tuple[int, Step, torch.Tensor]


def _pass_on(
    run: Callable[[Step, torch.Tensor], PendingResult],
    source: queue.Queue[_Passed | None],
    target: queue.Queue[_Passed | None],
) -> None:
    """Run a stage's loop: start the next step before waiting for the last one's result."""
    waiting: deque[tuple[int, Step, PendingResult]] = deque()
    while True:
        # Keep one step running while the next one is queued, and wait only if two run or none is to come.
        if waiting and (len(waiting) > 1 or source.empty()):
            number, step, pending = waiting.popleft()
            target.put((number, step, pending.wait()))
            continue
        passed = source.get(timeout=_WAIT_S)
        if passed is None:
            target.put(None)
            return
        number, step, given = passed
        waiting.append((number, step, run(step, given)))


class CudaPair:
    """Hold both stages, and pass micro-batches round between them."""

    def __init__(self, source: ModelSource, batch: int, num_micro_batches: int) -> None:
        num_layers = source.spec.num_layers
        # The first stage gets the odd layer, because the second stage also has the output.
        half = (num_layers + 1) // 2
        spans = ((0, half), (half, num_layers))
        self._stages = [
            CudaStage.load(
                source,
                StageAssignment(f"m{i}", start, end, embed=i == 0, output=i == 1),
                device=f"cuda:{i}",
                kernel=KERNEL,
                block_size=BLOCK_SIZE,
                require_tags=False,
            )
            for i, (start, end) in enumerate(spans)
        ]
        self._batch = batch
        self._num_micro_batches = num_micro_batches
        self._blocks = -(-(CONTEXT + _SPARE_TOKENS) // BLOCK_SIZE)
        self._number = 0
        self._copies = torch.cuda.Stream(self._stages[1].device)  # type: ignore[no-untyped-call]
        for stage in self._stages:
            stage.make_pools(batch * num_micro_batches * self._blocks)

    def read(self) -> list[torch.Tensor]:
        """Run every prompt. Return the last token of each, by micro-batch."""
        generator = torch.Generator().manual_seed(1)
        sequences = range(self._batch * self._num_micro_batches)
        for first in range(0, len(sequences), 4):
            chosen = sequences[first : first + 4]
            grants = [
                BlockGrant.append(s, 0, [s * self._blocks + b for b in range(self._blocks)]) for s in chosen
            ]
            ids = self._random_tokens(CONTEXT * len(chosen), generator)
            step = self._step(grants, [Row(s, 0, CONTEXT, 1) for s in chosen])
            self._stages[1].run(step, self._stages[0].run(step, None, ids), None)
        return [self._random_tokens(self._batch, generator) for _ in range(self._num_micro_batches)]

    def decode(self, tokens: Sequence[torch.Tensor], num_steps: int) -> float:
        """Return the seconds for ``num_steps`` tokens of every sequence. The first few steps do not count."""
        into: queue.Queue[_Passed | None] = queue.Queue()
        between: queue.Queue[_Passed | None] = queue.Queue()
        out: queue.Queue[_Passed | None] = queue.Queue()
        threads = [
            threading.Thread(target=_pass_on, args=(self._first, into, between)),
            threading.Thread(target=_pass_on, args=(self._second, between, out)),
        ]
        for thread in threads:
            thread.start()
        length = [CONTEXT] * self._num_micro_batches
        for number, ids in enumerate(tokens):
            into.put((number, self._decode_step(number, length), ids))
        started_s, total = 0.0, num_steps * self._num_micro_batches
        for count in range(total):
            if count == _WARM_STEPS * self._num_micro_batches:
                started_s = time.perf_counter()
            passed = out.get(timeout=_WAIT_S)
            assert passed is not None
            number, _, ids = passed
            if count < total - self._num_micro_batches:
                into.put((number, self._decode_step(number, length), ids.long()))
        seconds = time.perf_counter() - started_s
        into.put(None)
        for thread in threads:
            thread.join(_WAIT_S)
        return seconds

    def _first(self, step: Step, ids: torch.Tensor) -> PendingResult:
        return self._stages[0].start(step, None, ids)

    def _second(self, step: Step, hidden: torch.Tensor) -> PendingResult:
        stage = self._stages[1]
        found = stage.device_output(stage.start(step, hidden, None).wait())
        with torch.cuda.device(stage.device):
            return PendingResult.copied(found.argmax(-1), self._copies)

    def _decode_step(self, number: int, length: list[int]) -> Step:
        sequences = range(number * self._batch, (number + 1) * self._batch)
        rows = [Row(s, length[number], 1, 1) for s in sequences]
        length[number] += 1
        return self._step([], rows)

    def _step(self, grants: list[BlockGrant], rows: list[Row]) -> Step:
        self._number += 1
        return Step(self._number, [], grants, rows, b"")

    def _random_tokens(self, count: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(0, self._stages[0].vocab_size, (count,), generator=generator)


def measure_pair(
    source: ModelSource, batch: int, num_micro_batches: int, alone_tokens_per_s: float
) -> dict[str, object]:
    """Return the tokens per second of both devices together, beside one device's with the same batch."""
    pair = CudaPair(source, batch, num_micro_batches)
    seconds = pair.decode(pair.read(), _STEPS)
    rate = batch * num_micro_batches * (_STEPS - _WARM_STEPS) / seconds
    return {
        "devices": 2,
        "batch": batch,
        "micro_batches": num_micro_batches,
        "context_tokens": CONTEXT,
        "tokens_per_s": round(rate, 1),
        "over_one_device": round(rate / alone_tokens_per_s, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one device, then two, and write the file."""
    parser = argparse.ArgumentParser(prog="comparisons.cuda.pair", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="synthetic:llama-3-8b")
    parser.add_argument("--batch", type=int, default=64)
    chosen = parser.parse_args(arguments)
    findings = Findings(chosen.file, time.monotonic())
    machine = measure_machine()
    findings.add("machine", machine)
    source = ModelSource.resolve(chosen.model)
    whole = StageAssignment("alone", 0, source.spec.num_layers, embed=True, output=True)
    stage = CudaStage.load(
        *(source, whole), device="cuda:0", kernel=KERNEL, block_size=BLOCK_SIZE, require_tags=False
    )
    floor_ms = stage.weight_bytes / float(str(machine["copy_gb_per_s"])) / 1e6
    alone = measure_decode(stage, chosen.batch, floor_ms, 60)
    findings.add("alone", alone)
    stage.give_up()
    rows: list[dict[str, object]] = []
    for count in (2, 3, 4):
        rows.append(measure_pair(source, chosen.batch, count, float(str(alone["tokens_per_s"]))))
        findings.add("pair", rows)


if __name__ == "__main__":
    main()

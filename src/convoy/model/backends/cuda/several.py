"""Stages of one member on several devices of its host: what goes from one to the next crosses no link.

They are one stage for everybody else, with its layers in a row on the devices. Nobody waits between them, so
several steps may be under way at once, each on another device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from convoy.errors import PlanError
from convoy.model.backends.cuda.memory.pending import PendingResult
from convoy.model.backends.cuda.memory.weights import LoadProgress
from convoy.model.backends.cuda.sampling import PendingDraws
from convoy.model.backends.cuda.stage import CudaStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.device import check_device
from convoy.model.sampling.output_rows import SampleJob
from convoy.plan.spec.model import ModelSpec
from convoy.wire.messages.control import StageAssignment, Step


def load_on_devices(
    source: ModelSource,
    assignment: StageAssignment,
    *,
    devices: Sequence[str],
    kernel: str,
    block_size: int,
    require_tags: bool,
    captured: bool = True,
    progress: LoadProgress | None = None,
    before: object = None,
) -> CudaStage | SeveralStages:
    """One stage, or one in parts on ``devices``. Raises as `CudaStage.load`, PlanError for too few layers.

    What ``before`` has on the same device is not read again.
    """
    load = partial(
        CudaStage.load,
        source,
        kernel=kernel,
        block_size=block_size,
        require_tags=require_tags,
        captured=captured,
        progress=progress,
    )
    old = before.parts if isinstance(before, SeveralStages) else (before,)
    of_device = {str(stage.device): stage for stage in old if isinstance(stage, CudaStage)}
    kept = [of_device.get(str(check_device(device))) for device in devices]
    if len(devices) == 1:
        return load(assignment, device=devices[0], before=kept[0])
    cut = cut_assignment(source.spec, assignment, len(devices))
    parts = [
        load(part, device=device, before=own) for part, device, own in zip(cut, devices, kept, strict=True)
    ]
    return SeveralStages(assignment, parts)


def cut_assignment(spec: ModelSpec, assignment: StageAssignment, count: int) -> list[StageAssignment]:
    """``assignment`` in ``count`` parts that weigh as much as may be, cut where the model may be.

    The first has the embedding, and the last the output. Raises PlanError where there are not so many cuts.
    """
    start, end = assignment.start, assignment.end
    cuts = [cut for cut in range(start + 1, end) if cut not in spec.forbidden_cuts]
    if len(cuts) < count - 1:
        raise PlanError(
            f"layers {start} to {end - 1} cannot be cut into {count} parts, one for each device",
            hint="name fewer devices, or give this member more layers",
        )

    def weight(first: int, last: int) -> int:
        embed, output = assignment.embed and first == start, assignment.output and last == end
        # an embedding is looked up, not read
        held = spec.weight_bytes(first, last, embed=False, output=output, dtype="bfloat16")
        return held + (1 if embed else 0)

    chosen = [start]
    for part in range(1, count):
        whole, free = weight(start, end), cuts[: len(cuts) - (count - 1 - part)]
        after = [cut for cut in free if cut > chosen[-1]]
        wanted = whole * part / count
        chosen.append(min(after, key=lambda cut: abs(weight(start, cut) - wanted)))
    chosen.append(end)
    return [
        StageAssignment(
            assignment.member,
            chosen[i],
            chosen[i + 1],
            embed=assignment.embed and i == 0,
            output=assignment.output and i == count - 1,
        )
        for i in range(count)
    ]


class SeveralStages:
    """The parts, with the face of one stage. Not thread-safe, as they are not."""

    overlaps = True

    def __init__(self, assignment: StageAssignment, parts: Sequence[CudaStage]) -> None:
        first = parts[0]
        self.assignment = assignment
        self.parts = tuple(parts)
        self.num_devices = len(parts)
        self.hidden_size = first.hidden_size
        self.vocab_size = first.vocab_size
        self.token_id_layers = first.token_id_layers
        self.options = first.options
        self.weight_bytes = sum(part.weight_bytes for part in parts)
        self.bytes_read = sum(part.bytes_read for part in parts)

    def forget(self) -> None:
        """As of one."""
        for part in self.parts:
            part.forget()

    def give_up(self, source: ModelSource, options: object) -> None:
        """As of one."""
        for part in self.parts:
            part.give_up(source, options)

    def make_pools(self, num_blocks: int | Sequence[int]) -> None:
        """As of one."""
        for part in self.parts:
            part.make_pools(num_blocks)

    def room_bytes(self, offered_bytes: int) -> int:
        """So much that no device gets more than it has, where each holds its part of every block.

        ``offered_bytes`` are of all devices, in equal shares.
        """
        rooms = [part.room_bytes(offered_bytes // len(self.parts)) for part in self.parts]
        whole = self.block_bytes
        found = []
        for room, part in zip(rooms, self.parts, strict=True):
            share = max(own / all_ for own, all_ in zip(part.block_bytes, whole, strict=True) if all_)
            found.append(int(room / share) if share else room)
        return min(found)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """On all devices together."""
        return tuple(map(sum, zip(*(part.block_bytes for part in self.parts), strict=True)))

    @property
    def takes_tokens(self) -> bool:
        return any(part.takes_tokens for part in self.parts)

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        return {number: layer for part in self.parts for number, layer in part.layers.items()}

    @property
    def model_digest(self) -> str:
        return self.parts[0].model_digest

    def apply(self, step: Step) -> None:
        """As of one."""
        for part in self.parts:
            part.apply(step)

    def run(self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
        """As of one."""
        return self.start(step, hidden, tokens).wait()

    def start(
        self,
        step: Step,
        hidden: torch.Tensor | None,
        tokens: torch.Tensor | None,
        *,
        selects: bool = False,
    ) -> PendingResult:
        """As of one: the parts follow each other on their devices, and nobody waits here."""
        for part in self.parts[:-1]:
            hidden = part.start(step, hidden, tokens, stays=True).tensor
        return self.parts[-1].start(step, hidden, tokens, selects=selects)

    def select(self, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """As of one."""
        return self.parts[-1].select(step, hidden)

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        """As of one."""
        return self.parts[-1].output(hidden)

    def draw(self, hidden: torch.Tensor, draws: Sequence[SampleJob]) -> PendingDraws:
        """As of one."""
        return self.parts[-1].draw(hidden, draws)

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        """As of one."""
        self.kv_shape(end - start, len(blocks))
        return torch.cat([part.read_blocks(a, b, blocks) for part, a, b in self._parts_of(start, end)])

    def write_blocks(
        self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor
    ) -> None:
        """As of one; each part holds the prefixes once its own last layer is filled."""
        end = start + (kv.shape[0] if kv.dim() else 0)
        for part, a, b in self._parts_of(start, end):
            part.write_blocks(a, blocks, tags, kv[a - start : b - start])

    def kv_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        """As of one."""
        return self.parts[0].kv_shape(num_layers, num_blocks)

    def _parts_of(self, start: int, end: int) -> list[tuple[CudaStage, int, int]]:
        """The parts with layers of [start, end), and which; one at least, which refuses what there is not."""
        found = [
            (part, max(start, part.assignment.start), min(end, part.assignment.end))
            for part in self.parts
            if max(start, part.assignment.start) < min(end, part.assignment.end)
        ]
        return found or [(self.parts[0], start, end)]

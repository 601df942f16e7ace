"""Join stages of one member on several devices of its host. Activations between them cross no link.

Other members see one stage. Its layers lie on the devices in order. No thread waits between the devices,
so several steps may be in flight at once, each on another device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from convoy.errors import PlanError
from convoy.model.backends.cuda.memory.pending import PendingResult
from convoy.model.backends.cuda.memory.weights import LoadProgress
from convoy.model.backends.cuda.sampling import DeviceSamples
from convoy.model.backends.cuda.stage import CudaStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.device import check_device
from convoy.model.sampling.output_rows import SampleJob
from convoy.model.stage import LoadedStage
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
    before: LoadedStage | None = None,
) -> CudaStage | SeveralStages:
    """Load one stage, or one in parts on several ``devices``.

    Weights of ``before`` on the same device are reused. Raises as `CudaStage.load` does, and PlanError for
    too few layers.
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
    """Cut ``assignment`` into ``count`` parts of nearly equal weight, at the model's allowed cuts.

    The first part has the embedding, and the last the output. Raises PlanError where there are too few
    cuts.
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
        # A step reads few rows of an embedding, so it costs almost no time and counts as 1.
        held = spec.weight_bytes(first, last, embed=False, output=output, dtype="bfloat16")
        return held + (1 if embed else 0)

    chosen = [start]
    for part in range(1, count):
        whole, free = weight(start, end), cuts[: len(cuts) - (count - 1 - part)]
        # ``free`` leaves at least one cut for each part that is still to come.
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
    """Run the parts as one `Stage`. Not thread-safe, as the parts are not."""

    overlaps = True

    def __init__(self, assignment: StageAssignment, parts: Sequence[CudaStage]) -> None:
        first = parts[0]
        self.assignment = assignment
        self.parts = tuple(parts)
        self.num_devices = len(parts)
        self.hidden_size = first.hidden_size
        self.output_size = first.output_size
        self.vocab_size = first.vocab_size
        self.token_id_layers = first.token_id_layers
        self.block_size = first.block_size
        self.weight_bytes = sum(part.weight_bytes for part in parts)
        self.bytes_read = sum(part.bytes_read for part in parts)

    def forget(self) -> None:
        """Free the K/V pools of all parts."""
        for part in self.parts:
            part.forget()

    def give_up(self) -> None:
        """End all parts and free their memory."""
        for part in self.parts:
            part.give_up()

    def make_pools(self, num_blocks: int | Sequence[int]) -> None:
        """Make the K/V pools of all parts."""
        for part in self.parts:
            part.make_pools(num_blocks)

    def room_bytes(self, offered_bytes: int) -> int:
        """Return the bytes of K/V for which every device has room for its part of each block.

        ``offered_bytes`` is the sum over all devices, in equal shares.
        """
        rooms = [part.room_bytes(offered_bytes // len(self.parts)) for part in self.parts]
        whole = self.block_bytes
        found = []
        for room, part in zip(rooms, self.parts, strict=True):
            # A device's part of a block may differ between cache groups, so the largest share limits it.
            share = max(own / all_ for own, all_ in zip(part.block_bytes, whole, strict=True) if all_)
            found.append(int(room / share) if share else room)
        return min(found)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Return the bytes of a block of each cache group, on all devices together."""
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
        """Apply the step on all parts, without running its rows."""
        for part in self.parts:
            part.apply(step)

    def prepare(self, step: Step) -> None:
        """Prepare the step on all parts."""
        for part in self.parts:
            part.prepare(step)

    def run(self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
        """Run a step as `start` does, and wait for its result."""
        return self.start(step, hidden, tokens).wait()

    def start(
        self,
        step: Step,
        hidden: torch.Tensor | None,
        tokens: torch.Tensor | None,
        *,
        selects: bool = False,
    ) -> PendingResult:
        """Start a step on all devices in order, without waiting in between.

        Returns the last part's pending result.
        """
        for part in self.parts[:-1]:
            hidden = part.start(step, hidden, tokens, stays=True).tensor
        return self.parts[-1].start(step, hidden, tokens, selects=selects)

    def select(self, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``hidden`` that go on to the output."""
        return self.parts[-1].select(step, hidden)

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of ``hidden``, from the last part."""
        return self.parts[-1].output(hidden)

    def final_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the state of ``hidden`` behind the final norm, from the last part."""
        return self.parts[-1].final_state(hidden)

    def sample(self, hidden: torch.Tensor, jobs: Sequence[SampleJob]) -> DeviceSamples:
        """Start sampling from the output of ``hidden``, on the last part."""
        return self.parts[-1].sample(hidden, jobs)

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        """Return the K/V of ``blocks`` in layers [start, end), joined over the parts."""
        self.kv_shape(end - start, len(blocks))
        return torch.cat([part.read_blocks(a, b, blocks) for part, a, b in self._parts_of(start, end)])

    def write_blocks(
        self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor
    ) -> None:
        """Fill ``blocks`` on all parts. Each part holds the prefixes once its own last layer is filled."""
        end = start + (kv.shape[0] if kv.dim() else 0)
        for part, a, b in self._parts_of(start, end):
            part.write_blocks(a, blocks, tags, kv[a - start : b - start])

    def kv_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of a `read_blocks` result. Raises StepError as there."""
        return self.parts[0].kv_shape(num_layers, num_blocks)

    def _parts_of(self, start: int, end: int) -> list[tuple[CudaStage, int, int]]:
        """Return the parts with layers of [start, end), each with its range.

        Layers that do not exist go to one part whole, which refuses them.
        """
        first, last = self.parts[0].assignment.start, self.parts[-1].assignment.end
        if not first <= start < end <= last:
            return [(self.parts[0], start, end)]
        return [
            (part, max(start, part.assignment.start), min(end, part.assignment.end))
            for part in self.parts
            if max(start, part.assignment.start) < min(end, part.assignment.end)
        ]

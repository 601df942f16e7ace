"""The head's side of K/V transfers between a session's file and the stages: one exchange at a time.

1. The head asks a peer (`ReadBlocks`), or announces K/V (`WriteBlocks`) and sends a tensor.
2. The peer answers on the same link, with a tensor or a `BlocksDone`.
3. A peer that moves nothing on its link and answers no ping meanwhile is lost within two seconds.
4. A peer that sends K/V without being asked ends the plan.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Sequence

import numpy as np
import torch

from convoy.engine.run.executor import Kv
from convoy.engine.run.liveness import LivenessProbe, drain_s
from convoy.engine.run.send_guard import SendGuard
from convoy.errors import ConvoyError, LinkBroken, LinkClosed, StageLost, StepError
from convoy.model.stage import Stage
from convoy.model.tensors import to_wire
from convoy.transport.link.inbox import Inbox, weight_of
from convoy.transport.link.link import Link, Received, ReceivedMessage, ReceivedTensor
from convoy.wire.messages.control import (
    BlocksDone,
    FrameType,
    ReadBlocks,
    StageAssignment,
    StepFailed,
    WriteBlocks,
)
from convoy.wire.tensor import WireTensor

_FLOOR_BYTES_PER_S = 256 * 1024.0
_LOOK_S = 0.25


class KvClient:
    """Read and write blocks over the head's own stage (if it has layers) and the stages of its peers.

    One thread reads and writes, while no step is in flight. ``guard`` ends the link of a peer that takes
    nothing. ``timeout_s`` is the time allowed for a live peer, on top of the time for its bytes.
    """

    def __init__(
        self,
        stage: Stage,
        stages: Sequence[StageAssignment],
        head: str,
        links: dict[str, Link],
        *,
        plan_id: int,
        timeout_s: float,
        guard: SendGuard,
    ) -> None:
        self._stage = stage
        self._stages = tuple(stages)
        self._head = head
        self._links = links
        self._plan_id = plan_id
        self._timeout_s = timeout_s
        self._guard = guard
        self._number = 0
        # The member that may answer, once, and the number of its exchange.
        self._asked: tuple[str, int] | None = None
        self._arrivals: Inbox[Received | ConvoyError] = Inbox()
        self._ended: ConvoyError | None = None

    def expects(self, link: Link, received: Received) -> bool:
        """Return whether ``received`` answers an exchange of this client, under way or given up."""
        if not _is_answer(received) or received.plan_id != self._plan_id:
            return False
        return self._asked == (link.peer, received.step) or received.step < self._number

    def handle_answer(self, link: Link, received: Received) -> None:
        """Queue an answer that `expects` is true for. Receiver threads call this."""
        # A late reply to an exchange that was given up is dropped.
        if self._asked == (link.peer, received.step):
            self._asked = None
            self._arrivals.put(link, received, weight_of(received))

    def note(self, received: Received) -> None:
        """Watch all other messages: a stage that failed does not answer."""
        said = received.message if isinstance(received, ReceivedMessage) else None
        if isinstance(said, StepFailed) and received.plan_id == self._plan_id:
            self.end(StageLost(f"a stage failed while no step was under way: {said.reason}"))

    def end(self, error: ConvoyError) -> None:
        """Stop waiting for replies: a thread that waits for one, or asks again, raises `StageLost`."""
        # Only the first error is kept: it gives the cause, and the queue stays bounded.
        if self._ended is None:
            self._ended = error
            self._arrivals.put_last(None, error)

    def read(self, start: int, end: int, blocks: Sequence[int]) -> Kv:
        parts = []
        for one in self._stages:
            first, last = max(start, one.start), min(end, one.end)
            if first < last:
                parts.append(self._read(one, first, last, blocks))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def write(self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: Kv) -> None:
        end = start + len(kv)
        for one in self._stages:
            first, last = max(start, one.start), min(end, one.end)
            if first < last:
                self._write(one, first, blocks, tags, kv[first - start : last - start])

    def _read(self, one: StageAssignment, start: int, end: int, blocks: Sequence[int]) -> Kv:
        if one.member == self._head:
            found: Kv = self._stage.read_blocks(start, end, blocks).numpy()
            return found
        number = self._begin(one.member)
        ask = ReadBlocks(number, self._stage.model_digest, start, end, list(blocks))
        shape = self._stage.kv_shape(end - start, len(blocks))
        probe = self._send(one.member, ask, None)
        answer = self._await(one.member, probe, 4.0 * float(np.prod(shape)))
        if not isinstance(answer, ReceivedTensor):
            raise StageLost(f"{one.member} answered a reading of K/V by saying that it is done")
        tensor = answer.tensor
        if (answer.boundary, tensor.dtype, tensor.shape) != (start, "float32", shape):
            raise StageLost(f"{one.member} sent K/V of shape {tensor.shape}, expected {shape}")
        found = np.frombuffer(tensor.data, dtype="<f4").reshape(shape)
        # No stage holds such values, and no saved session may.
        if not np.isfinite(found).all():
            raise StageLost(f"{one.member} sent K/V that is not finite")
        return found

    def _write(
        self, one: StageAssignment, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: Kv
    ) -> None:
        if one.member == self._head:
            self._stage.write_blocks(start, blocks, tags, torch.from_numpy(kv))
            return
        number = self._begin(one.member)
        said = WriteBlocks(number, self._stage.model_digest, list(blocks), b"".join(tags))
        probe = self._send(one.member, said, (to_wire(torch.from_numpy(kv)), start))
        if isinstance(self._await(one.member, probe, float(kv.nbytes)), ReceivedTensor):
            raise StageLost(f"{one.member} answered a writing of K/V with K/V")

    def _begin(self, member: str) -> int:
        if self._ended is not None:
            raise StageLost(self._ended.message, hint=self._ended.hint) from self._ended
        self._number += 1
        self._asked = (member, self._number)
        return self._number

    def _send(
        self, member: str, message: ReadBlocks | WriteBlocks, tensor: tuple[WireTensor, int] | None
    ) -> LivenessProbe:
        """Send a message and its tensor; return the probe that tells whether the peer is still alive."""
        plan_id, number = self._plan_id, message.number
        link = self._links.get(member)
        if link is None:
            raise StageLost(f"there is no link to {member}")
        began_s = time.monotonic()
        self._guard.begin(link, LivenessProbe(link))
        try:
            link.send(message, plan_id=plan_id, step=number)
            if tensor is not None:
                kv, boundary = tensor
                kind = FrameType.BLOCKS
                link.send_tensor(kv, plan_id=plan_id, step=number, boundary=boundary, kind=kind)
        except (LinkBroken, LinkClosed) as error:
            raise StageLost(f"a stage could not be reached: {error.message}") from error
        finally:
            self._guard.end()
        num_bytes = 0 if tensor is None else tensor[0].nbytes
        return LivenessProbe(link, extra_s=drain_s(num_bytes, time.monotonic() - began_s))

    def _await(self, member: str, probe: LivenessProbe, num_bytes: float) -> Received:
        """Return the peer's reply. Raises `StageLost`, and `StepError` for K/V that the peer refused."""
        answer = self._arrival(member, probe, self._timeout_s + num_bytes / _FLOOR_BYTES_PER_S)
        if isinstance(answer, ConvoyError):
            raise StageLost(answer.message, hint=answer.hint) from answer
        said = answer.message if isinstance(answer, ReceivedMessage) else None
        if isinstance(said, BlocksDone) and said.error:
            raise StepError(f"{member} refused K/V of a session: {said.error}")
        return answer

    def _arrival(self, member: str, probe: LivenessProbe, within_s: float) -> Received | ConvoyError:
        deadline_s = time.monotonic() + within_s
        while (left_s := deadline_s - time.monotonic()) > 0.0:
            with contextlib.suppress(queue.Empty):
                return self._arrivals.get(min(_LOOK_S, left_s))
            if probe.is_gone():
                self._asked = None
                raise StageLost(f"{member} hangs: nothing moves on its link, and it answers no ping")
        self._asked = None
        raise StageLost(f"{member} did not answer for its K/V within {within_s:.3g} s")


def _is_answer(received: Received) -> bool:
    if isinstance(received, ReceivedTensor):
        return received.kind is FrameType.BLOCKS
    return isinstance(received.message, BlocksDone)

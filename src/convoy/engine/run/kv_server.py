"""A peer's side of K/V transfers: it answers the head of its plan on its own thread, between steps."""

from __future__ import annotations

import numpy as np
import torch

from convoy.errors import ConvoyError, StepError
from convoy.model.stage import Stage
from convoy.model.tensors import to_wire
from convoy.transport.link.link import Link, ReceivedTensor
from convoy.wire.messages.control import PREFIX_TAG_BYTES, BlocksDone, FrameType, ReadBlocks, WriteBlocks

# Characters of an error that go to the head.
MAX_REASON = 500


class KvServer:
    """Read and fill blocks of one stage, for one plan id. ``head`` is the link of the plan's head."""

    def __init__(self, stage: Stage, head: Link, plan_id: int) -> None:
        self._stage = stage
        self._head = head
        self._plan_id = plan_id
        self._announced: WriteBlocks | None = None

    def accept(self, asked: ReadBlocks | WriteBlocks, plan_id: int) -> None:
        """Answer a read, or keep the announcement of the tensor that follows."""
        if plan_id != self._plan_id:
            return
        self._announced = None
        try:
            self._check_model(asked.model_digest)
            if isinstance(asked, WriteBlocks):
                self._announced = asked
                return
            kv = to_wire(self._stage.read_blocks(asked.start, asked.end, asked.blocks))
        except ConvoyError as error:
            self._answer(asked.number, error)
            return
        self._head.send_tensor(
            kv, plan_id=plan_id, step=asked.number, boundary=asked.start, kind=FrameType.BLOCKS
        )

    def accept_tensor(self, received: ReceivedTensor) -> None:
        """Write the announced K/V and answer.

        A tensor without an announcement, or with a refused one, is dropped; the refusal was sent with the
        announcement.
        """
        if received.plan_id != self._plan_id:
            return
        announced, self._announced = self._announced, None
        if announced is None:
            # The refusal of its announcement is on the way.
            return
        try:
            if received.step != announced.number:
                raise StepError(f"K/V came as exchange {received.step}, expected {announced.number}")
            tags = _split(announced.tags)
            self._stage.write_blocks(received.boundary, announced.blocks, tags, _read(received))
        except ConvoyError as error:
            self._answer(announced.number, error)
            return
        self._answer(announced.number, None)

    def _check_model(self, digest: str) -> None:
        mine = self._stage.model_digest
        if digest != mine:
            raise StepError(f"K/V of the model {digest[:12]} is no use to {mine[:12]}")

    def _answer(self, number: int, error: ConvoyError | None) -> None:
        text = "" if error is None else error.message[:MAX_REASON]
        self._head.send(BlocksDone(number, text), plan_id=self._plan_id, step=number)


def _split(tags: bytes) -> list[bytes]:
    return [tags[i : i + PREFIX_TAG_BYTES] for i in range(0, len(tags), PREFIX_TAG_BYTES)]


def _read(received: ReceivedTensor) -> torch.Tensor:
    tensor = received.tensor
    if tensor.dtype != "float32":
        raise StepError(f"K/V came as {tensor.dtype}, expected float32")
    array = np.frombuffer(tensor.data, dtype="<f4")
    return torch.from_numpy(array if array.flags.writeable else array.copy()).view(tensor.shape)

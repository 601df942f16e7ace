"""Collectives of ranks on different members: parts of sums cross only in sealed links.

Ranks stand in a ring. Small tensors, and those of two or three ranks, circulate: each rank's part goes both
ways round until all have it, and each adds them itself. Larger ones of more ranks go along the chain piece by
piece: rank 0's part goes to rank 1, which adds its own, and so on. The last rank has the sums, which go back
the same way. So a link carries each element once per direction, where circulating costs once per rank. Either
way an element is ((p0 + p1) + p2) + ... in float32, and every rank has the same bits, whatever came first.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping

import torch

from convoy.engine.ranks.sums.agreement import Agreement, check_agreement
from convoy.engine.ranks.sums.mailbox import Arrived, ExpectedPart, PartMailbox, PartSlot, code_of
from convoy.engine.ranks.sums.pieces import add_in_order, cut, dtype_name, from_piece, piece_shapes, to_piece
from convoy.engine.ranks.sums.ring import Ring
from convoy.errors import CollectiveError, ConvoyError, StepError
from convoy.transport.link.link import Link, Received, ReceivedTensor
from convoy.transport.link.reader import Reader
from convoy.wire.frame import frames_from
from convoy.wire.messages.control import FrameType, Sender
from convoy.wire.messages.ranks import Agree
from convoy.wire.tensor import WireTensor

# The frame types that `SealedCollective.deliver` takes.
RANK_TYPES = frames_from(Sender.RANK)

# The kind of a piece, in its frame's header beside the rank that made it.
PART, PREFIX, SUM, SHARE = 0, 1, 2, 3

_READ_ELSEWHERE_S = 0.002
# At most this many pieces wait to be sent without blocking this thread, which then reads. With more pieces, a
# receiver thread must read meanwhile.
_READ_PIECES = 32
# A connection takes this much while its other end does not read, over any wire. It matters because two ranks
# that both send read only afterwards.
_AT_ONCE_BYTES = 32 * 1024
# The reply to a part sent from this thread usually comes sooner than a sleeping core wakes up.
_AWAKE_S = 0.0005
_CHAIN_RANKS = 4
_CHAIN_PIECES = 4


class SealedCollective:
    """Represent one rank's end. One thread runs operations, the same ones in the same order on every rank.

    ``links`` holds those to the ranks before and after this one in the ring, by rank; others are not used.
    Receiver threads call `deliver`. ``deadline_s`` applies to each operation. After an error the collective
    is over, and every later operation raises the same `CollectiveError`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        links: Mapping[int, Link],
        plan_id: int,
        deadline_s: float = 30.0,
    ) -> None:
        assert 0 <= rank < world_size > 1, "a rank alone has no other rank to exchange with"
        self.rank = rank
        self.world_size = world_size
        self.plan_id = plan_id
        self._deadline_s = deadline_s
        self._ring = ring = Ring(rank, world_size)
        self._links = {other: links[other] for other in {ring.left, ring.right}}
        self._rank_of = {link: other for other, link in self._links.items()}
        self._reader = self._links[ring.left].reader if world_size == 2 else None
        self._borrowed, self._not_borrowed = _Borrowed(self._reader), _Borrowed(None)
        self._reads = False
        # How long a wait spins. Beyond that, the sending thread of this process may need the core.
        self._awake_s = 0.0
        self._box = PartMailbox(deadline_s)
        # From so many pieces on, a sum of many ranks goes along the chain.
        self.chain_pieces = _CHAIN_PIECES
        self._agreement = Agreement(ring)

    # Operations.

    def agree(self, mine: Agree) -> None:
        """Check before the first operation that every rank is there for the same plan.

        Raises `CollectiveError` naming the rank and both values, or a rank that sent nothing within the
        deadline.
        """
        until_s = time.monotonic() + self._deadline_s
        self._say(self.rank, mine)
        for _ in range(self.world_size - 1):
            try:
                sender, theirs = self._agreement.take(until_s)
                self._say(sender, theirs)
                check_agreement(mine, theirs)
            except queue.Empty:
                missing = self._agreement.missing[0]
                text = f"rank {missing} did not announce its plan within {self._deadline_s:g} s"
                raise self._box.fail(CollectiveError(text, rank=missing)) from None
            except CollectiveError as error:
                raise self._box.fail(error) from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, in new memory; every rank gets the same bits.

        ``x`` is float32 or bfloat16, of the same shape on every rank. Raises `CollectiveError`.
        """
        own = _copied(x)
        name, shapes = dtype_name(own), piece_shapes(own.shape)
        if self.world_size == 2 and shapes == [own.shape]:
            with self._reading(1):
                self._awake_s = _AWAKE_S if own.nbytes <= _AT_ONCE_BYTES else 0.0
                out = self._add_pair(own, name)
            return out if x.device.type == "cpu" else out.to(x.device)
        out = torch.empty_like(own)
        pieces, outs = cut(own, shapes), cut(out, shapes)
        is_chain = self.world_size >= _CHAIN_RANKS and len(pieces) >= self.chain_pieces
        add = self._chain if is_chain else self._circulate
        with self._reading(len(pieces)):
            add(pieces, outs, shapes, name)
        return out if x.device.type == "cpu" else out.to(x.device)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Return all ranks' tensors in their order at rank 0, and None at the others, which do not wait.

        ``x`` and errors as for `all_reduce`.
        """
        own = _copied(x)
        name, shapes = dtype_name(own), piece_shapes(own.shape)
        with self._reading(len(shapes)):
            found = self._gather(own, shapes, name)
        if self.rank:
            return None
        return [x, *(found[other].to(x.device) for other in range(1, self.world_size))]

    def rest(self) -> None:
        """Hand the borrowed link back to its receiver thread, because no operation follows at once."""
        if self._reader is not None:
            self._reader.give_back()

    # Threads other than that of the operations.

    @property
    def held_bytes(self) -> int:
        """Return the bytes of parts that wait here for their operation."""
        return self._box.held_bytes

    def deliver(self, link: Link, received: Received) -> bool:
        """Take a frame from a receiver thread; return whether it is of this collective or an earlier one.

        A part that comes too early waits here, which holds its rank back. Raises `StepError` for an invalid
        part. The link that carried it ends then, and the collective too.
        """
        rank = self._rank_of.get(link)
        if rank is None or not _is_ours(received):
            return False
        if received.plan_id != self.plan_id:
            # Parts of a plan that is over are dropped.
            return received.plan_id < self.plan_id
        try:
            if isinstance(received, ReceivedTensor):
                self._box.put(rank, received)
            elif isinstance(received.message, Agree):
                self._agreement.put(rank, received.message)
        except StepError as error:
            self.abort(CollectiveError(error.message, rank=rank))
            raise
        return True

    def abort(self, error: ConvoyError) -> None:
        """End the collective: every waiting thread raises a `CollectiveError` with the reason."""
        if not isinstance(error, CollectiveError):
            error = CollectiveError(error.message, hint=error.hint, public=error.public)
        self._agreement.fail(self._box.fail(error))

    def link_ended(self, link: Link, error: ConvoyError) -> bool:
        """End the collective if ``link`` is one of its links; return whether it is."""
        rank = self._rank_of.get(link)
        if rank is not None:
            self.abort(CollectiveError(f"the link to rank {rank} ended: {error.message}", rank=rank))
        return rank is not None

    # How sums are made, and shares gathered.

    def _add_pair(self, own: torch.Tensor, dtype: str) -> torch.Tensor:
        """Add one piece of two ranks, as `_circulate` does but faster: a decode runs many such sums."""
        until_s, other = self._until_s, 1 - self.rank
        number = self._begin({PartSlot(other, PART, other): ExpectedPart((own.shape,), dtype)})
        self._send(other, to_piece(own), (number, PART, self.rank), True, until_s)
        theirs = from_piece(self._take(until_s, "an all-reduce").tensor)
        self._box.end()
        first, second = (own, theirs) if self.rank == 0 else (theirs, own)
        if dtype == "float32":
            return first + second
        return (first.float() + second.float()).to(own.dtype)

    def _circulate(
        self, pieces: list[torch.Tensor], outs: list[torch.Tensor], shapes: list[tuple[int, ...]], dtype: str
    ) -> None:
        until_s, waited = self._until_s, self._ring.circulating()
        number = self._begin(
            {PartSlot(sender, PART, origin): ExpectedPart(shapes, dtype) for sender, origin in waited}
        )
        parts: list[dict[int, torch.Tensor]] = [{self.rank: piece} for piece in pieces]
        alone, num_left = len(pieces) == 1, len(waited) * len(pieces)

        def take(arrived: Arrived) -> None:
            slot, nth, tensor = arrived
            for to in self._ring.onward(slot.sender, slot.origin):
                self._send(to, tensor, (number, PART, slot.origin), alone, until_s)
            of_piece = parts[nth]
            of_piece[slot.origin] = from_piece(tensor)
            if len(of_piece) == self.world_size:
                add_in_order((of_piece[rank] for rank in range(self.world_size)), outs[nth])
                of_piece.clear()

        for piece in pieces:
            wired = to_piece(piece)
            for to in self._ring.onward(self.rank, self.rank):
                self._send(to, wired, (number, PART, self.rank), alone, until_s)
            while not alone and (arrived := self._box.look()) is not None:
                take(arrived)
                num_left -= 1
        for _ in range(num_left):
            take(self._take(until_s, "an all-reduce"))
        self._box.end()

    def _chain(
        self, pieces: list[torch.Tensor], outs: list[torch.Tensor], shapes: list[tuple[int, ...]], dtype: str
    ) -> None:
        ring, until_s, last = self._ring, self._until_s, self.world_size - 1
        waited = {}
        if self.rank > 0:
            waited[PartSlot(ring.left, PREFIX, ring.left)] = ExpectedPart(shapes, "float32")
        if self.rank < last:
            waited[PartSlot(ring.right, SUM, ring.right)] = ExpectedPart(shapes, dtype)
        number = self._begin(waited)
        for piece in pieces if self.rank == 0 else ():
            self._send(ring.right, to_piece(piece.float()), (number, PREFIX, self.rank), False, until_s)
        for _ in range(len(waited) * len(pieces)):
            slot, nth, tensor = self._take(until_s, "an all-reduce")
            came = from_piece(tensor)
            if slot.part == PREFIX:
                came = came + pieces[nth].float()
                if self.rank < last:
                    self._send(ring.right, to_piece(came), (number, PREFIX, self.rank), False, until_s)
                    continue
                came = came.to(outs[nth].dtype)
                tensor = to_piece(came)
            outs[nth].copy_(came)
            if self.rank > 0:
                self._send(ring.left, tensor, (number, SUM, self.rank), False, until_s)
        self._box.end()

    def _gather(self, own: torch.Tensor, shapes: list[tuple[int, ...]], name: str) -> dict[int, torch.Tensor]:
        until_s, waited = self._until_s, self._ring.gathering()
        number = self._begin(
            {PartSlot(sender, SHARE, origin): ExpectedPart(shapes, name) for sender, origin in waited}
        )
        found = {origin: torch.empty_like(own) for _, origin in waited} if self.rank == 0 else {}
        places = {origin: cut(share, shapes) for origin, share in found.items()}
        alone = len(shapes) == 1
        if self.rank:
            for piece in cut(own, shapes):
                self._send(
                    self._ring.toward_first, to_piece(piece), (number, SHARE, self.rank), alone, until_s
                )
        for _ in range(len(waited) * len(shapes)):
            slot, nth, tensor = self._take(until_s, "a gather")
            if self.rank:
                self._send(self._ring.toward_first, tensor, (number, SHARE, slot.origin), alone, until_s)
            else:
                places[slot.origin][nth].copy_(from_piece(tensor))
        self._box.end()
        return found

    def _begin(self, expected: dict[PartSlot, ExpectedPart]) -> int:
        """Return the operation's number. A rank that sent an invalid part too early loses its link now."""
        try:
            return self._box.begin(expected)
        except CollectiveError as error:
            if isinstance(error.__cause__, StepError) and error.rank in self._links:
                self._links[error.rank].dismiss(error.message)
            raise

    def _reading(self, num_pieces: int) -> _Borrowed:
        """Return the context for an operation of ``num_pieces`` pieces; it decides which thread reads the
        link.
        """
        self._reads, self._awake_s = num_pieces <= _READ_PIECES, 0.0
        if self._reads:
            return self._borrowed
        self.rest()
        return self._not_borrowed

    def _take(self, until_s: float, what: str) -> Arrived:
        """Return the next piece.

        With two ranks this thread reads the link itself, so that no other thread must wake.
        """
        reader = self._reader if self._reads else None
        if reader is None or not reader.lends:
            return self._box.take(until_s, what)
        while (arrived := self._box.look()) is None:
            if time.monotonic() >= until_s:
                return self._box.take(until_s, what)
            try:
                has_read = reader.read_here(until_s, self._read, awake_s=self._awake_s)
            except StepError as error:
                raise self._box.fail(CollectiveError(error.message, rank=self._ring.left)) from error
            except ConvoyError as error:
                raise self._lost(self._ring.left, error) from error
            if not has_read and (arrived := self._box.look(_READ_ELSEWHERE_S)) is not None:
                break
        return arrived

    def _read(self, received: Received) -> bool:
        """Take a frame that this thread read itself; it must not make this thread wait."""
        if not (isinstance(received, ReceivedTensor) and received.kind is FrameType.PARTIAL):
            return False
        if received.plan_id == self.plan_id:
            self._box.put(self._ring.left, received, waits=False)
        return received.plan_id <= self.plan_id

    @property
    def _until_s(self) -> float:
        return time.monotonic() + self._deadline_s

    def _say(self, sender: int, said: Agree) -> None:
        for to in self._ring.onward(sender, said.rank):
            try:
                self._links[to].send(said, plan_id=self.plan_id)
            except ConvoyError as error:
                raise self._lost(to, error) from error

    def _send(
        self, to: int, piece: WireTensor, place: tuple[int, int, int], alone: bool, until_s: float
    ) -> None:
        """Send a piece: a small lone piece from this thread, which is quickest.

        Other pieces go through the sending thread, so that this thread can add meanwhile.
        """
        number, part, origin = place
        at_once = alone and piece.nbytes <= _AT_ONCE_BYTES
        try:
            sent = self._links[to].send_tensor(
                piece,
                plan_id=self.plan_id,
                step=number,
                boundary=code_of(part, origin),
                kind=FrameType.PARTIAL,
                until_s=None if at_once else until_s,
            )
        except ConvoyError as error:
            raise self._lost(to, error) from error
        if not sent:
            text = f"rank {to} took nothing of operation {number} within {self._deadline_s:g} s"
            raise self._box.fail(CollectiveError(text, rank=to))

    def _lost(self, rank: int, error: ConvoyError) -> CollectiveError:
        """Return the error for waiting threads, because nothing can be sent to ``rank``; an earlier error
        stands.
        """
        text = f"the link to rank {rank} ended: {error.message}"
        return self._box.fail(CollectiveError(text, rank=rank))


class _Borrowed:
    """Borrow a link's reader during an operation, so that an arriving frame wakes no other thread."""

    def __init__(self, reader: Reader | None) -> None:
        self._reader = reader

    def __enter__(self) -> None:
        if self._reader is not None:
            self._reader.borrow()

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if self._reader is not None:
            (self._reader.done if error is None else self._reader.give_back)()


def _copied(x: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, so that its memory stays unchanged while pieces of it wait to be sent."""
    return x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _is_ours(received: Received) -> bool:
    if isinstance(received, ReceivedTensor):
        return received.kind is FrameType.PARTIAL
    return isinstance(received.message, Agree)

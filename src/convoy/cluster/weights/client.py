"""The client of a peer that gets parts of a model from its head: it asks ahead for pieces.

It takes no pieces that it did not ask for. The receiver thread fills the queue; the thread that writes
empties it. The queue holds at most the pieces that were asked for.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from convoy.errors import ConvoyError, LinkBroken, PeerRefused, PeerUnreachable, StepError
from convoy.transport.link.link import Link
from convoy.wire.messages.fetch import PIECE_BYTES, Fetch, Piece

# Pieces under way: 8 MiB, which hides a round trip of 50 ms at 160 MB/s.
MAX_ASKED = 16
STALL_S = 60.0
_LOOK_UP_S = 0.5


@dataclass(frozen=True, slots=True)
class Want:
    """Name bytes [start, end) of a part, by its digest. ``end`` None asks for a first piece.

    ``name`` is for errors. ``wrong``: see `Fetch`.
    """

    part: str
    name: str
    start: int
    end: int | None
    wrong: str = ""


class PartClient:
    """Hold all requests of this member for pieces. Any thread may call `handle_piece`, `ended` and `abandon`.

    ``stall_s`` bounds how long no piece may come while some are under way.
    """

    def __init__(self, stall_s: float = STALL_S, piece_bytes: int = PIECE_BYTES) -> None:
        self._stall_s = stall_s
        self.piece_bytes = piece_bytes
        self._lock = threading.Lock()
        self._number = 0
        # The queue that waits for the answer to each number of a link; None once its reader has left.
        self._asked: dict[tuple[Link, int], queue.SimpleQueue[Piece | ConvoyError] | None] = {}

    def pieces_of(self, part: str, name: str, start: int, end: int, wrong: str = "") -> Iterator[Want]:
        """Yield bytes [start, end) in pieces as this member asks for them."""
        for at in range(start, end, self.piece_bytes):
            yield Want(part, name, at, min(at + self.piece_bytes, end), wrong)

    def handle_piece(self, link: Link, piece: Piece) -> None:
        """Queue a piece for its reader. A piece without a question ends the link."""
        with self._lock:
            known = (link, piece.number) in self._asked
            waiting = self._asked.pop((link, piece.number), None)
        if waiting is not None:
            waiting.put(piece)
        elif not known:
            link.dismiss("this member did not ask for that piece of a model")

    def abandon(self, why: ConvoyError) -> None:
        """Make every `pull` that waits for pieces raise ``why``."""
        with self._lock:
            waiting = {id(one): one for one in self._asked.values() if one is not None}
        for one in waiting.values():
            one.put(why)

    def ended(self, link: Link) -> None:
        """End the waits for pieces of a link that ended."""
        with self._lock:
            over = [key for key in self._asked if key[0] is link]
            waiting = {id(one): one for key in over if (one := self._asked.pop(key)) is not None}
        for one in waiting.values():
            one.put(LinkBroken(f"the link to {link.peer} ended while parts of the model came"))

    def pull(
        self,
        link: Link,
        manifest: str,
        wants: Iterable[Want],
        watch: Callable[[], None],
    ) -> Iterator[tuple[Want, Piece]]:
        """Yield every piece of ``wants``, in order, with `MAX_ASKED` under way at once.

        ``watch`` is called at least every half second; an error that it raises ends this. Raises
        `PeerRefused` with the other member's own words, `PeerUnreachable` if no piece comes for too long,
        and the errors of a link.
        """
        answers: queue.SimpleQueue[Piece | ConvoyError] = queue.SimpleQueue()
        under_way: deque[tuple[int, Want]] = deque()
        pieces = iter(wants)
        more = True
        try:
            while more or under_way:
                while more and len(under_way) < MAX_ASKED:
                    want = next(pieces, None)
                    more = want is not None
                    if want is not None:
                        under_way.append((self._ask(link, manifest, want, answers), want))
                if under_way:
                    number, want = under_way.popleft()
                    piece = self._next(link, answers, watch)
                    yield want, _checked(piece, number, want, link, self.piece_bytes)
        finally:
            with self._lock:
                for key, waiting in self._asked.items():
                    if waiting is answers:
                        self._asked[key] = None

    def _ask(
        self, link: Link, manifest: str, want: Want, answers: queue.SimpleQueue[Piece | ConvoyError]
    ) -> int:
        with self._lock:
            number = self._number
            self._number += 1
            self._asked[link, number] = answers
        num_bytes = self.piece_bytes if want.end is None else want.end - want.start
        link.send(Fetch(number, manifest, want.part, want.start, num_bytes, want.wrong))
        return number

    def _next(
        self, link: Link, answers: queue.SimpleQueue[Piece | ConvoyError], watch: Callable[[], None]
    ) -> Piece:
        until_s = time.monotonic() + self._stall_s
        while True:
            watch()
            try:
                answer = answers.get(timeout=_LOOK_UP_S)
            except queue.Empty:
                if link.is_over:
                    raise LinkBroken(f"the link to {link.peer} ended while parts of the model came") from None
                if time.monotonic() > until_s:
                    raise PeerUnreachable(
                        f"{link.peer} sent nothing of the model for {self._stall_s:g} s"
                    ) from None
                continue
            if isinstance(answer, ConvoyError):
                raise answer
            return answer


def _checked(piece: Piece, number: int, want: Want, link: Link, first_bytes: int) -> Piece:
    """Return the piece if it is the next one and has the size that was asked for.

    ``first_bytes`` is the most of a first piece. The piece's bytes are not verified yet.
    """
    if piece.number != number:
        raise StepError(f"{link.peer} sent piece {piece.number} of the model before piece {number}")
    if piece.error:
        raise PeerRefused(f"{link.peer} cannot send {want.name}: {piece.error}")
    end = min(first_bytes, piece.total_bytes) if want.end is None else want.end
    if len(piece.data) != end - want.start:
        raise StepError(
            f"{link.peer} sent {len(piece.data)} bytes of {want.name}, expected {end - want.start}"
        )
    return piece

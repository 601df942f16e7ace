"""Members that have what their head lacks of a model: asked once which tensors, then for pieces of these.

The head hands on what one peer sends to another, a few pieces at a time, and keeps nothing: both have a link
to it already, whatever lies between the two. It need not trust what it hands on, for whoever gets it compares
it with the manifest; where that comes to something else, or a source goes or stalls, the next one goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from convoy.cluster.weights.client import PIECE_BYTES, PartClient, pieces_of
from convoy.cluster.weights.part_index import PartLocation, check_listable, from_bits
from convoy.errors import ConvoyError, ModelError
from convoy.model.checkpoints.hub.weights import HeldTensors as HeldBack
from convoy.model.checkpoints.manifest import Manifest
from convoy.model.checkpoints.store.parts import ModelPart, PartFile
from convoy.transport.link.link import Link, Received, ReceivedMessage
from convoy.wire.messages.control import Hello
from convoy.wire.messages.fetch import Held, Holding

_log = logging.getLogger(__name__)

STALL_S = 12.0  # four sources may stall before who waits for the head gives up
_ANSWER_S = 12.0
_AGAIN_S = 5.0  # an answer as old as that may not be true any more
_LOOK_UP_S = 0.2
_MAX_TRIES = 8  # of one part: each but the first and those after a loss has another source

Present = Callable[[], Mapping[str, tuple[Link, Hello]]]
Watch = Callable[[], None]


class NobodyHas(ModelError):  # noqa: N818 - a state, as in errors.py
    """No member that is here has a tensor, or can send it: the text says which, and why."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What a peer said that it has, and when; ``names`` None: it was asked, and has not said yet.

    ``is_late``: it was waited for in vain.
    """

    at_s: float
    names: frozenset[str] | None = None
    is_late: bool = False


class PeerWeightSource:
    """One for a head. Any thread may call anything."""

    def __init__(self, present: Present) -> None:
        """``present``: who is here now."""
        self.fetches = PartClient(STALL_S)
        self._present = present
        self._changed = threading.Condition()
        self._said: dict[Link, _Said] = {}
        self._manifest: Manifest | None = None

    def takes(self, link: Link, received: Received) -> bool:
        """Whether it was something that was asked for here; what nobody asked for ends its link."""
        if self.fetches.takes(link, received):
            return True
        if not isinstance(received, ReceivedMessage) or not isinstance(received.message, Held):
            return False
        held = received.message
        with self._changed:
            said, manifest = self._said.get(link), self._manifest
            is_asked = said is not None and said.names is None
            if is_asked and manifest is not None:
                bits = held.tensors if held.manifest == manifest.digest else b""
                self._said[link] = _Said(time.monotonic(), from_bits(manifest.tensors, bits))
            self._changed.notify_all()
        if not is_asked:
            link.dismiss("nobody asked for what it has of a model")
        return True

    def ended(self, link: Link) -> None:
        """That link is over."""
        self.fetches.ended(link)
        with self._changed:
            self._said.pop(link, None)
            self._changed.notify_all()

    def having(
        self, manifest: Manifest, name: str, besides: str, failed: Collection[Link], watch: Watch
    ) -> list[Link]:
        """Who has that tensor, but ``besides`` and ``failed``. Where nobody is known, all are asked anew.

        Raises ModelError, before anybody is asked, for one of too many tensors, and what ``watch`` raises.
        """
        check_listable(manifest)

        def known() -> list[Link]:
            return [link for link in self._known(name, besides) if link not in failed]

        found = known()
        if not found:
            self._ask(manifest, name, besides)
            until_s = time.monotonic() + _ANSWER_S
            while not (found := known()) and self._is_expecting(besides, until_s):
                watch()
                with self._changed:
                    self._changed.wait(_LOOK_UP_S)
        return found

    def reader(self, manifest: Callable[[], Manifest], asker: str, watch: Watch) -> PeerReader:
        """For pieces of tensors that ``asker`` wants."""
        return PeerReader(self, manifest, asker, watch)

    def link_to(self, member: str) -> Link | None:
        present = self._present()
        return present[member][0] if member in present else None

    def _links(self, besides: str) -> dict[str, Link]:
        return {name: link for name, (link, _) in self._present().items() if name != besides}

    def _known(self, name: str, besides: str) -> list[Link]:
        links = self._links(besides).values()
        with self._changed:
            return [link for link in links if (one := self._said.get(link)) and name in (one.names or ())]

    def _is_expecting(self, besides: str, until_s: float) -> bool:
        """Whether an answer may still come; whoever was waited for in vain is not waited for again."""
        is_over = time.monotonic() >= until_s
        links = self._links(besides).values()
        with self._changed:
            late = [one for one in links if (said := self._said.get(one)) and said.names is None]
            if is_over:
                self._said |= {link: replace(self._said[link], is_late=True) for link in late}
            return any(not self._said[link].is_late for link in late)

    def _ask(self, manifest: Manifest, name: str, besides: str) -> None:
        now_s = time.monotonic()
        for link in self._links(besides).values():
            with self._changed:
                self._manifest = manifest
                said = self._said.get(link)
                if said is not None and (said.names is None or now_s - said.at_s < _AGAIN_S):
                    continue
                self._said[link] = _Said(now_s)
            try:
                link.send(Holding(manifest.digest))
            except ConvoyError as error:  # its link is over, and says so itself
                _log.debug("%s is not asked whether it has %s: %s", link.peer, name, error.message)
                self.ended(link)


@dataclass(slots=True)
class _At:
    """How far a tensor was read, and from whom."""

    digest: str
    start: int
    source: Link
    held: HeldBack


class PeerReader:
    """Pieces of tensors from whoever has them, for one member that asks for one piece behind the other.

    One thread. ``asker`` says of whose bytes it got others than the manifest lists; that counts for it alone.
    """

    def __init__(
        self, sources: PeerWeightSource, manifest: Callable[[], Manifest], asker: str, watch: Watch
    ) -> None:
        self._sources = sources
        self._manifest = manifest
        self._asker = asker
        self._watch = watch
        self._at: _At | None = None
        self._wrong: dict[tuple[str, Link], str] = {}  # why not, by digest and source
        self._failures: Counter[str] = Counter()
        self.taken: Counter[str] = Counter()  # bytes, by member

    def blame(self, place: PartLocation, digest: str, member: str) -> None:
        """What ``asker`` got of it from ``member`` were other bytes."""
        link = self._sources.link_to(member)
        if link is not None and (digest, link) not in self._wrong:
            _log.warning("%s got other bytes of %s from %s", self._asker, place.name, member)
            self._fail(digest, link, f"{member} sent other bytes of it")

    def read(self, place: PartLocation, digest: str, start: int, num_bytes: int) -> tuple[bytes, str]:
        """Bytes [start, start + num_bytes) of a tensor, and whose they are.

        Raises NobodyHas, with why those that have it could not send it, and what ``watch`` raises.
        """
        while True:
            at = self._at
            if at is None or (at.digest, at.start) != (digest, start) or (digest, at.source) in self._wrong:
                at = self._begin(place, digest, start)
            self._at = None
            try:
                data = b"".join(_pieces(at.held, num_bytes))
            except ConvoyError as error:
                self._watch()  # whether it is this end that is over
                why = f"{at.source.peer} sent no more of it: {error.message}"
                _log.warning("%s wants %s, and %s", self._asker, place.name, why)
                self._fail(digest, at.source, why)
                continue
            self._at = _At(digest, start + num_bytes, at.source, at.held)
            self.taken[at.source.peer] += num_bytes
            return data, at.source.peer

    def fill(self, part: ModelPart, tell: Callable[[int], None]) -> None:
        """Get one tensor whole; ``tell`` hears how many bytes are here. Raises as `read`, and ModelError."""
        place = PartLocation(part.name, None, 0, part.num_bytes)
        for _ in range(_MAX_TRIES):
            with PartFile(part, lambda _num_bytes: self._watch()) as file:
                resumed, members = file.resumed, set()
                while file.left:
                    most = min(PIECE_BYTES, file.left)
                    data, member = self.read(place, part.digest, file.num_bytes, most)
                    file.write(data)
                    members.add(member)
                    tell(file.num_bytes)
                if file.finish():
                    return
            if not resumed and len(members) == 1:
                self.blame(place, part.digest, members.pop())
        raise ModelError(f"{_MAX_TRIES} times other bytes of {part.name} came than the manifest lists")

    def _begin(self, place: PartLocation, digest: str, start: int) -> _At:
        manifest = self._manifest()
        failed = {link for part, link in self._wrong if part == digest}
        usable = self._sources.having(manifest, place.name, self._asker, failed, self._watch)
        if not usable:
            reasons = [text for (part, _), text in self._wrong.items() if part == digest]
            raise NobodyHas(": ".join([f"nobody who is here has {place.name}", *reasons[:1]]))
        source = min(usable, key=lambda link: (self._failures[link.peer], link.peer))
        wants = pieces_of(digest, place.name, start, place.num_bytes)
        pulled = self._sources.fetches.pull(source, manifest.digest, wants, self._watch)
        return _At(digest, start, source, HeldBack(piece.data for _, piece in pulled))

    def _fail(self, digest: str, source: Link, why: str) -> None:
        self._wrong[digest, source] = why
        self._failures[source.peer] += 1


def _pieces(held: HeldBack, num_bytes: int) -> Iterator[memoryview]:
    while num_bytes and (taken := held.take(num_bytes)):
        num_bytes -= len(taken)
        yield taken

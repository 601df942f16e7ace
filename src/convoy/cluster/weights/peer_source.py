"""Find members that have the parts of a model that their head lacks: ask once which tensors, then for pieces.

The head forwards pieces from one peer to another, a few at a time, and stores none: both have a link to
it already, whatever network lies between the two. The head need not trust the pieces, because the
receiving member compares them with the manifest. If a tensor is wrong, or its source leaves or stalls,
the next source goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from convoy.cluster.weights.client import PartClient
from convoy.cluster.weights.part_index import PartLocation, check_listable, from_bits
from convoy.errors import ConvoyError, ModelError
from convoy.model.checkpoints.hub.weights import ChunkBuffer
from convoy.model.checkpoints.manifest import Manifest
from convoy.model.checkpoints.store.parts import ModelPart, PartFile
from convoy.transport.link.link import Link
from convoy.wire.messages.control import Hello
from convoy.wire.messages.fetch import PIECE_BYTES, Held, Holding

_log = logging.getLogger(__name__)

# An answer older than this may no longer be true.
_AGAIN_S = 5.0
_LOOK_UP_S = 0.2
# Tries of one part. Each has another source, except the first and those after a loss.
_MAX_TRIES = 8

Present = Callable[[], Mapping[str, tuple[Link, Hello]]]
Watch = Callable[[], None]


class NobodyHas(ModelError):  # noqa: N818 - a state, as in errors.py
    """Say that no connected member has a tensor or can send it. The text names the tensor and the reason."""


@dataclass(frozen=True, slots=True)
class _Said:
    """Hold the tensors that a peer said it has, and when.

    ``names`` None: it was asked and has not answered yet. ``is_late``: the wait for its answer ended
    without one.
    """

    at_s: float
    names: frozenset[str] | None = None
    is_late: bool = False


class PeerWeightSource:
    """Know which peers have which tensors, for one head. Thread-safe."""

    def __init__(
        self, present: Present, *, answer_s: float, stall_s: float, piece_bytes: int = PIECE_BYTES
    ) -> None:
        """Start without answers.

        ``present`` returns the connected peers. One of them that answers nothing for ``answer_s`` is not
        waited for again. One that sends a part and is silent for ``stall_s`` is passed over.
        """
        self._answer_s = answer_s
        self.part_client = PartClient(stall_s, piece_bytes)
        self._present = present
        self._changed = threading.Condition()
        self._said: dict[Link, _Said] = {}
        self._manifest: Manifest | None = None

    def handle_held(self, link: Link, held: Held) -> None:
        """Note which tensors a peer has. An answer without a question ends its link."""
        with self._changed:
            said, manifest = self._said.get(link), self._manifest
            is_asked = said is not None and said.names is None
            if is_asked and manifest is not None:
                bits = held.tensors if held.manifest == manifest.digest else b""
                self._said[link] = _Said(time.monotonic(), from_bits(manifest.tensors, bits))
            self._changed.notify_all()
        if not is_asked:
            link.dismiss("this member did not ask which tensors it has")

    def ended(self, link: Link) -> None:
        """Forget a link that ended."""
        self.part_client.ended(link)
        with self._changed:
            self._said.pop(link, None)
            self._changed.notify_all()

    def having(
        self, manifest: Manifest, name: str, besides: str, failed: Collection[Link], watch: Watch
    ) -> list[Link]:
        """Return the links of members with that tensor, except ``besides`` and ``failed``.

        If no such member is known, all are asked anew. Raises ModelError, before any member is asked, for
        a model of too many tensors, and the errors of ``watch``.
        """
        check_listable(manifest)

        def known() -> list[Link]:
            return [link for link in self._known(name, besides) if link not in failed]

        found = known()
        if not found:
            self._ask(manifest, name, besides)
            until_s = time.monotonic() + self._answer_s
            while not (found := known()) and self._is_expecting(besides, until_s):
                watch()
                with self._changed:
                    self._changed.wait(_LOOK_UP_S)
        return found

    def reader(self, manifest: Callable[[], Manifest], asker: str, watch: Watch) -> PeerReader:
        """Return a reader for pieces of tensors that ``asker`` wants."""
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
        """Return whether an answer may still come.

        A member that did not answer in time is not waited for again.
        """
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
            # The link is over, and its end is reported separately.
            except ConvoyError as error:
                _log.debug("%s is not asked whether it has %s: %s", link.peer, name, error.message)
                self.ended(link)


@dataclass(slots=True)
class _At:
    """Remember how far a tensor was read, and from which source."""

    digest: str
    start: int
    source: Link
    buffer: ChunkBuffer


class PeerReader:
    """Read pieces of tensors from any member that has them, for one member that asks for piece after piece.

    It is for one thread. ``asker`` reports the member that sent wrong bytes; that counts for ``asker``
    alone.
    """

    def __init__(
        self, sources: PeerWeightSource, manifest: Callable[[], Manifest], asker: str, watch: Watch
    ) -> None:
        self._sources = sources
        self._manifest = manifest
        self._asker = asker
        self._watch = watch
        self._at: _At | None = None
        # The reason why a source is not used for a part, by digest and source.
        self._wrong: dict[tuple[str, Link], str] = {}
        self._failures: Counter[str] = Counter()
        # Bytes, by member.
        self.taken: Counter[str] = Counter()

    def report_wrong(self, place: PartLocation, digest: str, member: str) -> None:
        """Note that ``asker`` got wrong bytes of a part from ``member``."""
        link = self._sources.link_to(member)
        if link is not None and (digest, link) not in self._wrong:
            _log.warning("%s got other bytes of %s from %s", self._asker, place.name, member)
            self._fail(digest, link, f"{member} sent other bytes of it")

    def read(self, place: PartLocation, digest: str, start: int, num_bytes: int) -> tuple[bytes, str]:
        """Return bytes [start, start + num_bytes) of a tensor, and the member that sent them.

        Raises NobodyHas, with the reason of a source that could not send it, and the errors of ``watch``.
        """
        while True:
            at = self._at
            if at is None or (at.digest, at.start) != (digest, start) or (digest, at.source) in self._wrong:
                at = self._begin(place, digest, start)
            self._at = None
            try:
                data = b"".join(_pieces(at.buffer, num_bytes))
            except ConvoyError as error:
                # Raises if this end is over: then the source is not at fault.
                self._watch()
                why = f"{at.source.peer} sent no more of it: {error.message}"
                _log.warning("%s wants %s, and %s", self._asker, place.name, why)
                self._fail(digest, at.source, why)
                continue
            self._at = _At(digest, start + num_bytes, at.source, at.buffer)
            self.taken[at.source.peer] += num_bytes
            return data, at.source.peer

    def fill(self, part: ModelPart, tell: Callable[[int], None]) -> None:
        """Get one whole tensor.

        ``tell`` hears how many bytes are here. Raises as `read` does, and ModelError.
        """
        place = PartLocation(part.name, None, 0, part.num_bytes)
        for _ in range(_MAX_TRIES):
            with PartFile(part, lambda _num_bytes: self._watch()) as file:
                resumed, members = file.resumed, set()
                while file.left:
                    most = min(self._sources.part_client.piece_bytes, file.left)
                    data, member = self.read(place, part.digest, file.num_bytes, most)
                    file.write(data)
                    members.add(member)
                    tell(file.num_bytes)
                if file.finish():
                    return
            if not resumed and len(members) == 1:
                self.report_wrong(place, part.digest, members.pop())
        raise ModelError(f"{_MAX_TRIES} times other bytes of {part.name} came than the manifest lists")

    def _begin(self, place: PartLocation, digest: str, start: int) -> _At:
        manifest = self._manifest()
        failed = {link for part, link in self._wrong if part == digest}
        usable = self._sources.having(manifest, place.name, self._asker, failed, self._watch)
        if not usable:
            reasons = [text for (part, _), text in self._wrong.items() if part == digest]
            raise NobodyHas(": ".join([f"no connected member has {place.name}", *reasons[:1]]))
        source = min(usable, key=lambda link: (self._failures[link.peer], link.peer))
        client = self._sources.part_client
        wants = client.pieces_of(digest, place.name, start, place.num_bytes)
        pulled = client.pull(source, manifest.digest, wants, self._watch)
        return _At(digest, start, source, ChunkBuffer(piece.data for _, piece in pulled))

    def _fail(self, digest: str, source: Link, why: str) -> None:
        self._wrong[digest, source] = why
        self._failures[source.peer] += 1


def _pieces(buffer: ChunkBuffer, num_bytes: int) -> Iterator[memoryview]:
    while num_bytes and (taken := buffer.take(num_bytes)):
        num_bytes -= len(taken)
        yield taken

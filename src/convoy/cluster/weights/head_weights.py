"""A head without the whole model: its own tensors come from a hub or a peer, as its stage needs them.

That needs a manifest that the operator signed. A head that has not read all bytes cannot compute the
digests of the other members' tensors. Members get theirs from the hub too. For a member that cannot, the
head forwards the tensors of a peer (`cluster.weights.peer_source`), or reads through the hub.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from convoy.cluster.weights.peer_source import NobodyHas, PeerReader
from convoy.errors import ModelError
from convoy.model.checkpoints.hub.cache import InUse
from convoy.model.checkpoints.hub.weights import ChunkBuffer, HubWeights
from convoy.model.checkpoints.manifest import Manifest
from convoy.model.checkpoints.owned import owned_tensors
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.store.parts import ModelPart, is_whole
from convoy.model.checkpoints.store.received import ReceivedModel, VerifiedParts
from convoy.wire.messages.control import StageAssignment

_log = logging.getLogger(__name__)

# "check", "hub" or "peer", then the bytes done and the bytes in all.
Tell = Callable[[str, int, int], None]


class HeadWeights:
    """Get a head's own tensors.

    ``make_ready`` is for the thread that loads; any thread may have a `HubReader`.
    """

    def __init__(self, received: ReceivedModel, source: ModelSource, hub: HubWeights) -> None:
        self._received = received
        self.source = source
        self._hub = hub
        self._verified = VerifiedParts()
        self._in_use = InUse(received.folder)

    @property
    def manifest(self) -> Manifest:
        return self._received.manifest

    @property
    def hub(self) -> str:
        """Return the hub's commit as ``org/name@commit``, with ``:FILE`` for a GGUF model."""
        return self._hub.name

    def make_ready(
        self, mine: StageAssignment, watch: Callable[[], None], tell: Tell, peers: PeerReader | None = None
    ) -> None:
        """Get every tensor that ``mine`` owns, and compare each with the manifest.

        The hub is asked first, then ``peers`` for the rest. An error of ``watch`` or ``tell`` ends the
        work. Raises ModelError naming file and tensor.
        """
        owned = owned_tensors(self.source, range(mine.start, mine.end), embed=mine.embed, output=mine.output)
        parts = list({part.digest: part for part in (self._received.tensor(t.name) for t in owned)}.values())

        def say(what: str) -> Callable[[int, int], None]:
            return lambda done, total: tell(what, done, total)

        with self._received.open(watch):
            missing = self._verified.missing(parts, say("check"))
            if missing:
                self._received.require_room(missing)
                why = self._from_hub(missing, say("hub"), watch)
                left = [part for part in missing if not is_whole(part)]
                if left and why is not None:
                    self._from_peers(left, peers, why, say("peer"))
            self._verified.add(parts)

    def _from_hub(
        self, parts: list[ModelPart], tell: Callable[[int, int], None], watch: Callable[[], None]
    ) -> ModelError | None:
        """Fetch parts from the hub. Returns the error if some of them did not come."""
        try:
            wrong = self._hub.fetch(parts, tell, watch)
        except ModelError as error:
            return error
        if not wrong:
            return None
        return ModelError(
            f"{self.hub} lacks the bytes of {wrong[0].name} that the signed manifest lists",
            hint="sign the manifest of that commit: `convoy manifest sign org/name@commit`",
        )

    def _from_peers(
        self,
        parts: list[ModelPart],
        peers: PeerReader | None,
        why: ModelError,
        tell: Callable[[int, int], None],
    ) -> None:
        """Fetch parts from peers. Raises ``why``, the hub's error, if no peer has them either."""
        if peers is None:
            raise why
        _log.warning("%s, and the members are asked for %d tensors", why.message, len(parts))
        total, done = sum(part.num_bytes for part in parts), 0

        def count(num_bytes: int) -> None:
            tell(done + num_bytes, total)

        for part in parts:
            try:
                peers.fill(part, count)
            except NobodyHas as error:
                raise type(why)(f"{why.message}; {error.message}", hint=why.hint) from error
            done += part.num_bytes

    def close(self) -> None:
        """Release the files: nothing is loaded any more, so the cache may remove them."""
        self._in_use.close()

    def reader(self) -> HubReader:
        """Return a reader for pieces of tensors that are not here."""
        return HubReader(self._hub)


@dataclass(slots=True)
class _At:
    """Remember how far a tensor was read."""

    name: str
    start: int
    buffer: ChunkBuffer


class HubReader:
    """Read pieces of tensors from a hub, without a file here. One thread asks for them in order."""

    def __init__(self, hub: HubWeights) -> None:
        self._hub = hub
        self._at: _At | None = None

    def read(self, name: str, start: int, num_bytes: int, total: int) -> bytes:
        """Return bytes [start, start + num_bytes) of a tensor of ``total`` bytes. Raises ModelError."""
        at = self._at
        if at is None or (at.name, at.start) != (name, start):
            at = _At(name, start, ChunkBuffer(self._hub.stream(name, start, total - start)))
        self._at = None
        data = b"".join(_pieces(at.buffer, num_bytes))
        if len(data) != num_bytes:
            raise ModelError(f"the hub sent {len(data)} of {num_bytes} bytes of {name}")
        self._at = _At(name, start + num_bytes, at.buffer)
        return data


def _pieces(buffer: ChunkBuffer, num_bytes: int) -> Iterator[memoryview]:
    while num_bytes and (taken := buffer.take(num_bytes)):
        num_bytes -= len(taken)
        yield taken

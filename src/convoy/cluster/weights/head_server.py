"""The weight server of a head: the manifest, made once, and pieces of the parts that it describes.

Peers can get only parts that the manifest lists, by digest: no name or path in a peer's message is looked
at. A head that lacks parts of the model asks a peer that has them, and forwards the answer.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from convoy.cluster.options import MemberOptions
from convoy.cluster.weights.head_weights import HeadWeights, HubReader, Tell
from convoy.cluster.weights.part_index import PartLocation, places_of
from convoy.cluster.weights.peer_source import PeerReader, PeerWeightSource, Present
from convoy.cluster.weights.request_queue import Answer, RequestQueue
from convoy.errors import LinkClosed, ModelError
from convoy.model.checkpoints.hub.cache import InUse
from convoy.model.checkpoints.hub.files import commit_of, snapshot_of
from convoy.model.checkpoints.manifest import Manifest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.store.digests import Hashing, HashProgress, make_manifest
from convoy.transport.link.link import Link
from convoy.wire.messages.control import Message, Progress, StageAssignment
from convoy.wire.messages.fetch import Fetch, Piece

_MAX_REASON = 400


class HeadWeightServer:
    """Serve the weights of a head. Any thread may ask for the manifest.

    ``sources`` handles the answers of peers that are asked for parts.
    """

    def __init__(
        self,
        source: ModelSource,
        options: MemberOptions,
        own: HeadWeights | None = None,
        present: Present = dict,
    ) -> None:
        """Prepare to serve ``source``.

        ``own`` is set if the model is not here whole: it describes the model and reads the rest from a
        hub. ``present`` returns the connected peers, which may have the model too.
        """
        self._own = own
        self._options = options
        self._source = source
        self._hashing = Hashing(options.cache, options.num_threads or 0)
        self._making = threading.Lock()
        self._manifest: Manifest | None = None
        self._places: dict[str, PartLocation] = {}
        self._tensors: frozenset[str] = frozenset()
        snapshot = snapshot_of(source.path)
        self._in_use = None if snapshot is None else InUse(snapshot)
        self._answers = RequestQueue(self._begin)
        self.sources = PeerWeightSource(
            present,
            answer_s=options.held_answer_s,
            stall_s=options.part_stall_s,
            piece_bytes=options.piece_bytes,
        )
        # Bytes, by member and then by source.
        self._origins: defaultdict[str, Counter[str]] = defaultdict(Counter)
        # The peer that each member's last piece came from, if it did not come from the head.
        self._latest: dict[str, str] = {}

    @property
    def hub(self) -> str:
        """Return the commit of a hub that peers may be told of; empty for none."""
        if self._options.weights_from == "head":
            return ""
        return commit_of(self._source.path) if self._own is None else self._own.hub

    def make_ready(self, mine: StageAssignment, watch: Callable[[], None], tell: Tell) -> None:
        """Get the head's own tensors; see `HeadWeights`."""
        if self._own is not None:
            reader = self._reader(mine.member, watch)
            try:
                self._own.make_ready(mine, watch, tell, reader)
            finally:
                self._origins[mine.member].update(reader.taken)

    def origins(self, member: str) -> dict[str, int]:
        """Return the bytes of tensors that a peer got since the head began, by source.

        A source is "head", "hub" or the name of a peer.
        """
        return dict(self._origins.get(member, {}))

    def heard(self, member: str, progress: Progress) -> str:
        """Return a text of a member and its work before it loads, with the source of its weights."""
        if progress.stage == "hub":
            self._origins[member]["hub"] = max(self._origins[member]["hub"], progress.loaded_bytes)
        return doing(member, progress.stage, self._latest.get(member, ""))

    def manifest(self, progress: HashProgress | None = None) -> Manifest:
        """Return the manifest of the whole model.

        The first call hashes all files without a remembered digest. Raises ModelError, also if the
        operator signed another manifest.
        """
        with self._making:
            if self._manifest is None:
                own = self._own
                manifest = (
                    make_manifest(self._source, self._hashing, progress) if own is None else own.manifest
                )
                self._check_signed(manifest)
                self._places = places_of(self._source, manifest)
                self._tensors = frozenset(entry.digest for entry in manifest.tensors.values())
                self._manifest = manifest
            return self._manifest

    def _check_signed(self, manifest: Manifest) -> None:
        found, signed = manifest.digest, self._options.signed
        if signed is not None and found != signed:
            raise ModelError(
                f"the manifest of {self._source.name} has the digest {found[:12]}, and the operator signed "
                f"{signed[:12]}",
                hint="run the model that was signed, or have this one signed: `convoy manifest sign`",
            )

    def handle_fetch(self, link: Link, fetch: Fetch) -> None:
        """Queue a question for a piece."""
        self._answers.ask(link, fetch)

    def ended(self, link: Link) -> None:
        """Forget a link that ended."""
        self.sources.ended(link)

    def close(self) -> None:
        self._answers.close()
        for held in (self._in_use, self._own):
            if held is not None:
                held.close()

    def _begin(self, link: Link) -> Answer:
        def watch() -> None:
            if link.is_over or self._answers.is_closed:
                raise LinkClosed(f"{link.peer} gets no more of the model")

        absent = None if self._own is None else Absent(self._own.reader(), self._reader(link.peer, watch))

        def answer(question: Message) -> Message:
            assert isinstance(question, Fetch), "nothing else is put in"
            piece = self.answer_fetch(question, absent)
            if not piece.error and question.part in self._tensors:
                self._origins[link.peer][piece.source or "head"] += len(piece.data)
                self._latest[link.peer] = piece.source
            return piece

        return answer

    def _reader(self, asker: str, watch: Callable[[], None]) -> PeerReader:
        return self.sources.reader(self.manifest, asker, watch)

    def answer_fetch(self, fetch: Fetch, absent: Absent | None = None) -> Piece:
        """Return the piece that ``fetch`` asks for, or a piece with the reason why there is none."""
        try:
            place = self._find(fetch)
            if absent is None or place.path is None or place.path.exists():
                data, source = place.read(fetch.start, fetch.num_bytes), ""
            else:
                data, source = absent.read(place, fetch)
        except ModelError as error:
            return Piece(fetch.number, 0, b"", error.message[:_MAX_REASON])
        return Piece(fetch.number, place.num_bytes, data, "", source)

    def _find(self, fetch: Fetch) -> PartLocation:
        manifest = self._manifest
        if manifest is None or fetch.manifest != manifest.digest:
            raise ModelError(f"the model with the manifest {fetch.manifest[:12]} is not served here")
        if fetch.part == manifest.digest:
            return PartLocation("the manifest", None, 0, len(manifest.encoded), manifest.encoded)
        place = self._places.get(fetch.part)
        if place is None:
            raise ModelError(f"the model has no part with the digest {fetch.part[:12]} that lies in a file")
        return place


@dataclass(slots=True)
class Absent:
    """Read pieces of tensors that the head lacks, for one link.

    They come from a peer that has them, or else from a hub.
    """

    hub: HubReader
    peers: PeerReader

    def read(self, place: PartLocation, fetch: Fetch) -> tuple[bytes, str]:
        """Return the bytes, and the peer that sent them. Raises ModelError with the reason of each source."""
        num_bytes = place.clip(fetch.start, fetch.num_bytes)
        if fetch.wrong:
            self.peers.report_wrong(place, fetch.part, fetch.wrong)
        try:
            return self.peers.read(place, fetch.part, fetch.start, num_bytes)
        except ModelError as error:
            nobody = error.message
        try:
            return self.hub.read(place.name, fetch.start, num_bytes, place.num_bytes), ""
        except ModelError as error:
            raise ModelError(f"{nobody}; {error.message}", hint=error.hint) from error


def doing(member: str, what: str, source: str = "") -> str:
    """Return a member's name with its work before it loads: ``what`` is `Progress.stage`, or "peer".

    ``source`` is the peer that sends the missing parts; empty means the head.
    """
    said = {
        "check": "digests",
        "fetch": f"from {source or 'the head'}",
        "hub": "from the hub",
        "peer": "from other members",
    }.get(what)
    return member if said is None else f"{member} ({said})"

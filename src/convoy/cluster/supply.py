"""A head's end of handing out its model: the manifest, made once, and pieces of what it describes.

Only what the manifest lists can be had, by its digest: no name or path in what a peer sends is looked at. A
thread for each peer that fetches reads and sends, so that neither a receiver nor a step waits for it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from convoy.cluster.options import MemberOptions
from convoy.cluster.own_weights import HubReader, OwnWeights, Tell
from convoy.errors import ConvoyError, ModelError
from convoy.model.cache import InUse
from convoy.model.digests import Hashing, HashProgress, make_manifest
from convoy.model.hub import commit_of
from convoy.model.manifest import Manifest
from convoy.model.source import ModelSource
from convoy.transport.inbox import Inbox
from convoy.transport.link import Link, Received, ReceivedMessage
from convoy.wire.fetch import Fetch, Piece
from convoy.wire.messages import StageAssignment

_log = logging.getLogger(__name__)

_MAX_REASON = 400
_LOOK_UP_S = 5.0
_WEIGHT_BYTES = 1024
_MAX_WAITING = 64  # questions of one link; then its receiver waits


class _Place(NamedTuple):
    """Where the bytes of a part lie. ``path`` None: in ``data``."""

    name: str
    path: Path | None
    offset: int
    num_bytes: int
    data: bytes = b""


class Supply:
    """Any thread may ask for the manifest; `takes` is for receiver threads."""

    def __init__(self, source: ModelSource, options: MemberOptions, own: OwnWeights | None = None) -> None:
        """``own``: where the model is not here whole, what it is and who has the rest."""
        self._own = own
        self._options = options
        self._source = source
        self._hashing = Hashing(options.cache, options.num_threads or 0)
        self._making = threading.Lock()
        self._manifest: Manifest | None = None
        self._places: dict[str, _Place] = {}
        self._in_use = InUse(source.path) if commit_of(source.path) else None
        self._lock = threading.Lock()
        self._asked: dict[Link, Inbox[Fetch | None]] = {}
        self._closed = False

    @property
    def hub(self) -> str:
        """The commit of a hub that peers may be told of; empty for none."""
        if self._options.weights_from == "head":
            return ""
        return commit_of(self._source.path) if self._own is None else self._own.hub

    def make_ready(self, mine: StageAssignment, watch: Callable[[], None], tell: Tell) -> None:
        """The head's own tensors are here; see `OwnWeights`."""
        if self._own is not None:
            self._own.make_ready(mine, watch, tell)

    def manifest(self, progress: HashProgress | None = None) -> Manifest:
        """Of the whole model; the first call hashes what is not remembered.

        Raises ModelError, also where the operator signed another one.
        """
        with self._making:
            if self._manifest is None:
                own = self._own
                manifest = (
                    make_manifest(self._source, self._hashing, progress) if own is None else own.manifest
                )
                self._check_signed(manifest)
                self._places = _places(self._source, manifest)
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

    def takes(self, link: Link, received: Received) -> bool:
        """Whether it was a question for a piece, which is answered from another thread."""
        if not isinstance(received, ReceivedMessage) or not isinstance(received.message, Fetch):
            return False
        with self._lock:
            asked = self._asked.get(link)
            if asked is None and not self._closed:
                asked = self._asked[link] = Inbox(max_items=_MAX_WAITING)
                threading.Thread(
                    target=self._serve, args=(link, asked), name=f"supply {link.peer}", daemon=True
                ).start()
        if asked is not None:
            asked.put(link, received.message, _WEIGHT_BYTES)
        return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            asked = list(self._asked.values())
        for one in asked:
            one.close(None)
        for held in (self._in_use, self._own):
            if held is not None:
                held.close()

    def _serve(self, link: Link, asked: Inbox[Fetch | None]) -> None:
        """Until the link is over."""
        reader = None if self._own is None else self._own.reader()
        try:
            while not link.is_over:
                try:
                    fetch = asked.get(_LOOK_UP_S)
                except queue.Empty:
                    continue
                if fetch is None:
                    return
                link.send(self._answer(fetch, reader))
        except ConvoyError as error:  # its link is over, and says so itself
            _log.debug("%s gets no more of the model: %s", link.peer, error.message)
        finally:
            with self._lock:
                self._asked.pop(link, None)
            asked.close()

    def _answer(self, fetch: Fetch, reader: HubReader | None = None) -> Piece:
        try:
            place = self._find(fetch)
            data = _read(place, fetch.start, fetch.num_bytes, reader)
        except ModelError as error:
            return Piece(fetch.number, 0, b"", error.message[:_MAX_REASON])
        return Piece(fetch.number, place.num_bytes, data, "")

    def _find(self, fetch: Fetch) -> _Place:
        manifest = self._manifest
        if manifest is None or fetch.manifest != manifest.digest:
            raise ModelError(f"the model with the manifest {fetch.manifest[:12]} is not served here")
        if fetch.part == manifest.digest:
            return _Place("the manifest", None, 0, len(manifest.encoded), manifest.encoded)
        place = self._places.get(fetch.part)
        if place is None:
            raise ModelError(f"the model has no part with the digest {fetch.part[:12]} that lies in a file")
        return place


def doing(member: str, what: str) -> str:
    """A member, and what it does before it loads: what `Progress.stage` says."""
    said = {"check": "digests", "fetch": "from the head", "hub": "from the hub"}.get(what)
    return member if said is None else f"{member} ({said})"


def _places(source: ModelSource, manifest: Manifest) -> dict[str, _Place]:
    if source.seed is not None:
        return {}  # drawn wherever they are needed
    places = {
        entry.digest: _Place(name, source.path / name, 0, entry.num_bytes)
        for name, entry in manifest.files.items()
    }
    for name, tensor in manifest.tensors.items():
        stored = source.tensors[name]
        places[tensor.digest] = _Place(name, stored.path, stored.offset, stored.num_bytes)
    return places


def _read(place: _Place, start: int, num_bytes: int, reader: HubReader | None) -> bytes:
    """Bytes from ``start`` on, fewer at the part's end. Raises ModelError naming file and part.

    ``reader`` has those of a tensor that is not here.
    """
    if start > place.num_bytes:
        raise ModelError(f"{place.name} has {place.num_bytes} bytes, and byte {start} was asked for")
    num_bytes = min(num_bytes, place.num_bytes - start)
    if place.path is None:
        return place.data[start : start + num_bytes]
    if reader is not None and not place.path.exists():
        return reader.read(place.name, start, num_bytes, place.num_bytes)
    try:
        with place.path.open("rb", buffering=0) as file:
            file.seek(place.offset + start)
            data = file.read(num_bytes)
    except OSError as error:
        reason = (error.strerror or "unreadable").lower()
        raise ModelError(f"{place.path.name} cannot be read: {reason}, at {place.name}") from error
    if data is None or len(data) != num_bytes:
        raise ModelError(
            f"{place.path.name} is truncated at {place.name}: it was changed since it was hashed"
        )
    return data

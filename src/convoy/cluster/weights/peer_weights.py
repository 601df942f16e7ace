"""The source of a peer's part of a model: its own files, synthetic weights, a hub, or the head of the plan.

Whatever the source, each tensor is compared with the manifest that the plan names before its layer is
loaded. Only the tensors of the peer's own stage are hashed or fetched.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from convoy.cluster.options import PeerOptions
from convoy.cluster.weights.client import PartClient, Want
from convoy.cluster.weights.hub import FromHub
from convoy.cluster.weights.part_index import PartLocation, tensor_places
from convoy.cluster.weights.peer_server import PeerWeightServer
from convoy.errors import Incompatible, LinkBroken, ModelError, StepError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.hub.cache import InUse
from convoy.model.checkpoints.manifest import MAX_MANIFEST_BYTES, Manifest
from convoy.model.checkpoints.owned import owned_tensors
from convoy.model.checkpoints.source import ModelSource, needs_no_files
from convoy.model.checkpoints.store.digests import Hashing, make_manifest, tensor_digests
from convoy.model.checkpoints.store.parts import ModelPart, PartFile, is_whole
from convoy.model.checkpoints.store.received import ReceivedModel, VerifiedParts
from convoy.transport.link.link import Link
from convoy.wire.messages.control import Plan, Progress, StageAssignment
from convoy.wire.messages.fetch import Piece

_log = logging.getLogger(__name__)

# An empty text stands for loading.
Doing = Literal["", "check", "fetch", "hub"]
Tell = Callable[[Doing, int, int], None]
_CONFIG = "config.json"
_PACE_S = 0.2
_LOOK_UP_S = 0.2
# Each round asks other members than the one before.
_MAX_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Asker:
    """Describe one need for weights: the plan, and its head's link. An error of ``watch`` ends the work.

    ``loads`` is False if the plan is only prepared.
    """

    plan: Plan
    link: Link
    watch: Callable[[], None]
    loads: bool = True

    def check(self) -> None:
        """Raise the errors of ``watch``, and `LinkBroken` once the head's link is over."""
        self.watch()
        if self.link.is_over:
            raise LinkBroken("the link to the head ended while its weights were got ready")

    def tell(self, what: Doing, done: int, total: int) -> None:
        """Tell the head how many bytes are done, and of how many. Raises the errors of a link."""
        self.check()
        plan_id = self.plan.plan_id
        self.link.send(Progress(plan_id, done, total, what), plan_id=plan_id)


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """Hold a model that is described here.

    ``received`` is set if its tensors come from the head; some may be missing.
    """

    source: ModelSource
    received: ReceivedModel | None = None


class PeerWeights:
    """Find and fetch the weights of a peer, for the thread that loads and one that prepares a later plan.

    ``part_client`` handles pieces that come from the head, and ``server`` the head's own questions.
    """

    def __init__(self, me: str, options: PeerOptions) -> None:
        self.part_client = PartClient(piece_bytes=options.member.piece_bytes)
        self.server = PeerWeightServer(self.on_hand)
        self._me = me
        self._options = options
        self._from_hub = FromHub(me, options.member)
        self._hashing = Hashing(options.member.cache, options.member.num_threads or 0)
        # The manifest that was needed last.
        self._manifest: Manifest | None = None
        self.turn = threading.Lock()
        self._verified = VerifiedParts()
        self._in_use: InUse | None = None

    def find(self, asker: Asker) -> FoundWeights:
        """Return the model of a plan, known by its configuration and its tensors' headers.

        Raises `ModelError` if it cannot be had, `Incompatible` if another model is here, and the errors
        of fetching.
        """
        with self._turn(asker):
            return self._find(asker)

    @contextmanager
    def _turn(self, asker: Asker) -> Iterator[None]:
        """Let one thread work at a time. A waiting thread checks whether its plan is still wanted."""
        while not self.turn.acquire(timeout=_LOOK_UP_S):
            asker.check()
        try:
            yield
        finally:
            self.turn.release()

    def _find(self, asker: Asker) -> FoundWeights:
        self._check_signed(asker.plan)
        own = self._own_source(asker.plan)
        found = self._described(asker) if own is None else FoundWeights(own)
        if found.source.digest != asker.plan.model_digest:
            raise Incompatible(
                f"{asker.plan.model} differs: the head's digest is {asker.plan.model_digest[:12]}, "
                f"{self._me}'s is {found.source.digest[:12]}",
                hint="copy the same model directory to both members",
            )
        return found

    def _check_signed(self, plan: Plan) -> None:
        signed = self._options.member.signed
        if signed is not None and plan.manifest != signed:
            raise Incompatible(
                f"the plan's model {plan.model} has the manifest {plan.manifest[:12] or '(none)'}, and the "
                f"operator signed {signed[:12]}, which alone {self._me} may run",
                hint="run the model that was signed, or have this one signed: `convoy manifest sign`",
            )

    def ended(self, link: Link) -> None:
        """Forget the head's link, which ended."""
        self.part_client.ended(link)
        self.server.ended(link)

    def make_ready(self, asker: Asker, found: FoundWeights, mine: StageAssignment) -> None:
        """Get every tensor that ``mine`` owns, and compare each with the manifest. Raises as `find` does."""
        owned = owned_tensors(found.source, range(mine.start, mine.end), embed=mine.embed, output=mine.output)
        with self._turn(asker):
            if found.received is None:
                self._check(asker, found.source, owned)
            else:
                parts = {part.digest: part for part in (found.received.tensor(t.name) for t in owned)}
                self._get(asker, found.received, list(parts.values()), from_hub=True)

    # Own files.

    def _own_source(self, plan: Plan) -> ModelSource | None:
        path, model = self._options.model_path, plan.model
        own = None if path is None else ModelSource.resolve(str(path))
        if own is not None and (own.digest == plan.model_digest or own.name == model):
            return own
        # A head may run several models in turn, and a member's own files are of one.
        if needs_no_files(model):
            return ModelSource.resolve(model)
        return own if self._options.member.cache is None else None

    def _check(self, asker: Asker, source: ModelSource, owned: Sequence[StoredTensor]) -> None:
        plan = asker.plan
        if not plan.manifest:
            raise Incompatible(
                f"the plan names no manifest of {plan.model}, so its weights cannot be compared",
                hint="run the same version of Convoy on every member",
            )
        # Small or synthetic weights are compared whole. No other member has to be asked for the manifest.
        if self._options.model_path is None and self._own_manifest(source).digest == plan.manifest:
            return
        manifest = self._listed(asker)

        def progress(done: int, total: int) -> None:
            asker.tell("check", done, total)

        difference = manifest.first_difference(tensor_digests(source, owned, self._hashing, progress))
        if difference is not None:
            raise Incompatible(
                f"the weights of {plan.model} on {self._me} are not the head's {difference}",
                hint="copy the head's files, or start without --model to get them from the head",
            )

    def _own_manifest(self, source: ModelSource) -> Manifest:
        return make_manifest(source, self._hashing)

    # For others.

    def on_hand(self, link: Link, plan: Plan) -> tuple[Manifest, dict[str, PartLocation]]:
        """Return the manifest of a plan's model, and the place of each tensor that is here, by digest.

        The places are in this member's own files, which are not verified here, or in its cache. Raises as
        `find` does.
        """
        self._check_signed(plan)
        source, asker = self._own_source(plan), Asker(plan, link, lambda: None)
        if source is not None:
            # The manifest of synthetic weights is computed here and need not be asked for.
            own = self._own_manifest(source) if self._options.model_path is None else None
            manifest = own if own is not None and own.digest == plan.manifest else self._listed(asker)
            return manifest, tensor_places(source, manifest)
        cache = self._options.member.cache
        if cache is None:
            raise ModelError(f"{self._me} has no files for {plan.model}")
        received = ReceivedModel(cache, manifest := self._listed(asker))
        parts = (part for part in map(received.tensor, manifest.tensors) if is_whole(part))
        return manifest, {
            part.digest: PartLocation(part.name, part.place, 0, part.num_bytes) for part in parts
        }

    # From the hub or the head.

    def _described(self, asker: Asker) -> FoundWeights:
        cache, model = self._options.member.cache, asker.plan.model
        if cache is None or not asker.plan.manifest:
            raise ModelError(
                f"{self._me} has no files for {model}",
                hint="give its directory: `convoy join --model PATH`, or path in the [model] section",
            )
        received = ReceivedModel(cache, self._listed(asker))
        config = received.file(_CONFIG)
        self._get(asker, received, [config], from_hub=False)
        return FoundWeights(received.source(model, config), received)

    def close(self) -> None:
        """Release the cache: nothing is loaded any more, so its files may be removed."""
        self.server.close()
        if self._in_use is not None:
            self._in_use.close()

    def _hold(self, folder: Path) -> None:
        """Mark the folder as in use, so that it is not removed while this process may load from it again."""
        if self._in_use is None or self._in_use.folder != folder:
            held, self._in_use = self._in_use, InUse(folder)
            if held is not None:
                held.close()

    def _listed(self, asker: Asker) -> Manifest:
        """Return the manifest that the plan names.

        It is a remembered one, or the head's, which must have that digest.
        """
        digest, cache = asker.plan.manifest, self._options.member.cache
        manifest = self._manifest
        if manifest is not None and manifest.digest == digest:
            return manifest
        manifest = None if cache is None else ReceivedModel.remembered(cache, digest)
        manifest = manifest or Manifest.decode(self._pull_manifest(asker), digest)
        self._manifest = manifest
        return manifest

    def _pull_manifest(self, asker: Asker) -> bytes:
        digest, name = asker.plan.manifest, "the manifest"
        first = [Want(digest, name, 0, None)]
        data, total = bytearray(), 0
        for _, piece in self.part_client.pull(asker.link, digest, first, asker.check):
            data += piece.data
            total = piece.total_bytes
        if total > MAX_MANIFEST_BYTES:
            raise StepError(f"the head's manifest has {total} bytes, expected at most {MAX_MANIFEST_BYTES}")
        rest = self.part_client.pieces_of(digest, name, len(data), total)
        for _, piece in self.part_client.pull(asker.link, digest, rest, asker.check):
            data += piece.data
        return bytes(data)

    def _get(
        self, asker: Asker, received: ReceivedModel, parts: Sequence[ModelPart], *, from_hub: bool
    ) -> None:
        """Get the missing parts and verify them.

        ``from_hub`` tries the hub that the plan names first, if it names one. Files come from the head
        alone.
        """
        with received.open(asker.check):
            # The mark stays on the model that runs. A later one that comes is locked for writing.
            if asker.loads:
                self._hold(received.folder)
            missing = self._verified.missing(parts, partial(_paced(asker.tell), "check"))
            if missing:
                received.require_room(missing)
                if from_hub:
                    tell = partial(_paced(asker.tell), "hub")
                    missing = self._from_hub.get(asker.plan, missing, tell, asker.check)
                wanted = [_Wanted(part) for part in missing]
                for _ in range(_MAX_ROUNDS):
                    if not wanted:
                        break
                    wanted = self._fetch(asker, received, wanted)
                if wanted:
                    raise _wrong(asker, received, wanted[0].part)
            self._verified.add(parts)

    def _fetch(self, asker: Asker, received: ReceivedModel, wanted: Sequence[_Wanted]) -> list[_Wanted]:
        """Fetch ``wanted`` from the head. Returns the parts that were wrong and are worth another try."""
        files: deque[_Coming] = deque()
        again: list[_Wanted] = []
        total, done, tell = sum(one.part.num_bytes for one in wanted), 0, _paced(asker.tell)

        def count(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes

        def wants() -> Iterator[Want]:
            for one in wanted:
                part = one.part
                file = stack.enter_context(PartFile(part, lambda _num_bytes: asker.check()))
                files.append(_Coming(file))
                count(file.resumed)
                yield from self.part_client.pieces_of(
                    part.digest, part.name, file.resumed, part.num_bytes, one.wrong
                )

        def finish_whole() -> None:
            while files and not files[0].file.left:
                coming = files.popleft()
                resumed = coming.file.resumed > 0
                if not coming.file.finish():
                    again.append(self._doubted(asker, received, coming, resumed=resumed))
                coming.file.close()

        with ExitStack() as stack:
            for want, piece in self.part_client.pull(
                asker.link, received.manifest.digest, wants(), asker.check
            ):
                finish_whole()
                assert files[0].file.part.digest == want.part, "pieces come in the order of the parts"
                files[0].write(piece)
                count(len(piece.data))
                finish_whole()
                tell("fetch", done, total)
            finish_whole()
        return again

    @staticmethod
    def _doubted(asker: Asker, received: ReceivedModel, coming: _Coming, *, resumed: bool) -> _Wanted:
        """Return a wrong part, to be asked for again. Raises if the head itself sent all of it."""
        part, members = coming.file.part, coming.members
        if resumed or len(members) > 1:
            # The wrong bytes may be of an earlier try, perhaps before a crash, or of any of several
            # members.
            return _Wanted(part)
        if not members - {""}:
            raise _wrong(asker, received, part)
        (member,) = members
        _log.warning("%s sent other bytes of %s than the manifest lists; another is asked", member, part.name)
        return _Wanted(part, member)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Name a part to fetch, and the member that sent wrong bytes of it before."""

    part: ModelPart
    wrong: str = ""


@dataclass(slots=True)
class _Coming:
    """Hold a part that is being written, and the members that its bytes came from; "" is the head."""

    file: PartFile
    members: set[str] = field(default_factory=set)

    def write(self, piece: Piece) -> None:
        self.file.write(piece.data)
        self.members.add(piece.source)


def _paced(tell: Tell) -> Tell:
    """Return a ``tell`` that passes on a few calls a second and the last one."""
    told_s = 0.0

    def paced(stage: Doing, done: int, total: int) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if done >= total or now_s - told_s >= _PACE_S:
            told_s = now_s
            tell(stage, done, total)

    return paced


def _wrong(asker: Asker, received: ReceivedModel, part: ModelPart) -> Incompatible:
    digest = received.manifest.digest[:12]
    return Incompatible(
        f"{asker.link.peer} sent other bytes of {part.name} than the manifest {digest} lists; none were kept",
        hint=f"a file on {asker.link.peer} was changed while it ran: start it again",
    )

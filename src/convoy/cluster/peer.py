"""A peer's life: wait for the head, load the stage it plans, run its steps, and wait for the next head."""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass

from convoy.cluster.head import plan_digest
from convoy.cluster.offer import make_hello
from convoy.cluster.options import PeerOptions
from convoy.engine.peer import StageLoop, StageRoute
from convoy.errors import ConvoyError, Incompatible, ModelError, StepError
from convoy.model.source import BUNDLED, ModelSource
from convoy.model.stage import Stage, StageOptions
from convoy.transport.link import Link, Received, ReceivedMessage, ReceivedTensor
from convoy.transport.member import LocalMember
from convoy.transport.network import Network, TcpNetwork
from convoy.wire.messages import (
    Activate,
    Activated,
    FrameType,
    Hello,
    Plan,
    Progress,
    Ready,
    Refuse,
    Step,
    StepFailed,
)

_log = logging.getLogger(__name__)

FROM_HEAD = frozenset({FrameType.HELLO, FrameType.PLAN, FrameType.ACTIVATE, FrameType.STEP, FrameType.HIDDEN})
FROM_PREDECESSOR = frozenset({FrameType.HIDDEN})
_INBOX_ITEMS = 256


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """Something a person who watches wants to know: ``kind`` is listening, head, loading, ready, active, lost
    or refused.
    """

    kind: str
    text: str


@dataclass(slots=True)
class _Loaded:
    """A plan that is loaded here, and its loop once it is active."""

    plan: Plan
    stage: Stage
    loop: StageLoop | None = None


class Peer:
    """One thread owns the plan, the stage and its K/V; links only fill its bounded inbox."""

    def __init__(
        self,
        me: LocalMember,
        options: PeerOptions,
        on_event: Callable[[PeerEvent], None] | None = None,
        network: Network | None = None,
    ) -> None:
        self._me = me
        self._network = network or TcpNetwork()
        self._options = options
        self._on_event = on_event or (lambda _event: None)
        self._inbox: queue.Queue[tuple[Link | None, Received | ConvoyError]] = queue.Queue(_INBOX_ITEMS)
        self._hello = make_hello(options.member)
        self._links: dict[str, Link] = {}
        self._head: Link | None = None
        self._loaded: _Loaded | None = None
        self._stopping = False

    def run(self, bind: tuple[str, int]) -> None:
        """Serve until `stop`, or until the head goes if so configured.

        Raises `ConfigError` if the port is taken.
        """
        listener = self._network.listen(self._me, bind, self._greet)
        host, port = listener.address[:2]
        self._tell("listening", f"{self._me.name} listens on {host}:{port}")
        try:
            while not self._stopping:
                link, item = self._inbox.get()
                if link is not None:
                    self._handle(link, item)
        finally:
            listener.close()
            for link in list(self._links.values()):
                link.close("the peer is shutting down")

    def stop(self) -> None:
        """Make `run` return; from any thread or a signal handler."""
        self._stopping = True
        # A full inbox needs no wake-up: the loop is busy and looks at the flag after each item.
        with contextlib.suppress(queue.Full):
            self._inbox.put_nowait((None, StepError("stop")))

    # Receiver threads and the listener's threads: only fill the inbox.

    def _greet(self, link: Link) -> None:
        from_head = self._me.roster.member(link.peer).head
        link.start(self._deliver, self._ended, FROM_HEAD if from_head else FROM_PREDECESSOR)

    def _deliver(self, link: Link, received: Received) -> None:
        self._inbox.put((link, received))

    def _ended(self, link: Link, error: ConvoyError) -> None:
        self._inbox.put((link, error))

    # The peer's own thread.

    def _handle(self, link: Link, item: Received | ConvoyError) -> None:
        if isinstance(item, ConvoyError):
            self._link_ended(link, item)
            return
        self._links[link.peer] = link
        try:
            if isinstance(item, ReceivedTensor):
                self._hidden(link, item)
            else:
                self._message(link, item)
        except ConvoyError as error:
            self._failed(item, error)

    def _message(self, link: Link, received: ReceivedMessage) -> None:
        match received.message:
            case Hello():
                self._meet(link)
            case message if link is not self._head:
                link.close(f"{type(message).__name__} is for the head whose greeting was taken to send")
            case Plan() as plan:
                self._load(link, plan)
            case Activate() as activate:
                self._activate(link, activate)
            case Step() as step if self._loaded is not None and self._loaded.loop is not None:
                self._loaded.loop.accept_step(step, received.generation)
            case message:
                raise StepError(f"{type(message).__name__} came before a plan was active")

    def _meet(self, link: Link) -> None:
        old = self._head
        if old is not None and old is not link:
            if old.peer != link.peer:
                link.close(f"{old.peer} is the head of {self._me.name} already")
                return
            self._forget("the head came back on a new link")
            old.close("the head came back on a new link")
        self._head = link
        self._tell("head", f"{link.peer} is here")
        link.send(self._hello)

    def _load(self, link: Link, plan: Plan) -> None:
        self._loaded = None
        try:
            stage = self._load_stage(link, plan)
        except ConvoyError as error:
            self._tell("refused", error.message)
            link.send(Refuse(plan.generation, error.message, error.hint or ""), generation=plan.generation)
            return
        self._loaded = _Loaded(plan, stage)
        room = self._hello.memory_bytes - stage.weight_bytes
        ready = Ready(plan.generation, stage.weight_bytes, max(0, room // stage.block_bytes))
        link.send(ready, generation=plan.generation)
        self._tell("ready", f"holds {stage.weight_bytes / 1e6:.1f} MB of weights")

    def _load_stage(self, link: Link, plan: Plan) -> Stage:
        if plan.kernel not in self._hello.kernels or plan.activation_dtype not in self._hello.dtypes:
            raise Incompatible(
                f"the plan asks for {plan.kernel} and {plan.activation_dtype}, but {self._me.name} has "
                f"{', '.join(self._hello.kernels)} and {', '.join(self._hello.dtypes)}"
            )
        source = self._find_source(plan.model)
        if source.digest != plan.model_digest:
            raise Incompatible(
                f"{plan.model} differs: the head's digest is {plan.model_digest[:12]}, "
                f"{self._me.name}'s is {source.digest[:12]}",
                hint="copy the same model directory to both members",
            )
        mine = next((s for s in plan.stages if s.member == self._me.name), None)
        if mine is None:
            raise Incompatible(f"the plan has no stage for {self._me.name}")
        self._tell("loading", f"layers {mine.start}-{mine.end - 1} of {plan.model}")
        options = StageOptions(
            kernel=plan.kernel, block_size=plan.block_size, num_threads=self._options.member.num_threads
        )

        def progress(loaded: int, total: int) -> None:
            link.send(Progress(plan.generation, loaded, total), generation=plan.generation)

        return Stage.load(source, mine, options, progress)

    def _find_source(self, model: str) -> ModelSource:
        if self._options.model_path is not None:
            return ModelSource.resolve(str(self._options.model_path))
        if model in BUNDLED:
            return ModelSource.resolve(model)
        raise ModelError(
            f"{self._me.name} has no files for {model}",
            hint="give its directory: `convoy join --model PATH`, or path in the [model] section",
        )

    def _activate(self, link: Link, activate: Activate) -> None:
        loaded = self._loaded
        if loaded is None or activate.plan_digest != plan_digest(loaded.plan):
            raise StepError("Activate names a plan that is not loaded here")
        loaded.stage.make_pools(activate.num_blocks)
        names = [stage.member for stage in loaded.plan.stages]
        position = names.index(self._me.name)
        ring = loaded.plan.stages[(position + 1) % len(names)].member
        head_first = names[0] == link.peer
        route = StageRoute(
            generation=loaded.plan.generation,
            assignment=loaded.plan.stages[position],
            predecessor=names[position - 1] if position else None,
            last=head_first and position == len(names) - 1,
            activation_dtype=loaded.plan.activation_dtype,
        )
        loaded.loop = StageLoop(loaded.stage, route, self._successor(link, ring))
        link.send(Activated(loaded.plan.generation), generation=loaded.plan.generation)
        self._tell("active", f"{' -> '.join(names)}")

    def _successor(self, head: Link, name: str) -> Link:
        if name == head.peer:
            return head
        member = self._me.roster.member(name)
        link = self._network.dial(self._me, member, self._options.successor_wait_s)
        link.start(self._deliver, self._ended, frozenset())
        self._links[name] = link
        return link

    def _hidden(self, link: Link, received: ReceivedTensor) -> None:
        if self._loaded is None or self._loaded.loop is None:
            raise StepError("a hidden state came before a plan was active")
        self._loaded.loop.accept_hidden(link.peer, received)

    def _failed(self, item: Received, error: ConvoyError) -> None:
        _log.warning("step %d could not run: %s", item.step, error.message)
        if self._head is not None and not isinstance(error, ModelError):
            try:
                self._head.send(StepFailed(item.step, error.message), generation=item.generation)
            except ConvoyError as lost:
                _log.warning("the head could not be told: %s", lost.message)

    def _link_ended(self, link: Link, error: ConvoyError) -> None:
        known = self._links.get(link.peer) is link
        if known:
            del self._links[link.peer]
        if link is self._head:
            self._head = None
            self._forget(f"{link.peer} is gone: {error.message}")
            self._stopping = self._stopping or self._options.exit_with_head
        elif known and self._loaded is not None and self._loaded.loop is not None:
            self._forget(f"the ring is broken at {link.peer}: {error.message}")
            if self._head is not None:
                self._head.close("the ring is broken")

    def _forget(self, why: str) -> None:
        self._loaded = None
        self._tell("lost", why)

    def _tell(self, kind: str, text: str) -> None:
        _log.info("%s: %s", kind, text)
        self._on_event(PeerEvent(kind, text))

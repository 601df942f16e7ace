"""Dial the coordinator, register, answer the requests that come, and dial again when the connection ends."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from convoy.api.traces import NO_TRACES, Traces
from convoy.config.clear_text import check_sealed, without_userinfo
from convoy.crypto.identity import Identity
from convoy.crypto.sealed.request import RequestKey
from convoy.errors import ConfigError, ConvoyError, FrameError, PeerRefused, ProviderError
from convoy.fleet.capacity import Capacity
from convoy.fleet.outgoing_tls import verified_tls, why_unreachable
from convoy.fleet.provider.evidence import EvidencePresenter, EvidenceSource
from convoy.fleet.provider.greeting import CoordinatorUnproved, Greeting, NotYet, after_approval, binary
from convoy.fleet.provider.provided import Provided, SeenRequests
from convoy.fleet.provider.stream_rates import StreamRates
from convoy.fleet.provider.trace_span import AnswerSpan
from convoy.fleet.provider.upstream import Upstream
from convoy.plan.memory.free import free_bytes
from convoy.wire.fleet.messages import (
    MAX_GREETING_BYTES,
    MAX_MESSAGE_BYTES,
    AwaitApproval,
    Cancel,
    Credit,
    DrainNotice,
    FleetMessage,
    FromCoordinator,
    Heartbeat,
    ModelLoad,
    Offer,
    Proof,
    Prove,
    ProviderChallenge,
    Refused,
    Register,
    Registered,
    Serve,
    decode_from_coordinator,
    encode_fleet,
    proof_bytes,
    registration_bytes,
    request_key_bytes,
)

_log = logging.getLogger(__name__)

# How long a key for requests is offered. The socket is made anew with another key before that.
_KEY_S = 20 * 3600
# The requests that run at that time have this long to end.
_KEY_DRAIN_S = 600.0
_OPEN_S, _GREETING_S = 10.0, 30.0
# A coordinator that was refused need not answer the farewell.
_CLOSE_S = 2.0
_FIRST_WAIT_S, _MOST_WAIT_S = 0.5, 30.0
_SOFTWARE = "convoy"
# The beginnings of the events of a registration. A name or a command follows.
_REGISTERED, _WAITING = "registered as ", "waiting for approval: "
_OWN_KEYS = "each provider needs a folder of keys of its own (--dir), and runs once"


async def _wait_until_old(made_s: float) -> None:
    """Wait until a key for requests that was made at ``made_s`` (Unix seconds) has to be replaced."""
    await asyncio.sleep(max(1.0, made_s + _KEY_S * 3 / 4 - time.time()))


@dataclass(frozen=True, slots=True)
class ProvideOptions:
    """Hold a provider's options.

    ``coordinator_key``: if given, the provider registers with no other coordinator. ``certificate`` is an
    operator's, of `wire.fleet.certified`, for proxies that trust that operator.
    """

    url: str
    offers: dict[str, Capacity]
    heartbeat_s: float = 5.0
    drain_s: float = 60.0
    coordinator_key: bytes | None = None
    certificate: bytes = b""
    # The source of the evidence; None: no evidence is shown.
    evidence_source: EvidenceSource | None = None
    # Instead of the URL's own authority, if a proxy in front has another one.
    authorities: str | None = None
    events: Callable[[str], None] = field(default=lambda _text: None)
    traces: Traces = NO_TRACES
    # Share the engine's prefixes between accounts. This must be declared; it is never the default.
    shares_cache: bool = False
    # Waits until a key for requests that was made at that Unix time has to be replaced.
    key_is_old: Callable[[float], Awaitable[None]] = _wait_until_old
    # Verifies coordinators.
    tls: Callable[[], ssl.SSLContext] = verified_tls

    def check(self) -> None:
        """Check the URL: only this machine itself may be dialled in clear text. Raises `ConfigError`."""
        try:
            parts = urlsplit(self.url)
            host = (parts.hostname or "").encode("idna")
            usable = parts.scheme in {"ws", "wss"} and bool(host) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            shown = without_userinfo(self.url)
            raise ConfigError(f"the coordinator {shown!r} is no URL of a WebSocket", hint=_socket_hint(shown))
        check_sealed(self.url, "dial")

    @property
    def authority(self) -> str:
        """Return host:port as dialled. The registration is signed for it."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None, "checked"
        port = parts.port or (443 if parts.scheme == "wss" else 80)
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return self.authorities or f"{host}:{port}"

    @property
    def caveat(self) -> str:
        """Return a note on what a pinned coordinator does not prove on this connection; empty for TLS."""
        if self.coordinator_key is None or not self.url.startswith("ws:"):
            return ""
        return " (over ws:// the coordinator signs its address alone: a program on this machine may relay)"


class Provider:
    """Serve one coordinator, on one event loop.

    `run` lasts until `drain`, or until the coordinator refuses the provider for good.
    """

    def __init__(self, identity: Identity, upstream: Upstream, options: ProvideOptions) -> None:
        options.check()
        self._identity = identity
        self._upstream = upstream
        self._options = options
        self._key = RequestKey()
        self._key_made_s = time.time()
        self._seen = SeenRequests()
        self._running: dict[str, tuple[Provided, asyncio.Task[None]]] = {}
        # The model of each running request.
        self._models: dict[str, str] = {}
        self._draining = asyncio.Event()
        # This socket takes no new requests.
        self._leaving = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._sending = asyncio.Lock()
        self._connection: ClientConnection | None = None
        self._proving: asyncio.Task[None] | None = None
        self._stream_rates = {model: StreamRates() for model in options.offers}
        # Why the last try failed.
        self._said = ""
        self._was_registered = False

    def drain(self) -> None:
        """Finish running requests, take no new ones, and end. Runs on the event loop's thread."""
        self._draining.set()

    async def run(self) -> None:
        """Serve until drained.

        Raises `PeerRefused` if the coordinator says that another try is of no use. Raises
        `CoordinatorUnproved` if a coordinator is not the pinned one before any registration.
        """
        wait_s = _FIRST_WAIT_S
        while not self._draining.is_set():
            began = time.monotonic()
            try:
                await self._connected()
            except CoordinatorUnproved as error:
                # A provider that once reached the right coordinator
                # must not end because of a relay in between.
                if not self._was_registered:
                    raise
                self._say(f"refused: {error.message}")
            except PeerRefused:
                raise
            except (OSError, TimeoutError, WebSocketException, ConvoyError) as error:
                self._say(_why_not(error))
            finally:
                await self._stop_all()
            if time.monotonic() - began > _MOST_WAIT_S:
                wait_s = _FIRST_WAIT_S
            if not self._draining.is_set():
                # Many providers lose a coordinator at once, and must not all come back at once.
                pause_s = wait_s * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
                wait_s = min(_MOST_WAIT_S, wait_s * 2)
                await _first(self._draining.wait(), asyncio.sleep(pause_s))

    async def _connected(self) -> None:
        if time.time() - self._key_made_s > _KEY_S / 2:
            self._key, self._key_made_s = RequestKey(), time.time()
        url = self._options.url.rstrip("/") + "/provider"
        async with connect(
            url,
            ssl=self._options.tls() if url.startswith("wss:") else None,
            max_size=MAX_MESSAGE_BYTES,
            open_timeout=_OPEN_S,
            close_timeout=_CLOSE_S,
            compression=None,
            proxy=None,
            max_queue=64,
        ) as connection:
            async with asyncio.timeout(_GREETING_S):
                answer, coordinator = await self._register(connection)
            name, window = await self._accepted(connection, answer)
            self._connection, self._leaving = connection, False
            self._said, self._was_registered = "", True
            self._options.events(f"{_REGISTERED}{name}{self._options.caveat}")
            await self._live(connection, name, window, coordinator)

    async def _register(self, connection: ClientConnection) -> tuple[FromCoordinator, bytes]:
        greeting = Greeting(self._options.authority, self._options.coordinator_key)
        challenge = await greeting.challenged(connection)
        offers = [_offer(model, capacity) for model, capacity in self._options.offers.items()]
        expires_s = int(self._key_made_s) + _KEY_S
        unsigned = Register(
            identity=self._identity.public_key,
            request_key=self._key.public,
            request_key_expires_s=expires_s,
            key_signature=self._identity.sign(request_key_bytes(self._key.public, expires_s)),
            certificate=self._options.certificate,
            software=_SOFTWARE,
            offers=offers,
            signature=bytes(64),
            evidence=await self._evidence(challenge.coordinator, challenge),
        )
        said = registration_bytes(challenge, self._options.authority, unsigned)
        signature = self._identity.sign(said)
        await connection.send(encode_fleet(msgspec.structs.replace(unsigned, signature=signature)))
        answer = decode_from_coordinator(binary(await connection.recv()), MAX_GREETING_BYTES)
        return answer, challenge.coordinator

    async def _accepted(self, connection: ClientConnection, answer: FromCoordinator) -> tuple[str, int]:
        """Return the provider's name and window, once an administrator has approved it."""
        key = self._identity.public_key.hex()
        command = f"convoy coordinator providers --approve {key} NAME"
        waiting = f"{_WAITING}on the coordinator's machine, {command}"
        if isinstance(answer, AwaitApproval):
            self._say(waiting)
            try:
                data = await after_approval(connection, answer.wait_s + _GREETING_S, self._draining)
            except TimeoutError:
                raise NotYet(waiting) from None
            answer = decode_from_coordinator(data, MAX_GREETING_BYTES)
        if isinstance(answer, Refused):
            if answer.again:
                said = f"the coordinator says: {answer.reason}"
                raise NotYet(waiting if answer.unapproved else said)
            raise PeerRefused(f"the coordinator says: {answer.reason}")
        if not isinstance(answer, Registered):
            raise ProviderError(f"a {type(answer).__name__} came in answer to a registration")
        return answer.name, answer.window

    def _say(self, text: str) -> None:
        """Report why there is no socket, unless the last try failed for the same reason."""
        if text != self._said:
            self._options.events(text)
        self._said = text

    async def _live(self, connection: ClientConnection, name: str, window: int, coordinator: bytes) -> None:
        beating = asyncio.ensure_future(self._beat())
        ending = asyncio.ensure_future(self._end_when_due(connection))
        try:
            async for data in connection:
                message = decode_from_coordinator(binary(data), MAX_MESSAGE_BYTES)
                await self._take(message, name, window, coordinator)
        finally:
            beating.cancel()
            ending.cancel()
            if self._proving is not None:
                self._proving.cancel()
            self._connection = None

    async def _take(self, message: object, name: str, window: int, coordinator: bytes) -> None:
        match message:
            case Serve():
                self._serve(message, name, window)
            case Cancel(request_id=request_id):
                if request_id in self._running:
                    self._running[request_id][1].cancel()
            case Credit(request_id=request_id, chunks=chunks):
                if request_id in self._running:
                    self._running[request_id][0].window.grant(chunks)
            case Refused(reason=reason):
                raise PeerRefused(f"the coordinator says: {reason}", hint=_OWN_KEYS)
            case Prove():
                if self._proving is not None:
                    # Only the newest challenge counts.
                    self._proving.cancel()
                self._proving = asyncio.ensure_future(self._prove(message, coordinator))
            case _:
                raise FrameError(f"a {type(message).__name__} came where requests come")

    async def _prove(self, prove: Prove, coordinator: bytes) -> None:
        """Answer a challenge beside the running requests, because the members may take seconds."""
        signature = self._identity.sign(proof_bytes(coordinator, prove.nonce))
        evidence = await self._evidence(coordinator, prove)
        try:
            await self._send(Proof(prove.nonce, signature, evidence))
        except (ProviderError, WebSocketException, OSError) as error:
            _log.debug("a challenge was not answered: %s", type(error).__name__)

    async def _evidence(self, coordinator: bytes, asked: ProviderChallenge | Prove) -> bytes:
        if self._options.evidence_source is None:
            return b""
        expires_s = int(self._key_made_s) + _KEY_S
        shower = EvidencePresenter(self._options.evidence_source, self._identity, self._key.public, expires_s)
        return await shower.show(coordinator, asked.nonce, asked.registers)

    def _serve(self, serve: Serve, name: str, window: int) -> None:
        # The first one continues.
        if serve.request_id in self._running:
            _log.warning("a request came twice, while it runs")
            return
        span = self._span_of(serve)
        provided = (
            Provided(serve, self._send, window)
            if span is None
            else Provided(serve, span.send, window, span.traceparent)
        )
        if serve.model in self._stream_rates:
            provided.rates = self._stream_rates[serve.model]
        provided.shares_cache = self._options.shares_cache
        self._models[serve.request_id] = serve.model
        task = asyncio.ensure_future(self._answer(serve, provided, name))
        self._running[serve.request_id] = provided, task
        self._idle.clear()
        task.add_done_callback(lambda done: self._over(serve.request_id, done))
        if span is not None:
            task.add_done_callback(lambda _: span.end())

    def _span_of(self, serve: Serve) -> AnswerSpan | None:
        options = self._options
        if not options.traces.is_on:
            return None
        return AnswerSpan(options.traces, serve, self._send, is_offered=serve.model in options.offers)

    async def _answer(self, serve: Serve, provided: Provided, name: str) -> None:
        capacity = self._options.offers.get(serve.model)
        running = sum(model == serve.model for model in self._models.values())
        try:
            if capacity is None or self._leaving or running > capacity.slots:
                text = "it drains" if self._leaving else f"{running - 1} requests run here"
                await provided.refuse(text, full=True)
                return
            wanted, sealer = await provided.open(self._key, name, self._seen)
        except ConvoyError as error:
            _log.warning("a request was refused: %s", error.message)
            await provided.refuse(error.message, refused=True)
            return
        await provided.run(wanted, sealer, self._upstream)

    def _over(self, request_id: str, task: asyncio.Task[None]) -> None:
        del self._running[request_id]
        del self._models[request_id]
        if not self._running:
            self._idle.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("a request ended with %s", type(error).__name__)

    async def _beat(self) -> None:
        while True:
            loads = []
            for model, capacity in self._options.offers.items():
                ids = [request_id for request_id, of in self._models.items() if of == model]
                queued = sum(self._running[request_id][0].prompt_tokens for request_id in ids)
                free = 0 if self._leaving else max(0, capacity.slots - len(ids))
                loads.append(ModelLoad(model, free, queued, free_bytes(), *self._stream_rates[model].beat()))
            await self._send(Heartbeat(loads))
            await asyncio.sleep(self._options.heartbeat_s)

    async def _end_when_due(self, connection: ClientConnection) -> None:
        """Close the socket once the provider drains or its key is old; running requests get limited time."""
        await _first(self._draining.wait(), self._options.key_is_old(self._key_made_s))
        self._leaving = True
        await self._send(DrainNotice())
        if not self._draining.is_set():
            await _first(self._idle.wait(), self._draining.wait(), asyncio.sleep(_KEY_DRAIN_S))
        if self._draining.is_set():
            await _first(self._idle.wait(), asyncio.sleep(self._options.drain_s))
        await connection.close()

    async def _stop_all(self) -> None:
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, message: FleetMessage) -> None:
        connection = self._connection
        if connection is None:
            raise ProviderError("the coordinator's socket ended")
        async with self._sending:
            await connection.send(encode_fleet(message))


def state_of(event: str) -> str:
    """Return the state after an event of a provider, in fixed words: reports copy it."""
    if event.startswith(_REGISTERED):
        return "registered"
    return "waits for approval" if event.startswith(_WAITING) else "tries again"


def _why_not(error: BaseException) -> str:
    if isinstance(error, NotYet):
        return error.message
    if isinstance(error, InvalidStatus):
        status = error.response.status_code
        text = f"a server answers there with HTTP {status}, expected 101 from a coordinator"
    else:
        text = error.message if isinstance(error, ConvoyError) else why_unreachable(error)
    return f"the coordinator cannot be reached, and is tried again: {text}"


def _offer(model: str, one: Capacity) -> Offer:
    # The other side checks the signature over the decoded message, and encodes these rates as floats.
    decode, batch, prefill = (float(rate) for rate in (one.decode_rate, one.batch_rate, one.prefill_rate))
    return Offer(model, one.slots, decode, batch, prefill, one.max_context, one.template_tokens)


def _socket_hint(url: str) -> str:
    """Return the URL that a person meant by one of HTTP, or the form of one."""
    scheme, mark, place = url.partition("://")
    if mark and scheme in {"http", "https"} and place:
        return f"did you mean {scheme.replace('http', 'ws')}://{place[:200]}?"
    return "wss://HOST[:PORT], or ws://127.0.0.1:PORT for a coordinator on this machine"


async def _first(*awaited: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(one) for one in awaited]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()

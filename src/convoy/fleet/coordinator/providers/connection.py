"""Run the coordinator's end of one provider: its identity, its offers, and its answers in flight."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy.exc import SQLAlchemyError
from starlette.websockets import WebSocket, WebSocketDisconnect

from convoy.api.listen.abortable import abort
from convoy.crypto.identity import verify
from convoy.crypto.sealed.request import key_id_of
from convoy.errors import ConvoyError, ProviderError
from convoy.fleet.capacity import Capacity, Load
from convoy.fleet.coordinator.authority import authorities_of
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.providers.answering import Answering, ProviderFailed
from convoy.fleet.coordinator.providers.proof import CoordinatorProof
from convoy.fleet.provider_verifier import ProviderVerifier
from convoy.trust.evidence.level import Level
from convoy.trust.evidence.provider import NO_EVIDENCE, Challenged, Claimant
from convoy.wire.fleet.certified import read_certificate
from convoy.wire.fleet.messages import (
    MAX_CHUNK_MESSAGE_BYTES,
    MAX_GREETING_BYTES,
    MAX_REGISTRATION_BYTES,
    PROTOCOL,
    AwaitApproval,
    Began,
    Cancel,
    Chunk,
    Credit,
    Done,
    DrainNotice,
    Failed,
    FleetMessage,
    FromProvider,
    Heartbeat,
    Proof,
    Prove,
    ProviderChallenge,
    ProviderHello,
    Refused,
    Register,
    Registered,
    Serve,
    decode_from_provider,
    encode_fleet,
    proof_bytes,
    registration_bytes,
)
from convoy.wire.text import plain_text

_log = logging.getLogger(__name__)

_MAX_REQUEST_KEY_S = 24 * 3600


class Unapproved(ProviderError):  # noqa: N818
    """Signal that no administrator has approved the key that a provider showed and signed with."""

    def __init__(self, identity: bytes) -> None:
        super().__init__(
            f"the provider with key {identity.hex()} is not approved",
            hint=f"convoy coordinator providers --approve {identity.hex()} NAME",
        )
        self.identity = identity


class Removed(ProviderError):  # noqa: N818
    """Signal that an administrator has revoked a connected provider, at this coordinator or another one."""


@dataclass(frozen=True, slots=True)
class Registration:
    """Hold what a provider has proved of itself."""

    identity: bytes
    name: str
    request_key: bytes
    request_key_expires_s: int
    key_signature: bytes
    certificate: bytes
    # The operator of its certificate, if it has a valid one.
    operator: bytes | None
    software: str
    offers: dict[str, Capacity]

    @property
    def claimant(self) -> Claimant:
        """Return the keys that the provider's evidence must name."""
        return Claimant(self.identity, self.request_key, self.request_key_expires_s)

    @property
    def key_id(self) -> bytes:
        """Return the id of the key to which requests are sealed."""
        return key_id_of(self.request_key)


@dataclass(frozen=True, slots=True)
class Heard:
    """Report to the coordinator what a socket said: loads by model, a drain notice, or a new level."""

    loads: dict[str, Load]
    drains: bool = False
    level: Level | None = None


class ProviderSocket:
    """Serve one provider's WebSocket, on the event loop's thread."""

    def __init__(
        self,
        socket: WebSocket,
        options: CoordinatorOptions,
        proof: CoordinatorProof,
        verifier: ProviderVerifier,
    ) -> None:
        """Wrap ``socket``. ``proof`` is what this coordinator proves to a provider that dials."""
        self._verifier = verifier
        self._socket = socket
        self._options = options
        self._own_proof = proof
        self._coordinator = proof.public_key
        self._answers: dict[str, Answering] = {}
        self._sending = asyncio.Lock()
        # Why nothing is sent any more; empty while the socket stands.
        self._ended = ""
        # The challenge that is not answered yet.
        self._proof: bytes | None = None
        self._failed_proofs = 0
        self._name_of: Callable[[bytes], str | None] = lambda _: None
        self.on_failed_proof: Callable[[], None] = lambda: None
        # It gets the number of tokens that came with a message.
        self.on_tokens: Callable[[int], None] = lambda _: None
        self.registration: Registration | None = None
        # The newest sufficient evidence, as it came.
        self.evidence = b""
        self.verdict = NO_EVIDENCE

    async def greet(self) -> tuple[Register, bytes]:
        """Read the hello, send the challenge, and return the registration with the challenge's nonce.

        Raises `ProviderError`, `FrameError` or `HandshakeError`. The socket stays open, so that the caller
        can tell the provider.
        """
        async with asyncio.timeout(self._options.greeting_s):
            hello = await self._hello()
            challenge = self._own_proof.challenge(hello, self._verifier.rules.registers)
            await self.send(challenge)
            message = decode_from_provider(await self._socket.receive_bytes(), MAX_REGISTRATION_BYTES)
        if not isinstance(message, Register):
            raise ProviderError(f"a {type(message).__name__} came before a registration")
        self._check_signature(hello.authority, challenge, message)
        return message, challenge.nonce

    async def while_silent(self, work: Coroutine[Any, Any, str], wait_s: float) -> str:
        """Tell the provider to wait, and return the result of ``work``, as long as its socket stands.

        Raises `ProviderError` if the provider speaks meanwhile, and the socket's own error if it ends.
        """
        await self.send(AwaitApproval(wait_s))
        working = asyncio.ensure_future(work)
        hearing = asyncio.ensure_future(self._socket.receive_bytes())
        try:
            await asyncio.wait({working, hearing}, return_when=asyncio.FIRST_COMPLETED)
            if hearing.done():
                hearing.result()
                raise ProviderError("a provider speaks before it is let in")
            return working.result()
        finally:
            working.cancel()
            hearing.cancel()

    async def register(
        self, message: Register, nonce: bytes, name: str, name_of: Callable[[bytes], str | None]
    ) -> Registration:
        """Register a provider that is approved under ``name``. ``name_of`` tells later whether it still is.

        Raises `ProviderError` or `AttestationError`. The socket stays open, so that the caller can tell the
        provider.
        """
        self._name_of = name_of
        now_s = time.time()
        if not now_s < message.request_key_expires_s <= now_s + _MAX_REQUEST_KEY_S + 60:
            raise ProviderError("a provider's key for requests has expired, or lives longer than a day")
        offers = {
            one.model: Capacity(
                *(one.slots, one.decode_rate, one.batch_rate, one.prefill_rate),
                *(one.max_context, one.template_tokens),
            )
            for one in message.offers
        }
        for capacity in offers.values():
            capacity.check()
        registration = Registration(
            *(message.identity, name, message.request_key, message.request_key_expires_s),
            *(message.key_signature, message.certificate, _operator_of(message)),
            *(message.software, offers),
        )
        await self._verify_evidence(message.evidence, registration, nonce)
        self.registration = registration
        await self.send(Registered(name, self._options.window))
        return registration

    async def _verify_evidence(self, evidence: bytes, registration: Registration, nonce: bytes) -> None:
        """Verify evidence and keep it. Raises `AttestationError` if it does not suffice."""
        challenged = Challenged(self._coordinator, nonce)
        self.verdict = await self._verifier.verify_on_thread(evidence, registration.claimant, challenged)
        self.evidence = evidence

    async def _hello(self) -> ProviderHello:
        """Return the first message, which names an address of this coordinator. Raises `ProviderError`."""
        hello = decode_from_provider(await self._socket.receive_bytes(), MAX_GREETING_BYTES)
        if not isinstance(hello, ProviderHello):
            raise ProviderError(f"a {type(hello).__name__} came before a hello")
        if hello.protocol != PROTOCOL:
            raise ProviderError(f"a provider speaks version {hello.protocol}, expected {PROTOCOL}")
        options, host = self._options, self._socket.headers.get("host", "")
        tls = self._socket.scope.get("scheme") == "wss"
        if hello.authority not in authorities_of(options.authorities, options.names, host, tls=tls):
            dialled = plain_text(hello.authority, 300)
            raise ProviderError(
                f"a provider dials {dialled}, which is no address of this coordinator",
                hint="`convoy coordinator --authority HOST:PORT` names one",
            )
        return hello

    def _check_signature(self, authority: str, challenge: ProviderChallenge, message: Register) -> None:
        """Check that the provider signed the address that it dialled, so that no relay registers for it."""
        known = msgspec.structs.replace(challenge, coordinator=self._coordinator)
        try:
            verify(message.identity, message.signature, registration_bytes(known, authority, message))
        except ConvoyError:
            text = "a registration is not signed by its key for this coordinator and challenge"
            raise ProviderError(text) from None

    async def run(self, heard: Callable[[Heard], None]) -> None:
        """Read messages until the socket ends, and pass them to ``heard`` and to the answers.

        Always ends with an exception: the socket's own, `ProviderError`, `AttestationError` or `FrameError`
        for an invalid message, or TimeoutError after too long a silence.
        """
        proving = asyncio.create_task(self._prove_now_and_then())
        try:
            while True:
                async with asyncio.timeout(self._options.silence_s):
                    data = await self._socket.receive_bytes()
                message = decode_from_provider(data, MAX_CHUNK_MESSAGE_BYTES)
                if isinstance(message, Proof):
                    heard(Heard({}, level=await self._check_proof(message)))
                else:
                    self._take(message, heard)
                if self._ended:
                    raise ProviderError(self._ended)
                if proving.done():
                    proving.result()
        finally:
            proving.cancel()

    def _take(self, message: FromProvider, heard: Callable[[Heard], None]) -> None:
        match message:
            case Heartbeat(loads=loads):
                heard(
                    Heard(
                        {
                            one.model: Load(
                                *(one.free_slots, one.queued_tokens, one.free_memory_bytes),
                                *(one.decode_rate, one.streams),
                            )
                            for one in loads
                        }
                    )
                )
            case DrainNotice():
                heard(Heard({}, drains=True))
            case Began() | Chunk() | Done() | Failed():
                self._pass_on(message)
            case ProviderHello() | Register():
                raise ProviderError("a provider registered twice on one socket")

    def _pass_on(self, message: Began | Chunk | Done | Failed) -> None:
        answer = self._answers.get(message.request_id)
        if answer is None:
            # The request was given up, and its last messages were still in flight.
            return
        before = answer.tokens
        answer.put(message)
        self.on_tokens(answer.tokens - before)
        if answer.is_over:
            del self._answers[message.request_id]

    async def ask(self, serve: Serve) -> Answering:
        """Send a request to the provider, and return its answer.

        Raises the socket's error if that is gone.
        """
        request_id = serve.request_id

        def grant(count: int) -> None:
            self._send_soon(Credit(request_id, count))

        answer = self._answers[request_id] = Answering(request_id, self._options.window, grant)
        try:
            await self.send(serve)
        except BaseException:
            # `end` has removed the entry already if the socket ended meanwhile.
            self._answers.pop(request_id, None)
            raise
        return answer

    def give_up(self, request_id: str) -> None:
        """Cancel an answer that has no reader any more."""
        if self._answers.pop(request_id, None) is not None:
            self._send_soon(Cancel(request_id))

    def end(self, reason: str) -> None:
        """Fail every answer, because the socket is over."""
        self._ended = self._ended or reason
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.put(Failed(answer.request_id, reason, full=False))

    async def close(self, code: int, refusal: str = "") -> None:
        """Close the socket, whether or not the other side reads. A closed socket stays closed.

        A ``refusal`` is sent before; another try of the provider is of no use then.
        """
        try:
            async with asyncio.timeout(self._options.close_s):
                if refusal:
                    async with self._sending:
                        await self._socket.send_bytes(encode_fleet(Refused(refusal, again=False)))
                await self._socket.close(code)
        except TimeoutError:
            abort(self._socket.scope)
        except (WebSocketDisconnect, RuntimeError):
            return

    async def send(self, message: FleetMessage) -> None:
        """Send one message at a time.

        Raises `WebSocketDisconnect` or RuntimeError if the socket is gone. Raises `ProviderFailed` if the
        provider does not read earlier messages; then nothing more is sent, and `run` ends.
        """
        async with self._sending:
            if self._ended:
                raise ProviderFailed(self._ended)
            try:
                async with asyncio.timeout(self._options.first_token_s):
                    await self._socket.send_bytes(encode_fleet(message))
            except TimeoutError:
                self._ended = f"it read nothing for {self._options.first_token_s:g} s"
                raise ProviderFailed(self._ended) from None

    def _send_soon(self, message: FleetMessage) -> None:
        task = asyncio.ensure_future(self.send(message))
        task.add_done_callback(_forget_disconnect)

    async def _prove_now_and_then(self) -> None:
        while True:
            # The first check comes right after joining, because the provider may have been revoked meanwhile.
            await self._check_approved()
            await asyncio.sleep(self._options.prove_every_s)
            if self._proof is not None:
                self._count_failed_proof()
            self._proof = secrets.token_bytes(32)
            await self.send(Prove(self._proof, self._verifier.rules.registers))

    async def _check_approved(self) -> None:
        """Raise `Removed` if the provider is not approved any more.

        Another coordinator of this database may have revoked it.
        """
        assert self.registration is not None, "a socket runs once it registered"
        try:
            name = await asyncio.to_thread(self._name_of, self.registration.identity)
        except SQLAlchemyError as error:
            _log.warning(
                "the database cannot say which providers are approved class=%s", type(error).__name__
            )
            return
        if name != self.registration.name:
            raise Removed("it is not approved any more")

    async def _check_proof(self, proof: Proof) -> Level | None:
        """Return the level that a proof's evidence shows, or None if the proof is wrong.

        Raises `AttestationError` if the evidence does not suffice.
        """
        expected, self._proof = self._proof, None
        assert self.registration is not None, "a socket runs once it registered"
        try:
            if proof.nonce != expected:
                raise ProviderError("a proof answers no challenge of this coordinator")
            verify(self.registration.identity, proof.signature, proof_bytes(self._coordinator, proof.nonce))
        except ConvoyError:
            self._count_failed_proof()
            return None
        self._failed_proofs = 0
        await self._verify_evidence(proof.evidence, self.registration, proof.nonce)
        return self.verdict.level

    def _count_failed_proof(self) -> None:
        self._failed_proofs += 1
        self.on_failed_proof()
        if self._failed_proofs >= self._options.max_failed_proofs:
            raise ProviderError(f"{self._failed_proofs} challenges in a row were not answered rightly")


def _operator_of(message: Register) -> bytes | None:
    try:
        found = read_certificate(message.certificate, time.time())
    except ProviderError:
        return None
    return found.operator if found.identity == message.identity else None


def _forget_disconnect(task: asyncio.Task[None]) -> None:
    """Ignore the error of a message to a provider that is gone.

    The socket's reader hears of that by itself.
    """
    if not task.cancelled():
        error = task.exception()
        if error is not None and not isinstance(
            error, WebSocketDisconnect | RuntimeError | OSError | ProviderFailed
        ):
            raise error

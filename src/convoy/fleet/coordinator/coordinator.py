"""Hold the connected providers, and the requests on their way to them.

`dispatch.Dispatcher` decides. `Coordinator` tells it the time, sends what it decides, and wakes the requests
that wait.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from starlette.websockets import WebSocket, WebSocketDisconnect

from convoy.api.lifecycle import Lifecycle
from convoy.api.listen.keep_place import keep_place
from convoy.cluster.metrics.families import Metric
from convoy.config.clear_text import is_loopback
from convoy.errors import (
    AttestationError,
    ConvoyError,
    Draining,
    FrameError,
    NotReady,
    ProviderError,
    QueueFull,
)
from convoy.fleet.books.clerk import Clerk
from convoy.fleet.books.directory import Directory
from convoy.fleet.books.ledger import Ledger
from convoy.fleet.books.store import Store
from convoy.fleet.capacity import ModelState
from convoy.fleet.coordinator.callers import KeyUses
from convoy.fleet.coordinator.metrics import FleetCounts, ProviderState, fleet_families
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.providers.approvals import Approvals
from convoy.fleet.coordinator.providers.connection import (
    Heard,
    ProviderSocket,
    Registration,
    Removed,
    Unapproved,
)
from convoy.fleet.coordinator.providers.proof import CoordinatorProof
from convoy.fleet.coordinator.providers.record import ProviderRecord
from convoy.fleet.coordinator.routing.dispatch import Assignment, Dispatcher
from convoy.fleet.coordinator.routing.route_request import Owner, RouteRequest
from convoy.fleet.provider_verifier import ProviderVerifier
from convoy.fleet.status import ConnectedProvider, Departure
from convoy.wire.fleet.messages import Refused

_log = logging.getLogger(__name__)

# Close codes of WebSocket.
_POLICY_VIOLATION, _TRY_AGAIN = 1008, 1013


class Coordinator:
    """Place requests with providers.

    Lives on the event loop's thread; other threads only use the database.
    """

    def __init__(self, options: CoordinatorOptions, store: Store, proof: CoordinatorProof) -> None:
        """Make a coordinator without providers. ``proof`` is what it proves to providers that dial."""
        self.options = options
        self.directory = Directory(store)
        self.key_uses = KeyUses()
        self.ledger = Ledger(store, options.instance)
        self.clerk = Clerk(store, self.ledger)
        self.proof = proof
        self.lifecycle = Lifecycle()
        self.counts = FleetCounts()
        self.record = ProviderRecord()
        self.approvals = Approvals(options, self.directory.provider_name)
        self._verifier = ProviderVerifier(options.trust)
        self._dispatcher = Dispatcher(options.queue)
        self._sockets: dict[str, ProviderSocket] = {}
        self._drained: set[str] = set()
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._numbers = itertools.count()
        # Sockets that have not registered yet, by address.
        self._greeting: Counter[str] = Counter()
        self._closing: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()

    # Requests.

    def next_number(self) -> int:
        """Return a new request number for routing."""
        return next(self._numbers)

    async def place(self, ask: RouteRequest) -> str:
        """Wait for a provider that can take ``ask``, and return its name.

        Raises `QueueFull`, also if the deadline passes while the request waits, and `NotReady`.
        """
        return await self._wait(ask, self._dispatcher.submit(ask, time.monotonic()))

    async def place_again(self, ask: RouteRequest) -> str:
        """Place a request that a provider failed; otherwise as `place`."""
        return await self._wait(ask, self._dispatcher.again(ask, time.monotonic()))

    async def _wait(self, ask: RouteRequest, assignment: Assignment | None) -> str:
        if assignment is not None:
            return assignment.provider
        if self.lifecycle.draining:
            self.abandon(ask.number)
            raise _draining()
        future = self._waiting[ask.number] = asyncio.get_running_loop().create_future()
        self._wake.set()
        try:
            provider: str = await future
            return provider
        except asyncio.CancelledError:
            self.abandon(ask.number)
            raise
        finally:
            self._waiting.pop(ask.number, None)

    def drain(self) -> None:
        """Refuse all requests that wait for a provider. Running requests continue."""
        for number, future in list(self._waiting.items()):
            if not future.done():
                self.abandon(number)
                future.set_exception(_draining())

    def socket(self, provider: str) -> ProviderSocket:
        """Return the socket of an assigned provider. Raises `ProviderError` if it has left meanwhile."""
        socket = self._sockets.get(provider)
        if socket is None:
            raise ProviderError(f"{provider} is gone")
        return socket

    def first_token(self, ask: RouteRequest) -> None:
        """Note that the provider has read the prompt of ``ask``."""
        self._dispatcher.first_token(ask.number)

    def finished(self, ask: RouteRequest, *, first_s: float, output_tokens: int, decode_s: float) -> None:
        """Note that ``ask`` was answered completely, and place the next requests."""
        self._go_on(
            self._dispatcher.finished(
                *(ask.number, time.monotonic()),
                first_s=first_s,
                output_tokens=output_tokens,
                decode_s=decode_s,
            )
        )

    def failed(self, ask: RouteRequest) -> RouteRequest:
        """Note that its provider failed ``ask``, and return the request as it may be placed again."""
        again, placed = self._dispatcher.failed(ask.number, time.monotonic())
        self._go_on(placed)
        return ask if again is None else again

    def abandon(self, number: int) -> None:
        """Forget a request that has no reader any more, and place the next ones."""
        self._go_on(self._dispatcher.abandon(number, time.monotonic()))

    def models(self) -> list[str]:
        """Return the models that are served now, and those that have a price."""
        return sorted({*self._dispatcher.models(), *self.options.models})

    def is_known(self, model: str) -> bool:
        """Return whether a provider serves ``model`` now, or it is configured and may be served later."""
        return model in self.options.models or model in self._dispatcher.models()

    def waiting(self, model: str) -> int:
        """Return how many requests wait for ``model``."""
        return self._dispatcher.waiting(model)

    def free_slots(self, model: str) -> int:
        """Return the free slots of all providers of ``model``."""
        providers = self._dispatcher.providers(model)
        return 0 if providers is None else providers.free_slots()

    def load(self) -> tuple[int, int]:
        """Return how many requests are with a provider and how many wait, of all accounts."""
        return self._dispatcher.load()

    def running_of(self, account: str) -> int:
        """Return how many requests of an account are with a provider."""
        return self._dispatcher.running_of(account)

    def waiting_of(self, account: str) -> dict[str, int]:
        """Return how many requests of an account wait, by model, for the models where any does."""
        return self._dispatcher.waiting_of(account)

    @property
    def num_connected(self) -> int:
        """Return the number of connected providers."""
        return len(self._sockets)

    def model_state(self, model: str) -> ModelState:
        """Return the providers, the room and the queue of ``model``."""
        return self._dispatcher.state(model)

    def provider_levels(self) -> dict[str, str]:
        """Return the level that each connected provider proved, by its name."""
        return {name: socket.verdict.level.text for name, socket in self._sockets.items()}

    # Providers.

    async def take_provider(self, websocket: WebSocket) -> None:
        """Run a provider's socket, from its first byte to its last."""
        address = websocket.client.host if websocket.client else ""
        if self._is_crowded(address) or len(self._sockets) >= self.options.max_providers:
            await websocket.close(_TRY_AGAIN)
            return
        socket = ProviderSocket(websocket, self.options, self.proof, self._verifier)
        try:
            with self._greets(address):
                await websocket.accept()
                message, nonce = await socket.greet()
            name = await self.approvals.name(socket, message.identity, address)
            with self._greets(address):
                name_of = self.directory.provider_name
                registration = await socket.register(message, nonce, name, name_of)
                keep_place(websocket.scope)
        except (ConvoyError, TimeoutError, WebSocketDisconnect, KeyError) as error:
            await self._refuse(socket, error)
            return
        self._replace(registration.name)
        self._sockets[registration.name] = socket
        await self._live(registration, socket)

    def _is_crowded(self, address: str) -> bool:
        most, of_one = self.options.max_greeting, self.options.max_greeting_of_address
        # A proxy that ends TLS on this machine dials for every
        # provider, so loopback has no limit per address.
        alone = self._greeting[address] >= of_one and not is_loopback(address)
        return alone or self._greeting.total() >= most

    @contextmanager
    def _greets(self, address: str) -> Iterator[None]:
        self._greeting[address] += 1
        try:
            yield
        finally:
            self._greeting[address] -= 1
            # Adding an empty counter drops the addresses that have no socket left.
            self._greeting += Counter()

    async def _live(self, registration: Registration, socket: ProviderSocket) -> None:
        """Run a provider's socket from the moment it has a name until it ends."""
        name, reason, code, removed = registration.name, "its socket ended", 0, False
        try:
            self._join(registration, socket)
            await socket.run(lambda heard: self._heard(name, socket, heard))
        except (ProviderError, AttestationError, FrameError) as error:
            reason, code, removed = error.message, _POLICY_VIOLATION, isinstance(error, Removed)
            _log.warning("provider put out name=%s: %s", name, error.message)
        except TimeoutError:
            reason, code = f"it was silent for {self.options.silence_s:g} s", _POLICY_VIOLATION
        except (WebSocketDisconnect, KeyError, RuntimeError) as error:
            _log.debug("provider's socket ended name=%s class=%s", name, type(error).__name__)
        finally:
            # Leave before the socket is closed: a provider that reads nothing would hold the close up.
            if self._sockets.get(name) is socket:
                self._leave(name, socket, reason, removed=removed)
        if code:
            await socket.close(code)

    def _join(self, registration: Registration, socket: ProviderSocket) -> None:
        name, level = registration.name, socket.verdict.level
        socket.on_failed_proof = lambda: self.counts.challenge_failed(name)
        socket.on_tokens = self.counts.generated
        self.record.joined(name)
        _log.info("provider joined name=%s models=%d level=%s", name, len(registration.offers), level.text)
        owner = Owner(registration.identity, registration.operator)
        now_s = time.monotonic()
        self._go_on(self._dispatcher.join(*(name, registration.offers, level, now_s), owner=owner))

    async def _refuse(self, socket: ProviderSocket, error: BaseException) -> None:
        reason = error.message if isinstance(error, ConvoyError) else "no registration came in time"
        _log.info("provider refused: %s", reason)
        self.counts.registration_refused()
        self.record.refused(reason)
        try:
            unapproved = isinstance(error, Unapproved)
            await socket.send(Refused(reason[:500], not isinstance(error, FrameError), unapproved))
        except (WebSocketDisconnect, RuntimeError, ProviderError):
            # The provider is gone already.
            pass
        await socket.close(_POLICY_VIOLATION)

    def has_called(self, identity: bytes) -> bool:
        """Return whether a provider with that key has dialled, approved or not, as far as is remembered."""
        connected = (one.registration for one in self._sockets.values())
        is_here = any(one and one.identity == identity for one in connected)
        return is_here or self.approvals.has_called(identity)

    def _replace(self, name: str) -> None:
        """End a provider's old socket, in any state, once the provider has registered on a new one."""
        old = self._sockets.get(name)
        if old is not None:
            self._leave(name, old, "it came back on another socket")
            # A provider that came back itself reads this socket no more, so another process may read this.
            self._close_soon(old, _POLICY_VIOLATION, "another process uses this provider's key")

    def _close_soon(self, socket: ProviderSocket, code: int, refusal: str = "") -> None:
        """Close a socket in a task of its own, because that takes as long as the other side likes.

        ``refusal`` is said before, if given.
        """
        task = asyncio.ensure_future(socket.close(code, refusal))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _leave(self, name: str, socket: ProviderSocket, reason: str, *, removed: bool = False) -> None:
        del self._sockets[name]
        assert socket.registration is not None, "it registered"
        facts = name, socket.registration.identity, socket.verdict.level.text, reason
        how: Departure = "removed" if removed else "left" if name in self._drained else "lost"
        self.record.left(*facts, how)
        self._drained.discard(name)
        # The dispatcher forgets the provider before its answers fail: a reader that hears of a failure asks
        # for another provider at once, and must not get this one's slots.
        self._dispatcher.leave(name)
        socket.end(f"{name}: {reason}")
        # Requests that it failed may have no provider left, so their deadlines are looked at again.
        self._wake.set()
        _log.info("provider left name=%s: %s", name, reason)

    def _heard(self, name: str, socket: ProviderSocket, heard: Heard) -> None:
        if self._sockets.get(name) is not socket:
            raise ProviderError("another socket has its name now, or it was put out")
        if heard.drains:
            self._drained.add(name)
            self._dispatcher.drain(name)
            self._wake.set()
            return
        if heard.level is not None:
            self._go_on(self._dispatcher.set_level(name, heard.level, time.monotonic()))
        self._go_on(self._dispatcher.note_load(name, heard.loads, time.monotonic()))

    async def put_out(self, name: str) -> bool:
        """End a provider's socket on an administrator's request; return whether there was one."""
        socket = self._sockets.get(name)
        if socket is None:
            return False
        self._leave(name, socket, "an administrator removed it", removed=True)
        self._close_soon(socket, _POLICY_VIOLATION)
        return True

    def providers(self, most: int | None = None, most_offers: float = math.inf) -> list[ConnectedProvider]:
        """Return the connected providers, by name.

        They are at most the first ``most``, and no more once they have ``most_offers`` models together.
        """
        found, counts, num_offers = [], self.counts, 0
        for name in heapq.nsmallest(len(self._sockets) if most is None else most, self._sockets):
            socket = self._sockets[name]
            registration = socket.registration
            assert registration is not None, "it registered"
            num_offers += len(registration.offers)
            if num_offers > most_offers:
                break
            verdict = socket.verdict
            running = self._dispatcher.running(name, registration.offers)
            found.append(
                ConnectedProvider(
                    *(name, registration.identity.hex(), registration.software),
                    *(verdict.level.text, verdict.why),
                    *({one.member: one.level.text for one in verdict.members}, verdict.absent),
                    *(running, name in self._drained),
                    {model: offer.template_tokens for model, offer in registration.offers.items()},
                    *(counts.unbilled(name), self.record.since(name)),
                    self._dispatcher.places(name, registration.offers),
                    *(counts.answers(name), counts.failures(name), counts.failed_challenges(name)),
                )
            )
        return found

    def families(self) -> Iterator[Metric]:
        """Return the metrics for a scrape: the counts so far, and the present state."""
        models = [self.model_state(name) for name in self.models()]
        levels = self.provider_levels().items()
        providers = [ProviderState(level, name in self._drained) for name, level in levels]
        return fleet_families(self.counts, models, providers, draining=self.lifecycle.draining)

    # Time.

    async def run(self) -> None:
        """Handle deadlines, and providers that may be tried again, until the task is cancelled."""
        while True:
            now_s = time.monotonic()
            expired, placed = self._dispatcher.tick(now_s)
            for ask in expired:
                self._end_waiting(ask)
            self._go_on(placed)
            next_s = self._dispatcher.next_tick_s(now_s)
            self._wake.clear()
            try:
                async with asyncio.timeout(None if next_s is None else max(0.0, next_s - now_s) + 0.001):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _end_waiting(self, ask: RouteRequest) -> None:
        future = self._waiting.get(ask.number)
        if future is None or future.done():
            return
        waited_s = ask.deadline_s - ask.arrived_s
        providers = self._dispatcher.providers(ask.model)
        if providers is None or not providers.num_open():
            text = f"no provider of {ask.model} came within {waited_s:.0f} s"
            future.set_exception(NotReady(text, public=text))
            return
        text = f"no provider of {ask.model} was free within {waited_s:.0f} s"
        future.set_exception(QueueFull(text, public=text, retry_after_s=self._dispatcher.wait_s(ask)))

    def _go_on(self, placed: Iterable[Assignment]) -> None:
        for assignment in placed:
            future = self._waiting.get(assignment.ask.number)
            # The request was cancelled at this very moment: give the slot back.
            if future is None or future.done():
                self.abandon(assignment.ask.number)
            else:
                future.set_result(assignment.provider)
        self._wake.set()


def _draining() -> Draining:
    text = "the coordinator is shutting down"
    return Draining(text, hint="send the request again once it is back", public=text)

"""Test sockets of providers that read nothing, come twice, or never name themselves, without a network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.websockets import WebSocket

from convoy.crypto.identity import Identity
from convoy.crypto.sealed.request import RequestKey
from convoy.fleet.books.keys import NO_TERMS, Grant
from convoy.fleet.books.store import Store
from convoy.fleet.coordinator.coordinator import Coordinator
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.picture import FleetPicture
from convoy.fleet.coordinator.providers.answering import ProviderFailed
from convoy.fleet.coordinator.providers.proof import CoordinatorProof
from convoy.fleet.coordinator.routing.policy import FirstToFinish
from convoy.fleet.coordinator.routing.route_request import RouteRequest
from convoy.fleet.coordinator.server import ListenOptions, run_coordinator
from convoy.wire.fleet.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    FleetMessage,
    FromCoordinator,
    Heartbeat,
    ModelLoad,
    Offer,
    ProviderChallenge,
    ProviderHello,
    Register,
    Registered,
    Serve,
    decode_from_coordinator,
    encode_fleet,
    registration_bytes,
)
from support.fleet import LOCAL, MODEL

AUTHORITY = "127.0.0.1:1"
OPTIONS = CoordinatorOptions(authorities=(AUTHORITY,), first_token_s=0.05)
KEY = RequestKey()
SERVE = Serve("r", bytes(16), MODEL, b"", 1, 1, "chat", b"sealed")


class Dialled:
    """Stand for a provider's socket, as ASGI has it."""

    def __init__(self, coordinator: Coordinator, identity: Identity, address: str = "203.0.113.7") -> None:
        self.identity = identity
        self.reads = asyncio.Event()
        self.reads.set()
        self.is_cut = asyncio.Event()
        self.closed: int | None = None
        self._to_provider: asyncio.Queue[bytes] = asyncio.Queue()
        self._from_provider: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._from_provider.put_nowait({"type": "websocket.connect"})
        scope = {
            "type": "websocket",
            "scheme": "ws",
            "path": "/provider",
            "client": (address, 7),
            "headers": [(b"host", AUTHORITY.encode())],
            "extensions": {"convoy.abort": {"abort": self.is_cut.set}},
        }
        websocket = WebSocket(scope, self._receive, self._send)
        self.task = asyncio.ensure_future(coordinator.take_provider(websocket))

    async def _receive(self) -> Any:
        return await self._from_provider.get()

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "websocket.send":
            self._to_provider.put_nowait(message["bytes"])
        elif message["type"] == "websocket.close":
            self.closed = message["code"]
            self._from_provider.put_nowait({"type": "websocket.disconnect", "code": self.closed})

    async def hear(self) -> FromCoordinator:
        return decode_from_coordinator(await self._to_provider.get(), MAX_MESSAGE_BYTES)

    def say(self, message: FleetMessage) -> None:
        self._from_provider.put_nowait({"type": "websocket.receive", "bytes": encode_fleet(message)})

    async def greet(self) -> FromCoordinator:
        """Say hello; return what comes back."""
        self.say(ProviderHello(PROTOCOL, bytes(32), AUTHORITY, tls=False, pinned=False))
        return await self.hear()

    async def register(self) -> Dialled:
        challenge = await self.greet()
        assert isinstance(challenge, ProviderChallenge)
        made = Register(
            *(self.identity.public_key, KEY.public, int(time.time()) + 3600, bytes(64), b"", "fake"),
            *([Offer(MODEL, 4, 10.0, 20.0, 100.0, 4096)], bytes(64)),
        )
        signature = self.identity.sign(registration_bytes(challenge, AUTHORITY, made))
        self.say(msgspec.structs.replace(made, signature=signature))
        return self

    async def registered(self) -> Dialled:
        await self.register()
        assert isinstance(await self.hear(), Registered)
        while not self.task.done() and not self._is_listened_to:
            await asyncio.sleep(0)
        return self

    @property
    def _is_listened_to(self) -> bool:
        return bool(self._from_provider._getters)  # type: ignore[attr-defined]


@asynccontextmanager
async def coordinating(folder: Path, options: CoordinatorOptions = OPTIONS) -> AsyncIterator[Coordinator]:
    store = Store(f"sqlite:///{folder}/fleet.db")
    coordinator = Coordinator(options, store, CoordinatorProof(Identity.generate()))
    with closing(coordinator.clerk):
        yield coordinator
    store.close()


Scene = Callable[[Coordinator, Identity], Coroutine[Any, Any, None]]


def play(folder: Path, scene: Scene, options: CoordinatorOptions = OPTIONS) -> None:
    async def run() -> None:
        async with coordinating(folder, options) as coordinator, asyncio.timeout(20):
            identity = Identity.generate()
            coordinator.directory.approve(identity.public_key, "p")
            await scene(coordinator, identity)

    asyncio.run(run())


def test_who_reads_nothing_fails_what_it_was_sent_is_out_is_cut_off_and_may_come_back(tmp_path: Path) -> None:
    async def scene(coordinator: Coordinator, identity: Identity) -> None:
        frozen = await Dialled(coordinator, identity).registered()
        frozen.reads.clear()
        asks = [
            coordinator.socket("p").ask(msgspec.structs.replace(SERVE, request_id=f"r{n}")) for n in "123"
        ]
        for error in await asyncio.gather(*asks, return_exceptions=True):
            assert isinstance(error, ProviderFailed)
        frozen.say(Heartbeat([]))  # it beats on
        await frozen.is_cut.wait()
        await frozen.task
        assert coordinator.providers() == []
        await Dialled(coordinator, identity).registered()
        assert [one.name for one in coordinator.providers()] == ["p"]

    play(tmp_path, scene, replace(OPTIONS, close_s=0.05))


def test_whoever_asks_while_the_socket_ends_may_go_too(tmp_path: Path) -> None:
    async def scene(coordinator: Coordinator, identity: Identity) -> None:
        frozen = await Dialled(coordinator, identity).registered()
        frozen.reads.clear()
        asking = asyncio.ensure_future(coordinator.socket("p").ask(SERVE))
        await asyncio.sleep(0)
        assert await coordinator.put_out("p")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    play(tmp_path, scene)


def test_who_comes_back_waits_for_nothing_of_its_old_socket_which_says_nothing_for_it_any_more(
    tmp_path: Path,
) -> None:
    async def scene(coordinator: Coordinator, identity: Identity) -> None:
        old = await Dialled(coordinator, identity).registered()
        old.reads.clear()
        new = await Dialled(coordinator, identity).registered()
        old.say(Heartbeat([ModelLoad(MODEL, 0, 0, 0, 0.0)]))
        while not old._from_provider.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert coordinator.free_slots(MODEL) == 4
        assert not new.task.done()
        assert await coordinator.put_out("p")  # at once, too
        assert coordinator.providers() == []

    play(tmp_path, scene)


def test_of_two_that_come_at_once_under_one_name_one_is_ended(tmp_path: Path) -> None:
    async def scene(coordinator: Coordinator, identity: Identity) -> None:
        old = await Dialled(coordinator, identity).registered()
        old.reads.clear()
        both = [Dialled(coordinator, identity) for _ in range(2)]
        await asyncio.gather(*(one.registered() for one in both))
        done, running = await asyncio.wait([one.task for one in both], return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), len(running)) == (1, 1)
        assert coordinator.free_slots(MODEL) == 4

    play(tmp_path, scene)


def test_a_provider_that_cannot_join_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ArithmeticError

    async def scene(coordinator: Coordinator, identity: Identity) -> None:
        asked = RouteRequest(0, "a", MODEL, 10, 10, 0.0, time.monotonic() + 60)
        waiting = asyncio.ensure_future(coordinator.place(asked))
        await asyncio.sleep(0)
        monkeypatch.setattr(FirstToFinish, "choose", broken)
        dialled = await Dialled(coordinator, identity).register()
        with pytest.raises(ArithmeticError):
            await dialled.task
        assert coordinator.providers() == []
        assert coordinator.free_slots(MODEL) == 0
        monkeypatch.undo()
        waiting.cancel()

    play(tmp_path, scene)


def test_one_address_cannot_take_the_places_of_all_that_come_to_register(tmp_path: Path) -> None:
    options = replace(OPTIONS, max_greeting=8, max_greeting_of_address=3)

    async def scene(coordinator: Coordinator, identity: Identity) -> None:
        silent = [Dialled(coordinator, identity) for _ in range(5)]
        for one in silent[:3]:
            await one.greet()
        await asyncio.gather(*(one.task for one in silent[3:]))
        assert [one.closed for one in silent] == [None, None, None, 1013, 1013]
        await Dialled(coordinator, identity, "203.0.113.8").registered()
        near = [Dialled(coordinator, identity, "127.0.0.1") for _ in range(5)]  # a proxy, for all behind it
        for one in near:
            await one.greet()
        await asyncio.wait_for(Dialled(coordinator, identity, "203.0.113.8").task, 10)  # all are taken
        for one in (*silent, *near):
            one.task.cancel()
        await asyncio.gather(*(one.task for one in (*silent, *near)), return_exceptions=True)
        await Dialled(coordinator, identity).registered()

    play(tmp_path, scene, options)


def test_all_readers_share_a_picture_of_the_fleet_until_it_is_old(tmp_path: Path) -> None:
    async def scene(coordinator: Coordinator, identity: Identity) -> None:
        now_s = 0.0
        picture = FleetPicture(coordinator, max_age_s=1.0, clock=lambda: now_s)
        grants = [Grant(name, name.encode() * 16, NO_TERMS) for name in ("aa", "bb")]
        whole, models = picture.whole(), picture.models()
        await Dialled(coordinator, identity).registered()
        now_s = 0.9
        assert picture.whole() is whole
        assert picture.models() is models
        ann, bob = map(picture.of_key, grants)
        assert ann.offered is bob.offered
        now_s = 1.0
        record = picture.whole().record
        assert record is not None
        assert [one.name for one in record.providers] == ["p"]
        assert [one.name for one in picture.models()] == [MODEL]

    play(tmp_path, scene)


def test_a_list_of_providers_ends_before_it_has_too_many_models(tmp_path: Path) -> None:
    async def scene(coordinator: Coordinator, identity: Identity) -> None:
        other = Identity.generate()
        coordinator.directory.approve(other.public_key, "q")
        await Dialled(coordinator, other).registered()
        await Dialled(coordinator, identity).registered()
        assert [one.name for one in coordinator.providers(most_offers=2)] == ["p", "q"]
        assert [one.name for one in coordinator.providers(most_offers=1)] == ["p"]

    play(tmp_path, scene)


def test_a_coordinator_for_which_no_time_passes_any_more_ends_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: Coordinator) -> None:
        raise ArithmeticError("no time")

    monkeypatch.setattr(Coordinator, "run", broken)
    with closing(Store(f"sqlite:///{tmp_path}/fleet.db")) as store, pytest.raises(ArithmeticError):
        run_coordinator(OPTIONS, ListenOptions(LOCAL, LOCAL), store, Identity.generate())

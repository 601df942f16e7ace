"""A coordinator, providers and an engine behind them, in this process, over real sockets."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from convoy.api.listen.options import PageOptions, ServeOptions
from convoy.api.page.tokens import OpenTokens
from convoy.api.server import HttpServer, Stop, bind, url_of
from convoy.crypto.identity import Identity
from convoy.fleet.books.directory import Directory
from convoy.fleet.books.keys import Scope
from convoy.fleet.books.ledger import Ledger
from convoy.fleet.books.store import Store
from convoy.fleet.capacity import Capacity
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.server import ListenOptions, run_coordinator
from convoy.fleet.provider.provide import ProvideOptions, Provider
from convoy.fleet.provider.upstream import Upstream
from support.waiting import WAIT_S, wait_until

MODEL = "adder"
LOCAL = ServeOptions(port=0, allow_unauthenticated=True)
FAST = Capacity(slots=4, decode_rate=100, batch_rate=300, prefill_rate=5000, max_context=4096)


class FakeEngine:
    """Answer ``What is 2+3?`` with its sum, a token for each digit. ``trouble`` lists the next failures."""

    def __init__(self) -> None:
        # One entry for each request to come: busy, refuses, too long, broken, cut, slow.
        self.trouble: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.traceparents: list[str] = []
        self.aborted = threading.Event()
        self.go_on = threading.Event()
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": MODEL, "max_model_len": 4096}]})

    async def _chat(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        self.bodies.append(body)
        if "traceparent" in request.headers:
            self.traceparents.append(request.headers["traceparent"])
        trouble = self.trouble.pop(0) if self.trouble else ""
        if trouble == "busy":
            return JSONResponse({"error": {"message": "full"}}, 503)
        if trouble == "refuses":
            return JSONResponse({"error": {"message": "temperature: too hot"}}, 400)
        if trouble == "too long":
            return JSONResponse({"error": {"message": "long", "code": "context_length_exceeded"}}, 400)
        question = body["messages"][-1]["content"]
        one, _, two = question.removeprefix("What is ").partition("?")[0].partition("+")
        text = str(int(one) + int(two))
        usage = {"prompt_tokens": len(question), "completion_tokens": len(text)}
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            return JSONResponse({"id": secrets.token_hex(8), "choices": [choice], "usage": usage})
        return StreamingResponse(self._events(text, usage, body, trouble), media_type="text/event-stream")

    async def _events(self, text: str, usage: dict[str, int], body: dict[str, Any], trouble: str) -> Any:
        name = secrets.token_hex(8)

        def event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
            return b"data: " + msgspec.json.encode({"id": name, "choices": [choice]}) + b"\n\n"

        try:
            yield event({"role": "assistant", "content": ""})
            if trouble == "broken":
                yield b'data: {"error": {"message": "lost"}}\n\n'
                return
            for index, digit in enumerate(text):
                if trouble == "slow" and index == 1:
                    await asyncio.to_thread(self.go_on.wait, 30)
                yield event({"content": digit})
                if trouble == "cut":
                    return
            yield event({}, "stop")
            if body.get("stream_options", {}).get("include_usage"):
                yield b"data: " + msgspec.json.encode({"choices": [], "usage": usage}) + b"\n\n"
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.aborted.set()
            raise


class Running:
    """Run a thread with an event loop. `stop` ends it."""

    def __init__(self, run: Callable[[], None], stop: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._stop = stop
        self.thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self.thread.start()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - for the test that waits
            self.error = error

    def stop(self) -> None:
        self._stop()
        self.thread.join(30)
        assert not self.thread.is_alive()


@contextmanager
def engine_server(engine: FakeEngine) -> Iterator[str]:
    """Serve the engine until the block ends, and yield its URL."""
    listener = bind(LOCAL)
    server = HttpServer(engine.app)

    def stop() -> None:
        server.should_exit = True

    running = Running(lambda: asyncio.run(server.serve(sockets=[listener])), stop)
    try:
        yield url_of("127.0.0.1", listener)
    finally:
        running.stop()


class FleetUnderTest:
    """Run a coordinator with one account and its key. Providers are added by name."""

    def __init__(
        self,
        folder: Path,
        options: CoordinatorOptions,
        database_url: str = "",
        tls: tuple[str, str] | None = None,
        public_certificate: Path | None = None,
        heartbeat_s: float = 5.0,
    ) -> None:
        self.heartbeat_s = heartbeat_s
        self.identity = Identity.generate()
        self.tls, self.public_certificate = tls, public_certificate
        self.options = options
        self.tokens = OpenTokens(folder / "open")
        self.database_url = database_url or f"sqlite:///{folder}/fleet.db"
        store = self.store = Store(self.database_url)
        self.ledger = Ledger(store, "test")
        self.directory = Directory(store)
        self.ledger.open_account("ann")
        self.ledger.credit("ann", 10**12)
        self.key = self.directory.make_key(Scope.CONSUMER, "ann")
        self.admin_key = self.directory.make_key(Scope.ADMIN, None)
        self._providers: list[tuple[Running, Provider]] = []
        self.identities: list[bytes] = []
        self.events: list[str] = []
        self._registered = threading.Semaphore(0)
        self.url = self.admin_url = ""
        self.start()

    def start(self, port: int = 0) -> None:
        """Start the coordinator, on a free port or on ``port``."""
        ready = threading.Event()

        def on_ready(url: str, admin_url: str, _: int) -> None:
            self.url, self.admin_url = url, admin_url
            ready.set()

        stop = self.stop = Stop()
        public = ServeOptions(
            port=port,
            allow_unauthenticated=True,
            drain_s=5.0,
            heartbeat_s=self.heartbeat_s,
            page=PageOptions(tokens=self.tokens.folder),
            tls=self.tls,
        )
        store = Store(self.database_url)

        def run() -> None:
            run_coordinator(
                *(self.options, self._listen_options(public), store, self.identity),
                on_ready=on_ready,
                stop=stop,
            )
            store.close()

        self.coordinator = Running(run, stop.request)
        assert ready.wait(WAIT_S), self.coordinator.error

    def _listen_options(self, public: ServeOptions) -> ListenOptions:
        return ListenOptions(
            *(public, LOCAL, self.public_certificate is not None),
            public_certificate=self.public_certificate,
        )

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def socket_url(self) -> str:
        """Return the URL that providers dial."""
        return self.url.replace("http", "ws", 1)

    def add(
        self,
        name: str,
        upstream_url: str,
        capacity: Capacity = FAST,
        *,
        wait_s: float = WAIT_S,
        identity: Identity | None = None,
        approved: bool = True,
        dial: str = "",
        **changes: Any,
    ) -> Provider:
        """Add a provider. If it is approved, it is registered when this returns."""
        identity = identity or Identity.generate()
        self.identities.append(identity.public_key)
        if approved:
            self.directory.approve(identity.public_key, name)
        made: list[Provider] = []
        there = threading.Event()
        loops: list[asyncio.AbstractEventLoop] = []

        def heard(text: str) -> None:
            self.events.append(f"{name}: {text}")
            if text.startswith("registered"):
                self._registered.release()

        async def live() -> None:
            loops.append(asyncio.get_running_loop())
            upstream = Upstream(upstream_url)
            options = ProvideOptions(dial or self.socket_url, {MODEL: capacity}, events=heard, **changes)
            made.append(Provider(identity, upstream, options))
            there.set()
            try:
                await made[0].run()
            finally:
                await upstream.close()

        def stop() -> None:
            if not loops[0].is_closed():
                loops[0].call_soon_threadsafe(made[0].drain)

        running = Running(lambda: asyncio.run(live()), stop)
        assert there.wait(WAIT_S)
        self._providers.append((running, made[0]))
        if approved:
            self.wait_registered(wait_s)
        return made[0]

    def wait_registered(self, wait_s: float = WAIT_S) -> None:
        """Wait until another provider is registered, or one registers again."""
        assert self._registered.acquire(timeout=wait_s), self.events

    def wait_event(self, part: str) -> None:
        """Wait until a provider reports an event with ``part`` in it."""
        wait_until(lambda: any(part in text for text in self.events))

    def error_of(self, index: int) -> BaseException | None:
        """Return the error that ended a provider, or None."""
        running = self._providers[index][0]
        running.thread.join(WAIT_S)
        return running.error

    def stop_provider(self, index: int) -> None:
        self._providers.pop(index)[0].stop()

    def client(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=WAIT_S, trust_env=False)

    def admin(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.admin_key}"}
        return httpx.Client(base_url=self.admin_url, headers=headers, timeout=WAIT_S, trust_env=False)

    def close(self) -> None:
        for running, _ in self._providers:
            running.stop()
        self.coordinator.stop()


def question(one: int, two: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": f"What is {one}+{two}?"}], **more}


def streamed(text: str) -> str:
    """Return the text of a stream of events. Mark a stream that has no end, or an error."""
    said: str = ""
    for line in text.splitlines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return said + "."
        event = msgspec.json.decode(line[6:])
        if "error" in event:
            return f"{said}!{event['error']['message']}"
        said += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    return said

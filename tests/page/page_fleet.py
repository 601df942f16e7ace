"""The coordinator's page in a real browser, over processes of a coordinator and of providers."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from cli.transcript import run_here
from convoy.api.listen.options import ServeOptions
from page.conftest import PHONE, WIDE, Open, ask, serious
from support.fake_service import FakeEngine, serving
from support.programs import Program

HOSTILE = "<img src=x onerror=window.ran=1>"


@dataclass
class Fleet:
    """Hold the processes of a fleet. The engine behind its providers is a fake one, in this process."""

    folder: Path
    stack: ExitStack
    upstream: str
    engine: FakeEngine
    url: str = ""
    key: str = ""
    admin: httpx.Client = field(default_factory=httpx.Client)

    def start(self) -> None:
        flags = ("--port", "0", "--admin-port", "0", "--dir", "coordinator", "--json")
        program = Program(self.folder, "coordinator", "coordinator", *flags)
        self.stack.callback(program.stop)
        ready = program.ready()
        self.url = ready["url"]
        key = (self.folder / ready["admin_key_file"]).read_text().strip()
        headers = {"authorization": f"Bearer {key}"}
        self.admin = self.stack.enter_context(httpx.Client(base_url=ready["admin_url"], headers=headers))
        self.key = self.account("ann")

    def account(self, name: str) -> str:
        """Open an account, and return its key."""
        self.admin.post("/accounts", json={"name": name, "credit_micro": 10**9}).raise_for_status()
        made = self.admin.post("/keys", json={"scope": "consumer", "account": name})
        return str(made.raise_for_status().json()["key"])

    def chat(self) -> None:
        """Ask the fleet once, and wait for the answer."""
        body = {"model": "fake", "messages": [{"role": "user", "content": "What is 2+3?"}]}
        headers = {"authorization": f"Bearer {self.key}"}
        httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers).raise_for_status()

    def dial(self, folder: str) -> Program:
        """Start a provider that nobody has approved yet."""
        dial = self.url.replace("http", "ws", 1)
        program = Program(self.folder, folder, "provide", dial, "--upstream", self.upstream, "--dir", folder)
        self.stack.callback(program.stop)
        return program

    def key_of(self, program: Program) -> str:
        """Return the key of a provider once it waits for approval."""
        program.until("waiting for approval")
        found = re.search(r"\b[0-9a-f]{64}\b", program.said())
        assert found is not None, program.said()
        return found[0]

    def approve(self, key: str, name: str) -> None:
        self.admin.post("/providers", json={"identity": key, "name": name}).raise_for_status()

    def signed_in(self, *flags: str) -> str:
        """Return the address that ``convoy open`` prints."""
        done = run_here(["open", "--url", self.url, *flags], self.folder)
        assert done.returncode == 0, done
        return done.stdout.strip()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run a coordinator with two providers, which no test kills."""
    folder = tmp_path_factory.mktemp("fleet")
    engine = FakeEngine()
    with (
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as stack,
        serving(engine, ServeOptions(port=0)) as head,
    ):
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        made = Fleet(folder, stack, head.url, engine)
        made.start()
        started = {name: made.dial(name) for name in ("alpha", "beta")}
        for name, program in started.items():
            made.approve(made.key_of(program), name)
            program.until("registered as")
        for _ in range(6):
            made.chat()
        yield made


def shown(page: Page) -> Page:
    """Return the page once it lists the providers of the fixture."""
    expect(page.get_by_role("heading", name="alpha")).to_be_visible()
    expect(page.get_by_role("heading", name="beta")).to_be_visible()
    return page


def test_no_view_of_a_fleet_has_a_serious_finding_or_is_wider_than_a_phone(
    fleet: Fleet, open_page: Open, pytestconfig: pytest.Config
) -> None:
    for scheme, size in (("light", WIDE), ("dark", PHONE)):
        page = shown(open_page(fleet.signed_in(), scheme=scheme, size=size))
        for name in ("Requests", "Connect", "Fleet"):
            page.get_by_role("link", name=name, exact=True).click()
            expect(page.locator("nav a[aria-current]")).to_have_text(name)
            assert serious(page) == [], (name, scheme)
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], name
        expect(page.get_by_role("region", name="Trust")).to_contain_text(
            re.compile("none came sealed|in clear")
        )
        picture = page.screenshot()
        assert len(picture) > 10_000
        if pytestconfig.getoption("--pictures") and scheme == "light":
            (pytestconfig.rootpath / "docs" / "pictures" / "fleet-light.png").write_bytes(picture)


def test_a_key_looks_at_its_own_requests_alone_and_chats(fleet: Fleet, open_page: Open) -> None:
    operator = shown(open_page(fleet.signed_in()))
    bob = open_page(fleet.url)
    bob.get_by_label("API key").fill(fleet.account("bob"))
    bob.get_by_role("button", name="Look").click()
    expect(bob.get_by_text("Looking with an API key")).to_be_visible()
    expect(bob.get_by_role("region", name="Models")).to_contain_text(re.compile("2 providers.*0 waiting"))
    fleet.engine.reply = "It is **five**."
    fleet.engine.pause_after = 5
    fleet.engine.go.clear()
    operator.get_by_role("link", name="Chat").click()
    operator.get_by_label("API key for chat").fill(fleet.key)
    operator.get_by_role("button", name="Use it").click()
    expect(
        operator.get_by_text("The coordinator and the provider that answers can read this chat.")
    ).to_be_visible()
    ask(operator, "What is 2+3?")
    operator.get_by_role("link", name="Fleet").click()
    expect(operator.locator(".machine", has_text="1 of 8 places taken")).to_have_count(1)
    running = bob.locator(".facts-line dd").first
    expect(bob.get_by_role("region", name="Models")).not_to_contain_text("free")
    expect(running).to_have_text("0")
    assert "alpha" not in bob.locator("body").inner_text()
    fleet.engine.pause_after = None
    fleet.engine.go.set()
    operator.get_by_role("link", name="Chat").click()
    expect(operator.locator(".prose strong")).to_have_text("five")
    operator.get_by_role("link", name="Fleet").click()
    expect(operator.locator(".machine", has_text="0 of 8 places taken")).to_have_count(2)
    expect(running).to_have_text("0")
    # The page forgets the key, and the session ends for this browser and every other one.
    operator.get_by_text("May operate").click()
    operator.get_by_role("button", name="Sign everybody out").click()
    expect(operator.get_by_text("Looking with an API key")).to_be_visible()
    assert "alpha" not in operator.locator("body").inner_text()
    assert operator.evaluate("window.ran") is None


def test_a_provider_is_seen_as_it_waits_serves_and_is_killed(fleet: Fleet, open_page: Open) -> None:
    page = shown(open_page(fleet.signed_in("--view")))
    assert "token" not in page.url
    program = fleet.dial("gamma")
    key = fleet.key_of(program)
    waiting = page.get_by_role("region", name="Providers that wait for approval")
    expect(waiting).to_contain_text(f"convoy coordinator providers --approve {key} NAME")
    # Approval refuses such a name, and a database of another maker may still have it.
    with closing(sqlite3.connect(fleet.folder / "coordinator" / "fleet.db")) as database, database:
        database.execute("INSERT INTO providers VALUES (?, ?, 1, NULL)", (bytes.fromhex(key), HOSTILE))
    card = page.locator(".machine", has=page.get_by_role("heading", name=HOSTILE))
    expect(card).to_contain_text("0 of 8 places taken")
    expect(card).to_contain_text("self-signed evidence")
    expect(card.locator("code").first).to_have_attribute("title", key)
    expect(waiting).to_have_count(0)
    program.process.kill()
    began_s = time.monotonic()
    left = page.get_by_role("region", name="Providers that left")
    expect(left.get_by_role("listitem")).to_contain_text(re.compile(f"{re.escape(HOSTILE)}.*lost"))
    # The system ends the sockets of a process that is killed, so the coordinator knows it at once.
    print(f"a killed provider is on the page after {time.monotonic() - began_s:.2f} s")
    expect(page.locator(".machine h3")).to_have_text(["alpha", "beta"])
    page.get_by_role("link", name="Requests").click()
    log = page.get_by_role("log")
    expect(log).to_contain_text(f"{HOSTILE} is lost: its socket ended.")
    expect(log).to_contain_text(f"{HOSTILE} is connected, with self-signed evidence.")
    assert page.evaluate("window.ran") is None

"""A whole fleet of programs at their most talkative: nothing private is in what they say, trace or leave.

A coordinator, a head with a real model, an engine's provider before it, and a proxy; requests that succeed,
fail, are refused and are left. And what a coordinator has in memory while it passes on what it cannot read.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from confidentiality.search import Secrets, find_secrets
from convoy.cli.operator.home import Home
from convoy.crypto.identity import IDENTITY_KEY
from convoy.model.checkpoints.source import ModelSource
from convoy.model.text.tokens import Tokenizer
from convoy.transport.ports import free_port
from support.fleet import streamed
from support.otlp import collecting
from support.programs import Program
from support.proxy import found_in
from support.response_events import parse_response_stream
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.long]

MODEL = "demo-mini"
PLAIN = "Remember: the unannounced merger is called Heronsgate-Plain"
BLIND = "Remember: the unannounced merger is called Quillmarsh-Blind"
RESPONSE = "Remember: the unannounced merger is called Marrowfield-Response"
HELD = "Remember: the unannounced merger is called Larkspur-Held"  # of a request that runs meanwhile
WRONG_KEY = "convoy-Wr0ngKeyOfSomebodyWhoIsNotHere0000000001"
TOOLS_KEY = "a-tools-own-idempotency-key-7731"
TALK = ("--log-level", "debug", "--log-format", "json")
LEASE = re.compile(rb"lease-[0-9a-f]{8,}")
HASHED = {
    f"{key} as sha256" for key in ("api key", "revoked key", "administrator's key")
}  # all that it keeps
KEY_FILES = {"admin.key", "ann.key", "engine.key", IDENTITY_KEY}


class Fleet:
    """Hold a fleet and ``private``: the texts and tokens that must be nowhere, by their name."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.collector = stack.enter_context(collecting())
        self.private: dict[str, str] = {"wrong key": WRONG_KEY, "idempotency key": TOOLS_KEY}
        self.token_ids: list[list[int]] = []
        self.raw_keys: list[bytes] = []  # the secret halves of identities
        self.tokenizer = Tokenizer(ModelSource.resolve(MODEL))
        self._stack = stack
        self.programs: dict[str, Program] = {}
        port, head_port = free_port(), free_port()
        database = ("--dir", "coordinator", "--port", str(port), "--admin-port", "0", "--json")
        self.coordinator = self.start("coordinator", "coordinator", *database)
        ready = self.coordinator.ready()
        self.url, admin_url = ready["url"], ready["admin_url"]
        admin_key = Path(folder, ready["admin_key_file"]).read_text().strip()
        headers = {"authorization": f"Bearer {admin_key}"}
        with httpx.Client(base_url=admin_url, headers=headers, trust_env=False) as admin:
            admin.post("/accounts", json={"name": "ann", "credit_micro": 10**12}).raise_for_status()
            self.key = admin.post("/keys", json={"scope": "consumer", "account": "ann"}).json()["key"]
            self.revoked = admin.post("/keys", json={"scope": "consumer", "account": "ann"}).json()["key"]
            admin.post("/keys/revoke", json={"account": "ann", "hint": self.revoked[7:11]}).raise_for_status()
            keys = {name: Home(folder / name).open_identity() for name in ("head", "provider")}
            for name, identity in keys.items():
                body = {"identity": identity.public_key.hex(), "name": name}
                admin.post("/providers", json=body).raise_for_status()
            dial = ("ws" + self.url.removeprefix("http"),)
            serve = ("--dir", "head", "--port", str(head_port), "--provide", *dial)
            self.start("head", "serve", MODEL, *serve).until("registered as head")
            upstream = ("--upstream", f"http://127.0.0.1:{head_port}", "--dir", "provider", "--slots", "2")
            self.start("provider", "provide", *dial, *upstream).until("registered as provider")
        (folder / "ann.key").touch(mode=0o600)
        (folder / "ann.key").write_text(self.key + "\n")
        trust = ("--trust-provider", keys["provider"].public_key.hex())  # blind requests go through all four
        listen = ("--api-key-file", "ann.key", "--port", "0", "--json")
        self.proxy = self.start("proxy", "proxy", self.url, *listen, *trust).ready()["url"]
        self.private |= {"api key": self.key, "administrator's key": admin_key, "revoked key": self.revoked}
        for file in folder.rglob(IDENTITY_KEY):
            lines = [line for line in file.read_text().splitlines() if not line.startswith("-")]
            self.private[f"private key of {file.parent.parent.name}"] = "".join(lines)
            self.raw_keys.append(base64.b64decode("".join(lines))[-32:])

    def start(self, name: str, verb: str, *arguments: str) -> Program:
        program = Program(self.folder, name, *TALK, verb, *arguments, "--traces", self.collector.url)
        self._stack.callback(program.stop)
        self.programs[name] = program
        return program

    def ask(self, url: str, text: str, key: str = "", **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key or self.key}"}
        body = _body(text, **more)
        return httpx.post(
            f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False
        )

    def answered(self, url: str, text: str, **more: Any) -> str:
        """Return a whole answer, and make its text private from here on."""
        answer = self.ask(url, text, **more)
        assert answer.status_code == 200, answer.text
        said = (
            streamed(answer.text) if more.get("stream") else answer.json()["choices"][0]["message"]["content"]
        )
        told: str = said.removesuffix(".") if more.get("stream") else said
        assert len(told) > 24
        self.token_ids += [self.tokenizer.encode(text), self.tokenizer.encode(told)]
        self.private |= {f"prompt {text[-8:]}": text, f"answer to {text[-8:]}": told}
        return told

    def responded(self, url: str, text: str) -> None:
        """Read a streamed answer of the Responses API, of which the prompt is private from here on."""
        headers = {"authorization": f"Bearer {self.key}"}
        body = {"model": MODEL, "input": text, "max_output_tokens": 32, "temperature": 1, "stream": True}
        answer = httpx.post(f"{url}/v1/responses", json=body, headers=headers, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert parse_response_stream(answer.text)[-1]["response"]["output"]
        self.token_ids.append(self.tokenizer.encode(text))
        self.private |= {f"prompt {text[-8:]}": text}

    def left(self, url: str, text: str, meanwhile: Callable[[], None]) -> None:
        """Leave a stream before its end."""
        headers = {"authorization": f"Bearer {self.key}"}
        body = _body(text, stream=True, max_tokens=1200)
        post = ("POST", f"{url}/v1/chat/completions")
        with (
            httpx.Client(trust_env=False, timeout=60) as client,
            client.stream(*post, json=body, headers=headers) as answer,
        ):
            assert answer.status_code == 200
            next(answer.iter_bytes())
            meanwhile()

    def everything(self) -> dict[str, bytes]:
        """Return every file that they wrote, but for those that hold a key to be kept."""
        files = [file for file in self.folder.rglob("*") if file.is_file() and file.name not in KEY_FILES]
        written = {str(file.relative_to(self.folder)): file.read_bytes() for file in files}
        return written | {"traces": b"".join(data for _, data in self.collector.posted)}


def _body(text: str, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    fixed = {"model": MODEL, "messages": [message], "max_tokens": 32, "ignore_eos": True, "temperature": 0}
    return fixed | more


def leaks(capture: bytes, private: dict[str, str], token_ids: list[list[int]]) -> list[str]:
    """Return the finds: in which disguise, and as which list of token ids."""
    found = [f"{what} as {how}" for what, text in private.items() for how in found_in(capture, text)]
    for text in private.values():
        found += [f"{word} of a prompt" for word in re.findall(r"\w+-\w+", text) if word.encode() in capture]
    for ids in token_ids:
        for start in range(len(ids) - 5):
            run = ids[start : start + 6]
            lists = [joint.join(map(str, run)) for joint in (", ", ",", " ", "\n")]
            found += [f"token ids from {start}" for one in lists if one.encode() in capture]
    return found + find_secrets(capture, Secrets(token_ids=token_ids))


def in_memory(memory: bytes, text: str, ids: list[int]) -> list[str]:
    """Search as `leaks`, in the shapes that a program has texts and ids in: there is much of it to read."""
    shapes = {name: text.encode(name) for name in ("utf-8", "utf-16-le", "utf-32-le")}
    shapes["base64"] = base64.b64encode(text.encode())[:-4]
    shapes["JSON"] = json.dumps(text).encode()
    if ids:
        run = ids[-8:]
        shapes |= {
            f"{width} bytes": b"".join(one.to_bytes(width, "little") for one in run) for width in (2, 4, 8)
        }
        shapes |= {repr(joint): joint.join(map(str, run)).encode() for joint in (", ", ",")}
    return [name for name, shape in shapes.items() if shape in memory]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path_factory.mktemp("talkative"), stack)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of another process")
def test_a_coordinators_memory_has_no_text_of_a_blind_request_that_runs(fleet: Fleet) -> None:
    """First of this module: nothing of it was ever sent in plain."""
    told = fleet.answered(fleet.proxy, BLIND)
    fleet.responded(fleet.proxy, RESPONSE)
    held: list[bytes] = []
    fleet.left(fleet.proxy, HELD, lambda: held.append(fleet.coordinator.memory()))
    for text in (BLIND, HELD, RESPONSE, told):
        ids = fleet.tokenizer.encode(text)
        assert in_memory(held[0], text, ids) == []
    for word in ("Quillmarsh", "Larkspur", "Marrowfield", '"messages"', '"delta"'):
        assert word.encode() not in held[0]
    # in plain it is there: so it would have been found
    fleet.left(fleet.url, PLAIN, lambda: held.append(fleet.coordinator.memory()))
    assert in_memory(held[1], PLAIN, [])
    assert b'"messages"' in held[1]


def test_nothing_private_is_in_what_a_fleet_says_or_leaves_on_disk(fleet: Fleet) -> None:
    for url, text in ((fleet.url, PLAIN), (fleet.proxy, BLIND)):
        for stream in (False, True):
            fleet.answered(url, text, stream=stream)
        fleet.private |= {"prompt refused": f"{text} refused", "prompt without model": f"{text} nowhere"}
        assert fleet.ask(url, f"{text} refused", temperature=99).status_code == 400
        assert fleet.ask(url, f"{text} nowhere", model=f"{text} model").status_code == 404
        assert fleet.ask(url, text, max_tokens=-2).status_code == 400
        broken = httpx.post(f"{url}/v1/chat/completions", content=f'{{"{text}'.encode(), trust_env=False)
        assert broken.status_code in {400, 401}
        headers = {"authorization": f"Bearer {fleet.key}", "idempotency-key": TOOLS_KEY}
        kept = [
            httpx.post(
                f"{url}/v1/chat/completions",
                json=_body(text, seed=seed),
                headers=headers,
                timeout=60,
                trust_env=False,
            ).status_code
            for seed in (1, 2)
        ]
        assert kept == [200, 409]
        fleet.left(url, HELD, lambda: None)
    fleet.token_ids.append(fleet.tokenizer.encode(HELD))
    fleet.private["prompt left"] = HELD
    for key in (WRONG_KEY, fleet.revoked):
        assert fleet.ask(fleet.url, PLAIN, key=key).status_code == 401
    wait_until(lambda: "client gone" in fleet.coordinator.said())
    assert len(fleet.raw_keys) == 3
    for program in fleet.programs.values():
        program.stop()
    written = fleet.everything()
    assert {"coordinator/fleet.db", "coordinator.log", "head.log", "provider.log", "proxy.log"} <= set(
        written
    )
    in_database = {"idempotency key"}  # which finds a retry; a proxy's own hides it
    for name, data in written.items():
        known = in_database if ".db" in name else set()
        private = {what: text for what, text in fleet.private.items() if what not in known}
        found = leaks(data, private, fleet.token_ids)
        assert [one for one in found if not (".db" in name and one in HASHED)] == [], name
        assert LEASE.findall(data) == [], name
        shapes = [
            shape for raw in fleet.raw_keys for shape in (raw, raw.hex().encode(), base64.b64encode(raw))
        ]
        assert [shape for shape in shapes if shape in data] == [], name
    lines = [
        json.loads(line) for line in written["coordinator.log"].splitlines() if line.startswith(b'{"time')
    ]
    by_trace: dict[bytes, set[str]] = {}
    for service, span in fleet.collector.spans():
        by_trace.setdefault(span.trace_id, set()).add(service.removeprefix("convoy-"))
    assert set(fleet.programs) in by_trace.values(), "one that all of them had a part in"
    outcomes = {line["outcome"] for line in lines if "outcome" in line}
    assert {"complete", "client gone"} <= outcomes
    assert all(line["total_e2e_us"] > 0 for line in lines if "outcome" in line)


def test_the_same_search_finds_them_where_somebody_logs_them() -> None:
    private = {"prompt": PLAIN, "key": WRONG_KEY}
    ids = [list(range(300, 320))]
    said = json.dumps({"message": f"asked {PLAIN}"}).encode()
    assert leaks(said, private, ids)
    assert leaks(base64.b64encode(b".." + WRONG_KEY.encode()), private, ids)
    assert leaks(b"ids=[305, 306, 307, 308, 309, 310]", private, ids)
    assert leaks(b"request=1 outcome=complete", private, ids) == []

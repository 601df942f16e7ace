"""What a client with a valid key can do by its prompts alone: cost itself time, and nothing to others."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

import convoy
from adversary.beside import others_beside
from adversary.ledger import Row
from support.head_processes import head_processes
from support.programs import Program
from support.waiting import wait_until

SIZE = 8 * 1024 * 1024 - 4096
# A body of 8 MiB is decoded to as much as 140 MiB, one body at a time. Usually at most 55 MiB stay, but once
# it was more than 128 MiB. Bodies that stay add up: those of six clients are above half a gibibyte.
MAX_FRONT_GROWTH_BYTES = 256 << 20
# No body comes to the engine's process, unless it serves HTTP itself. Its first streams touch 50 MiB.
MAX_ENGINE_GROWTH_BYTES = 96 << 20
ENDLESS = (
    "{% if messages[0].content == 'forever' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% elif messages[0].content == 'long' %}{% for a in range(99999) %}"
    "{{ 'x' * 1000 }}{% endfor %}{% elif messages[0].content == 'wide' %}"
    "{{ ('x' * 999999999) | length }}{% endif %}"
)


@dataclass
class Served:
    """Run a head and a peer as processes, behind HTTP."""

    program: Program
    url: str

    def post(self, path: str, body: bytes) -> httpx.Response:
        headers = {"content-type": "application/json"}
        return httpx.post(self.url + path, content=body, headers=headers, timeout=300.0)

    def memory(self) -> list[int]:
        """Return the bytes of the head's process, and of its front process if it has one."""
        return [one.memory_info().rss for one in head_processes(self.program.process.pid)]

    def check_memory(self, before: list[int]) -> None:
        """Wait until each process has given back all but its bound."""
        bounds = [MAX_ENGINE_GROWTH_BYTES, MAX_FRONT_GROWTH_BYTES][-len(before) :]

        def fits() -> bool:
            grown = [now - old for now, old in zip(self.memory(), before, strict=True)]
            return all(one < bound for one, bound in zip(grown, bounds, strict=True))

        wait_until(fits)

    def check_unharmed(self) -> None:
        status = httpx.get(f"{self.url}/status", timeout=120.0).json()
        assert (status["ready"], status["recoveries"], len(status["stages"])) == (True, 0, 2)
        answer = self.post("/v1/chat/completions", chat("hello"))
        assert answer.status_code == 200, answer.text


def chat(content: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 4}).encode()


def filled(start: bytes, unit: bytes, end: bytes) -> bytes:
    return start + unit * ((SIZE - len(start) - len(end)) // len(unit)) + end


def served(folder: Path, context: int) -> Program:
    model = folder / "model"
    shutil.copytree(Path(convoy.__file__).parent / "models" / "demo-mini", model)
    template = model / "chat_template.jinja"
    template.write_text(ENDLESS + template.read_text("utf-8"), "utf-8")
    config = json.loads((model / "config.json").read_text("utf-8"))
    config["max_position_embeddings"] = context
    (model / "config.json").write_text(json.dumps(config), "utf-8")
    return Program(folder, "head", "run", str(model), "--members", "2", "--threads", "1", "--port", "0")


@pytest.fixture(scope="module", params=[2048, 200_000], ids=["a small context", "a large context"])
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    program = served(tmp_path_factory.mktemp("head"), request.param)
    try:
        program.until("/v1")
        found = re.search(r"(http://[\d.:]+)/v1", program.said())
        assert found is not None
        head = Served(program, found[1])
        # one-time work is done now
        head.check_unharmed()
        yield head
        program.process.send_signal(signal.SIGINT)
        assert program.process.wait(120.0) == 0
    finally:
        program.stop()


BODIES = {
    "text of 8 MiB as a prompt": (
        "/v1/completions",
        filled(b'{"prompt": "', b"hello world, how are you today? ", b'"}'),
    ),
    "text of 8 MiB as a message": (
        "/v1/chat/completions",
        filled(b'{"messages": [{"role": "user", "content": "', b"a b c d ", b'"}]}'),
    ),
    "control strings of 8 MiB as a prompt": ("/v1/completions", filled(b'{"prompt": "', b"<|end|>", b'"}')),
    "one letter 8 million times": ("/v1/completions", filled(b'{"prompt": "', b"a", b'"}')),
    "token ids of 8 MiB": ("/v1/completions", filled(b'{"prompt": [1', b",1", b"]}")),
    "fractions by the million": ("/v1/completions", filled(b'{"prompt": [1.5', b",1.5", b"]}")),
    "words by the million": ("/v1/completions", filled(b'{"prompt": ["ab"', b',"ab"', b"]}")),
    "millions of empty lists": ("/v1/completions", filled(b'{"prompt": [[]', b",[]", b"]}")),
    "messages by the hundred thousand": (
        "/v1/chat/completions",
        filled(b'{"messages": [{"role":"user","content":""}', b',{"role":"user","content":""}', b"]}"),
    ),
}


@pytest.mark.parametrize(
    "body", [pytest.param(name, marks=pytest.mark.attack(name, layer="http")) for name in BODIES]
)
def test_six_long_bodies_at_once_are_refused_and_leave_nothing_behind(
    head: Served, row: Row, body: str
) -> None:
    check_refused(head, row, body, 6)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(name, marks=pytest.mark.attack(f"four of: {name}", layer="http"))
        for name in BODIES
        if name.startswith("text of 8 MiB")
    ],
)
def test_four_long_bodies_at_once_are_refused_and_leave_nothing_behind(
    head: Served, row: Row, body: str
) -> None:
    check_refused(head, row, body, 4)


def check_refused(head: Served, row: Row, body: str, num_bodies: int) -> None:
    """Send ``num_bodies`` bodies at once beside a stream; see `others_beside` for what the row then shows."""
    path, data = BODIES[body]
    before = head.memory()
    with others_beside(head.url, row), ThreadPoolExecutor(num_bodies) as clients:
        # Each body ends in another number of blanks: a server refuses the sixth of six equal ones unread.
        for answer in clients.map(lambda number: head.post(path, data + b" " * number), range(num_bodies)):
            assert answer.status_code in {400, 413}, answer.text
            row.tried(answer.json()["error"]["code"] or "refused")
    head.check_unharmed()
    head.check_memory(before)


@pytest.mark.attack("a chat template without an end", layer="http")
@pytest.mark.parametrize("content", ["forever", "long", "wide"])
def test_a_template_without_an_end_costs_its_own_request_alone(head: Served, row: Row, content: str) -> None:
    with others_beside(head.url, row), ThreadPoolExecutor(4) as clients:
        for answer in clients.map(lambda _: head.post("/v1/chat/completions", chat(content)), range(4)):
            assert answer.status_code == 400
            row.tried(answer.json()["error"]["code"])
            assert answer.json()["error"]["code"] == "chat_template_limit"
    head.check_unharmed()


@pytest.mark.attack("clients that come and go with long bodies", layer="http")
def test_clients_that_go_before_their_answer_do_not_pile_up_work(head: Served, row: Row) -> None:
    path, data = BODIES["text of 8 MiB as a prompt"]
    before = head.memory()

    def come_and_go(_: int) -> str:
        timeout = httpx.Timeout(60.0, read=0.2)
        try:
            answer = httpx.post(
                head.url + path, content=data, headers={"content-type": "application/json"}, timeout=timeout
            )
        except httpx.ReadTimeout:
            return "gone"
        return str(answer.json()["error"]["code"])

    with others_beside(head.url, row), ThreadPoolExecutor(4) as clients:
        for outcome in clients.map(come_and_go, range(40)):
            row.tried(outcome)
    assert all(one.num_threads() < 100 for one in head_processes(head.program.process.pid))
    head.check_unharmed()
    head.check_memory(before)

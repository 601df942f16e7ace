"""The four agents, as npm has them, run a whole loop on a split model, with and without a loss."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agents.loops import AFTER, ANSWER, BEFORE, CHECK, CHECK_TURN, TASKS, UNPRIVILEGED, Ended, Home
from agents.names import NameServer
from agents.recorder import Exchange, Recorder
from agents.split import HEAD, PEER, Split, split
from convoy.testing import Script, ScriptedCall

DOCS = Path(__file__).parents[2] / "docs" / "agents.md"
LOCK = Path(__file__).with_name("package-lock.json")
PACKAGES = {
    "codex": "@openai/codex-linux-x64",
    "claude": "@anthropic-ai/claude-code-linux-x64",
    "opencode": "opencode-linux-x64-baseline",
    "cline": "@cline/cli-linux-x64",
}
TITLES = {"Codex CLI": "codex", "Claude Code": "claude", "opencode": "opencode", "Cline": "cline"}
STREAMED_S = 120.0
# Of a server's answer: new in each, or of the time or of the cache.
VARYING = {"id", "item_id", "call_id", "created", "created_at", "completed_at", "usage"} | {
    "sequence_number",
    "prompt_cache_key",
}
# The fields of events that hold a text of the model, whole or in pieces.
TEXTS = {"arguments", "content", "delta", "partial_json", "text"}


@dataclass(frozen=True, slots=True)
class Run:
    """Hold the results of one run of an agent.

    ``turns`` are its requests with tools. ``streamed`` is the part of an answer that came before the loss.
    """

    ended: Ended
    note: str
    checked: str
    turns: list[Exchange]
    hosts: set[str]
    members: list[str]
    recoveries: int
    streamed: bytes = b""


@dataclass(frozen=True, slots=True)
class Runs:
    """Run one agent on one cluster. In the second run its peer is killed in the middle of a call."""

    name: str
    whole: Run
    killed: Run


class Loss:
    """Kill the peer once the agent has the beginning of the call, and half of it has been generated."""

    def __init__(self, cluster: Split, tool: str) -> None:
        self._cluster = cluster
        self._tool = tool.encode()
        self.recorder: Recorder | None = None
        self.streamed = b""

    def during(self, turn: int, text: str) -> None:
        """Kill the peer on the engine's thread, so that no step runs meanwhile."""
        if turn != CHECK_TURN or self.streamed or CHECK[: len(CHECK) // 2] not in text:
            return
        assert self.recorder is not None
        self.recorder.wait_for(self._has_begun, STREAMED_S)
        self.streamed = bytes(self.recorder.turns[CHECK_TURN].answer)
        self._cluster.kill_peer()

    def _has_begun(self, exchanges: list[Exchange]) -> bool:
        turns = [one for one in exchanges if one.has_tools]
        return len(turns) > CHECK_TURN and self._tool in turns[CHECK_TURN].answer


def run(cluster: Split, home: Home, names: NameServer, loss: Loss | None = None) -> Run:
    home.renew()
    calls = TASKS[home.name].calls(home.work)
    script = Script([*calls, ANSWER], during=None if loss is None else loss.during)
    names.take()
    with cluster.serve(script) as url:
        recorder = Recorder(url)
        if loss is not None:
            loss.recorder = recorder
        try:
            ended = home.run(recorder.url)
        finally:
            recorder.close()
    print(f"--- {home.name}, {ended.seconds:.1f} s\n{ended.output}")
    checked = home.work / "checked.txt"
    return Run(
        ended,
        (home.work / "note.txt").read_text(),
        checked.read_text() if checked.exists() else "",
        recorder.turns,
        names.take(),
        cluster.members(),
        cluster.recoveries(),
        b"" if loss is None else loss.streamed,
    )


@pytest.fixture(scope="module", params=TASKS)
def runs(request: pytest.FixtureRequest, place: Path, names: NameServer) -> Iterator[Runs]:
    home = Home(place, request.param)
    with split() as cluster:
        whole = run(cluster, home, names)
        check: ScriptedCall = TASKS[home.name].calls(home.work)[CHECK_TURN]
        yield Runs(home.name, whole, run(cluster, home, names, Loss(cluster, check.name)))


def check_end(ended: Run) -> None:
    """Check what the loop leaves: the file as edited, the mark of the command, and the answer."""
    assert ended.ended.code == 0
    assert ended.note == f"{AFTER}\n"
    assert ended.checked == f"{UNPRIVILEGED}\n", "the command ran, as the unprivileged user"
    assert ANSWER in ended.ended.output
    assert len(ended.turns) == 4
    assert [turn.status for turn in ended.turns] == [200] * 4
    assert BEFORE not in ended.turns[0].body.decode()
    assert BEFORE in ended.turns[1].body.decode(), "the text of the file reached the model"


def test_an_agent_reads_runs_edits_and_answers_on_a_split_model(runs: Runs) -> None:
    check_end(runs.whole)
    assert runs.whole.members == [HEAD, PEER]
    assert runs.whole.recoveries == 0


def test_the_second_turn_reads_its_prompt_from_the_prefix_cache(runs: Runs) -> None:
    prompt, cached = cached_tokens(runs.whole.turns[1])
    print(f"{runs.name}: {cached} of {prompt} tokens of the second prompt were cached")
    assert prompt > 5000
    assert cached / prompt >= 0.95


def test_a_peer_killed_in_the_middle_of_a_call_changes_no_byte_of_it(runs: Runs) -> None:
    check_end(runs.killed)
    assert runs.killed.members == [HEAD]
    assert runs.killed.recoveries == 1
    whole = bytes(runs.killed.turns[CHECK_TURN].answer)
    assert whole.startswith(runs.killed.streamed)
    assert 0 < len(runs.killed.streamed) < len(whole), "the peer was lost in the middle of the call"
    assert not calls_ended(runs.killed.streamed)
    for before, after in zip(runs.whole.turns, runs.killed.turns, strict=True):
        assert told(after) == told(before)


def test_an_agent_looks_up_the_host_names_that_its_page_lists_and_leaves_no_process(runs: Runs) -> None:
    version, hosts = documented()[runs.name]
    assert runs.whole.hosts | runs.killed.hosts == hosts
    packages: dict[str, Any] = json.loads(LOCK.read_text())["packages"]
    installed = packages[f"node_modules/{PACKAGES[runs.name]}"]["version"]
    assert installed.removesuffix("-linux-x64") == version
    assert runs.whole.ended.left == runs.killed.ended.left == ()


def documented() -> dict[str, tuple[str, set[str]]]:
    """Return version and host names of each agent, from the first table of their page."""
    found: dict[str, tuple[str, set[str]]] = {}
    for line in DOCS.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in TITLES and TITLES[cells[0]] not in found:
            found[TITLES[cells[0]]] = cells[1], set(re.findall(r"`([^`]+)`", cells[3]))
    return found


def events_of(answer: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, but for those that only keep it alive."""
    lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: {")]
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [event for event in events if not keeps_alive(event)]


def keeps_alive(event: dict[str, Any]) -> bool:
    if event.get("type") in {"ping", "response.in_progress"}:
        return True
    choices: list[dict[str, Any]] = event.get("choices") or []
    return any(choice["delta"] == {} and choice["finish_reason"] is None for choice in choices)


def told(exchange: Exchange) -> list[tuple[Any, str]]:
    """Return the events of an answer and their texts, without the parts that are new in each.

    Pieces that follow each other are one: a sampler may write a text in other tokens.
    """
    found: list[tuple[Any, str]] = []
    for event in events_of(bytes(exchange.answer)):
        form, text = without_text(event)
        if found and found[-1][0] == form:
            text = found.pop()[1] + text
        found.append((form, text))
    return found


def without_text(value: Any) -> tuple[Any, str]:
    """Return a part of an event without its texts and without `VARYING`, and its texts."""
    if isinstance(value, list):
        parts = [without_text(one) for one in value]
        return [form for form, _ in parts], "".join(text for _, text in parts)
    if not isinstance(value, dict):
        return value, ""
    form, texts = {}, ""
    for key, one in value.items():
        if key in VARYING:
            continue
        is_text = key in TEXTS and isinstance(one, str)
        form[key], text = ("", one) if is_text else without_text(one)
        texts += text
    return form, texts


def calls_ended(answer: bytes) -> bool:
    """Tell whether a stream has the event behind its last call."""
    ends = (b'"finish_reason":"tool_calls"', b"content_block_stop", b"response.function_call_arguments.done")
    return any(end in answer for end in ends)


def cached_tokens(exchange: Exchange) -> tuple[int, int]:
    """Return the tokens of a prompt, and those from the prefix cache, as the answer's usage has them."""
    for event in reversed(events_of(bytes(exchange.answer))):
        usage: Any = event.get("usage") or (event.get("response") or {}).get("usage")
        if not usage:
            continue
        if "cache_read_input_tokens" in usage:
            cached = usage["cache_read_input_tokens"]
            return usage["input_tokens"] + cached, cached
        if "prompt_tokens" in usage:
            return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    raise AssertionError("the answer has no usage")

"""`convoy.testing.Script`: the answers of a served model are those of a script, literally and in order."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from convoy.errors import ConfigError
from convoy.testing import Script, ScriptedCall, serve

MODEL = "synthetic:agent"
ARGUMENTS = {"text": 'two\nlines and "marks"', "count": 3}
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]


def ask(url: str, **fields: object) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 200, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60.0)
    assert answer.status_code in {200, 400}, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_each_request_with_tools_gets_the_next_turn_and_others_get_the_text_beside() -> None:
    seen: list[tuple[int, str]] = []
    script = Script(
        [ScriptedCall("write", ARGUMENTS), "It is written."],
        beside="A name",
        during=lambda turn, text: seen.append((turn, text)),
    )
    with serve(MODEL, script=script) as server:
        beside = ask(server.url)
        called = ask(server.url, tools=TOOLS)
        answered = ask(server.url, tools=TOOLS)
        refused = ask(server.url, tools=TOOLS)
    assert beside["choices"][0]["message"]["content"] == "A name"
    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {
        "name": "write",
        "arguments": '{"text": "two\\nlines and \\"marks\\"", "count": 3}',
    }
    assert called["choices"][0]["finish_reason"] == "tool_calls"
    assert answered["choices"][0]["message"]["content"] == "It is written."
    assert answered["choices"][0]["finish_reason"] == "stop"
    assert "2 turns" in refused["error"]["message"]
    assert [turn for turn, _ in seen] == sorted(turn for turn, _ in seen)
    assert seen[-1] == (1, "It is written.")


def test_a_script_without_turns_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one turn"):
        Script([])


def test_a_model_without_a_format_of_calls_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="no format of calls"),
        serve("demo-mini", script=Script([ScriptedCall("write", {})])),
    ):
        pass

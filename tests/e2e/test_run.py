"""`convoy run` as a person types it: real processes, real sockets, TLS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.transcript import run_here
from convoy.cli import main
from e2e.served import convoy_json
from support.odd_models import make_odd_llama

QUESTION = "What is 36+37? Answer with just the number."
STORY = ("--prompt", "Once upon a time", "--raw", "--temperature", "1.2", "--max-tokens", "40")


def whole_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return one member's answer to the same command line, in this process: processes are not the point."""
    assert main.run(["run", *arguments, "--members", "1", "--threads", "1", "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.slow
@pytest.mark.long
def test_a_prompt_gets_the_same_tokens_from_one_and_two_members(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("demo", "--prompt", QUESTION, "--max-tokens", "24")
    whole = whole_json(capsys, *asked)
    split = convoy_json("run", *asked, "--threads", "1", "--members", "2")
    assert whole["text"] == "73"
    assert whole["token_ids"] == split["token_ids"]
    assert whole["sealed_bytes"] == 0
    assert split["sealed_bytes"] > 1000
    assert [stage["member"] for stage in split["stages"]] == ["alpha", "beta"]
    for answer in (whole, split):
        assert answer["finish_reason"] == "stop"
        assert answer["completion_tokens"] == len(answer["token_ids"])
        assert answer["time_to_first_token_s"] > 0
        assert {"member", "start", "end", "embed", "output", "weight_bytes"} <= set(answer["stages"][0])


@pytest.mark.slow
@pytest.mark.long
def test_every_layout_gives_the_same_text_by_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    whole = whole_json(capsys, "demo", *STORY, "--seed", "7")
    assert whole_json(capsys, "demo", *STORY, "--seed", "8")["token_ids"] != whole["token_ids"]
    layouts = {
        "alpha 0:5 -> beta 6:output": ["0:5", "6:output"],
        "beta 0:7 -> alpha 8:output": ["8:output", "0:7"],
        "alpha 0:0,output -> gamma 1:7 -> beta 8:11 -> alpha": ["0:0,output", "8:11", "1:7"],
    }
    for route, spans in layouts.items():
        layers = [word for span in spans for word in ("--layers", span)]
        split = convoy_json("run", "demo", "--members", str(len(spans)), *layers, *STORY, "--seed", "7")
        assert split["token_ids"] == whole["token_ids"]
        assert split["text"] == whole["text"]
        assert split["route"] == f"complete: {route}"
        seeing = {stage["member"] for stage in split["stages"] if stage["can_read_prompts"] == "tokens"}
        assert seeing == ({"alpha"} if route.endswith("-> alpha") else {"alpha", "beta"})


@pytest.mark.slow
@pytest.mark.long
def test_a_directory_from_elsewhere_with_odd_dimensions_runs_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(make_odd_llama(tmp_path / "odd"))
    asked = ("--prompt", "hello", "--max-tokens", "12")
    split = convoy_json("run", model, "--members", "3", *asked)
    assert split["token_ids"] == whole_json(capsys, model, *asked)["token_ids"]
    assert [stage["member"] for stage in split["stages"]] == ["alpha", "beta", "gamma"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere"], "no model at nowhere"),
        (["demo", "--layers", "0:5", "--layers", "6:11"], "no member owns the output"),
        (["demo", "--layers", "0:5,output", "--layers", "5:11"], "layer 5 claimed twice, by alpha"),
        (["demo", "--layers", "0:5,output", "--layers", "7:11"], "no member owns layer 6 of 12"),
        (["demo", "--layers", "0:5,output", "--layers", "6:output"], "the output claimed twice, by alpha"),
        (["demo", "--layers", "6:11", "--layers", "0:5,output"], "the output claimed by beta (0:5,output)"),
        (["demo", "--micro-batches", "65"], "micro_batches is 65, expected 0 to 64 steps in flight"),
        (["demo", "--layers", "0:x"], "0:x"),
        (["demo", "--max-tokens", "0"], "--max-tokens is 0, expected 1 or more"),
        (["demo", "--members", "0"], "--members is 0, expected 1 to 64"),
        (["demo", "--temperature", "3"], "temperature is 3.0, expected a number from 0 to 2"),
    ],
)
def test_wrong_usage_is_one_line_that_says_what_was_expected(
    tmp_path: Path, arguments: list[str], error: str
) -> None:
    done = run_here(["run", *arguments, "--prompt", "hello"], tmp_path)
    assert done.returncode in {1, 2, 78}
    lines = done.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert error in lines[0]
    assert all(line.startswith(("error:", "hint:")) for line in lines), done.stderr

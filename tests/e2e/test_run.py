"""`convoy run` as a person types it: real processes, real sockets, TLS."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.served import convoy, convoy_json
from support.odd_models import make_odd_llama

QUESTION = "What is 36+37? Answer with just the number."


@pytest.mark.slow
def test_a_prompt_gets_the_same_tokens_from_one_two_and_three_members() -> None:
    answers = {
        members: convoy_json(
            "run", "demo", "--members", str(members), "--prompt", QUESTION, "--max-tokens", "24"
        )
        for members in (1, 2, 3)
    }
    assert answers[1]["text"] == "73"
    assert answers[1]["token_ids"] == answers[2]["token_ids"] == answers[3]["token_ids"]
    assert answers[1]["sealed_bytes"] == 0
    assert answers[2]["sealed_bytes"] > 1000
    assert [stage["member"] for stage in answers[3]["stages"]] == ["alpha", "beta", "gamma"]
    for answer in answers.values():
        assert answer["finish_reason"] == "stop"
        assert answer["completion_tokens"] == len(answer["token_ids"])
        assert answer["time_to_first_token_s"] > 0
        assert {"member", "start", "end", "embed", "output", "weight_bytes"} <= set(answer["stages"][0])


@pytest.mark.slow
def test_a_seed_gives_the_same_text_split_and_whole_and_another_seed_another() -> None:
    story = ("--prompt", "Once upon a time", "--raw", "--temperature", "1.2", "--max-tokens", "40")
    whole = convoy_json("run", "demo", "--members", "1", *story, "--seed", "7")
    split = convoy_json(
        "run", "demo", "--members", "2", "--layers", "8:output", "--layers", "0:7", *story, "--seed", "7"
    )
    other = convoy_json("run", "demo", "--members", "1", *story, "--seed", "8")
    assert whole["token_ids"] == split["token_ids"]
    assert whole["token_ids"] != other["token_ids"]
    assert [stage["sees_token_ids"] for stage in split["stages"]] == [True, True]


@pytest.mark.slow
def test_every_layout_gives_the_same_text() -> None:
    story = ("--prompt", "Once upon a time", "--raw", "--temperature", "1.2", "--max-tokens", "40")
    whole = convoy_json("run", "demo", "--members", "1", *story)
    layouts = {
        "alpha 0:5 -> beta 6:output": ["0:5", "6:output"],
        "alpha 0:2 -> beta 3:7 -> gamma 8:output": ["0:2", "3:7", "8:output"],
        "gamma 0:2 -> beta 3:7 -> alpha 8:output": ["8:output", "3:7", "0:2"],
        "alpha 0:0,output -> gamma 1:7 -> beta 8:11 -> alpha": ["0:0,output", "8:11", "1:7"],
    }
    for route, spans in layouts.items():
        layers = [word for span in spans for word in ("--layers", span)]
        split = convoy_json("run", "demo", "--members", str(len(spans)), *layers, *story)
        assert split["token_ids"] == whole["token_ids"]
        assert split["text"] == whole["text"]
        assert split["route"] == f"complete: {route}"


@pytest.mark.slow
@pytest.mark.parametrize("members", ["2", "3"])
def test_a_directory_from_elsewhere_with_odd_dimensions_runs_split(tmp_path: Path, members: str) -> None:
    model = str(make_odd_llama(tmp_path / "odd"))
    asked = ("--prompt", "hello", "--max-tokens", "12")
    split = convoy_json("run", model, "--members", members, *asked)
    whole = convoy_json("run", model, "--members", "1", *asked)
    assert split["token_ids"] == whole["token_ids"]
    assert len(split["stages"]) == int(members)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere"], "no model at nowhere"),
        (["demo", "--layers", "0:5", "--layers", "6:11"], "nobody owns the output"),
        (["demo", "--layers", "0:5,output", "--layers", "5:11"], "layer 5 claimed twice, by alpha"),
        (["demo", "--layers", "0:5,output", "--layers", "7:11"], "nobody owns layer 6 of 12"),
        (["demo", "--layers", "0:5,output", "--layers", "6:output"], "the output claimed twice, by alpha"),
        (["demo", "--layers", "6:11", "--layers", "0:5,output"], "the output claimed by beta (0:5,output)"),
        (["demo", "--micro-batches", "65"], "micro_batches is 65, expected 0 to 64 steps in flight"),
        (["demo", "--layers", "0:x"], "0:x"),
        (["demo", "--max-tokens", "0"], "--max-tokens is 0, expected 1 or more"),
        (["demo", "--members", "0"], "--members is 0, expected 1 to 64"),
        (["demo", "--temperature", "3"], "temperature is 3.0, expected a number from 0 to 2"),
    ],
)
def test_wrong_usage_is_one_line_that_says_what_was_expected(arguments: list[str], error: str) -> None:
    done = convoy("run", *arguments, "--prompt", "hello")
    assert done.returncode in {1, 2}
    lines = done.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert error in lines[0]
    assert all(line.startswith(("error:", "hint:")) for line in lines), done.stderr

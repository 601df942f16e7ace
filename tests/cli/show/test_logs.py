from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from convoy.cli.main import run
from convoy.cli.show.logs import Format, JsonLines, set_up_logs
from convoy.cli.show.output import print_note
from convoy.errors import FrameError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("convoy")
    handlers, level = list(root.handlers), ours.level
    yield
    root.handlers = handlers
    ours.setLevel(level)


def line_of(message: str, *arguments: object) -> dict[str, object]:
    record = logging.LogRecord(
        "convoy.fleet.coordinator.requests.routed_request",
        logging.INFO,
        "way.py",
        1,
        message,
        arguments,
        None,
    )
    found: dict[str, object] = json.loads(JsonLines().format(record))
    return found


def test_a_line_has_its_message_and_the_fields_that_it_names() -> None:
    line = line_of("done request=%s e2e_s=%.3f tries=%d: %s", "r-1", 0.5, 2, "why\nnot")
    assert line["message"] == "done request=r-1 e2e_s=0.500 tries=2: why\nnot"
    assert (line["request"], line["e2e_s"], line["tries"]) == ("r-1", 0.5, 2)
    assert (line["level"], line["logger"]) == ("info", "convoy.fleet.coordinator.requests.routed_request")
    assert str(line["time"]).endswith("Z")


def test_words_of_others_make_no_field_and_no_line() -> None:
    line = line_of('provider refused: %s 100%% of name=%s"', 'level=error admin=true\n{"x": 1}', "level=%s")
    assert {"admin", "x"}.isdisjoint(line)
    assert (line["level"], line["name"]) == ("info", "level=%s")


def test_libraries_stay_quiet_at_the_most_talkative_level(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("debug", "json")
    logging.getLogger("convoy.fleet.coordinator.requests.routed_request").debug("heard=%s", "yes")
    logging.getLogger("httpx").info("HTTP Request: POST /v1/leases/lease-00")
    logging.getLogger("websockets.client").debug("> GET /provider")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["heard"] == "yes"


@pytest.mark.parametrize("form", ["text", "json"])
def test_of_an_error_its_place_is_logged_and_not_what_it_quotes(
    form: Format, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logs("info", form)
    try:
        try:
            int("the heron flies at midnight")
        except ValueError:
            raise FrameError("3 bytes are no message") from None
    except FrameError:
        logging.getLogger("convoy.engine.engine").exception("the engine stopped")
    said = capsys.readouterr().err
    assert "heron" not in said
    assert "FrameError: 3 bytes are no message" in said
    assert "ValueError" in said
    assert "test_logs.py" in said


def test_a_level_that_is_none_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--log-level", "loud", "status"]) == 2
    assert "loud" in capsys.readouterr().err


def test_notes_for_a_person_are_lines_of_the_log_in_json_if_it_is_in_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_logs("warning", "json")
    print_note("lost: beta, 100% of it level=%s")
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["message"]) == ("info", "lost: beta, 100% of it level=%s")
    set_up_logs("warning", "text")
    print_note("lost: beta")
    assert capsys.readouterr().err == "lost: beta\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["roster", "show", "nothing.toml"], "cannot read nothing.toml: no such file or directory"),
        (["run"], "missing argument 'model'"),
        # The option parser knows no verb before the log is set up.
        (["serv"], "no such command 'serv'"),
    ],
)
def test_an_error_that_ends_a_command_is_one_line_in_json(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--log-format", "json", *arguments]) > 0
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert [told["level"], told["message"]] == ["error", message]
    assert told["hint"]
    assert told["time"].endswith("Z")

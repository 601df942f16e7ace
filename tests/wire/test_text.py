"""Text of a peer does nothing to a log or a terminal."""

from __future__ import annotations

import msgspec
import pytest

from convoy.errors import FrameError
from convoy.wire.codec import decode_message, encode_message
from convoy.wire.messages.control import Hello, Message, Plan, Refuse, StageAssignment, StepFailed
from convoy.wire.messages.link import Bye
from convoy.wire.text import plain_text

ROGUE = "ok\nERROR forged\r\x1b[2J\x1b]0;title\x07\u202eevil\u2028\x00\x7f\x9b"
PLAN = Plan(1, "demo", "0" * 64, [StageAssignment("beta", 0, 2, True, True)], "exact-f32", "float32", 16, 64)
HELLO = Hello("convoy", ["float32"], ["exact-f32"], 1, 1, "Linux")


def through_the_codec(message: Message) -> Message:
    return decode_message(message.frame.type, encode_message(message))


def test_control_characters_and_line_ends_are_taken_out() -> None:
    assert plain_text(ROGUE, 100) == "ok?ERROR forged??[2J?]0;title??evil?????"[:39]
    assert plain_text(ROGUE, 100).isprintable()
    assert plain_text("Prüfung, ja: 東京", 100) == "Prüfung, ja: 東京"


def test_long_text_is_cut_and_says_so() -> None:
    assert plain_text("x" * 1000, 10) == "xxxxxxx..."


@pytest.mark.parametrize(
    "message",
    [
        Refuse(1, ROGUE * 50, ROGUE * 50),
        StepFailed(1, ROGUE * 50),
        Bye(ROGUE * 20),
        msgspec.structs.replace(HELLO, software=ROGUE * 9, platform=ROGUE * 9),
    ],
)
def test_every_text_for_people_is_plain_and_short_once_decoded(message: Message) -> None:
    decoded = through_the_codec(message)
    texts = [value for value in msgspec.structs.astuple(decoded) if isinstance(value, str)]
    assert texts
    assert all(text.isprintable() and len(text) <= 500 for text in texts)


@pytest.mark.parametrize(
    "message",
    [
        msgspec.structs.replace(PLAN, model=ROGUE),
        msgspec.structs.replace(PLAN, model="m" * 300),
        msgspec.structs.replace(PLAN, kernel="exact\n"),
        msgspec.structs.replace(PLAN, activation_dtype="\x1b[0m"),
        msgspec.structs.replace(PLAN, stages=[StageAssignment("be\nta", 0, 2, True, True)]),
        msgspec.structs.replace(HELLO, kernels=["exact-f32\n"]),
        msgspec.structs.replace(HELLO, dtypes=["\x00"]),
    ],
)
def test_a_name_that_cannot_be_printed_is_refused_by_name(message: Message) -> None:
    with pytest.raises(FrameError, match="a name in a ") as refused:
        through_the_codec(message)
    assert refused.value.message.isprintable()
    assert len(refused.value.message) < 200


@pytest.mark.parametrize("message", [PLAN, HELLO, Bye("done"), Refuse(1, "no", "")])
def test_an_honest_message_is_not_changed(message: Message) -> None:
    assert through_the_codec(message) == message

"""How members and their spans are named on a command line."""

from __future__ import annotations

import pytest

from convoy.cli.local.members import parse_members
from convoy.errors import UsageError
from convoy.sdk.names import local_names, spans_by_name

NAMES = ("alpha", "beta", "gamma")


def test_local_members_have_names_and_the_first_is_the_head() -> None:
    assert local_names(2) == ("alpha", "beta")
    assert local_names(26)[-3:] == ("omega", "member-25", "member-26")
    assert len(set(local_names(64))) == 64


@pytest.mark.parametrize("count", [-1, 0, 65])
def test_a_number_of_members_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match=f"--members is {count}, expected 1 to 64"):
        local_names(count)


def test_a_member_that_is_named_twice_is_a_wrong_argument() -> None:
    with pytest.raises(UsageError, match="--members names a twice") as error:
        parse_members("a=1,a=2")
    assert error.value.hint is not None


def test_a_bare_span_goes_to_the_next_member_without_one() -> None:
    assert spans_by_name(["0:3,output", "4:7"], NAMES) == {"alpha": "0:3,output", "beta": "4:7"}
    assert spans_by_name(["beta=4:7", "0:3,output", "8:11"], NAMES) == {
        "beta": "4:7",
        "alpha": "0:3,output",
        "gamma": "8:11",
    }
    assert spans_by_name(["alpha+beta=0:3,output", "4:7"], NAMES) == {
        "alpha+beta": "0:3,output",
        "gamma": "4:7",
    }
    assert spans_by_name([], NAMES) is None
    assert spans_by_name(None, NAMES) is None


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["1", "2", "3", "4"], "--layers was given 4 times, and there are 3 members"),
        (["delta=0:1"], "--layers delta=0:1 is for delta, expected a member: alpha, beta, gamma"),
        (["beta=0:1", "beta=2:3"], "--layers gives beta two spans, 0:1 and 2:3"),
        (["alpha+delta=0:1"], "--layers alpha+delta=0:1 is for delta, expected a member: alpha, beta, gamma"),
        (
            ["alpha+=0:1"],
            "--layers alpha+=0:1: a span is for 'alpha+', expected NAME or NAME+NAME with names that differ",
        ),
    ],
)
def test_spans_that_cannot_be_handed_out_are_refused(layers: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        spans_by_name(layers, NAMES)
    assert caught.value.message == message


def test_members_are_a_count_or_names_with_memory() -> None:
    assert parse_members("2") == (("alpha", None), ("beta", None))
    assert parse_members("mac=8, box=0.5") == (("mac", 8 * 10**9), ("box", 5 * 10**8))
    assert parse_members("mac=24GB,box=0.5 gb") == (("mac", 24 * 10**9), ("box", 5 * 10**8))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mac",
        "mac=",
        "mac=much",
        "mac=-1",
        "mac=0",
        "=8",
        "mac=8,",
        "mac=inf",
        "mac=nan",
        "mac=GB",
        "mac=8MB",
    ],
)
def test_members_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--members has "):
        parse_members(text)

"""What can be done to the sums of two ranks: nothing but end them, by name, and no sum is ever wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from adversary.arena import Arena, AttackedLink
from adversary.attack_frames import outer_or
from adversary.conftest import BOTH, INNER
from adversary.ledger import Row
from adversary.middle import Tamper, drop, flip, keep, late, nth, repeat, swap_from
from convoy.wire.frame import HEADER_BYTES
from convoy.wire.tensor import DESCRIPTOR_BYTES

PLAN_ID = 3  # as in `adversary.victim`
SIZE = 512  # float32 of a sum: one record outside, and one frame inside


@pytest.fixture(scope="module", params=[BOTH, INNER])
def arena(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """Run two members that can be ranks."""
    with Arena.open(tmp_path_factory.mktemp("arena"), request.param, ranks=True) as opened:
        yield opened


def joined(arena: Arena, deadline_s: float = 3.0) -> AttackedLink:
    """Rank 0 at alpha, rank 1 at beta."""
    link = arena.link()
    for victim, key, rank in ((arena.alpha, link.near, 0), (arena.beta, link.far, 1)):
        victim.tell("join", key=key, rank=rank, deadline_s=deadline_s)
        victim.wait("joined", key)
    return link


def both(link: AttackedLink, do: str, **order: Any) -> None:
    link.arena.alpha.tell(do, key=link.near, **order)
    link.arena.beta.tell(do, key=link.far, **order)


def check_sums(link: AttackedLink, row: Row, far_errors: set[str], most: int) -> None:
    """Check that both ranks stopped by name, after sums that were right, and that beta's link ended."""
    far = link.far_end()
    row.tried(far["error"])
    assert far["error"] in far_errors, far
    for victim, key in ((link.arena.alpha, link.near), (link.arena.beta, link.far)):
        assert victim.wait("ranked", key).get("error") == "CollectiveError"
        added = victim.now("added", key)
        assert all(event["right"] for event in added), added
        assert len(added) <= most + 1


def tampers(name: str) -> tuple[Tamper, int]:
    """Return the tamper, which counts from its own beginning, and the most sums that are right before it."""
    return {
        "drop": (nth(2, drop), 2),
        "reorder": (swap_from(2), 3),
        "duplicate": (nth(2, repeat), 4),
        "cut": (nth(2, keep(60)), 3),
        "change of a part": (nth(2, flip(8 * (HEADER_BYTES + DESCRIPTOR_BYTES + 20))), 3),
    }[name]


@pytest.mark.attack("sums of ranks: drop, reorder, duplicate, cut, change")
@pytest.mark.parametrize("name", ["drop", "reorder", "duplicate", "cut", "change of a part"])
def test_a_part_of_a_sum_that_is_touched_ends_the_sums_and_changes_none(
    arena: Arena, row: Row, name: str
) -> None:
    link = joined(arena)
    link.up.tamper, most = tampers(name)
    both(link, "add", count=12, size=SIZE)
    errors = {"LinkBroken"} if name == "cut" else outer_or(arena, "SealError")
    check_sums(link, row, errors, most)


@pytest.mark.attack("sums of ranks: delay")
def test_sums_that_are_late_are_right(arena: Arena, row: Row) -> None:
    link = joined(arena)
    link.up.tamper = nth(1, late(0.5))
    both(link, "add", count=3, size=SIZE)
    for victim, key in ((arena.alpha, link.near), (arena.beta, link.far)):
        assert "error" not in victim.wait("ranked", key)
        assert [event["right"] for event in victim.now("added", key)] == [True] * 3
    row.tried("arrives late and right")
    link.middle.close()


@pytest.mark.attack("sums of ranks: replay, reflect and splice")
@pytest.mark.parametrize("name", ["replay", "reflect", "splice"])
def test_a_part_of_another_sum_way_or_link_ends_the_link(arena: Arena, row: Row, name: str) -> None:
    link, other = joined(arena), joined(arena)
    before, beside = len(link.up.seen), len(other.up.seen)
    for each in (link, other):
        both(each, "add", count=2, size=SIZE)
        for victim, key in ((arena.alpha, each.near), (arena.beta, each.far)):
            assert "error" not in victim.wait("ranked", key)
            assert len(victim.now("added", key)) == 2
    part = link.up.wait_seen(before + 2)[before]
    if name == "splice":
        part = other.up.wait_seen(beside + 1)[beside]
    (link.down if name == "reflect" else link.up).inject(part)
    ended = link.near_end() if name == "reflect" else link.far_end()
    row.tried(ended["error"])
    assert ended["error"] in outer_or(arena, "SealError")
    other.middle.close()


@pytest.mark.attack("what ranks agree on: drop, reorder, change")
@pytest.mark.parametrize("name", ["drop", "reorder", "change"])
def test_ranks_whose_agreement_is_touched_do_not_begin(arena: Arena, row: Row, name: str) -> None:
    link = joined(arena, deadline_s=1.0)
    change = {"drop": drop, "change": flip(8 * HEADER_BYTES + 3)}.get(name)
    link.up.tamper = swap_from(0) if change is None else nth(0, change)
    both(link, "agree")
    if name == "reorder":
        assert "error" not in arena.alpha.wait("ranked", link.near)
        arena.alpha.tell("add", key=link.near, count=1, size=SIZE)
    said = arena.beta.wait("ranked", link.far)
    assert said["error"] == "CollectiveError", said
    row.tried(said["error"])
    if name != "drop":
        assert link.far_end()["error"] in outer_or(arena, "SealError")
    link.middle.close()


LIES: dict[str, dict[str, Any]] = {
    "another shape": {"shape": [1, SIZE]},
    "another size": {"shape": [SIZE + 1]},
    "another dtype": {"dtype": "bfloat16"},
    "another rank's": {"boundary": 2},
    "of the other rank": {"boundary": 1},
    "a kind that is none": {"boundary": 0xFFFF},
    "an operation far ahead": {"step": 2**63},
}


@pytest.mark.attack("a rank that sends what no sum expects", layer="both")
@pytest.mark.parametrize("arena", ["both"], indirect=True)
@pytest.mark.parametrize("lie", LIES)
def test_a_rank_that_lies_about_its_part_is_refused_by_name(arena: Arena, row: Row, lie: str) -> None:
    link = joined(arena)
    arena.beta.tell("add", key=link.far, count=1, size=SIZE)
    honest = {"plan_id": PLAN_ID, "step": 0, "boundary": 0, "dtype": "float32", "shape": [SIZE]}
    arena.alpha.tell("part", key=link.near, **{**honest, **LIES[lie]})
    ended, said = link.far_end(), arena.beta.wait("ranked", link.far)
    row.tried(ended["error"])
    assert ended["error"] in {"StepError", "LinkClosed"}  # as it came, or once it was to be added
    assert said["error"] == "CollectiveError"
    assert "rank 0" in said["message"]


@pytest.mark.attack("a rank's parts of another plan id", layer="both")
@pytest.mark.parametrize("arena", ["both"], indirect=True)
def test_parts_of_a_plan_that_is_over_are_of_no_effect(arena: Arena, row: Row) -> None:
    link = joined(arena)
    for _ in range(5):
        arena.alpha.tell("part", key=link.near, plan_id=2, step=0, boundary=0, dtype="bfloat16", shape=[7])
        row.tried("of no effect")
    both(link, "add", count=3, size=SIZE)
    for victim, key in ((arena.alpha, link.near), (arena.beta, link.far)):
        assert "error" not in victim.wait("ranked", key)
        assert [event["right"] for event in victim.now("added", key)] == [True] * 3
    link.middle.close()

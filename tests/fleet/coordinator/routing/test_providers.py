from __future__ import annotations

import math
from dataclasses import replace

from convoy.fleet.capacity import Capacity, Load, ModelState
from convoy.fleet.coordinator.routing.policy import FirstToFinish
from convoy.fleet.coordinator.routing.providers import ProviderTable
from convoy.fleet.coordinator.routing.route_request import Owner, RouteRequest, Trusted
from convoy.trust.evidence.level import Level

ONE = Capacity(slots=2, decode_rate=10, batch_rate=16, prefill_rate=100, max_context=4096)
ASK = RouteRequest(0, "a", "m", 100, 50, 0.0, 60.0)


def provider_table(*names: str) -> ProviderTable:
    made = ProviderTable()
    for name in names:
        made.add(name, ONE, Level.NONE)
    return made


def chosen(among: ProviderTable, ask: RouteRequest = ASK, now_s: float = 0.0) -> str | None:
    return FirstToFinish().choose(among, ask, 50.0, now_s)


def test_there_is_room_for_more_than_there_was() -> None:
    many = provider_table(*(f"p{number}" for number in range(40)))
    assert (len(many), many.free_slots()) == (40, 80)
    for number in range(80):
        name = chosen(many, replace(ASK, number=number))
        assert name is not None
        many.begin(name, ASK)
    assert chosen(many) is None
    assert {many.running(name) for name in many.names()} == {2}


def test_who_takes_a_seat_has_nothing_of_whoever_had_it() -> None:
    one = provider_table("old")
    tagged = replace(ASK, tag=b"t", prompt_tokens=4000)
    one.begin("old", tagged)
    one.close_until("old", 1e9, 30.0)
    one.note_load("old", Load(0, 9999, 0, 0.1, 1.0))
    before = provider_table("new").finish_s(tagged, 50.0)
    one.remove("old")
    assert (one.free_slots(), chosen(one)) == (0, None)
    one.add("new", ONE, Level.NONE)
    assert chosen(one) == "new"
    assert one.finish_s(tagged, 50.0)[0] == before[0]


def test_the_state_of_a_model_is_that_of_the_providers_that_are_here() -> None:
    found = provider_table("a", "b")
    found.add("c", replace(ONE, slots=5, max_context=8192), Level.HARDWARE)
    found.add("gone", replace(ONE, max_context=1 << 20), Level.SELF_SIGNED)
    for name in ("a", "gone"):
        found.begin(name, ASK)
    found.remove("gone")
    found.set_open("b", False)
    assert found.state("m", 7) == ModelState(
        "m", 3, {"none": 2, "hardware": 1}, 8192, free_slots=6, running=1, waiting=7
    )
    assert provider_table().state("m", 0) == ModelState("m")


def test_equal_ones_take_turns_and_busy_ones_come_later() -> None:
    three = provider_table("a", "b", "c")
    assert {chosen(three, replace(ASK, number=number)) for number in range(3)} == {"a", "b", "c"}
    three.begin("a", ASK)
    three.begin("b", ASK)
    assert {chosen(three, replace(ASK, number=number)) for number in range(3)} == {"c"}


def test_a_full_one_is_never_chosen_however_fast_and_a_free_one_always_however_slow() -> None:
    both = provider_table("slow")
    both.add("fast", replace(ONE, decode_rate=1e6, batch_rate=1e6, prefill_rate=1e6, slots=1), Level.NONE)
    assert chosen(both) == "fast"
    both.begin("fast", ASK)
    assert chosen(both) == "slow"
    both.note_load("slow", Load(1, 0, 0, 0.0))  # one runs there for somebody else
    both.begin("slow", ASK)
    assert (chosen(both), both.free_slots()) == (None, 0)
    both.end("slow")
    assert chosen(both) == "slow"


def test_an_estimate_that_is_no_number_hides_nobody_else() -> None:
    two = provider_table("good", "odd")
    two.column("prefill_scale")[1] = math.nan
    assert {chosen(two, replace(ASK, number=number)) for number in range(3)} == {"good"}
    two.remove("good")
    assert chosen(two) is None


def test_one_that_left_is_trusted_by_nobodys_key_any_more() -> None:
    two = provider_table("stranger")
    only = replace(ASK, trusted=Trusted(frozenset({b"i" * 32}), frozenset()))
    two.add("known", ONE, Level.NONE, Owner(b"i" * 32))
    assert {chosen(two, replace(only, number=number)) for number in range(2)} == {"known"}
    two.remove("known")
    two.add("another", ONE, Level.NONE, Owner(b"j" * 32))
    assert {chosen(two, replace(only, number=number)) for number in range(2)} == {"stranger", "another"}

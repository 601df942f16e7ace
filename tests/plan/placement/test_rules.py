"""Placement rules: kept parts in every layout, and refusals that name the rule and the member."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.errors import PlanError, SpanError
from convoy.plan.offer import MemberOffer
from convoy.plan.placement.arrange import Rest, arrangements
from convoy.plan.placement.placement import place
from convoy.plan.placement.rules import breaches, room, satisfies
from convoy.plan.report import report, rule_reports
from convoy.plan.span import Span
from convoy.trust.evidence.level import Level
from convoy.trust.evidence.policy import PlacementRule
from plan.placement.test_placement import GB, owned, spec_of
from support.examples import examples

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon")
ENDS = PlacementRule(True, True, 2, 2, Level.HARDWARE, ())


def keep(
    *,
    embedding: bool = False,
    output: bool = False,
    first: int = 0,
    last: int = 0,
    members: tuple[str, ...] = (),
) -> PlacementRule:
    return PlacementRule(embedding, output, first, last, None if members else Level.HARDWARE, members)


def offers(levels: str, *, head: int = 0, size: int = GB) -> list[MemberOffer]:
    """Make members by letter: ``hns`` is one with level hardware, one with none, one with self_signed."""
    words = {"h": Level.HARDWARE, "n": Level.NONE, "s": Level.SELF_SIGNED}
    return [MemberOffer(NAMES[i], size, i == head, words[letter]) for i, letter in enumerate(levels)]


def refusal(*arguments: object, kind: type[Exception] = PlanError) -> tuple[str, str]:
    with pytest.raises(kind) as caught:
        place(spec_of(), *arguments)  # type: ignore[arg-type]
    hint = getattr(caught.value, "hint", None)
    assert type(caught.value) is kind
    assert isinstance(hint, str)
    return str(caught.value), hint


def test_both_ends_stay_on_members_of_the_level() -> None:
    assert owned(place(spec_of(), offers("hnh"), None, [ENDS])) == [
        ("alpha", 0, 4, True, True),
        ("beta", 4, 8, False, False),
        ("gamma", 8, 12, False, False),
    ]


def test_the_order_changes_where_the_roster_has_the_wrong_one_last() -> None:
    assert [stage[:3] for stage in owned(place(spec_of(), offers("hhn"), None, [ENDS]))] == [
        ("alpha", 0, 4),
        ("gamma", 4, 8),
        ("beta", 8, 12),
    ]


def test_cuts_move_where_shares_by_memory_would_break_a_rule() -> None:
    small_head = [replace(offer, memory_bytes=GB * (1 if offer.head else 5)) for offer in offers("hnh")]
    assert [stage[:3] for stage in owned(place(spec_of(), small_head, None, [keep(first=3)]))] == [
        ("alpha", 0, 3),
        ("beta", 3, 7),
        ("gamma", 7, 12),
    ]


def test_layers_that_do_not_fit_are_not_moved_onto_a_member_that_may_not_hold_them() -> None:
    spec = spec_of()
    least = spec.layer_bytes(0, "float32") + 16 * spec.kv_token_bytes(0, 1, "float32")
    ends = spec.embed_bytes("float32") + spec.output_bytes("float32")
    members = offers("hn")
    crowded = [replace(members[0], memory_bytes=ends + 2 * least), replace(members[1], memory_bytes=GB)]
    assert next(stage[:3] for stage in owned(place(spec, crowded, None, [keep(first=2)]))) == ("alpha", 0, 2)
    with pytest.raises(PlanError, match=r"stage 0 on alpha needs .* for layers 0-2 but has"):
        place(spec, crowded, None, [keep(first=3)])


def test_named_members_satisfy_a_rule_whatever_their_level() -> None:
    rules = [keep(first=1, embedding=True, output=True, members=("alpha",)), keep(last=3, members=("beta",))]
    assert [s[:3] for s in owned(place(spec_of(), offers("nnn"), None, rules))] == [
        ("alpha", 0, 4),
        ("gamma", 4, 8),
        ("beta", 8, 12),
    ]


def test_a_level_that_detects_drift_alone_never_satisfies_a_rule() -> None:
    drift = PlacementRule(True, False, 0, 0, Level.SELF_SIGNED, ())
    assert not satisfies(drift, offers("s")[0])
    assert satisfies(drift, offers("h")[0])
    with pytest.raises(PlanError, match="the embedding must be on members of level self_signed"):
        place(spec_of(), offers("s"), None, [drift])


def test_a_head_that_may_not_hold_the_output_is_named() -> None:
    told, hint = refusal(offers("nh"), None, [keep(output=True)])
    assert told == (
        "rule 1: the output must be on members of level hardware, and alpha has none (alpha is the head)"
    )
    assert hint == "beta would satisfy rule 1: give the output to one of them"


def test_a_head_that_may_not_hold_the_embedding_is_told_of_the_reverse_layout() -> None:
    told, hint = refusal(offers("sh"), None, [keep(embedding=True, first=2)])
    assert told == (
        "rule 1: the embedding and layer 0 must be on members of level hardware, and alpha has self_signed "
        "(alpha is the head)"
    )
    assert hint.startswith("in the reverse layout alpha owns the last layers: alpha=K:output, or beta would")
    reverse = place(spec_of(), offers("sh"), {"alpha": "8:output"}, [keep(embedding=True, first=2)])
    assert owned(reverse) == [("beta", 0, 8, True, False), ("alpha", 8, 12, False, True)]


def test_a_reverse_layout_orders_its_peers_by_the_rules() -> None:
    reverse = place(spec_of(), offers("hnh"), {"alpha": "8:output"}, [ENDS])
    assert [stage[:3] for stage in owned(reverse)] == [("gamma", 0, 4), ("beta", 4, 8), ("alpha", 8, 12)]
    told, _ = refusal(offers("nnh"), {"alpha": "8:output"}, [ENDS], kind=SpanError)
    assert told.startswith("rule 1: layers 10-11 and the output must be on members of level hardware, and al")


def test_a_member_without_any_layer_left_is_named() -> None:
    told, hint = refusal(offers("hn"), None, [keep(first=6, last=6)])
    assert told == (
        "rule 1: layers 0-11 must be on members of level hardware, and beta has none "
        "(no layer of layers 0-11 is left for it)"
    )
    assert hint == "alpha would satisfy rule 1: give layers 0-11 to one of them"


def test_last_layers_that_nobody_but_the_head_may_hold_are_refused_with_the_way_out() -> None:
    told, hint = refusal(offers("hns"), None, [ENDS])
    assert told == (
        "rule 1: layer 11 must be on members of level hardware, and beta has none; "
        "rule 1: layer 11 must be on members of level hardware, and gamma has self_signed; "
        "alpha, the head, has 0 of the last 2 layers that rule 1 keeps"
    )
    assert hint == "alpha, the head, holds the other end: let one more member satisfy rule 1"


def test_nobody_satisfies_a_rule_says_what_would() -> None:
    assert refusal(offers("ns"), None, [keep(output=True)])[1].startswith("no member has level hardware")
    named = keep(output=True, members=("zeta", "eta", "theta"))
    told, hint = refusal(offers("nn"), None, [named])
    assert "the output must be on zeta, eta or theta, not on alpha" in told
    assert hint.startswith("no member is named zeta, eta or theta: add it to the roster")


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ({"alpha": "0:1,output", "beta": "2:11"}, "rule 1: layers 10-11 must be on members of level hardwa"),
        ({"alpha": "0:0,output", "beta": "1:11"}, "rule 1: layer 1 and layers 10-11 must be on members of"),
        ({"alpha": "2:output", "beta": "0:1"}, "rule 1: the embedding and layers 0-1 must be on members of"),
    ],
)
def test_spans_that_break_a_rule_are_refused(spans: dict[str, str], expected: str) -> None:
    told, hint = refusal(offers("hs"), spans, [ENDS], kind=SpanError)
    assert told.startswith(expected)
    assert "and beta has self_signed; alpha, the head, has " in told
    assert told.endswith(" layers that rule 1 keeps")
    assert hint.startswith("alpha would satisfy rule 1")


@pytest.mark.parametrize("claimed", [GB, 2**44])
def test_a_rule_for_the_head_holds_whatever_memory_a_peer_claims(claimed: int) -> None:
    rule = keep(first=4, members=("alpha",))
    members = [MemberOffer("alpha", GB, head=True), MemberOffer("beta", claimed)]
    mine = place(spec_of(), members, None, [rule]).stages[0]
    assert mine.member == "alpha"
    assert mine.end >= 4


def test_a_head_whose_share_is_below_a_rule_is_named_with_both_numbers() -> None:
    members = [MemberOffer("alpha", GB, head=True), MemberOffer("beta", GB)]
    rules = [keep(first=4, last=3, members=("alpha",))]
    told, _ = refusal(members, {"alpha": "0:0,output", "beta": "1:11"}, rules, kind=SpanError)
    assert "alpha, the head, has 1 of the first 4 layers that rule 1 keeps" in told
    assert "alpha, the head, has 0 of the last 3 layers that rule 1 keeps" in told
    told, _ = refusal(members, None, rules)
    assert "alpha, the head, has 0 of the last 3 layers that rule 1 keeps" in told


def test_every_broken_rule_is_told() -> None:
    rules = [keep(first=1), keep(last=1, members=("gamma",))]
    told, _ = refusal(
        offers("nnn"), {"alpha": "0:3,output", "gamma": "4:7", "beta": "8:11"}, rules, kind=SpanError
    )
    assert told == (
        "rule 1: layer 0 must be on members of level hardware, and alpha has none; "
        "rule 2: layer 11 must be on gamma, not on beta"
    )


def test_a_rule_for_more_layers_than_there_are_keeps_them_all() -> None:
    assert room(4, [keep(first=9)], offers("n")[0]) == (4, 4)
    assert room(4, [keep(last=9)], offers("n")[0]) == (0, 0)
    found = breaches(spec_of(4), [keep(first=3, last=3)], [(offers("n")[0], Span(0, 4, True))])
    assert [breach.parts for breach in found] == ["layers 0-3"]


def test_layers_that_read_token_ids_count_as_part_of_the_embedding() -> None:
    spec = replace(spec_of(), token_id_layers=frozenset({7}))
    with pytest.raises(PlanError, match=r"rule 1: layer 7 must be on members of level hardware, and beta"):
        place(spec, offers("hn"), None, [keep(embedding=True)])
    place(spec, offers("hn"), None, [keep(output=True)])


def test_the_report_says_which_rule_excludes_whom() -> None:
    rules = [ENDS, keep(last=1, members=("gamma", "delta"))]
    shown = report(place(spec_of(), offers("hnh"), None, rules)).rules
    assert [(rule.number, rule.keeps, rule.on) for rule in shown] == [
        (1, "the embedding, layers 0-1, layers 10-11 and the output", "members of level hardware"),
        (2, "layer 11", "gamma or delta"),
    ]
    assert [rule.satisfied_by for rule in shown] == [["alpha", "gamma"], ["gamma"]]
    assert [[out.member for out in rule.excluded] for rule in shown] == [["beta"], ["alpha", "beta"]]
    assert shown[0].excluded[0].level == "none"
    assert shown[1].excluded[1].reason == "rule 2: layer 11 must be on gamma or delta, not on beta"
    assert rule_reports(spec_of(), offers("hnh"), rules) == shown


def test_without_rules_nothing_is_reported() -> None:
    assert report(place(spec_of(), offers("hn"))).rules == []


members_of_clusters = st.builds(
    lambda letters, sizes, head: [
        replace(offer, memory_bytes=sizes[i], head=i == head % len(letters))
        for i, offer in enumerate(offers(letters))
    ],
    st.text("hns", min_size=1, max_size=5),
    st.lists(st.integers(10**5, 10**9), min_size=5, max_size=5),
    st.integers(0, 4),
)
some_rules = st.lists(
    st.builds(
        lambda embedding, output, first, last, names: keep(
            embedding=embedding, output=output, first=first, last=last, members=tuple(sorted(names))
        ),
        st.booleans(),
        st.booleans(),
        st.integers(0, 4),
        st.integers(0, 4),
        st.sets(st.sampled_from(NAMES), max_size=3),
    ),
    max_size=3,
)


def spans_of(members: list[MemberOffer], head_end: int | None) -> dict[str, str] | None:
    head = next(member.name for member in members if member.head)
    return None if head_end is None else {head: f"{head_end}:output"}


@settings(max_examples=examples(400))
@given(members_of_clusters, some_rules, st.integers(1, 14), st.none() | st.integers(1, 13))
def test_a_placement_never_breaks_a_rule_and_covers_every_layer_once(
    members: list[MemberOffer], rules: list[PlacementRule], num_layers: int, reverse_from: int | None
) -> None:
    try:
        placement = place(spec_of(num_layers), members, spans_of(members, reverse_from), rules)
    except (PlanError, SpanError):
        return
    by_name = {member.name: member for member in members}
    assert [i for s in placement.stages for i in range(s.start, s.end)] == list(range(num_layers))
    for rule, stage in itertools.product(rules, placement.stages):
        member = by_name[stage.member]
        if member.name in rule.members or (not rule.members and member.level is Level.HARDWARE):
            continue
        assert not (rule.embedding and stage.embed)
        assert not (rule.output and stage.output)
        assert stage.start >= min(rule.first_layers, num_layers)
        assert stage.end <= max(0, num_layers - rule.last_layers)


@settings(max_examples=examples(300))
@given(members_of_clusters, st.integers(1, 14), st.none() | st.integers(1, 13))
def test_rules_that_exclude_nobody_change_nothing(
    members: list[MemberOffer], num_layers: int, reverse_from: int | None
) -> None:
    def outcome(*rules: PlacementRule) -> list[tuple[str, int, int, bool, bool]] | str:
        try:
            return owned(place(spec_of(num_layers), members, spans_of(members, reverse_from), rules))
        except (PlanError, SpanError) as error:
            return str(error)

    lax = keep(embedding=True, output=True, first=3, last=3, members=NAMES)
    assert outcome(lax) == outcome()
    plain = [replace(member, level=Level.NONE) for member in members]
    expected = outcome()
    members = plain
    assert outcome() == expected


def exists(members: list[MemberOffer], num_layers: int, rules: list[PlacementRule]) -> bool:
    """Try every order (the head first) and every cut."""
    rooms = {member.name: room(num_layers, rules, member) for member in members}
    head = next(member for member in members if member.head)
    for order in itertools.permutations([m for m in members if m is not head]):
        for inner in itertools.combinations(range(1, num_layers), len(order)):
            runs = itertools.pairwise([0, *inner, num_layers])
            if all(
                rooms[m.name][0] <= start and end <= rooms[m.name][1]
                for m, (start, end) in zip([head, *order], runs, strict=True)
            ):
                return True
    return False


@settings(max_examples=examples(500))
@given(members_of_clusters, some_rules, st.integers(5, 8))
def test_whatever_way_there_is_is_found(
    members: list[MemberOffer], rules: list[PlacementRule], num_layers: int
) -> None:
    members = sorted(members, key=lambda member: not member.head)
    found = next(arrangements(spec_of(num_layers), members, Rest(0, num_layers), rules), None)
    assert (found is not None) == exists(members, num_layers, rules)


def test_the_output_goes_to_a_peer_only_where_the_rules_let_it() -> None:
    forward = {"alpha": "0:3"}
    kept = [keep(output=True, last=2)]
    told, _ = refusal(offers("hn"), forward, kept)
    assert told == "rule 1: layer 11 and the output must be on members of level hardware, and beta has none"
    with pytest.raises(
        SpanError, match="rule 1: layers 10-11 and the output must be on members of level har"
    ):
        place(spec_of(), offers("hn"), {"alpha": "0:3", "beta": "4:output"}, kept)
    # of two that share the rest, the one that may comes last
    found = owned(place(spec_of(), offers("hnh"), forward, kept))
    assert [(member, output) for member, *_, output in found] == [
        ("alpha", False),
        ("beta", False),
        ("gamma", True),
    ]
    found = owned(place(spec_of(), offers("hhn"), forward, kept))
    assert [(member, output) for member, *_, output in found] == [
        ("alpha", False),
        ("gamma", False),
        ("beta", True),
    ]


def test_a_rule_alone_gives_no_peer_the_output() -> None:
    told, hint = refusal(offers("nh"), None, [keep(output=True)])
    assert told.endswith("(alpha is the head)")
    assert hint == "beta would satisfy rule 1: give the output to one of them"


def test_a_rule_is_never_met_by_a_name_alone_where_it_asks_for_a_level() -> None:
    told, _ = refusal(offers("nn"), None, [ENDS])
    assert re.search(r"and alpha has none \(alpha is the head\)$", told)

"""What a newcomer's card makes of a roster."""

from __future__ import annotations

import datetime
from dataclasses import replace

import pytest

from convoy.crypto.identity import Identity
from convoy.errors import RosterError
from convoy.trust.roster.card import member_of
from convoy.trust.roster.newcomer import roster_with, why_not
from convoy.trust.roster.roster import make_roster
from convoy.wire.messages.enrolment import EnrolmentCard, Refusal

ALPHA, BETA = Identity.generate(), Identity.generate()
NOW = datetime.datetime(2027, 1, 15, 8, tzinfo=datetime.UTC)
ROSTER = make_roster("home", [member_of("alpha", ALPHA, ("192.0.2.1", 7777), head=True)], not_before=NOW)
CARD = EnrolmentCard("beta", ("192.0.2.2", 7777), BETA.public_key, BETA.tls_certificate_der)


def test_a_newcomer_is_in_the_next_epoch_and_may_not_be_head() -> None:
    roster = roster_with(ROSTER, CARD, NOW)
    assert roster.epoch == 2
    assert [member.name for member in roster.members] == ["alpha", "beta"]
    assert not roster.member("beta").head
    assert why_not(ROSTER, CARD, NOW) is None


def test_a_newcomer_whose_clock_is_minutes_behind_can_use_the_roster() -> None:
    roster_with(ROSTER, CARD, NOW).require_valid(NOW - datetime.timedelta(minutes=9))


def test_a_roster_keeps_the_lifetime_that_its_operator_chose() -> None:
    long = make_roster("home", ROSTER.members, not_before=NOW, lifetime=datetime.timedelta(days=300))
    later = NOW + datetime.timedelta(days=200)
    assert roster_with(long, CARD, later).expires > later + datetime.timedelta(days=299)


def test_a_member_that_comes_back_keeps_its_name_and_rights_and_gets_its_new_address() -> None:
    back = EnrolmentCard("other", ("192.0.2.9", 9), ALPHA.public_key, ALPHA.tls_certificate_der)
    roster = roster_with(ROSTER, back, NOW)
    assert [(m.name, m.address, m.head) for m in roster.members] == [("alpha", ("192.0.2.9", 9), True)]
    assert roster.epoch == 2


def test_a_name_of_another_identity_is_taken() -> None:
    assert why_not(ROSTER, replace(CARD, name="alpha"), NOW) is Refusal.NAME_TAKEN


def test_an_address_of_another_member_is_taken_however_it_is_spelled() -> None:
    for host in ("192.0.2.1", "2001:db8::1", "Alpha.example."):
        roster = make_roster("home", [replace(ROSTER.members[0], address=(host, 7777))], not_before=NOW)
        for spelled in (host, host.lower(), host.replace("::", ":0:0::"), host.removesuffix(".")):
            card = replace(CARD, address=(spelled, 7777))
            assert why_not(roster, card, NOW) is Refusal.ADDRESS_TAKEN
            with pytest.raises(RosterError, match=r"beta asks for the address .*, which is alpha's"):
                roster_with(roster, card, NOW)
        assert why_not(roster, replace(CARD, address=(host, 7778)), NOW) is None


def test_a_member_that_comes_back_to_its_own_address_takes_nobodys() -> None:
    back = EnrolmentCard("alpha", ("192.0.2.1", 7777), ALPHA.public_key, ALPHA.tls_certificate_der)
    assert why_not(ROSTER, back, NOW) is None


def test_a_newcomer_is_not_refused_for_two_others_that_share_an_address() -> None:
    gamma = member_of("gamma", Identity.generate(), ROSTER.members[0].address)
    roster = make_roster("home", [*ROSTER.members, gamma], not_before=NOW)
    assert why_not(roster, CARD, NOW) is None


def test_a_card_that_no_roster_can_hold_is_refused() -> None:
    bad = [
        replace(CARD, name="no spaces"),
        replace(CARD, address=("bad host", 7777)),
        replace(CARD, address=("192.0.2.2", 0)),
        replace(CARD, certificate_der=b"no certificate"),
        replace(CARD, certificate_der=ALPHA.tls_certificate_der),
        replace(CARD, name="x" * 64),
        replace(CARD, name='beta"\nhead = true'),
    ]
    assert [why_not(ROSTER, card, NOW) for card in bad] == [Refusal.BAD_CARD] * len(bad)

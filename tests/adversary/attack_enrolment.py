"""What a stranger, and a thief of the token, can do to an open invitation: learn few codes, close it late."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adversary.ledger import Row
from convoy.crypto.enrolment import MAX_UNPROVED_CHALLENGES, code
from convoy.transport.listen.enrolment_tls import send_enrolment
from convoy.wire.messages.enrolment import EnrolmentType, Refusal
from support.invitations import LIMITS, RawNewcomer, assert_still_good, invitation

NUM_STRANGERS = 60


@pytest.mark.attack("enrolment: HELLOs without the secret", layer="both")
@pytest.mark.parametrize("mac", [bytes(32), None], ids=["zeros", "random"])
def test_strangers_are_hung_up_on_and_cannot_close_an_invitation(
    tmp_path: Path, row: Row, mac: bytes | None
) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        for _ in range(NUM_STRANGERS):
            raw = RawNewcomer(offer.token, secret=os.urandom(16))
            send_enrolment(raw.stream, EnrolmentType.HELLO, bytes(32) + (mac or os.urandom(32)))
            assert raw.hung_up()
            row.tried("hung up on, not counted")
        assert list(tmp_path.iterdir()) == []  # nothing was written for any of them
        assert_still_good(offer)


@pytest.mark.attack("enrolment: codes sampled with a stolen token", layer="both")
def test_a_thief_of_the_token_sees_twenty_codes_and_no_more(tmp_path: Path, row: Row) -> None:
    codes = []
    with invitation(tmp_path, limits=LIMITS) as offer:
        while True:
            raw = RawNewcomer(offer.token)
            raw.say_hello()
            try:
                challenge = raw.challenge()
            except AssertionError:
                break
            raw.proof(challenge)
            codes.append(code(offer.token.secret, raw.spoken))
            raw.close()
            row.tried("a code, no proof")
        again = RawNewcomer(offer.token)
        again.say_hello()
        assert again.refusal() is Refusal.BUSY
        row.tried("BUSY: the invitation is closed")
        assert not offer.consumption.used
    assert len(codes) == MAX_UNPROVED_CHALLENGES == 20

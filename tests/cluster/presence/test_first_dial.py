"""The first dial of all members: a slow one is dialled again, and one with another identity ends it."""

from __future__ import annotations

import pytest

from convoy.cluster.presence.first_dial import DialResults, FirstDial
from convoy.errors import HandshakeError, HandshakeLate
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import Link
from convoy.transport.member import Member
from convoy.transport.membership import Membership
from support.members import make_local_members, membership_of


class Failing(MemoryNetwork):
    """Fail the first dials."""

    def __init__(self, error: Exception, times: int) -> None:
        super().__init__()
        self.error, self.left = error, times

    def dial(self, me: Membership, peer: Member, timeout_s: float) -> Link:
        if self.left:
            self.left -= 1
            raise self.error
        return super().dial(me, peer, timeout_s)


def dial_all(network: Failing, wait_s: float) -> DialResults:
    """Dial beta as alpha."""
    alpha, beta = make_local_members(("alpha", "beta"))
    came: list[Link] = []
    network.listen(membership_of(beta), beta.member.address, came.append)
    calling = FirstDial(membership_of(alpha), network, wait_s, lambda: None, on_link=lambda _: None)
    found = calling.call()
    for link in (*found.links.values(), *came):
        link.close("done")
    return found


def test_a_member_whose_handshake_took_too_long_is_dialled_again() -> None:
    network = Failing(HandshakeLate("the handshake with beta broke off: nothing came in time"), times=2)
    assert list(dial_all(network, wait_s=20).links) == ["beta"]
    assert network.left == 0


def test_one_whose_handshakes_all_break_off_is_absent_and_the_reason_is_said() -> None:
    network = Failing(HandshakeLate("the handshake with beta broke off: nothing came in time"), times=1 << 30)
    found = dial_all(network, wait_s=0.05)
    assert not found.links
    assert "did not answer within 0.05 s: the handshake with beta broke" in found.absent["beta"].message


def test_one_that_proves_to_be_somebody_else_ends_the_first_dial_at_once() -> None:
    network = Failing(HandshakeError("beta proved to be somebody else"), times=1)
    with pytest.raises(HandshakeError, match="somebody else"):
        dial_all(network, wait_s=600)

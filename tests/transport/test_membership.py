"""Rosters that change while links stand: over memory and over real sockets, with clocks of the test's own."""

from __future__ import annotations

import datetime
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.errors import (
    ConvoyError,
    FrameError,
    HandshakeError,
    Incompatible,
    LinkBroken,
    LinkClosed,
    RosterError,
)
from convoy.testing.links import memory_link_pair
from convoy.testing.network import MemoryNetwork
from convoy.transport.dial import dial
from convoy.transport.link.link import Link, LinkOptions
from convoy.transport.link.outgoing import OutgoingFrame, message_frame
from convoy.transport.listen.listener import Listener
from convoy.transport.member import LocalMember
from convoy.transport.membership import MAX_NEEDLESS_ROSTERS, Membership
from convoy.transport.network import Network, TcpNetwork
from convoy.trust.roster.roster import sign_roster
from convoy.wire.messages.control import Hello
from convoy.wire.messages.link import RosterUpdate
from support.link_parts import outgoing_of, stop_writing
from support.links import WAIT_S, End
from support.members import OPERATOR, later, make_local_members, membership_of, shifted, with_roster
from support.waiting import wait_until

NAMES = ["alpha", "beta", "gamma"]
DAY = datetime.timedelta(days=1)


class Town:
    """Hold members that all listen, on one network; ``links`` are the listening ends, in order of arrival."""

    def __init__(self, members: tuple[LocalMember, ...], network: Network, bind: bool) -> None:
        self.network = network
        self.memberships = {me.name: membership_of(me) for me in members}
        self.arrived: dict[str, queue.SimpleQueue[End]] = {name: queue.SimpleQueue() for name in NAMES}
        self.addresses: dict[str, tuple[str, int]] = {}
        self.listeners = []
        self.ends: list[End] = []
        for name, me in self.memberships.items():
            where = ("127.0.0.1", 0) if bind else me.member.address
            listening = network.listen(me, where, self._greet(name))
            self.listeners.append(listening)
            self.addresses[name] = listening.address

    def __getitem__(self, name: str) -> Membership:
        return self.memberships[name]

    def _greet(self, name: str) -> Callable[[Link], None]:
        return lambda link: self.arrived[name].put(End(link).start())

    def link(self, dialler: str, listener: str) -> tuple[End, End]:
        me = self.memberships[dialler]
        peer = replace(me.roster.member(listener), address=self.addresses[listener])
        mine = End(self.network.dial(me, peer, WAIT_S)).start()
        theirs = self.arrived[listener].get(timeout=WAIT_S)
        self.ends += [mine, theirs]
        return mine, theirs

    def close(self) -> None:
        for listening in self.listeners:
            listening.close()
        for end in self.ends:
            end.link.close()


@pytest.fixture(params=["memory", pytest.param("tcp", marks=pytest.mark.outside)])
def town(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Town]:
    tcp = request.param == "tcp"
    members = make_local_members(NAMES, tmp_path if tcp else None)
    made = Town(members, TcpNetwork() if tcp else MemoryNetwork(), tcp)
    yield made
    made.close()


@pytest.mark.long
def test_a_removed_member_loses_its_links_everywhere_and_the_others_live_on(town: Town) -> None:
    alpha_beta, beta_alpha = town.link("alpha", "beta")
    alpha_gamma, gamma_alpha = town.link("alpha", "gamma")
    beta_gamma, gamma_beta = town.link("beta", "gamma")
    assert town["alpha"].offer(later(town["alpha"].roster, without=["gamma"]), "the operator")
    for end in (alpha_gamma, beta_gamma):
        error = end.error()
        assert isinstance(error, LinkClosed)
        assert "roster epoch 2 does not list gamma" in error.message
    for end in (gamma_alpha, gamma_beta):
        error = end.error()
        assert isinstance(error, LinkBroken)
        assert error.message.endswith("roster epoch 2 does not list gamma")
    assert town["beta"].roster == town["alpha"].roster
    assert alpha_beta.link.ping(WAIT_S) > 0
    assert beta_alpha.link.ping(WAIT_S) > 0
    assert alpha_beta.link.link_id == beta_alpha.link.link_id
    with pytest.raises(ConvoyError):
        town.link("gamma", "beta")
    assert town.arrived["beta"].empty()
    assert town["gamma"].roster.epoch == 1


@pytest.mark.parametrize("newer", ["alpha", "beta"])
def test_the_end_that_lags_gets_the_newer_roster_first_and_then_the_link(town: Town, newer: str) -> None:
    signed = later(town["alpha"].roster, epoch=5)
    town[newer].offer(signed, "the operator")
    mine, theirs = town.link("alpha", "beta")
    assert {town["alpha"].roster.epoch, town["beta"].roster.epoch} == {6}
    assert town["alpha"].signed == town["beta"].signed == signed
    assert (mine.link.facts.epoch, theirs.link.facts.epoch) == (6, 6)
    assert mine.link.ping(WAIT_S) > 0


@pytest.mark.long
def test_a_member_that_the_newer_roster_took_out_gets_neither_roster_nor_link(town: Town) -> None:
    town["beta"].offer(later(town["beta"].roster, without=["gamma"]), "the operator")
    with pytest.raises(ConvoyError):
        town.link("gamma", "beta")
    assert town["gamma"].roster.epoch == 1


def test_two_rosters_of_one_epoch_are_loud_at_a_dial(town: Town) -> None:
    other = replace(town["beta"].roster, epoch=2, expires=town["beta"].roster.expires + DAY)
    town["alpha"].offer(later(town["alpha"].roster), "one operator")
    town["beta"].offer(sign_roster(other, OPERATOR), "the same one")
    with pytest.raises(Incompatible, match="another roster of the same epoch 2"):
        town.link("alpha", "beta")


def test_a_roster_that_does_not_verify_at_the_end_that_lags_ends_the_dial_with_both_epochs(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    town["beta"].offer(later(town["beta"].roster), "the operator")
    changed = town["beta"].signed.replace(b"epoch = 2", b"epoch = 3")
    monkeypatch.setattr(Membership, "signed", changed)  # the one that lags sends none
    with pytest.raises(Incompatible, match=r"beta holds roster epoch 2, and .* epoch 1; .*changed after"):
        town.link("alpha", "beta")
    assert town["alpha"].roster.epoch == 1


@pytest.mark.outside
def test_a_member_that_came_in_later_can_call_a_listener_that_runs_already(tmp_path: Path) -> None:
    alpha, beta, gamma = make_local_members(NAMES, tmp_path)
    before = replace(beta.roster, members=beta.roster.members[:2])
    listening = membership_of(with_roster(beta, before))
    links: queue.SimpleQueue[Link] = queue.SimpleQueue()
    listener = Listener(("127.0.0.1", 0), listening, links.put)
    address = listener.address
    grown = replace(gamma.roster, epoch=2)
    newcomer = membership_of(with_roster(gamma, grown))
    with pytest.raises(ConvoyError):
        dial(address, me=newcomer, peer_name="beta", timeout_s=WAIT_S)
    call = membership_of(with_roster(alpha, grown))
    told = dial(address, me=call, peer_name="beta", timeout_s=WAIT_S)  # alpha brings the roster along
    assert listening.roster.epoch == 2
    link = dial(address, me=newcomer, peer_name="beta", timeout_s=WAIT_S)
    for one in (told, link, links.get(timeout=WAIT_S), links.get(timeout=WAIT_S)):
        one.close()
    listener.close()


def test_a_link_to_a_head_that_lost_the_right_is_closed(town: Town) -> None:
    beta_alpha, _ = town.link("beta", "alpha")
    beta_gamma, _ = town.link("beta", "gamma")
    old = town["beta"].roster
    members = (replace(old.members[0], head=False), replace(old.members[1], head=True), old.members[2])
    town["beta"].offer(sign_roster(replace(old, epoch=2, members=members), OPERATOR), "the operator")
    assert "does not allow alpha as head any more" in beta_alpha.error().message
    assert beta_gamma.link.ping(WAIT_S) > 0


def test_a_member_with_other_keys_is_another_member(town: Town) -> None:
    alpha_beta, _ = town.link("alpha", "beta")
    old = town["alpha"].roster
    fresh = make_local_members(["beta"])[0].member
    changed = replace(fresh, address=old.members[1].address, head=False)
    members = (old.members[0], changed, old.members[2])
    town["alpha"].offer(sign_roster(replace(old, epoch=2, members=members), OPERATOR), "the operator")
    assert "lists other keys for beta" in alpha_beta.error().message


def test_a_member_that_learns_of_its_own_removal_closes_all_its_links() -> None:
    town = Town(make_local_members(NAMES), MemoryNetwork(), False)
    beta_alpha, _ = town.link("beta", "alpha")
    with pytest.raises(RosterError, match="beta is not in the roster"):
        town["beta"].offer(later(town["beta"].roster, without=["beta"]), "a file")
    assert "has no place for beta" in beta_alpha.error().message


def test_a_handshake_that_began_under_the_old_roster_is_judged_again_at_its_end() -> None:
    alpha, _, gamma = make_local_members(NAMES)
    me = membership_of(alpha)
    link, _ = memory_link_pair(alpha, gamma)
    me.offer(later(me.roster, without=["gamma"]), "the operator")
    with pytest.raises(HandshakeError, match="gamma is out: roster epoch 2 does not list gamma"):
        me.attach(link)
    assert link.is_over


def test_a_half_open_link_gets_the_roster_that_came_meanwhile() -> None:
    alpha, beta, _ = make_local_members(NAMES)
    me, other = membership_of(alpha), membership_of(beta)
    mine, theirs = memory_link_pair(alpha, beta)
    other.attach(theirs)
    me.offer(later(me.roster, without=["gamma"]), "the operator")
    me.attach(mine)
    ends = End(mine).start(), End(theirs).start()
    wait_until(lambda: other.roster.epoch == 2)
    assert ends[0].link.ping(WAIT_S) > 0


def test_what_was_queued_for_a_removed_member_is_not_sent_any_more() -> None:
    alpha, _, gamma = make_local_members(NAMES)
    me = membership_of(alpha)
    mine, theirs = memory_link_pair(alpha, gamma)
    me.attach(mine)
    outgoing_of(mine).post_roster(_frame(b"x"))  # queued: the link is not started
    mine.send(Hello("for members", [], [], 0, 1, ""))
    mine.revoke("out")
    end = End(theirs).start()
    assert end.error().message == "alpha closed the link: out"
    assert end.arrived.empty()


def test_a_removed_member_that_takes_nothing_and_hangs_up_never_is_out_long_before_a_stall_ends() -> None:
    alpha, _, gamma = make_local_members(NAMES)
    me = membership_of(alpha)
    mine, _ = memory_link_pair(alpha, gamma)  # the other end does not read
    me.attach(mine)
    end = End(mine).start()
    stop_writing(mine)
    began_s = time.monotonic()
    me.offer(later(me.roster, without=["gamma"]), "the operator")
    assert "does not list gamma" in end.error().message
    assert time.monotonic() - began_s < LinkOptions().stall_timeout_s / 2


def _frame(signed: bytes) -> OutgoingFrame:
    return message_frame(RosterUpdate(signed))


def test_a_lower_epoch_is_refused_and_both_are_named() -> None:
    me = membership_of(make_local_members(NAMES, epoch=7)[0])
    older = sign_roster(replace(me.roster, epoch=6), OPERATOR)
    with pytest.raises(RosterError, match="beta offers roster epoch 6, and this member accepted epoch 7"):
        me.offer(older, "beta")
    assert me.roster.epoch == 7


def test_the_same_roster_again_is_no_news_and_another_of_its_epoch_is_an_error() -> None:
    me = membership_of(make_local_members(NAMES)[0])
    assert not me.offer(me.signed, "beta")
    other = sign_roster(replace(me.roster, expires=me.roster.expires + DAY), OPERATOR)
    with pytest.raises(RosterError, match="beta offers another roster of the same epoch 1"):
        me.offer(other, "beta")


def test_s9_a_roster_of_another_cluster_is_refused_whatever_its_epoch() -> None:
    me = membership_of(make_local_members(NAMES)[0])
    foreign = sign_roster(replace(me.roster, cluster_id="away", epoch=9), OPERATOR)
    with pytest.raises(RosterError, match="a roster of away, and this member is of test"):
        me.offer(foreign, "beta")


def test_s9_an_expired_roster_is_not_adopted() -> None:
    me = membership_of(make_local_members(NAMES)[0])
    expired = replace(shifted(me.roster, -60 * DAY), epoch=2)
    with pytest.raises(RosterError, match="expired"):
        me.offer(sign_roster(expired, OPERATOR), "beta")
    assert me.roster.epoch == 1


class Clock:
    """Hold a clock that the test moves."""

    def __init__(self) -> None:
        self.at = datetime.datetime.now(datetime.UTC)

    def now(self) -> datetime.datetime:
        return self.at


@pytest.mark.parametrize("by", ["the check", "the thread that looks"])
def test_s9_a_partitioned_member_is_out_when_its_roster_expires(by: str) -> None:
    alpha, beta, _ = make_local_members(NAMES)
    clock = Clock()
    every_s = 3600.0 if by == "the check" else 0.01
    me = membership_of(alpha, now=clock.now, check_every_s=every_s)
    mine, theirs = memory_link_pair(alpha, beta)
    me.attach(mine)
    ends = End(mine).start(), End(theirs).start()
    clock.at = alpha.roster.expires - datetime.timedelta(seconds=1)
    me.check()
    assert mine.ping(WAIT_S) > 0
    clock.at = alpha.roster.expires
    if by == "the check":
        me.check()
    assert "the roster of test expired at" in ends[0].error().message
    assert "the roster of test expired at" in ends[1].error().message
    with pytest.raises(RosterError, match="expired"):
        me.require_valid()


@pytest.mark.outside
def test_s9_nobody_dials_or_is_let_in_with_an_expired_roster(tmp_path: Path) -> None:
    alpha, beta, _ = make_local_members(NAMES, tmp_path)
    clock = Clock()
    clock.at = alpha.roster.expires
    town = MemoryNetwork()
    town.listen(membership_of(beta), beta.member.address, lambda _link: None)
    with pytest.raises(RosterError, match="expired"):
        town.dial(membership_of(alpha, now=clock.now), beta.member, WAIT_S)
    refused: queue.SimpleQueue[ConvoyError] = queue.SimpleQueue()
    late = membership_of(beta, now=clock.now)
    listener = Listener(("127.0.0.1", 0), late, lambda _link: None, on_refused=refused.put)
    with pytest.raises(ConvoyError):
        TcpNetwork().dial(membership_of(alpha), replace(beta.member, address=listener.address), 1.0)
    assert "expired" in refused.get(timeout=WAIT_S).message
    listener.close()


def test_a_peer_that_keeps_sending_rosters_of_no_use_loses_its_link() -> None:
    alpha, beta, _ = make_local_members(NAMES)
    me, mine, theirs = _linked(alpha, beta)
    for _ in range(MAX_NEEDLESS_ROSTERS):
        theirs.link.post_roster(b"nothing that anybody signed")
        assert theirs.link.ping(WAIT_S) > 0
    theirs.link.post_roster(b"nothing that anybody signed")
    error = mine.error()
    assert isinstance(error, FrameError)
    assert "beta keeps sending rosters of no use" in error.message
    assert me.roster.epoch == 1


def test_gossip_of_many_epochs_is_no_misbehaviour() -> None:
    alpha, beta, _ = make_local_members(NAMES)
    me, mine, theirs = _linked(alpha, beta)
    for _ in range(2 * MAX_NEEDLESS_ROSTERS):
        signed = later(me.roster)
        me.offer(signed, "the operator")
        theirs.link.post_roster(signed)
        assert theirs.link.ping(WAIT_S) > 0
    assert mine.link.ping(WAIT_S) > 0


def _linked(alpha: LocalMember, beta: LocalMember) -> tuple[Membership, End, End]:
    me = membership_of(alpha)
    mine, theirs = memory_link_pair(alpha, beta)
    me.attach(mine)
    return me, End(mine).start(), End(theirs).start()


def test_a_roster_is_sent_on_adoption_only_so_that_it_goes_round_no_loop(town: Town) -> None:
    ends = [*town.link("alpha", "beta"), *town.link("beta", "gamma"), *town.link("gamma", "alpha")]
    signed = later(town["alpha"].roster)
    town["alpha"].offer(signed, "the operator")
    wait_until(lambda: all(town[name].roster.epoch == 2 for name in NAMES))
    for end in ends:
        assert end.link.ping(WAIT_S) > 0
    sent = [end.link.sent_frames for end in ends]
    for end in ends:  # a ping and a pong each, and nothing that still goes round
        assert end.link.ping(WAIT_S) > 0
    assert [end.link.sent_frames - before for end, before in zip(ends, sent, strict=True)] == [2] * 6


@pytest.mark.parametrize("failure", [RosterError("no"), KeyError("a bug")])
def test_a_subscriber_that_fails_does_not_keep_a_roster_from_counting(failure: Exception) -> None:
    me = membership_of(make_local_members(NAMES)[0])
    seen: list[int] = []

    def fail(_roster: object) -> None:
        raise failure

    me.subscribe(fail)
    end = me.subscribe(lambda roster: seen.append(roster.epoch))
    me.offer(later(me.roster), "the operator")
    end()
    me.offer(later(me.roster), "the operator")
    assert seen == [2]
    assert me.roster.epoch == 3


def test_a_new_roster_without_us_is_refused_and_the_old_one_stays() -> None:
    me = membership_of(make_local_members(NAMES)[1])
    with pytest.raises(RosterError):
        me.offer(later(me.roster, without=["beta"]), "the operator")
    assert me.roster.epoch == 1
    assert with_roster(me.current, me.roster) == me.current


def test_a_roster_is_not_sent_back_to_the_member_that_brought_it() -> None:
    alpha, beta, _ = make_local_members(NAMES)
    me, mine, theirs = _linked(alpha, beta)
    theirs.link.post_roster(later(me.roster))
    assert theirs.link.ping(WAIT_S) > 0
    assert me.roster.epoch == 2
    assert mine.link.sent_frames == 1  # the pong

"""Challenges and evidence between real members: which get a stage, which lose it, and the cost of silence."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from convoy.cluster.attestation.claims import own_claims, package_digest
from convoy.cluster.attestation.evidence_maker import EvidenceMaker
from convoy.cluster.attestation.exchange import Attestation
from convoy.cluster.options import HeadOptions, MemberOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.errors import ConvoyError, LinkBroken, PeerRefused, PlanError, StageLost
from convoy.model.checkpoints.source import ModelSource
from convoy.testing.links import memory_link_pair
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import Link, Received, ReceivedMessage
from convoy.transport.member import LocalMember
from convoy.transport.options import LinkOptions
from convoy.trust.evidence.level import Level
from convoy.trust.evidence.policy import PcrRule, Policy, SoftwareRule
from convoy.trust.evidence.verdict import Verdict
from convoy.wire.frame import frames_from
from convoy.wire.messages.claims import Claims
from convoy.wire.messages.control import FrameType, Hello, Plan, Sender, StageAssignment
from convoy.wire.messages.evidence import Challenge, Evidence
from support.cluster import MEMBER, PeerThread
from support.link_parts import go_on_writing, stop_writing
from support.members import make_local_members, membership_of
from support.tpm_vectors import LyingTpm
from support.waiting import wait_until

ATTESTATION_FRAMES = frozenset({FrameType.CHALLENGE, FrameType.EVIDENCE})
CLAIMS = Claims("ab" * 32, {"convoy": "0.1.0"}, "here", "", [])
ZERO, OTHER = bytes(32), b"\xab" * 32
WAIT_S = 20.0
NOTHING = Policy()


@dataclass
class FakeHardware:
    """Stand for a TPM that measures ``registers``. It waits for ``slow`` before it answers."""

    kind: str = "tpm2"
    tpm: LyingTpm = field(default_factory=LyingTpm)
    values: list[bytes] = field(default_factory=lambda: [ZERO] * 8)
    slow: threading.Event | None = None
    begun: threading.Event = field(default_factory=threading.Event)

    def statement(self, _me: LocalMember, qualifying: bytes, registers: Sequence[int]) -> list[bytes]:
        self.begun.set()
        if self.slow is not None:
            self.slow.wait(WAIT_S)
        bits = sum(1 << index for index in registers).to_bytes(3, "little")
        selection = bytes.fromhex("00000001000b03") + bits
        return self.tpm.quote(qualifying, [self.values[index] for index in registers], selection=selection)


@dataclass
class Side:
    """Hold one end of a link with its attestation."""

    me: LocalMember
    attestation: Attestation
    link: Link
    fallen: queue.SimpleQueue[Verdict]
    passed: list[Received] = field(default_factory=list)

    def deliver(self, link: Link, received: Received) -> None:
        if not isinstance(received, ReceivedMessage):
            return
        match received.message:
            case Challenge() as challenge:
                self.passed.append(received)
                self.attestation.handle_challenge(link, challenge)
            case Evidence() as evidence:
                self.passed.append(received)
                self.attestation.handle_evidence(link, evidence)

    def ended(self, link: Link, _error: ConvoyError) -> None:
        self.attestation.detach(link)


def enrolled(members: Sequence[LocalMember], name: str, key_der: bytes) -> tuple[LocalMember, ...]:
    roster = members[0].roster
    listed = tuple(
        replace(one, attestation_key=key_der) if one.name == name else one for one in roster.members
    )
    return tuple(LocalMember(one.name, one.identity, replace(roster, members=listed)) for one in members)


def side(me: LocalMember, link: Link, policy: Policy, hardware: FakeHardware | None = None) -> Side:
    fallen: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
    attestation = Attestation(
        lambda: me, EvidenceMaker(hardware, CLAIMS), policy, lambda _link, verdict: fallen.put(verdict)
    )
    attestation.attach(link)
    return Side(me, attestation, link, fallen)


@contextmanager
def two_sides(
    policy: Policy, hardware: FakeHardware | None = None, *, answer: bool = True
) -> Iterator[tuple[Side, Side]]:
    """Let alpha judge beta over a real sealed link."""
    members = make_local_members(("alpha", "beta"))
    if hardware is not None:
        members = enrolled(members, "beta", hardware.tpm.key_der)
    links = memory_link_pair(members[0], members[1])
    alpha = side(members[0], links[0], policy)
    beta = side(members[1], links[1], Policy(minimum=Level.SELF_SIGNED), hardware)
    links[0].start(alpha.deliver, alpha.ended, ATTESTATION_FRAMES)
    links[1].start(beta.deliver if answer else lambda *_: None, beta.ended, ATTESTATION_FRAMES)
    try:
        yield alpha, beta
    finally:
        for one in (alpha, beta):
            one.attestation.close()
            one.link.close()


def test_a_member_that_asks_and_takes_nothing_keeps_no_evidence_from_others() -> None:
    with two_sides(Policy()) as (alpha, beta):
        stalled, _ = memory_link_pair(*make_local_members(("beta", "gamma")))
        beta.attestation.attach(stalled)
        stop_writing(stalled)
        for _ in range(LinkOptions().max_queued_frames + 1):
            beta.attestation.handle_challenge(stalled, Challenge(secrets.token_bytes(32), []))
            assert alpha.attestation.check([alpha.link])["beta"].level is Level.SELF_SIGNED
        go_on_writing(stalled)


def test_both_ends_of_a_link_can_judge_each_other() -> None:
    with two_sides(Policy()) as (alpha, beta):
        assert alpha.attestation.check([alpha.link])["beta"].level is Level.SELF_SIGNED
        assert beta.attestation.check([beta.link])["alpha"].level is Level.SELF_SIGNED
        assert alpha.attestation.check_self().level is Level.SELF_SIGNED


def test_each_challenge_is_a_fresh_one() -> None:
    with two_sides(Policy()) as (alpha, beta):
        for _ in range(3):
            alpha.attestation.check([alpha.link])
        nonces = {item.message.nonce for item in beta.passed}  # type: ignore[union-attr]
    assert len(nonces) == 3


def test_an_enrolled_machine_is_hardware_over_a_link() -> None:
    hardware = FakeHardware()
    with two_sides(Policy(minimum=Level.HARDWARE, pcrs=(PcrRule(7, (ZERO,)),)), hardware) as (alpha, _beta):
        verdict = alpha.attestation.check([alpha.link])["beta"]
    assert verdict.level is Level.HARDWARE, verdict.reasons
    assert alpha.attestation.suffices(verdict)


def test_evidence_of_an_earlier_challenge_or_another_link_does_not_count() -> None:
    hardware = FakeHardware()
    with two_sides(Policy(), hardware) as (alpha, _):
        alpha.attestation.check([alpha.link])
        [old] = [item.message for item in alpha.passed if isinstance(item, ReceivedMessage)]
        assert isinstance(old, Evidence)
        with two_sides(Policy(), hardware, answer=False) as (other, mute):
            got: list[Verdict] = []
            asking = threading.Thread(
                target=lambda: got.extend(other.attestation.check([other.link]).values())
            )
            asking.start()
            mute.link.send(old)
            asking.join(WAIT_S)
    assert got[0].level is Level.NONE
    assert "for this challenge and link" in got[0].why


def test_a_member_that_does_not_answer_in_time_is_none() -> None:
    with two_sides(Policy(deadline_s=0.5), answer=False) as (alpha, _beta):
        verdict = alpha.attestation.check([alpha.link])["beta"]
    assert verdict.level is Level.NONE
    assert verdict.why == "beta sent no evidence within 0.5 s"


def test_a_link_that_ends_is_not_waited_for() -> None:
    with two_sides(Policy(deadline_s=60), answer=False) as (alpha, beta):
        threading.Timer(0.1, beta.link.close).start()
        verdict = alpha.attestation.check([alpha.link])["beta"]
    assert verdict.level is Level.NONE
    assert "ended" in verdict.why


def test_evidence_that_nobody_asked_for_is_dropped() -> None:
    with two_sides(Policy()) as (alpha, beta):
        beta.link.send(Evidence(b"", b"s" * 64, "", []))
        beta.link.ping(WAIT_S)  # answered behind it
        assert alpha.attestation.check([alpha.link])["beta"].level is Level.SELF_SIGNED


def test_while_hardware_is_slow_newer_challenges_replace_older_ones_and_none_piles_up() -> None:
    hardware = FakeHardware(slow=threading.Event())
    with two_sides(Policy(deadline_s=0.5), hardware) as (alpha, beta):
        for _ in range(3):
            assert alpha.attestation.check([alpha.link])["beta"].level is Level.NONE
        assert beta.attestation.num_to_prove <= 1
        assert hardware.slow is not None
        hardware.slow.set()


def test_a_machine_that_changes_while_it_runs_falls_at_the_next_check() -> None:
    hardware = FakeHardware()
    policy = Policy(minimum=Level.HARDWARE, interval_s=0.5, pcrs=(PcrRule(7, (ZERO,)),))
    with two_sides(policy, hardware) as (alpha, _beta):
        assert alpha.attestation.suffices(alpha.attestation.check([alpha.link])["beta"])
        alpha.attestation.watch([alpha.link], hold_stages=True)
        hardware.values[7] = OTHER
        verdict = alpha.fallen.get(timeout=WAIT_S)
    assert verdict.level is Level.SELF_SIGNED
    assert "register 7" in verdict.why


def test_a_model_is_claimed_while_a_stage_is_held() -> None:
    policy = Policy(
        minimum=Level.SELF_SIGNED, interval_s=0.5, software=(SoftwareRule("model", ("ef" * 32,)),)
    )
    with two_sides(policy) as (alpha, beta):
        beta.attestation.evidence_maker.model = "ef" * 32
        assert alpha.attestation.check([alpha.link], holds_stage=True)["beta"].level is Level.SELF_SIGNED
        alpha.attestation.watch([alpha.link], hold_stages=True)
        beta.attestation.evidence_maker.model = "dd" * 32
        assert "model" in alpha.fallen.get(timeout=WAIT_S).why


def test_who_is_given_a_stage_is_asked_at_once_however_old_its_verdict_is() -> None:
    hardware = FakeHardware()
    policy = Policy(minimum=Level.HARDWARE, interval_s=3600, pcrs=(PcrRule(7, (ZERO,)),))
    with two_sides(policy, hardware) as (alpha, _beta):
        assert alpha.attestation.suffices(alpha.attestation.check([alpha.link])["beta"])
        alpha.attestation.watch((), hold_stages=False)
        hardware.values[7] = OTHER
        alpha.attestation.watch([alpha.link], hold_stages=True)
        assert "register 7" in alpha.fallen.get(timeout=WAIT_S).why


def test_who_lets_the_plan_end_while_it_is_asked_is_asked_again_at_once_under_the_next() -> None:
    hardware = FakeHardware(slow=threading.Event(), values=[OTHER] * 8)
    policy = Policy(minimum=Level.HARDWARE, interval_s=3600, pcrs=(PcrRule(7, (ZERO,)),))
    with two_sides(policy, hardware) as (alpha, beta):
        assert hardware.slow is not None
        alpha.attestation.watch([alpha.link], hold_stages=True)
        assert hardware.begun.wait(WAIT_S)
        alpha.attestation.watch((), hold_stages=False)
        hardware.slow.set()
        wait_until(lambda: alpha.passed)
        alpha.attestation.watch([alpha.link], hold_stages=True)
        assert "register 7" in alpha.fallen.get(timeout=WAIT_S).why
        assert len(beta.passed) == 2, "what came for the plan that ended did not count"


def test_an_answer_from_between_two_plans_is_neither_kept_nor_held_against_its_member() -> None:
    hardware = FakeHardware(slow=threading.Event())
    model = "ef" * 32
    policy = Policy(minimum=Level.HARDWARE, interval_s=0.5, software=(SoftwareRule("model", (model,)),))
    with two_sides(policy, hardware) as (alpha, beta):
        assert hardware.slow is not None
        alpha.attestation.watch([alpha.link], hold_stages=True)
        assert hardware.begun.wait(WAIT_S)  # the claims were made, without a model
        alpha.attestation.watch((), hold_stages=False)
        beta.attestation.evidence_maker.model = model
        alpha.attestation.watch([alpha.link], hold_stages=True)
        hardware.slow.set()
        wait_until(lambda: alpha.attestation.verdicts)
        verdict = alpha.attestation.verdicts["beta"]
        assert verdict.level is Level.HARDWARE, verdict.reasons
        assert alpha.fallen.empty()


def test_who_owes_an_answer_when_its_plan_ends_has_no_more_time_than_it_had() -> None:
    hardware = FakeHardware(slow=threading.Event())
    policy = Policy(minimum=Level.HARDWARE, interval_s=3600, deadline_s=1.0, pcrs=(PcrRule(7, (ZERO,)),))
    with two_sides(policy, hardware) as (alpha, _beta):
        assert hardware.slow is not None
        alpha.attestation.watch([alpha.link], hold_stages=True)
        assert hardware.begun.wait(WAIT_S)
        alpha.attestation.watch((), hold_stages=False)
        alpha.attestation.settle(lambda: None)
        assert alpha.fallen.get(timeout=WAIT_S).why == "beta sent no evidence within 1 s"
        hardware.slow.set()


def test_who_answers_between_two_plans_is_judged_by_that_and_who_owes_nothing_is_not_waited_for() -> None:
    hardware = FakeHardware(slow=threading.Event())
    policy = Policy(minimum=Level.HARDWARE, interval_s=3600, deadline_s=60, pcrs=(PcrRule(7, (ZERO,)),))
    with two_sides(policy, hardware) as (alpha, _beta):
        assert hardware.slow is not None
        alpha.attestation.watch([alpha.link], hold_stages=True)
        assert hardware.begun.wait(WAIT_S)
        alpha.attestation.watch((), hold_stages=False)
        alpha.attestation.settle(hardware.slow.set)  # called while it waits
        alpha.attestation.settle(lambda: pytest.fail("nobody owes anything"))
        assert alpha.fallen.empty()
        hardware.values[7] = OTHER
        hardware.slow.clear()
        alpha.attestation.watch([alpha.link], hold_stages=True)
        wait_until(lambda: alpha.attestation.is_asking)
        alpha.attestation.watch((), hold_stages=False)
        alpha.attestation.settle(hardware.slow.set)
        assert "register 7" in alpha.fallen.get(timeout=WAIT_S).why


def test_where_nothing_is_demanded_a_new_plan_asks_nobody() -> None:
    with two_sides(Policy()) as (alpha, beta):
        for _ in range(20):
            alpha.attestation.watch([alpha.link], hold_stages=True)
            alpha.link.ping(WAIT_S)
        assert not beta.passed


def test_the_package_digest_changes_with_any_file_and_not_with_bytecode(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "b.py").write_text("")
    first = package_digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_bytes(b"code")
    assert package_digest(tmp_path) == first
    (tmp_path / "room" / "b.py").rename(tmp_path / "b.py")
    assert package_digest(tmp_path) != first
    (tmp_path / "b.py").rename(tmp_path / "room" / "b.py")
    (tmp_path / "a.py").write_text("x = 2\n")
    assert package_digest(tmp_path) != first
    assert own_claims().versions["python"]


# Whole clusters.


@contextmanager
def members_of(
    policy: Policy = NOTHING, *, spans: dict[str, str] | None = None
) -> Iterator[tuple[list[PeerThread], Callable[[Policy], RunningCluster]]]:
    """Yield two peers under ``policy``, and a function that starts a head under a policy of its own."""
    source, network = ModelSource.resolve("demo-mini"), MemoryNetwork()
    members = make_local_members(("alpha", "beta", "gamma"))
    peers = [PeerThread(me, PeerOptions(replace(MEMBER, policy=policy)), network) for me in members[1:]]

    def start(head_policy: Policy) -> RunningCluster:
        options = HeadOptions(replace(MEMBER, policy=head_policy), spans=spans, wait_s=20, num_blocks=64)
        return RunningCluster.start(membership_of(members[0]), source, options, network=network)

    try:
        yield peers, start
    finally:
        for peer in peers:
            peer.stop()


def drifted(peer: PeerThread) -> None:
    """Change this member's files from now on."""
    evidence_maker = peer.peer.attestation.evidence_maker
    evidence_maker.__dict__["software"] = CLAIMS


def test_without_a_policy_levels_are_reported_and_nothing_is_demanded() -> None:
    with members_of() as (peers, start):
        drifted(peers[1])
        cluster = start(Policy())
        status = cluster.status()
        cluster.close()
    assert status.level == "self_signed"
    assert [stage.level for stage in status.stages] == ["self_signed"] * len(status.stages)
    assert not any(one.excluded for one in status.verdicts)


def test_a_member_below_the_minimum_gets_no_stage_and_the_others_share_it() -> None:
    with members_of() as (peers, start):
        drifted(peers[1])
        cluster = start(Policy(minimum=Level.SELF_SIGNED, software=(SoftwareRule("package", ()),)))
        status = cluster.status()
        cluster.close()
    assert "gamma" not in {stage.member for stage in status.stages}
    [gamma] = [one for one in status.verdicts if one.excluded]
    assert gamma.member == "gamma"
    assert "package" in gamma.reasons[0]
    assert status.level == "self_signed"


def test_a_plan_that_needs_the_excluded_member_says_who_which_level_and_why() -> None:
    spans = {"alpha": "0:0,output", "beta": "1:1"}
    with members_of(spans=spans) as (_peers, start), pytest.raises(PlanError) as refused:
        start(Policy(minimum=Level.HARDWARE))
    assert "beta has level self_signed, and the policy's minimum is hardware" in refused.value.message
    assert "no attestation key of beta is enrolled" in refused.value.message


def test_a_member_that_drifts_while_it_runs_is_lost_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = Policy(minimum=Level.SELF_SIGNED, interval_s=0.5, software=(SoftwareRule("package", ()),))
    with members_of() as (peers, start):
        cluster = start(policy)
        held = {stage.member for stage in cluster.status().stages}
        assert "beta" in held
        drifted(peers[0])
        wait_until(lambda: cluster.engine.stats().recoveries)
        assert "beta" not in {stage.member for stage in cluster.status().stages}
        cluster.close()
    [lost] = [record.message for record in caplog.records if record.message.startswith("lost: beta, which ")]
    assert "beta has level none" in lost
    assert "package" in lost


def test_a_member_that_drifted_long_ago_falls_at_the_next_plan() -> None:
    policy = Policy(minimum=Level.SELF_SIGNED, interval_s=3600, software=(SoftwareRule("package", ()),))
    with members_of() as (peers, start):
        cluster = start(policy)
        drifted(peers[0])
        peers[1].stop()
        wait_until(lambda: {stage.member for stage in cluster.status().stages} == {"alpha"})
        wait_until(lambda: "beta" in cluster.head.verifier.excluded)
        cluster.close()


def test_a_peer_lets_no_head_plan_that_is_below_its_own_minimum() -> None:
    with members_of(Policy(minimum=Level.HARDWARE)) as (peers, start):
        reasons = []
        try:
            cluster = start(Policy())
        except (PeerRefused, LinkBroken, StageLost, PlanError) as refused:
            reasons.append(refused.message)
        else:
            # Both peers ended their links before the head planned, so it planned for itself alone.
            assert {stage.member for stage in cluster.status().stages} == {"alpha"}
            cluster.close()
        assert all("hardware" in reason for reason in reasons)
        wait_for_refusal(peers, "alpha has level self_signed")


def wait_for_refusal(peers: list[PeerThread], text: str) -> None:
    """Wait until one of the peers has refused its head with ``text``.

    The head gives up at the first refusal. The other peer may find its link ended before it has a verdict.
    """
    until_s, seen = time.monotonic() + 30, []
    while time.monotonic() < until_s:
        for peer in peers:
            with suppress(queue.Empty):
                seen.append(peer.events.get(timeout=0.01))
                if seen[-1].kind == "refused" and text in seen[-1].text:
                    return
    raise AssertionError([event.text for event in seen if event.kind == "refused"])


def test_what_still_waits_of_a_head_that_was_refused_is_not_loaded() -> None:
    members, network = make_local_members(("alpha", "beta")), MemoryNetwork()
    options = PeerOptions(replace(MEMBER, policy=Policy(minimum=Level.HARDWARE, deadline_s=0.5)))
    peer = PeerThread(members[1], options, network)
    link = network.dial(membership_of(members[0]), members[1].member, 5)
    link.start(lambda *_: None, lambda *_: None, frames_from(Sender.PEER))
    source = ModelSource.resolve("demo-mini")
    stages = [StageAssignment("alpha", 0, 2, True, True), StageAssignment("beta", 2, 4, False, False)]
    plan = Plan(1, source.name, source.digest, stages, "exact-f32", "float32", 16, 256)
    link.send(Hello("test", ["float32"], ["exact-f32"], 1 << 30, 1, "test"))
    link.send(plan, plan_id=1)
    peer.wait_for("refused")
    peer.wait_for("lost")
    peer.stop()
    assert peer.peer.plan_id == 0, "the plan was dropped, not taken up"
    link.close()


def test_a_peer_with_a_policy_works_for_a_head_that_meets_it() -> None:
    with members_of(Policy(minimum=Level.SELF_SIGNED, interval_s=0.5)) as (_peers, start):
        cluster = start(Policy())
        assert cluster.health()[0]
        cluster.close()


def test_a_tpm_that_is_named_wrongly_is_said_before_anything_starts() -> None:
    [me, _] = make_local_members(("alpha", "beta"))
    with pytest.raises(ConvoyError, match="does not name a TPM"):
        Attestation.of(lambda: me, MemberOptions(tpm="; rm -rf /"), lambda *_: None)

"""A real head and real peers in one process: members are lost, replaced, taken out, let in and back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from convoy.cluster.options import HeadOptions, MemberOptions, PeerOptions
from convoy.cluster.peer.peer import Peer
from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.outputs import FinishOutput, Output, PrefillOutput, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import StageLost, StepError
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.registry import own_form
from convoy.model.sampling.params import SamplingParams
from convoy.plan.memory.memory import stage_bytes
from convoy.plan.span import Span
from convoy.testing.network import MemoryNetwork
from convoy.transport.member import LocalMember
from convoy.transport.membership import Membership
from convoy.trust.evidence.level import Level
from convoy.trust.evidence.policy import Policy, SoftwareRule
from convoy.wire.messages.control import Step, StepFailed
from support.cluster import MEMBER, PeerThread
from support.members import later, make_local_members, membership_of
from support.waiting import wait_until

SOURCE = ModelSource.resolve("demo-mini")
ANSWER = "17"
LONG = GenerationRequest(tuple(range(5, 35)), SamplingParams(temperature=0.0), 8)


def small(num_layers: int = 2) -> MemberOptions:
    """Return options of a head that cannot hold the whole model, which has four layers."""
    needed = stage_bytes(SOURCE.spec, Span(0, num_layers, True), own_form("exact-f32"))
    return replace(MEMBER, memory_bytes=needed + 600_000)


@dataclass
class Scene:
    """Start and stop peers by name; the head is in this process too."""

    members: dict[str, LocalMember]
    network: MemoryNetwork
    me: Membership
    stack: ExitStack
    peers: dict[str, PeerThread] = field(default_factory=dict)

    def join(self, name: str, **options: object) -> PeerThread:
        peer = PeerThread(self.members[name], PeerOptions(MEMBER, **options), self.network)  # type: ignore[arg-type]
        self.peers[name] = peer
        self.stack.callback(peer.stop)
        return peer

    def serve(self, **options: object) -> RunningCluster:
        # The head goes on as soon as all are here, so a busy machine may take its time.
        wait_s = 60 if len(self.peers) == len(self.members) - 1 else 5
        head = HeadOptions(**{"member": MEMBER, "wait_s": wait_s, "num_blocks": 32, **options})  # type: ignore[arg-type]
        cluster = RunningCluster.start(self.me, SOURCE, head, network=self.network)
        self.stack.callback(cluster.close)
        return cluster


@contextmanager
def scene(*names: str) -> Iterator[Scene]:
    members = make_local_members(("alpha", *names))
    with ExitStack() as stack:
        by_name = {member.name: member for member in members}
        yield Scene(by_name, MemoryNetwork(), membership_of(members[0]), stack)


def ask(cluster: RunningCluster) -> str:
    prompt = [{"role": "user", "content": "What is 8+9? Answer with just the number."}]
    ids = tuple(cluster.tokenizer.encode_chat(prompt))
    return generate(cluster.engine, GenerationRequest(ids, SamplingParams(temperature=0.0), 8)).text


def stages(cluster: RunningCluster) -> list[str]:
    assert cluster.head.active_plan is not None
    return [stage.member for stage in cluster.head.active_plan.plan.stages]


def test_who_stays_reads_only_the_layers_that_it_lacks() -> None:
    with scene("beta", "gamma") as s:
        s.join("beta")
        gone = s.join("gamma")
        cluster = s.serve()
        loaded = s.peers["beta"].peer.loaded
        assert loaded is not None
        held = set(loaded.stage.layers.values())
        gone.stop()
        wait_until(lambda: stages(cluster) == ["alpha", "beta"])
        assert ask(cluster) == ANSWER
        loaded = s.peers["beta"].peer.loaded
        assert loaded is not None
        assert held & set(loaded.stage.layers.values()), "modules that it had are used again"
        assert loaded.stage.bytes_read < loaded.stage.weight_bytes


def test_a_fed_text_goes_on_after_a_loss_with_the_tokens_that_it_would_have_had() -> None:
    request = replace(LONG, max_tokens=32, ignore_eos=True)
    tokens: list[int] = []
    is_under_way, is_lost, is_over = threading.Event(), threading.Event(), threading.Event()

    def take(output: Output) -> None:
        if isinstance(output, TokenOutput):
            tokens.append(output.token_id)
            if len(tokens) == 9:
                is_under_way.set()
                # Steps are in flight, and the last of them is fed with a sample of one ahead.
                is_lost.wait(60)
        elif not isinstance(output, PrefillOutput):
            assert isinstance(output, FinishOutput)
            is_over.set()

    with scene("beta", "gamma") as s:
        gone = s.join("beta")
        s.join("gamma")
        cluster = s.serve(speculate=0, jump_forward=False)
        expected = generate(cluster.engine, request).token_ids
        before = cluster.engine.scheduler.num_fed
        cluster.engine.submit(replace(request, cache_salt=b"nothing is cached"), take)
        assert is_under_way.wait(60)
        gone.stop()
        is_lost.set()
        assert is_over.wait(60)
        assert tuple(tokens) == expected
        assert cluster.engine.stats().recoveries == 1
        assert cluster.engine.scheduler.num_fed - before > len(expected) // 2


def test_a_loss_while_nothing_runs_is_mended_before_anybody_asks() -> None:
    with scene("beta", "gamma") as s:
        s.join("beta")
        gone = s.join("gamma")
        cluster = s.serve()
        gone.stop()
        wait_until(lambda: cluster.engine.stats().recoveries == 1)
        wait_until(lambda: cluster.health()[0])
        assert ask(cluster) == ANSWER


def test_a_member_that_comes_back_is_used_again_once_nothing_runs() -> None:
    with scene("beta", "gamma") as s:
        s.join("beta")
        gone = s.join("gamma")
        cluster = s.serve()
        gone.stop()
        wait_until(lambda: stages(cluster) == ["alpha", "beta"])
        s.join("gamma")
        wait_until(lambda: stages(cluster) == ["alpha", "beta", "gamma"])
        assert ask(cluster) == ANSWER
        assert cluster.engine.stats().recoveries == 1, "to use one that came is no recovery"


def test_a_member_that_the_operator_takes_out_loses_its_stage_to_the_others() -> None:
    with scene("beta", "gamma") as s:
        s.join("beta")
        s.join("gamma")
        cluster = s.serve()
        s.me.offer(later(s.me.roster, without=["gamma"]), "the operator")
        wait_until(lambda: stages(cluster) == ["alpha", "beta"])
        assert ask(cluster) == ANSWER


def test_a_member_that_the_operator_lets_in_is_dialled_and_used_once_nothing_runs() -> None:
    with scene("beta", "gamma") as s:
        whole = s.me.roster
        early = replace(whole, members=whole.members[:2])
        for name in ("alpha", "beta"):
            s.members[name] = LocalMember(name, s.members[name].identity, early)
        s.me = membership_of(s.members["alpha"])
        s.join("beta")
        cluster = s.serve()
        assert stages(cluster) == ["alpha", "beta"]
        newer = later(whole)
        s.members["gamma"] = LocalMember("gamma", s.members["gamma"].identity, replace(whole, epoch=2))
        s.join("gamma")
        s.me.offer(newer, "the operator")
        wait_until(lambda: stages(cluster) == ["alpha", "beta", "gamma"])
        assert ask(cluster) == ANSWER


def test_a_standby_preloads_and_stands_in() -> None:
    with scene("beta", "gamma") as s:
        gone = s.join("beta")
        standby = s.join("gamma", standby=True)
        cluster = s.serve(member=small())
        assert stages(cluster) == ["alpha", "beta"]
        standby.wait_for("ready")
        gone.stop()
        wait_until(lambda: stages(cluster) == ["alpha", "gamma"])
        assert ask(cluster) == ANSWER
        loaded = standby.peer.loaded
        assert loaded is not None
        assert loaded.stage.bytes_read == 0, "all of it was there"


def test_a_member_that_nobody_can_stand_in_for_is_waited_for() -> None:
    with scene("beta") as s:
        s.join("beta")
        cluster = s.serve(member=small())
        s.peers["beta"].stop()
        wait_until(lambda: "waiting for a member for at most 60 s" in cluster.health()[1])
        reason = cluster.health()[1]
        assert reason.startswith("recovering: missing layer")
        assert "beta is gone" in reason
        assert cluster.status().route.startswith("missing layer")
        s.join("beta")
        assert ask(cluster) == ANSWER
        assert cluster.status().route.startswith("complete: ")


def test_who_does_not_come_back_in_time_ends_what_runs_and_one_that_comes_later_is_used() -> None:
    with scene("beta") as s:
        s.join("beta")
        cluster = s.serve(member=small(), recover_wait_s=0.2)
        s.peers["beta"].stop()
        with pytest.raises(
            StageLost, match=r"missing layers? .* beta is gone; nobody took over within 0\.2 s"
        ):
            ask(cluster)
        with pytest.raises(StageLost, match="nobody took over"):
            ask(cluster)
        assert not cluster.health()[0]
        s.join("beta")
        wait_until(lambda: cluster.health()[0])
        assert ask(cluster) == ANSWER


def test_where_nobody_is_waited_for_the_next_look_still_takes_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scene("beta") as s:
        s.join("beta")
        cluster = s.serve(member=small(), recover_wait_s=0.0)
        looks: list[float] = []
        again = cluster.head.planner.again

        def look(*arguments: Any) -> Any:
            looks.append(time.monotonic())
            return again(*arguments)

        monkeypatch.setattr(cluster.head.planner, "again", look)
        s.peers["beta"].stop()
        with pytest.raises(StageLost, match="nobody took over within 0 s"):
            ask(cluster)
        wait_until(lambda: len(looks) >= 3)
        assert looks[2] - looks[0] >= 0.9


def test_a_member_that_comes_back_below_the_minimum_is_not_used() -> None:
    policy = Policy(minimum=Level.SELF_SIGNED, software=(SoftwareRule("package", ()),))
    with scene("beta", "gamma") as s:
        s.join("beta")
        gone = s.join("gamma")
        cluster = s.serve(member=replace(MEMBER, policy=policy))
        gone.stop()
        wait_until(lambda: stages(cluster) == ["alpha", "beta"])
        back = Peer(membership_of(s.members["gamma"]), PeerOptions(MEMBER), network=s.network)
        evidence_maker = back.attestation.evidence_maker
        evidence_maker.__dict__["software"] = msgspec.structs.replace(
            evidence_maker.claims, package="ab" * 32
        )
        running = threading.Thread(target=back.run, args=(s.members["gamma"].member.address,), daemon=True)
        running.start()
        wait_until(lambda: "gamma" in cluster.head.verifier.excluded)
        assert stages(cluster) == ["alpha", "beta"]
        assert ask(cluster) == ANSWER
        back.stop()
        running.join(10)


@pytest.mark.parametrize("lacks", [{"kernels": ["none"]}, {"memory_bytes": 1}])
@pytest.mark.long
def test_a_member_that_refuses_every_plan_is_left_out(lacks: dict[str, object]) -> None:
    with scene("beta", "gamma") as s:
        s.join("beta")
        stubborn = s.join("gamma")
        cluster = s.serve()
        # From now on it refuses what it offered, or has no room for it; then the ring breaks.
        stubborn.peer.hello = msgspec.structs.replace(stubborn.peer.hello, **lacks)
        assert cluster.head.active_plan is not None
        plan_id = cluster.head.active_plan.plan.plan_id
        link = stubborn.peer.head
        assert link is not None
        link.send(StepFailed(0, "the ring is broken"), plan_id=plan_id)
        wait_until(lambda: stages(cluster) == ["alpha", "beta"])
        assert ask(cluster) == ANSWER


def refuse_long_rows(monkeypatch: pytest.MonkeyPatch, *peers: Peer) -> None:
    """Refuse rows of more than 20 tokens in these peers' stages from now on."""
    run = HostStage.run

    def refuse(stage: HostStage, step: Step, hidden: Any, tokens: Any) -> Any:
        is_theirs = any(peer.loaded is not None and peer.loaded.stage is stage for peer in peers)
        if is_theirs and any(row.num_tokens > 20 for row in step.rows):
            raise StepError("there is no memory for a row of that size")
        return run(stage, step, hidden, tokens)

    monkeypatch.setattr(HostStage, "run", refuse)


@pytest.mark.long
def test_a_request_that_no_stage_can_run_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with scene("beta") as s:
        s.join("beta")
        cluster = s.serve(member=small(), prefill_chunk=64)
        refuse_long_rows(monkeypatch, s.peers["beta"].peer)
        with pytest.raises(StageLost, match=r"failed at the request 8 times in a row: .* no memory"):
            generate(cluster.engine, LONG)
        short = GenerationRequest(LONG.prompt_ids[:9], SamplingParams(temperature=0.0), 8)
        assert len(generate(cluster.engine, short).token_ids) > 0
        assert stages(cluster) == ["alpha", "beta"]


def test_a_member_that_fails_again_and_again_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with scene("beta", "gamma") as s:
        s.join("beta")
        s.join("gamma")
        cluster = s.serve(prefill_chunk=64)
        undisturbed = generate(cluster.engine, LONG).token_ids
        refuse_long_rows(monkeypatch, s.peers["gamma"].peer)
        longer = replace(LONG, cache_salt=b"nobody's")
        assert generate(cluster.engine, longer).token_ids == undisturbed
        assert stages(cluster) == ["alpha", "beta"]


def test_a_member_whose_hidden_states_fit_nothing_is_left_out_and_not_the_one_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scene("beta", "gamma") as s:
        s.join("beta")
        s.join("gamma")
        cluster = s.serve(prefill_chunk=64)
        undisturbed = generate(cluster.engine, LONG).token_ids
        first = next(name for name in stages(cluster) if name != "alpha")
        other = next(name for name in stages(cluster) if name not in ("alpha", first))
        run = HostStage.run

        def cut(stage: HostStage, step: Step, hidden: Any, tokens: Any) -> Any:
            loaded = s.peers[first].peer.loaded
            out = run(stage, step, hidden, tokens)
            return out[:-1] if loaded is not None and loaded.stage is stage and len(out) > 1 else out

        monkeypatch.setattr(HostStage, "run", cut)
        longer = replace(LONG, cache_salt=b"nobody's")
        assert generate(cluster.engine, longer).token_ids == undisturbed
        assert stages(cluster) == ["alpha", other]


@pytest.mark.long
def test_a_request_that_no_member_can_run_costs_one_of_them_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scene("beta", "gamma") as s:
        s.join("beta")
        s.join("gamma")
        cluster = s.serve(prefill_chunk=64)
        refuse_long_rows(monkeypatch, *(peer.peer for peer in s.peers.values()))
        with pytest.raises(
            StageLost, match=r"failed at the request \d times in a row, at beta and at gamma: "
        ):
            generate(cluster.engine, LONG)
        assert len(stages(cluster)) == 2
        short = GenerationRequest(LONG.prompt_ids[:9], SamplingParams(temperature=0.0), 8)
        assert len(generate(cluster.engine, short).token_ids) > 0

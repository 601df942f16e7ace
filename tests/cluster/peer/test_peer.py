"""A real peer on a thread, and heads that come, go and come again, over in-memory links."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from convoy.cluster.active_plan import plan_digest
from convoy.cluster.head.head import Head
from convoy.cluster.options import HeadOptions, MemberOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import (
    ConvoyError,
    Incompatible,
    LinkBroken,
    PeerRefused,
    PeerUnreachable,
    TooLittleMemory,
)
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import Link, Received, ReceivedMessage
from convoy.transport.member import LocalMember
from convoy.wire.frame import frames_from
from convoy.wire.messages.control import (
    Activate,
    Hello,
    Message,
    Plan,
    Ready,
    Refuse,
    Sender,
    Step,
    StepFailed,
)
from support.cluster import MEMBER, PeerThread
from support.members import make_local_members, membership_of

HEAD_OPTIONS = HeadOptions(MEMBER, wait_s=60, num_blocks=32)


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return ModelSource.resolve("demo-mini")


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def members() -> tuple[LocalMember, ...]:
    return make_local_members(["alpha", "beta"])


@pytest.fixture
def peer(members: tuple[LocalMember, ...], network: MemoryNetwork) -> Iterator[PeerThread]:
    thread = PeerThread(members[1], PeerOptions(MEMBER), network)
    yield thread
    thread.stop()


class Conversation:
    """Drive a head's link by hand."""

    def __init__(self, me: LocalMember, peer: LocalMember, network: MemoryNetwork) -> None:
        self.link = network.dial(membership_of(me), peer.member, 5)
        self._arrived: queue.SimpleQueue[Received | ConvoyError] = queue.SimpleQueue()
        self.link.start(self._keep, self._ended, frames_from(Sender.PEER))

    def _keep(self, _link: Link, received: Received) -> None:
        self._arrived.put(received)

    def _ended(self, _link: Link, error: ConvoyError) -> None:
        self._arrived.put(error)

    def ask(self, message: Message, plan_id: int = 0) -> Message | ConvoyError:
        self.link.send(message, plan_id=plan_id, step=7)
        return self.hear()

    def hear(self) -> Message | ConvoyError:
        item = self._arrived.get(timeout=60)
        return item.message if isinstance(item, ReceivedMessage) else item  # type: ignore[return-value]


HELLO = Hello("test", ["float32"], ["plain-f32"], 1 << 30, 1, "test")


def plan_for(source: ModelSource, head: Head) -> Plan:
    return head.planner.first({"alpha": HELLO, "beta": HELLO}).plan


def ask_once(cluster: RunningCluster) -> str:
    prompt = [{"role": "user", "content": "What is 5+6? Answer with just the number."}]
    request = GenerationRequest(
        tuple(cluster.tokenizer.encode_chat(prompt)), SamplingParams(temperature=0.0), max_tokens=8
    )
    return generate(cluster.engine, request).text


def test_a_peer_serves_one_head_after_another(
    members: tuple[LocalMember, ...], network: MemoryNetwork, peer: PeerThread, source: ModelSource
) -> None:
    for _ in range(2):
        cluster = RunningCluster.start(membership_of(members[0]), source, HEAD_OPTIONS, network=network)
        assert ask_once(cluster) == "11"
        cluster.close()
        assert peer.wait_for("ended").text == "alpha closed the link: the head is shutting down"


def test_a_head_that_comes_back_displaces_its_old_link(
    members: tuple[LocalMember, ...], network: MemoryNetwork, peer: PeerThread
) -> None:
    first = Conversation(members[0], members[1], network)
    assert isinstance(first.ask(HELLO), Hello)
    second = Conversation(members[0], members[1], network)
    assert isinstance(second.ask(HELLO), Hello)
    assert isinstance(first.hear(), LinkBroken)


def test_a_lowered_offer_stays_within_the_grant_and_counts_until_the_head_comes_anew(
    members: tuple[LocalMember, ...],
    network: MemoryNetwork,
    peer: PeerThread,
    source: ModelSource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, rooms = MEMBER.memory_bytes, [MEMBER.memory_bytes + 9, 1 << 29, 1 << 30]
    load, offered = HostStage.load, list[int]()
    room_bytes = HostStage.room_bytes

    def refuse_while_rooms(*args: object, **kept: object) -> HostStage:
        if rooms:
            raise TooLittleMemory("it does not fit", room_bytes=rooms.pop(0))
        return load(*args, **kept)  # type: ignore[arg-type]

    def note(stage: HostStage, offered_bytes: int) -> int:
        offered.append(offered_bytes)
        return room_bytes(stage, offered_bytes)

    head = Head(membership_of(members[0]), source, HEAD_OPTIONS, network)
    plans = [plan_for(source, head) for _ in range(5)]
    monkeypatch.setattr(HostStage, "load", refuse_while_rooms)
    monkeypatch.setattr(HostStage, "room_bytes", note)

    def answer_of(talk: Conversation) -> Message | ConvoyError:
        plan = plans.pop(0)
        answer = talk.ask(plan, plan_id=plan.plan_id)
        while not isinstance(answer, Ready | Refuse):
            answer = talk.hear()
        return answer

    talk = Conversation(members[0], members[1], network)
    talk.ask(HELLO)
    refused = [answer_of(talk) for _ in range(3)]
    assert [one.memory_bytes for one in refused if isinstance(one, Refuse)] == [whole, 1 << 29, 1 << 29]
    assert isinstance(answer_of(talk), Ready)
    again = Conversation(members[0], members[1], network)
    greeting = again.ask(HELLO)
    assert isinstance(greeting, Hello)
    assert greeting.memory_bytes == whole
    assert isinstance(answer_of(again), Ready)
    assert offered == [1 << 29, whole]


def test_another_head_is_turned_away_while_the_first_is_there(network: MemoryNetwork) -> None:
    from convoy.trust.roster.card import member_of
    from convoy.trust.roster.roster import make_roster

    trio = make_local_members(["alpha", "beta", "gamma"])
    listed = [
        member_of(m.name, m.identity, m.member.address, head=m.name in {"alpha", "gamma"}) for m in trio
    ]
    roster = make_roster("two-heads", listed)
    alpha, beta, gamma = (LocalMember(m.name, m.identity, roster) for m in trio)
    peer = PeerThread(beta, PeerOptions(MEMBER), network)
    first = Conversation(alpha, beta, network)
    assert isinstance(first.ask(HELLO), Hello)
    refused = Conversation(gamma, beta, network).ask(HELLO)
    assert isinstance(refused, LinkBroken)
    assert "alpha is the head of beta already" in refused.message
    peer.stop()


@pytest.mark.parametrize("message", [Step(0, [], [], [], b""), Activate(1, b"x" * 32, [4])])
def test_a_step_before_any_plan_is_answered_and_the_peer_lives_on(
    members: tuple[LocalMember, ...], network: MemoryNetwork, peer: PeerThread, message: Message
) -> None:
    head = Conversation(members[0], members[1], network)
    head.ask(HELLO)
    assert isinstance(head.ask(message, plan_id=1), StepFailed | Refuse)
    assert isinstance(Conversation(members[0], members[1], network).ask(HELLO), Hello)


def test_an_activation_of_another_plan_is_refused(
    members: tuple[LocalMember, ...], network: MemoryNetwork, peer: PeerThread, source: ModelSource
) -> None:
    talk = Conversation(members[0], members[1], network)
    talk.ask(HELLO)
    answer = talk.ask(
        plan_for(source, Head(membership_of(members[0]), source, HEAD_OPTIONS, network)), plan_id=1
    )
    while not isinstance(answer, Ready):
        answer = talk.hear()
    failed = talk.ask(Activate(1, b"x" * 32, [4]), plan_id=1)
    assert isinstance(failed, Refuse)
    assert "names a plan that is not loaded here" in failed.reason


@pytest.mark.parametrize("num_blocks", [[0], [1 << 40], [1 << 62], [4, 4], [4, -4]])
@pytest.mark.long
def test_an_activation_with_impossible_pools_is_refused_and_the_peer_lives_on(
    members: tuple[LocalMember, ...],
    network: MemoryNetwork,
    peer: PeerThread,
    source: ModelSource,
    num_blocks: list[int],
) -> None:
    talk = Conversation(members[0], members[1], network)
    talk.ask(HELLO)
    plan = plan_for(source, Head(membership_of(members[0]), source, HEAD_OPTIONS, network))
    answer = talk.ask(plan, plan_id=plan.plan_id)
    while not isinstance(answer, Ready):
        answer = talk.hear()
    activate = Activate(plan.plan_id, plan_digest(plan), num_blocks)
    assert isinstance(talk.ask(activate, plan_id=plan.plan_id), Refuse)
    assert isinstance(Conversation(members[0], members[1], network).ask(HELLO), Hello)


def test_a_plan_that_is_not_newer_is_refused(
    members: tuple[LocalMember, ...], network: MemoryNetwork, peer: PeerThread, source: ModelSource
) -> None:
    talk = Conversation(members[0], members[1], network)
    talk.ask(HELLO)
    plan = plan_for(source, Head(membership_of(members[0]), source, HEAD_OPTIONS, network))
    answer = talk.ask(plan, plan_id=plan.plan_id)
    while not isinstance(answer, Ready):
        answer = talk.hear()
    refused = talk.ask(plan, plan_id=plan.plan_id)
    assert isinstance(refused, Refuse)
    assert "not newer than the last" in refused.reason


def test_a_head_that_starts_again_may_have_a_clock_that_went_back(
    members: tuple[LocalMember, ...], network: MemoryNetwork, peer: PeerThread, source: ModelSource
) -> None:
    earlier = plan_for(source, Head(membership_of(members[0]), source, HEAD_OPTIONS, network))
    later = plan_for(source, Head(membership_of(members[0]), source, HEAD_OPTIONS, network))
    assert later.plan_id > earlier.plan_id
    for plan in (later, earlier):
        talk = Conversation(members[0], members[1], network)
        talk.ask(HELLO)
        answer = talk.ask(plan, plan_id=plan.plan_id)
        while not isinstance(answer, Ready | Refuse):
            answer = talk.hear()
        assert isinstance(answer, Ready)


def test_a_plan_for_other_weights_is_refused_with_both_digests(
    members: tuple[LocalMember, ...], network: MemoryNetwork, peer: PeerThread, source: ModelSource
) -> None:
    import msgspec

    talk = Conversation(members[0], members[1], network)
    talk.ask(HELLO)
    plan = plan_for(source, Head(membership_of(members[0]), source, HEAD_OPTIONS, network))
    refusal = talk.ask(msgspec.structs.replace(plan, model_digest="0" * 64), plan_id=1)
    assert isinstance(refusal, Refuse)
    assert "the head's digest is 000000000000" in refusal.reason
    assert source.digest[:12] in refusal.reason


def test_a_head_never_names_a_path(
    members: tuple[LocalMember, ...], network: MemoryNetwork, peer: PeerThread, source: ModelSource
) -> None:
    import msgspec

    talk = Conversation(members[0], members[1], network)
    talk.ask(HELLO)
    plan = plan_for(source, Head(membership_of(members[0]), source, HEAD_OPTIONS, network))
    refusal = talk.ask(msgspec.structs.replace(plan, model=str(source.path)), plan_id=1)
    assert isinstance(refusal, Refuse)
    assert "beta has no files for" in refusal.reason


def test_a_peer_that_is_not_there_is_named_with_its_address(
    members: tuple[LocalMember, ...], network: MemoryNetwork, source: ModelSource
) -> None:
    options = replace(HEAD_OPTIONS, wait_s=0.5, spans={"alpha": "0:1,output", "beta": "2:3"})
    with pytest.raises(PeerUnreachable, match=r"beta at 127\.0\.0\.1:7001 did not answer within 0\.5 s"):
        Head(membership_of(members[0]), source, options, network).bring_up()


def test_another_activation_dtype_is_refused_at_join_and_both_are_named(
    members: tuple[LocalMember, ...], network: MemoryNetwork, source: ModelSource
) -> None:
    peer = PeerThread(members[1], PeerOptions(MemberOptions(num_threads=1, memory_bytes=1 << 30)), network)
    peer.peer.hello = msgspec.structs.replace(peer.peer.hello, dtypes=["bfloat16"])
    with pytest.raises(Incompatible, match="alpha sends activations as float32, but beta takes bfloat16"):
        Head(membership_of(members[0]), source, HEAD_OPTIONS, network).bring_up()
    peer.stop()


def test_a_peer_without_the_model_refuses_with_what_to_do(
    members: tuple[LocalMember, ...],
    network: MemoryNetwork,
    peer: PeerThread,
    tmp_path: Path,
) -> None:
    from support.odd_models import make_odd_llama

    model = ModelSource.resolve(str(make_odd_llama(tmp_path / "odd")))
    with pytest.raises(PeerRefused, match="beta refused the plan: beta has no files for odd") as refused:
        Head(membership_of(members[0]), model, HEAD_OPTIONS, network).bring_up()
    assert refused.value.hint is not None
    assert "convoy join --model PATH" in refused.value.hint

"""What a valid member can do with well-sealed nonsense: be refused by name, while others are served."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest

from adversary.ledger import Row
from adversary.process import VictimProcess
from convoy.cluster.active_plan import plan_digest
from convoy.cluster.attestation.exchange import Attestation
from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.crypto.identity import Identity, OperatorKey
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import ConvoyError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.store.digests import Hashing, make_manifest
from convoy.model.sampling.params import SamplingParams
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import Link, Received, ReceivedMessage
from convoy.transport.member import LocalMember, Roster
from convoy.transport.network import TcpNetwork
from convoy.transport.ports import free_port
from convoy.trust.roster.card import member_of
from convoy.trust.roster.roster import make_roster, sign_roster
from convoy.wire.frame import frames_from
from convoy.wire.messages.control import (
    Activate,
    Activated,
    BlockGrant,
    FrameType,
    Hello,
    Message,
    Plan,
    Ready,
    Sender,
    StageAssignment,
    Step,
    StepFailed,
)
from convoy.wire.messages.control import Row as StepRow
from convoy.wire.messages.evidence import Challenge, Evidence
from convoy.wire.messages.fetch import Fetch, Held, Holding, Piece, Prepare
from convoy.wire.tensor import WireTensor
from support.cluster import MEMBER, PeerThread
from support.members import make_local_members, membership_of

WAIT_S = 90.0
MODEL = "demo-mini"
HIDDEN = 192
NUM_BLOCKS = 16
MAX_GROWTH_BYTES = 256 << 20
HELLO = Hello("test", ["float32"], ["exact-f32", "plain-f32"], 1 << 30, 1, "test")
HEAD = HeadOptions(MEMBER, wait_s=WAIT_S, num_blocks=32)


@dataclass
class Besieged:
    """Hold beta, a peer process, and alpha, its head, which the test plays."""

    process: VictimProcess
    alpha: LocalMember
    beta: LocalMember


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    directory = tmp_path_factory.mktemp("besieged")
    operator = OperatorKey.generate()
    identities = {name: Identity.generate() for name in ("alpha", "beta")}
    port = free_port()
    for name, identity in identities.items():
        identity.save(directory / name)
    members = [
        member_of("alpha", identities["alpha"], ("127.0.0.1", free_port()), head=True),
        member_of("beta", identities["beta"], ("127.0.0.1", port)),
    ]
    roster: Roster = make_roster("besieged", members)
    (directory / "roster.toml").write_bytes(sign_roster(roster, operator))
    setup = {
        "directory": str(directory),
        "name": "beta",
        "operator": operator.public_key.hex(),
        "port": port,
    }
    process = VictimProcess(setup, "adversary.peer_victim")
    yield Besieged(process, *(LocalMember(name, identities[name], roster) for name in identities))
    process.stop()


class Hostile:
    """Drive a head's link to the peer by hand."""

    plan_id = 100

    def __init__(self, besieged: Besieged) -> None:
        self._process = besieged.process
        self.link = TcpNetwork().dial(membership_of(besieged.alpha), besieged.beta.member, 10)
        self._arrived: queue.SimpleQueue[Received | ConvoyError] = queue.SimpleQueue()
        self.link.start(self._keep, self._keep, frames_from(Sender.PEER))
        assert isinstance(self.ask(HELLO), Hello)

    def _keep(self, _link: Link, item: Received | ConvoyError) -> None:
        self._arrived.put(item)

    def ask(self, message: Message, *, plan_id: int = 0, step: int = 0) -> Message | ConvoyError:
        self.link.send(message, plan_id=plan_id, step=step)
        return self.hear()

    def hear(self) -> Message | ConvoyError:
        while True:
            item = self._arrived.get(timeout=WAIT_S)
            if not isinstance(item, ReceivedMessage):
                return item  # type: ignore[return-value]
            if type(item.message).__name__ != "Progress":
                return item.message

    def not_followed(self, row: Row) -> str:
        """Return the error by which the peer refused."""
        error = self._process.wait("not followed")
        row.tried(error["error"])
        assert "internal error" not in error["message"], error
        name: str = error["error"]
        return name

    def plan(self, **changed: object) -> Plan:
        Hostile.plan_id += 1
        source = ModelSource.resolve(MODEL)
        honest = Plan(
            Hostile.plan_id,
            MODEL,
            source.digest,
            [StageAssignment("alpha", 0, 2, True, True), StageAssignment("beta", 2, 4, False, False)],
            "plain-f32",
            "float32",
            16,
            2048,
            make_manifest(source, Hashing()).digest,
        )
        return msgspec.structs.replace(honest, **changed)

    def activate(self) -> int:
        """Make an honest plan up to its activation, and return its plan id."""
        plan = self.plan()
        ready = self.ask(plan, plan_id=plan.plan_id)
        assert isinstance(ready, Ready), ready
        activated = self.ask(Activate(plan.plan_id, plan_digest(plan), [NUM_BLOCKS]), plan_id=plan.plan_id)
        assert isinstance(activated, Activated), activated
        return plan.plan_id


BIG = 2**62


@pytest.fixture
def hostile(besieged: Besieged) -> Iterator[Hostile]:
    head = Hostile(besieged)
    before = besieged.process.rss_bytes()
    yield head
    # The peer lives, follows an honest plan, and has grown by nothing that the attack named.
    assert besieged.process.alive
    assert not besieged.process.crashes, besieged.process.crashes
    head.link.close("done")
    honest = Hostile(besieged)
    honest.activate()
    honest.link.close("done")
    assert besieged.process.rss_bytes() - before < MAX_GROWTH_BYTES
    besieged.process.now("not followed")  # of what still waited when the attack was over


def stages(*spans: tuple[str, int, int, bool, bool]) -> list[StageAssignment]:
    return [StageAssignment(*span) for span in spans]


ALPHA = ("alpha", 0, 2, True, True)
PLANS: dict[str, dict[str, object]] = {
    "no stages": {"stages": []},
    "no stage for the peer": {"stages": stages(("alpha", 0, 4, True, True))},
    "overlapping spans": {"stages": stages(("alpha", 0, 3, True, True), ("beta", 2, 4, False, False))},
    "a gap": {"stages": stages(("alpha", 0, 1, True, True), ("beta", 2, 4, False, False))},
    "layers past the end": {"stages": stages(ALPHA, ("beta", 2, 5, False, False))},
    "a huge span": {"stages": stages(ALPHA, ("beta", 2, 2**62, False, False))},
    "a negative start": {"stages": stages(ALPHA, ("beta", -1, 4, False, False))},
    "an end before its start": {"stages": stages(ALPHA, ("beta", 4, 2, False, False))},
    "no layers": {"stages": stages(ALPHA, ("beta", 2, 2, False, False))},
    "the peer twice": {"stages": stages(ALPHA, ("beta", 2, 3, False, False), ("beta", 3, 4, False, False))},
    "two embeddings": {"stages": stages(ALPHA, ("beta", 2, 4, True, False))},
    "two outputs": {"stages": stages(ALPHA, ("beta", 2, 4, False, True))},
    "ten thousand stages": {"stages": stages(*[("alpha", 0, 0, False, False)] * 10_000)},
    "an unknown kernel": {"kernel": "../kernel"},
    "an unknown dtype": {"activation_dtype": "float8"},
    "block size 0": {"block_size": 0},
    "block size -1": {"block_size": -1},
    "block size 7": {"block_size": 7},
    "a huge block size": {"block_size": 2**62},
    "a path as model": {"model": "../../../../etc/passwd"},
    "another digest": {"model_digest": "0" * 64},
    "plan id 0": {"plan_id": 0},
    "a negative plan id": {"plan_id": -5},
    "a negative context": {"max_context": -1},
    "a huge context": {"max_context": 2**62},
}


@pytest.mark.attack("a head's plans that make no sense", layer="both")
@pytest.mark.parametrize("case", PLANS)
def test_a_plan_that_makes_no_sense_is_refused_by_name(hostile: Hostile, row: Row, case: str) -> None:
    plan = hostile.plan(**PLANS[case])
    hostile.link.send(plan, plan_id=abs(plan.plan_id))
    assert hostile.not_followed(row) in {"Incompatible", "ModelError", "StepError", "PlanError"}
    hostile.hear()


@pytest.mark.attack("a head's plans that make no sense", layer="both")
def test_a_plan_older_than_the_last_of_its_link_is_refused_by_name(hostile: Hostile, row: Row) -> None:
    plan = hostile.plan()
    assert isinstance(hostile.ask(plan, plan_id=plan.plan_id), Ready)
    older = hostile.plan(plan_id=plan.plan_id - 1)
    hostile.link.send(older, plan_id=older.plan_id)
    assert hostile.not_followed(row) == "StepError"
    hostile.hear()


@pytest.mark.attack("a head's activations that make no sense", layer="both")
@pytest.mark.parametrize(
    ("num_blocks", "digest", "other_plan_id"),
    [
        (0, None, 0),
        (-1, None, 0),
        (2**62, None, 0),
        (8, b"", 0),
        (8, bytes(32), 0),
        (8, None, 1),
        (8, None, -1),
    ],
)
def test_an_activation_that_makes_no_sense_is_refused_by_name(
    hostile: Hostile, row: Row, num_blocks: int, digest: bytes | None, other_plan_id: int
) -> None:
    plan = hostile.plan()
    assert isinstance(hostile.ask(plan, plan_id=plan.plan_id), Ready)
    named = plan_digest(plan) if digest is None else digest
    hostile.link.send(Activate(plan.plan_id, named, [num_blocks]), plan_id=plan.plan_id + other_plan_id)
    assert hostile.not_followed(row) in {"StepError", "PlanError"}
    hostile.hear()


@pytest.mark.attack("a head's plans that make no sense", layer="both")
def test_a_plan_with_a_member_that_nobody_knows_is_refused_by_name(hostile: Hostile, row: Row) -> None:
    plan = hostile.plan(stages=stages(ALPHA, ("beta", 2, 3, False, False), ("nobody", 3, 4, False, False)))
    assert isinstance(hostile.ask(plan, plan_id=plan.plan_id), Ready)
    hostile.link.send(Activate(plan.plan_id, plan_digest(plan), [8]), plan_id=plan.plan_id)
    assert hostile.not_followed(row) == "RosterError"


@pytest.mark.attack("texts that no message has room for", layer="both")
@pytest.mark.parametrize("name", ["x" * 5000, "\x1b[2J" * 500])
def test_a_text_of_absurd_length_ends_the_link_by_name(
    hostile: Hostile, besieged: Besieged, row: Row, name: str
) -> None:
    besieged.process.now("link ended")
    plan = hostile.plan(stages=stages(ALPHA, ("beta", 2, 3, False, False), (name, 3, 4, False, False)))
    hostile.link.send(plan, plan_id=plan.plan_id)
    ended = besieged.process.wait("link ended")
    row.tried(ended["error"])
    assert ended["error"] == "FrameError", ended
    assert "\x1b" not in ended["message"]


NO_DIGEST = "0" * 64
SERVED = make_manifest(ModelSource.resolve(MODEL), Hashing())
NORM = SERVED.tensors["model.norm.weight"].digest
QUESTIONS: dict[str, Fetch | Holding] = {
    "what is here of another model": Holding(NO_DIGEST),
    "a tensor of another model": Fetch(0, NO_DIGEST, NORM, 0, 1),
    "a tensor that the model has not": Fetch(0, SERVED.digest, NO_DIGEST, 0, 1),
    "a byte behind the end": Fetch(0, SERVED.digest, NORM, BIG, 1),
    "a file beside the weights": Fetch(0, SERVED.digest, SERVED.files["tokenizer.json"].digest, 0, 1),
    "the manifest itself": Fetch(0, SERVED.digest, SERVED.digest, 0, 1),
}


@pytest.mark.attack("a head that asks a peer for what is none of its plan's tensors", layer="both")
@pytest.mark.parametrize("case", ["before a plan", *QUESTIONS])
def test_a_peer_hands_out_nothing_but_tensors_of_its_plans_model(
    hostile: Hostile, row: Row, case: str
) -> None:
    question = QUESTIONS.get(case, Fetch(0, SERVED.digest, NORM, 0, 1))
    if case != "before a plan":
        hostile.activate()
    answer = hostile.ask(question)
    assert isinstance(answer, Piece | Held), answer
    assert answer.error
    assert not (answer.data if isinstance(answer, Piece) else answer.tensors)
    row.tried("refused")


FIRST = BlockGrant.append(1, 0, [0, 1])
STEPS: dict[str, Step] = {
    "a row of a sequence that nobody knows": Step(0, [], [], [StepRow(9, 0, 1, 1)], b""),
    "a row of no tokens": Step(0, [], [FIRST], [StepRow(1, 0, 0, 0)], b""),
    "a row of negative length": Step(0, [], [FIRST], [StepRow(1, 0, -3, 0)], b""),
    "a row that starts past what is known": Step(0, [], [FIRST], [StepRow(1, 5, 1, 1)], b""),
    "a row that starts before 0": Step(0, [], [FIRST], [StepRow(1, -1, 1, 1)], b""),
    "a row past its blocks": Step(0, [], [FIRST], [StepRow(1, 0, 33, 1)], b""),
    "a row of 2^62 tokens": Step(0, [], [FIRST], [StepRow(1, 0, BIG, 1)], b""),
    "more outputs than tokens": Step(0, [], [FIRST], [StepRow(1, 0, 1, 2)], b""),
    "negative outputs": Step(0, [], [FIRST], [StepRow(1, 0, 1, -1)], b""),
    "one sequence in two rows": Step(0, [], [FIRST], [StepRow(1, 0, 1, 1)] * 2, b""),
    "a block past the pool": Step(0, [], [BlockGrant.append(1, 0, [NUM_BLOCKS])], [StepRow(1, 0, 1, 1)], b""),
    "a block of 2^62": Step(0, [], [BlockGrant.append(1, 0, [BIG])], [StepRow(1, 0, 1, 1)], b""),
    "a negative block": Step(0, [], [BlockGrant.append(1, 0, [-1])], [StepRow(1, 0, 1, 1)], b""),
    "a block granted twice": Step(0, [], [BlockGrant.append(1, 0, [0, 0])], [StepRow(1, 0, 1, 1)], b""),
    "a cache group that is not": Step(0, [], [BlockGrant.append(1, 7, [0])], [StepRow(1, 0, 1, 1)], b""),
    "a negative cache group": Step(0, [], [BlockGrant.append(1, -1, [0])], [StepRow(1, 0, 1, 1)], b""),
    "a release of nobody": Step(0, [77], [], [], b""),
    "a release twice": Step(0, [1, 1], [FIRST], [], b""),
    "a step number below 0": Step(-1, [], [], [], b""),
    "sixty thousand releases": Step(0, [5] * 60_000, [], [], b""),
    "a block shared that was never full": Step(
        0, [], [BlockGrant.append(1, 0, [0, 1], b"t" * 16)], [StepRow(1, 16, 1, 1, b"t" * 16, b"u" * 16)], b""
    ),
    "half a tag of a shared block": Step(
        0, [], [BlockGrant.append(1, 0, [0, 1], b"t" * 8)], [StepRow(1, 0, 1, 1)], b""
    ),
    "more shared blocks than blocks": Step(
        0, [], [BlockGrant.append(1, 0, [0], b"t" * 32)], [StepRow(1, 0, 1, 1)], b""
    ),
    "a row of half a tag": Step(0, [], [FIRST], [StepRow(1, 0, 1, 1, b"t" * 8, b"u" * 16)], b""),
    "a row of a tag too many": Step(0, [], [FIRST], [StepRow(1, 0, 1, 1, b"t" * 16, b"u" * 32)], b""),
    "one block for two sequences": Step(
        0, [], [FIRST, BlockGrant.append(2, 0, [1])], [StepRow(1, 0, 1, 1)], b""
    ),
    "sixteen thousand rows": Step(0, [], [], [StepRow(1, 0, 1, 1)] * 16_000, b""),
}


def hidden(num_rows: int, width: int = HIDDEN, dtype: str = "float32") -> WireTensor:
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    return WireTensor(dtype, (num_rows, width), bytes(num_rows * width * size))


@pytest.mark.attack("a head's steps that make no sense", layer="both")
@pytest.mark.parametrize("case", STEPS)
def test_a_step_that_makes_no_sense_is_refused_by_name(hostile: Hostile, row: Row, case: str) -> None:
    plan_id = hostile.activate()
    step = STEPS[case]
    num_tokens = sum(max(0, min(r.num_tokens, 64)) for r in step.rows[:4])
    if step.number == 0:
        hostile.link.send_tensor(hidden(num_tokens), plan_id=plan_id, step=0, boundary=2)
    hostile.link.send(step, plan_id=plan_id, step=0)
    assert hostile.not_followed(row) == "StepError"
    assert isinstance(hostile.hear(), StepFailed)


TOO_LONG: dict[str, Step] = {
    "two hundred thousand releases": Step(0, [5] * 200_000, [], [], b""),
    "sixty thousand rows": Step(0, [], [], [StepRow(1, 0, 1, 1)] * 60_000, b""),
    "a million blocks twice": Step(0, [], [BlockGrant.append(1, 0, [0] * 1_000_000)] * 2, [], b""),
}


@pytest.mark.attack("lists that no step can need", layer="both")
@pytest.mark.parametrize("case", TOO_LONG)
def test_a_step_of_absurd_length_ends_the_link_by_name(
    hostile: Hostile, besieged: Besieged, row: Row, case: str
) -> None:
    plan_id = hostile.activate()
    besieged.process.now("link ended")
    hostile.link.send(TOO_LONG[case], plan_id=plan_id, step=0)
    ended = besieged.process.wait("link ended")
    row.tried(ended["error"])
    assert ended["error"] == "FrameError", ended


ONE = Step(0, [], [FIRST], [StepRow(1, 0, 2, 1, b"t" * 16, b"u" * 16)], b"")
TENSORS: dict[str, tuple[WireTensor, int, int]] = {  # tensor, step, boundary
    "too few rows": (hidden(1), 0, 2),
    "too many rows": (hidden(3), 0, 2),
    "no rows": (hidden(0), 0, 2),
    "another width": (hidden(2, 191), 0, 2),
    "width 0": (hidden(2, 0), 0, 2),
    "another dtype": (hidden(2, dtype="bfloat16"), 0, 2),
    "one dimension": (WireTensor("float32", (2 * HIDDEN,), bytes(8 * HIDDEN)), 0, 2),
    "no dimension": (WireTensor("float32", (), bytes(4)), 0, 2),
    "six dimensions": (WireTensor("float32", (1, 1, 1, 1, 2, HIDDEN), bytes(8 * HIDDEN)), 0, 2),
    "another layer": (hidden(2), 0, 3),
    "layer 65535": (hidden(2), 0, 65535),
}


@pytest.mark.attack("hidden states of a wrong shape, dtype, step or layer", layer="both")
@pytest.mark.parametrize("case", TENSORS)
def test_a_hidden_state_that_does_not_fit_is_refused_by_name(hostile: Hostile, row: Row, case: str) -> None:
    plan_id = hostile.activate()
    tensor, step, boundary = TENSORS[case]
    hostile.link.send(ONE, plan_id=plan_id, step=0)
    hostile.link.send_tensor(tensor, plan_id=plan_id, step=step, boundary=boundary)
    assert hostile.not_followed(row) == "HiddenError"
    assert isinstance(hostile.hear(), StepFailed)


@pytest.mark.attack("hidden states and steps twice, or too many", layer="both")
@pytest.mark.parametrize("what", ["a hidden state twice", "many hidden states", "many steps", "a step again"])
def test_what_comes_twice_or_too_often_is_refused_by_name(hostile: Hostile, row: Row, what: str) -> None:
    plan_id = hostile.activate()
    empty = Step(0, [], [], [], b"")
    for number in range(70):
        if "hidden" in what:
            step = 5 if what == "a hidden state twice" else number + 1
            hostile.link.send_tensor(hidden(1), plan_id=plan_id, step=step, boundary=2)
        else:
            again = 3 if what == "a step again" else number
            later = msgspec.structs.replace(empty, number=again)
            hostile.link.send(later, plan_id=plan_id, step=again)
    assert hostile.not_followed(row) == ("HiddenError" if "hidden" in what else "StepError")


@pytest.mark.attack("frames of an old plan id", layer="both")
def test_frames_of_an_old_plan_are_of_no_effect(hostile: Hostile, row: Row) -> None:
    old = hostile.activate()
    new = hostile.activate()
    for _ in range(3):
        hostile.link.send(STEPS["a release of nobody"], plan_id=old, step=0)
        hostile.link.send_tensor(hidden(9, 7), plan_id=old, step=0, boundary=9)
        row.tried("of no effect")
    hostile.link.send(ONE, plan_id=new, step=0)
    hostile.link.send_tensor(hidden(2), plan_id=new, step=0, boundary=2)
    item = hostile._arrived.get(timeout=WAIT_S)
    assert type(item).__name__ == "ReceivedTensor", item
    hostile.link.send(Activate(old, bytes(32), [8]), plan_id=old)
    hostile.not_followed(row)


def ask(cluster: RunningCluster) -> str:
    ids = tuple(
        cluster.tokenizer.encode_chat(
            [{"role": "user", "content": "What is 8+9? Answer with just the number."}]
        )
    )
    return generate(cluster.engine, GenerationRequest(ids, SamplingParams(temperature=0.0), 8)).text


@pytest.mark.attack("after all of it: an honest head", layer="both")
def test_an_honest_head_gets_the_right_tokens_from_the_same_process(besieged: Besieged, row: Row) -> None:
    cluster = RunningCluster.start(
        membership_of(besieged.alpha), ModelSource.resolve(MODEL), HEAD, network=TcpNetwork()
    )
    try:
        assert ask(cluster) == "17"
        row.tried("the right tokens")
    finally:
        cluster.close()


@pytest.mark.attack("strangers before a peer that serves", layer="both")
def test_strangers_do_not_disturb_a_running_generation(besieged: Besieged, row: Row) -> None:
    cluster = RunningCluster.start(
        membership_of(besieged.alpha), ModelSource.resolve(MODEL), HEAD, network=TcpNetwork()
    )
    answers: list[str] = []
    busy = threading.Thread(target=lambda: answers.extend(ask(cluster) for _ in range(12)))
    socks = []
    try:
        busy.start()
        for number in range(200):
            sock = socket.socket()
            sock.settimeout(5)
            sock.bind((f"127.0.{1 + number // 100}.{1 + number % 100}", 0))
            with contextlib.suppress(OSError):
                sock.connect(besieged.beta.member.address)
                sock.sendall(b"\x16\x03\x01\xff\xff"[: number % 6] + random.Random(number).randbytes(number))
            socks.append(sock)
            row.tries += 1
        busy.join(WAIT_S)
        assert answers == ["17"] * 12
        row.tries -= 1
        row.tried("the right tokens meanwhile")
    finally:
        for sock in socks:
            sock.close()
        cluster.close()
    assert not besieged.process.crashes


# A peer that does a head's work.


@dataclass
class Ring:
    """Hold three members that serve. ``ended`` tells how links ended at beta."""

    cluster: RunningCluster
    network: MemoryNetwork
    members: tuple[LocalMember, ...]
    ended: queue.SimpleQueue[ConvoyError]


class TellingPeer(PeerThread):
    def tell_ends(self) -> queue.SimpleQueue[ConvoyError]:
        ended: queue.SimpleQueue[ConvoyError] = queue.SimpleQueue()
        link_ended = self.peer.link_ended

        def tell(link: Link, error: ConvoyError) -> None:
            ended.put(error)
            link_ended(link, error)

        vars(self.peer)["link_ended"] = tell
        return ended


@pytest.fixture
def ring() -> Iterator[Ring]:
    network = MemoryNetwork()
    members = make_local_members(["alpha", "beta", "gamma"])
    peers = [TellingPeer(me, PeerOptions(MEMBER), network) for me in members[1:]]
    ended = peers[0].tell_ends()
    cluster = RunningCluster.start(
        membership_of(members[0]), ModelSource.resolve(MODEL), HEAD, network=network
    )
    yield Ring(cluster, network, members, ended)
    cluster.close()
    for peer in peers:
        peer.stop()


NOT_FOR_PEERS: dict[str, Message] = {
    "a plan": Plan(2**62, MODEL, "0" * 64, [], "plain-f32", "float32", 16, 64),
    "an activation": Activate(2**62, bytes(32), [1]),
    "a cancel": Step(10**9, [0, 1, 2, 3], [], [], b""),
    "a block table": Step(10**9, [], [BlockGrant.append(0, 0, [0, 1])], [], b""),
    "a greeting": HELLO,
    "a piece of a model": Piece(0, 1, b"w", ""),
    "a question for a piece of a model": Fetch(0, "0" * 64, "0" * 64, 0, 1),
    "a question for what is here of a model": Holding("0" * 64),
    "a preparation": Prepare(Plan(2**62, MODEL, "0" * 64, [], "plain-f32", "float32", 16, 64)),
    "a readiness": Ready(1, 1, 1, [1]),
}


@pytest.mark.attack("a peer that sends a plan, cancel or block table", layer="inner alone")
def test_what_only_a_head_may_send_ends_the_link_of_a_peer(ring: Ring, row: Row) -> None:
    answers: list[str] = []
    busy = threading.Thread(target=lambda: answers.extend(ask(ring.cluster) for _ in range(4)))
    busy.start()
    for message in NOT_FOR_PEERS.values():
        link = ring.network.dial(membership_of(ring.members[2]), ring.members[1].member, 5)
        over = threading.Event()
        link.start(lambda _link, _item: None, lambda _link, _error, over=over: over.set(), frozenset())  # type: ignore[misc]
        link.send(message, plan_id=2**62, step=1)
        error = ring.ended.get(timeout=WAIT_S)
        row.tried(type(error).__name__)
        assert type(error).__name__ == "FrameError"
        assert "which it may not send here" in error.message
        assert over.wait(WAIT_S)
    busy.join(WAIT_S)
    assert answers == ["17"] * 4
    assert ask(ring.cluster) == "17"


# A false peer before an honest head.


class FalsePeer:
    """Listen as beta and answer a head as ``lies`` say; answer everything else as an honest peer would."""

    def __init__(self, network: MemoryNetwork, me: LocalMember, lies: dict[str, object]) -> None:
        self._lies = lies
        self._attestation = Attestation.of(lambda: me, MEMBER, lambda *_: None)
        self._listening = network.listen(membership_of(me), me.member.address, self._greet)
        self.ended: queue.SimpleQueue[ConvoyError] = queue.SimpleQueue()

    def close(self) -> None:
        self._listening.close()
        self._attestation.close()

    def _greet(self, link: Link) -> None:
        self._attestation.attach(link)
        everything = frozenset(FrameType) - {FrameType.HANDSHAKE_1}
        link.start(self._deliver, lambda _link, error: self.ended.put(error), everything)

    def _deliver(self, link: Link, received: Received) -> None:
        if not isinstance(received, ReceivedMessage):
            return
        plan_id = received.plan_id
        match received.message:
            case Challenge() as challenge:
                self._attestation.handle_challenge(link, challenge)
            case Evidence() as evidence:
                self._attestation.handle_evidence(link, evidence)
            case Hello():
                self._say(link, "hello", HELLO, plan_id)
            case Plan():
                self._say(link, "ready", Ready(plan_id, 1000, 64_000, [1000]), plan_id)
            case Activate():
                self._say(link, "activated", Activated(plan_id), plan_id)
            case Step() as step:
                self._step(link, step, plan_id)

    def _say(self, link: Link, when: str, honest: Message, plan_id: int) -> None:
        said = self._lies.get(when, honest)
        assert isinstance(said, Message)
        link.send(said, plan_id=plan_id)

    def _step(self, link: Link, step: Step, plan_id: int) -> None:
        num_outputs = sum(r.num_outputs for r in step.rows)
        said = self._lies.get("hidden", hidden(num_outputs))
        boundary = self._lies.get("boundary", 4)
        number = self._lies.get("step", step.number)
        off = self._lies.get("plan_id", 0)
        assert isinstance(boundary, int)
        assert isinstance(number, int)
        assert isinstance(off, int)
        if isinstance(said, WireTensor):
            link.send_tensor(said, plan_id=plan_id + off, step=number, boundary=boundary)
        elif isinstance(said, Message):
            link.send(said, plan_id=plan_id, step=step.number)


def greeting(**changed: object) -> dict[str, object]:
    return {"hello": msgspec.structs.replace(HELLO, **changed)}


LIES: dict[str, dict[str, object]] = {
    "no kernels": greeting(kernels=[]),
    "no dtypes": greeting(dtypes=[]),
    "memory below 0": greeting(memory_bytes=-(2**62)),
    "memory of 2^62": {**greeting(memory_bytes=2**62), "ready": Ready(0, 1, -1, [1])},
    "a plan in place of a greeting": {"hello": NOT_FOR_PEERS["a plan"]},
    "no room": {"ready": Ready(0, 1000, 0, [1000])},
    "room below 0": {"ready": Ready(0, 1000, -(2**62), [1000])},
    "weights below 0, and no room": {"ready": Ready(0, -1, -1, [1000])},
    "blocks of less than nothing": {"ready": Ready(0, 1000, 64_000, [-(2**62)])},
    "blocks of groups that the model has not": {"ready": Ready(0, 1000, 64_000, [1000, 1000])},
    "a step in place of a readiness": {"ready": ONE},
    "a piece of a model that nobody asked for": {"ready": Piece(0, 9, b"unwanted!", "")},
    "what it has of a model, unasked": {"ready": Held("0" * 64, b"\xff" * 99, "")},
    "a failure in place of an activation": {"activated": StepFailed(0, "no")},
    "too few rows": {"hidden": hidden(0)},
    "too many rows": {"hidden": hidden(900)},
    "another width": {"hidden": hidden(1, 5)},
    "another dtype": {"hidden": hidden(1, dtype="float16")},
    "six dimensions": {"hidden": WireTensor("float32", (1,) * 6, bytes(4))},
    "another layer": {"boundary": 3},
    "another step": {"step": 2**63},
    "a failure": {"hidden": StepFailed(0, "x\x1b[2J" * 2000)},
    "a block table": {"hidden": NOT_FOR_PEERS["a block table"]},
    "nothing of this plan id": {"plan_id": 1},
}
NAMED = {
    "PlanError",
    "Incompatible",
    "LinkBroken",
    "PeerRefused",
    "PeerUnreachable",
    "StageLost",
    "FrameError",
    "StepError",
}


@pytest.mark.attack("a peer that lies to its head", layer="inner alone")
@pytest.mark.parametrize("case", LIES)
def test_a_peer_that_lies_ends_the_bring_up_by_name(row: Row, case: str) -> None:
    network = MemoryNetwork()
    members = make_local_members(["alpha", "beta"])
    false = FalsePeer(network, members[1], LIES[case])
    spans = {"alpha": "0:1,output", "beta": "2:3"}
    options = HeadOptions(MEMBER, spans=spans, wait_s=3, load_wait_s=3, step_timeout_s=3, num_blocks=32)
    try:
        cluster = RunningCluster.start(
            membership_of(members[0]), ModelSource.resolve(MODEL), options, network=network
        )
    except ConvoyError as error:
        named, drawn = type(error).__name__, "\x1b" in error.message
    else:
        held = {stage.member for stage in cluster.status().stages}
        cluster.close()
        assert "beta" not in held, "the head believed it"
        named, drawn = "StageLost", False  # and it went on without that peer
    finally:
        false.close()
    row.tried(named)
    assert named in NAMED
    assert not drawn, "a peer's text draws on the terminal"

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.config.table import MAX_STEP_TOKENS
from convoy.errors import FrameError
from convoy.model.sampling.params import MAX_LOGIT_BIAS, MAX_LOGPROBS
from convoy.transport.link.incoming import ReceivedMessage
from convoy.transport.link.outgoing import OutgoingFrame, message_frame
from convoy.wire.codec import decode_message, encode_message
from convoy.wire.frame import TENSOR_TYPES
from convoy.wire.messages.control import (
    MAX_MASK_BYTES,
    MAX_OFFER_BYTES,
    MAX_STEP_BLOCKS,
    Activate,
    Activated,
    BlockGrant,
    BlocksDone,
    FrameType,
    Hello,
    Inquire,
    Message,
    Plan,
    Progress,
    Reached,
    ReadBlocks,
    Ready,
    Refuse,
    Row,
    SampleReplies,
    SampleReply,
    SampleRequest,
    StageAssignment,
    StageMarks,
    Step,
    StepFailed,
    WriteBlocks,
)
from convoy.wire.messages.evidence import Challenge, Evidence, Vouch, Vouched
from convoy.wire.messages.fetch import (
    MAX_PIECE_BYTES,
    Fetch,
    Held,
    Holding,
    Piece,
    Prepare,
    Prepared,
    Unload,
)
from convoy.wire.messages.link import Bye, Ping, Pong, RosterUpdate, Switch
from convoy.wire.messages.ranks import Agree, RankOutput, RankStep
from convoy.wire.messages.types import MESSAGE_TYPES
from convoy.wire.tensor import WireTensor
from support.examples import examples

MESSAGES: list[Message] = [
    Hello("convoy 0.1", ["float32"], ["exact-f32"], 1 << 30, 2, "linux"),
    Plan(1, "demo", "ab", [StageAssignment("alpha", 0, 4, True, False)], "exact-f32", "float32", 16, 2048),
    Plan(1, "demo", "ab", [], "exact-f32", "float32", 16, 2048, "c" * 64),
    Plan(1, "demo", "ab", [StageAssignment("a", 0, 4, True, True, ["a", "b"])], "", "float32", 16, 2048),
    Progress(1, 5, 10),
    Progress(1, 5, 10, "fetch"),
    Fetch(3, "a" * 64, "b" * 64, 1 << 40, MAX_PIECE_BYTES),
    Fetch(3, "a" * 64, "b" * 64, 1 << 40, MAX_PIECE_BYTES, "m" * 64),
    Piece(3, 1 << 41, b"w" * 9, ""),
    Piece(3, 1 << 41, b"w" * 9, "", "beta"),
    Holding("a" * 64),
    Held("a" * 64, b"\x03", ""),
    Prepare(Plan(1, "demo", "ab", [], "exact-f32", "float32", 16, 2048, "c" * 64)),
    Prepared(1, "no room"),
    Unload("another model"),
    Ready(1, 100, 7000, [16, 0]),
    Refuse(1, "no room", "free some"),
    Activate(1, b"d" * 32, [9, 2]),
    Activated(1),
    Challenge(b"n" * 32, [0, 7]),
    Evidence(b"claims", b"s" * 64, "tpm2", [b"a", b""]),
    Vouch(b"p" * 32, [0, 7]),
    Vouched(b"p" * 32, b"claims", b"s" * 64, "tpm2", [b"a", b""]),
    Step(4, [1], [BlockGrant.append(2, 0, [3, 4])], [Row(2, 0, 5, 1)], b"\1\0\0\0"),
    Step(4, [], [BlockGrant.append(2, 0, [3, 4], b"s" * 16)], [Row(2, 16, 5, 1, b"s" * 16, b"t" * 16)], b""),
    Step(
        5,
        [],
        [],
        [Row(2, 5, 1, 1)],
        b"",
        [
            SampleRequest(
                6,
                0,
                -1,
                0.5,
                3,
                0.9,
                0.1,
                1.1,
                0.2,
                0.3,
                [(7, -1.5)],
                2,
                -1,
                True,
                b"p" * 4,
                b"",
                b"a" * 8,
                b"",
            )
        ],
    ),
    SampleReplies(
        5,
        [SampleReply(9, -0.5, [(9, -0.5)], b"\0" * 4, "", 0), SampleReply(0, 0.0, [], b"", "not finite", 0)],
    ),
    ReadBlocks(6, "ab", 2, 4, [7, 1]),
    WriteBlocks(7, "ab", [7, 1], b"t" * 32),
    BlocksDone(7, "block 7 has an owner"),
    StepFailed(4, "an index is out of range"),
    StepFailed(5, "the ring is broken at beta", "beta"),
    Hello("convoy 0.1", ["float32"], ["exact-f32"], 1 << 30, 2, "linux", standby=True, bits="7690d65006d2"),
    Agree(3, 1, 2, b"d" * 32, "float32", "c" * 64),
    RankStep(Step(4, [1], [], [Row(2, 0, 5, 1)], b"\1\0\0\0"), hidden=False, output=True),
    RankOutput(4, 3, hidden=True),
    Inquire(3),
    Reached(3, -1),
    Reached(3, 8, [StageMarks(8, 900, 700, 300, 0)]),
    RosterUpdate(b"signed by the operator"),
    Ping(1),
    Pong(1),
    Bye("done"),
    Switch(b"l" * 16),
]


def test_every_message_type_is_tried_here() -> None:
    assert {message.frame.type for message in MESSAGES} == set(MESSAGE_TYPES)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_way_there_and_back(message: Message) -> None:
    assert decode_message(message.frame.type, encode_message(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_truncated_or_padded_message_is_refused(message: Message) -> None:
    payload = encode_message(message)
    for changed in (payload[:-1], payload + b"\0", b"", payload[:1]):
        with pytest.raises(FrameError, match="is not the message its type says"):
            decode_message(message.frame.type, changed)


def test_fields_of_another_type_or_number_are_refused() -> None:
    for fields in ([1, 2], ["one"], [], [1.5], [None], {"token": 1}, [[1]]):
        with pytest.raises(FrameError):
            decode_message(FrameType.PING, msgspec.msgpack.encode(fields))


def test_a_list_that_claims_billions_of_entries_is_refused() -> None:
    step = bytes([0x95, 0x01, 0xDD]) + b"\xff\xff\xff\xff"
    with pytest.raises(FrameError):
        decode_message(FrameType.STEP, step)


def test_the_replies_of_a_peer_are_bounded_before_they_are_built() -> None:
    """A frame of 64 MiB would hold millions of empty entries, and more than a gigabyte of them."""
    most = SampleReplies(5, [SampleReply(3, -0.5, [(3, -0.5)] * MAX_LOGPROBS, b"", "", 0)])
    assert decode_message(FrameType.SAMPLED, encode_message(most)) == most
    alternatives = SampleReplies(5, [SampleReply(3, -0.5, [(3, -0.5)] * (MAX_LOGPROBS + 1), b"", "", 0)])
    answers = SampleReplies(5, [SampleReply(0, 0.0, [], b"", "", 0)] * (64 * 1024 + 1))
    for message in (alternatives, answers):
        with pytest.raises(FrameError):
            decode_message(FrameType.SAMPLED, encode_message(message))


@pytest.mark.parametrize("claimed", [-1, MAX_OFFER_BYTES + 1, 10**15])
def test_an_offer_of_more_memory_than_any_machine_has_is_malformed(claimed: int) -> None:
    most = Hello("convoy 0.1", ["float32"], ["exact-f32"], MAX_OFFER_BYTES, 2, "linux")
    assert decode_message(FrameType.HELLO, encode_message(most)) == most
    lie = msgspec.structs.replace(most, memory_bytes=claimed)
    with pytest.raises(FrameError, match=r"a HELLO of .* is not the message its type says"):
        decode_message(FrameType.HELLO, encode_message(lie))


def test_there_is_a_number_for_each_cache_group_and_there_are_sixteen_at_most() -> None:
    most = Activate(1, b"d" * 32, [1 << 62] * 16)
    assert decode_message(FrameType.ACTIVATE, encode_message(most)) == most
    for counts in ([], [1] * 17):
        for message in (Activate(1, b"d" * 32, counts), Ready(1, 100, 7000, counts)):
            kind = FrameType.ACTIVATE if isinstance(message, Activate) else FrameType.READY
            with pytest.raises(FrameError):
                decode_message(kind, encode_message(message))


def test_as_many_biases_are_sent_as_a_request_may_have() -> None:
    def sample(num_biases: int) -> Step:
        request = SampleRequest(
            9,
            0,
            1,
            0.5,
            0,
            1.0,
            0.0,
            1.0,
            0.0,
            0.0,
            [(7, 1.0)] * num_biases,
            -1,
            -1,
            False,
            b"",
            b"",
            b"",
            b"",
        )
        return Step(5, [], [], [Row(2, 5, 1, 1)], b"", [request])

    assert decode_message(FrameType.STEP, encode_message(sample(MAX_LOGIT_BIAS))) == sample(MAX_LOGIT_BIAS)
    with pytest.raises(FrameError):
        decode_message(FrameType.STEP, encode_message(sample(MAX_LOGIT_BIAS + 1)))


def bias_step(num_samples: int, num_biases: int) -> Step:
    request = SampleRequest(
        9, 0, 1, 0.5, 0, 1.0, 0.0, 1.0, 0.0, 0.0, [(7, 1.0)] * num_biases, -1, -1, False, b"", b"", b"", b""
    )
    return Step(5, [], [], [], b"", [request] * num_samples)


def grant_step(num_grants: int, num_blocks: int) -> Step:
    return Step(
        5, [], [BlockGrant.append(number, 0, [7] * num_blocks) for number in range(num_grants)], [], b""
    )


@pytest.mark.parametrize(
    ("most", "more"),
    [
        (bias_step(320, 1024), bias_step(321, 1024)),
        (bias_step(MAX_STEP_TOKENS, 20), bias_step(MAX_STEP_TOKENS, 21)),
        (grant_step(1, MAX_STEP_BLOCKS), grant_step(1, MAX_STEP_BLOCKS + 1)),
        (grant_step(2, MAX_STEP_BLOCKS // 2), grant_step(2, MAX_STEP_BLOCKS // 2 + 1)),
        (Step(5, [1] * 65_536, [], [], b""), Step(5, [1] * 65_537, [], [], b"")),
        (bias_step(MAX_STEP_TOKENS, 0), bias_step(MAX_STEP_TOKENS + 1, 0)),
        (
            Step(5, [], [], [Row(2, 5, 1, 1)] * MAX_STEP_TOKENS, b""),
            Step(5, [], [], [Row(2, 5, 1, 1)] * 16_385, b""),
        ),
    ],
    ids=["biases", "biases of many samples", "blocks", "blocks of two grants", "released", "samples", "rows"],
)
def test_a_whole_step_is_bounded_and_not_only_each_of_its_lists(most: Step, more: Step) -> None:
    assert decode_message(FrameType.STEP, encode_message(most)) == most
    with pytest.raises(FrameError):
        decode_message(FrameType.STEP, encode_message(more))


@pytest.mark.parametrize("num_fields", [3, 4])
def test_a_grant_without_all_its_fields_is_refused(num_fields: int) -> None:
    grant = [1, 0, [7], b"", -1]
    whole = Step(5, [], [BlockGrant(1, 0, [7], b"", -1)], [], b"")
    assert encode_message(whole) == msgspec.msgpack.encode([5, [], [grant], [], b"", []])
    with pytest.raises(FrameError):
        decode_message(FrameType.STEP, msgspec.msgpack.encode([5, [], [grant[:num_fields]], [], b"", []]))


def test_a_step_full_of_biases_is_refused_before_most_of_it_is_built() -> None:
    """It would take 29 times its bytes: 3 for a bias on the wire, and 88 of objects and lists."""
    sample = (
        b"\xdc\x00\x12"
        + b"\x00" * 10
        + b"\xdc\x04\x00"
        + b"\x92\x01\x01" * 1024
        + b"\x00\x00\xc2\xc4\x00\xc4\x00\xc4\x00\xc4\x00"
    )
    payload = b"\x96\x05\x90\x90\x90\xc4\x00\xdc" + (2000).to_bytes(2, "big") + sample * 2000
    decode_message(FrameType.STEP, payload[:8] + (1).to_bytes(2, "big") + sample)  # well-formed
    tracemalloc.start()
    with pytest.raises(FrameError, match="more than 327680 blocks or biases in all"):
        decode_message(FrameType.STEP, payload)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * 1024 * 1024  # 180 MB, if all were built


def test_samples_and_answers_have_the_bytes_that_the_protocol_describes() -> None:
    """Vectors of `docs/protocol.md`, "Sampling": fields in order, token ids as little-endian uint32."""
    sample = SampleRequest(
        *(6, 0, 77, 0.5, 3, 1.0, 0.0, 1.0, 0.0, 0.0, [(7, 1.5)], 2, -1, False, b"", b"", b""),
        *(b"\2\1\0\0", b"\0\2\0\0"),
    )
    sent = encode_message(Step(5, [], [], [], b"", [sample]))
    assert sent.hex() == (
        "96059090"
        "90c40091dc0014"
        "06004dcb3fe000000000000003cb3ff0000000000000cb0000000000000000cb3ff0000000000000"
        "cb0000000000000000cb0000000000000000"
        "919207cb3ff8000000000000"
        "02ffc2c400c400c400c40402010000c40400020000c2"
    )
    answers = encode_message(SampleReplies(5, [SampleReply(9, -0.5, [(9, -0.5)], b"", "", 3)]))
    assert answers.hex() == "9205919709cbbfe0000000000000919209cbbfe0000000000000c400a003c400"


@pytest.mark.parametrize("field", ["allowed", "banned"])
def test_a_sample_request_restricts_at_most_1024_tokens(field: str) -> None:
    def step(num_bytes: int) -> Step:
        return Step(5, [], [], [], b"", [msgspec.structs.replace(SAMPLE, **{field: bytes(num_bytes)})])

    assert decode_message(FrameType.STEP, encode_message(step(4096))) == step(4096)
    with pytest.raises(FrameError):
        decode_message(FrameType.STEP, encode_message(step(4097)))


def test_a_sample_request_has_a_mask_of_at_most_524288_tokens() -> None:
    def step(num_bytes: int) -> Step:
        return Step(5, [], [], [], b"", [msgspec.structs.replace(SAMPLE, mask=bytes(num_bytes))])

    assert decode_message(FrameType.STEP, encode_message(step(MAX_MASK_BYTES))) == step(MAX_MASK_BYTES)
    with pytest.raises(FrameError):
        decode_message(FrameType.STEP, encode_message(step(MAX_MASK_BYTES + 1)))


def test_a_step_for_a_rank_is_bounded_as_a_step_is_and_has_no_samples() -> None:
    most = RankStep(grant_step(2, MAX_STEP_BLOCKS // 2), hidden=False, output=False)
    assert decode_message(FrameType.RANK_STEP, encode_message(most)) == most
    for step in (grant_step(2, MAX_STEP_BLOCKS // 2 + 1), bias_step(1, 1), bias_step(MAX_STEP_TOKENS, 20)):
        with pytest.raises(FrameError):
            decode_message(FrameType.RANK_STEP, encode_message(RankStep(step, hidden=False, output=False)))


def test_a_stage_has_sixteen_ranks_at_most_by_harmless_names() -> None:
    def plan(ranks: list[str]) -> Plan:
        stage = StageAssignment("a", 0, 4, True, True, ranks)
        return Plan(1, "demo", "ab", [stage], "exact-f32", "float32", 16, 2048)

    names = [f"m{i}" for i in range(17)]
    assert decode_message(FrameType.PLAN, encode_message(plan(names[:16]))) == plan(names[:16])
    for ranks in (names, ["a", "b\n"]):
        with pytest.raises(FrameError):
            decode_message(FrameType.PLAN, encode_message(plan(ranks)))


def test_the_error_does_not_quote_the_payload() -> None:
    with pytest.raises(FrameError) as caught:
        decode_message(FrameType.STEP, b"the prompt's own words")
    assert "words" not in str(caught.value)


@pytest.mark.parametrize("kind", [*sorted(TENSOR_TYPES), FrameType.HANDSHAKE_1])
def test_a_type_without_a_message_is_refused(kind: FrameType) -> None:
    with pytest.raises(FrameError, match="carries no message"):
        decode_message(kind, b"")


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(list(MESSAGE_TYPES)), st.binary(max_size=300))
def test_garbage_is_never_more_than_a_frame_error(kind: FrameType, garbage: bytes) -> None:
    try:
        message = decode_message(kind, garbage)
    except FrameError:
        return
    assert decode_message(kind, encode_message(message)) == message


TOKEN, LOGPROB = 54_321, -0.8125
TOKENS = TOKEN.to_bytes(4, "little") * 3
SAMPLE = SampleRequest(
    6, 0, 77, 0.5, 3, 0.9, 0.1, 1.1, 0.2, 0.3, [(TOKEN, 1.5)], 2, TOKEN, True, TOKENS, TOKENS, TOKENS, TOKENS
)
ANSWER = SampleReply(TOKEN, LOGPROB, [(TOKEN, LOGPROB)], TOKENS, f"no {TOKEN}", 1)


@pytest.mark.parametrize(
    "value",
    [
        SAMPLE,
        ANSWER,
        Step(4, [], [], [Row(2, 0, 3, 1)], TOKENS, [SAMPLE]),
        SampleReplies(5, [ANSWER]),
        ReceivedMessage(1, 4, Step(4, [], [], [Row(2, 0, 3, 1)], TOKENS, [SAMPLE])),
        ReceivedMessage(1, 4, SampleReplies(5, [ANSWER])),
        message_frame(Step(4, [], [], [], TOKENS, [SAMPLE]), 1, 4),
        WireTensor("float32", (3,), TOKENS),
        OutgoingFrame(FrameType.HIDDEN, 1, 4, 2, tensor=WireTensor("float32", (3,), TOKENS)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whoever_formats_a_message_sees_no_token(value: object) -> None:
    """A log line or an assertion that has one in it must not become a leak."""
    for text in (repr(value), str(value), f"{value}", repr([value])):
        assert str(TOKEN) not in text
        assert str(LOGPROB) not in text
        assert repr(TOKENS)[2:-1] not in text

"""What an attacker can do to the inner layer alone, the outer one taken away: nothing but end the link."""

from __future__ import annotations

import os
import struct
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.errors import (
    ConvoyError,
    FrameError,
    FrameTooLong,
    Incompatible,
    LinkBroken,
    PeerError,
    SealError,
)
from convoy.testing.links import memory_link_pair
from convoy.testing.streams import (
    Cut,
    Drop,
    Fault,
    FlipBit,
    MemoryStream,
    Reorder,
    Repeat,
    Stall,
    memory_stream_pair,
)
from convoy.transport.link.establish import establish_initiator, establish_responder
from convoy.transport.link.link import Link, LinkOptions, ReceivedTensor
from convoy.transport.streams.stream import Stream
from convoy.wire.codec import encode_message
from convoy.wire.frame import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    RECORD_BYTES,
    FrameHeader,
    encode_handshake,
    encode_header_into,
    encode_size,
)
from convoy.wire.messages.control import FrameType, Row, Step
from convoy.wire.tensor import WireTensor, encode_descriptor
from support.link_parts import cluster_of, num_buffer_bytes, sealer_of, streams_of
from support.links import End
from support.members import make_local_members

ALPHA, BETA = make_local_members(["alpha", "beta"])
STEP = Step(7, [], [], [Row(1, 0, 2, 1)], b"\1\0\0\0\2\0\0\0")
LARGE = WireTensor("bfloat16", (RECORD_BYTES,), bytes(2 * RECORD_BYTES))
M1, M3, FRAME = 0, 1, 2  # the writes of the dialling end


def attacked(*faults: Fault, num_steps: int = 3) -> tuple[End, ConvoyError]:
    """Send steps through faults; the receiving end and how it ended."""
    links = memory_link_pair(ALPHA, BETA, faults=faults)
    here, there = End(links[0]).start(), End(links[1]).start()
    try:
        for number in range(num_steps):
            here.link.send(STEP, step=number)
    except LinkBroken:
        pass
    error = there.error()
    here.error()
    return there, error


def steps_of(end: End) -> list[int]:
    steps = []
    while not end.arrived.empty():
        steps.append(end.arrived.get().step)
    return steps


HEADER_FIELDS = {
    "type": (0, 8),
    "flags": (8, 16),
    "boundary": (16, 32),
    "length": (32, 64),
    "cluster": (64, 128),
    "plan_id": (128, 192),
    "step": (192, 256),
    "sequence": (256, 320),
    "tensor": (320, 352),
    "record": (352, 384),
}


@pytest.mark.parametrize("field", list(HEADER_FIELDS))
def test_each_flipped_bit_of_a_header_field_ends_the_link(field: str) -> None:
    start, end = HEADER_FIELDS[field]
    for bit in range(start, end):
        links = memory_link_pair(ALPHA, BETA, faults=[FlipBit(FRAME + 1, bit)])
        here, there = End(links[0]).start(), End(links[1]).start()
        here.link.send(STEP, step=1)
        try:
            here.link.send(STEP, step=2)
            # A longer length would wait for more bytes: give it some, they are not what it waits for.
            for number in range(3, 6):
                here.link.send(STEP, step=number)
            streams_of(links[0])[0].close()
        except LinkBroken:
            pass
        assert isinstance(there.error(), FrameError | SealError | LinkBroken)
        assert steps_of(there) == [1]
        here.link.close()


@settings(max_examples=25, deadline=None)
@given(st.integers(8 * HEADER_BYTES, 8 * (HEADER_BYTES + 30)))
def test_a_flipped_bit_of_a_payload_ends_the_link(bit: int) -> None:
    there, error = attacked(FlipBit(FRAME + 1, bit))
    assert isinstance(error, SealError)
    assert "does not open" in error.message
    assert steps_of(there) == [0]


def test_a_replayed_frame_ends_the_link() -> None:
    there, error = attacked(Repeat(FRAME))
    assert isinstance(error, SealError)
    assert "frame 0 came where 1 was expected" in error.message
    assert steps_of(there) == [0]


def test_reordered_frames_end_the_link() -> None:
    there, error = attacked(Reorder(FRAME))
    assert isinstance(error, SealError)
    assert "frame 1 came where 0 was expected" in error.message
    assert steps_of(there) == []


def test_a_dropped_frame_is_noticed_at_the_next() -> None:
    there, error = attacked(Drop(FRAME + 1))
    assert isinstance(error, SealError)
    assert "frame 2 came where 1 was expected" in error.message
    assert steps_of(there) == [0]


@pytest.mark.parametrize("keep", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 17])
def test_a_truncated_frame_is_never_delivered(keep: int) -> None:
    there, error = attacked(Cut(FRAME + 1, keep))
    assert isinstance(error, LinkBroken)
    assert ("inside a frame" in error.message) == (keep > 0)
    assert steps_of(there) == [0]


class Tap:
    """Show the sends of a stream, and give bytes to its far end: the attacker's hands."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.sent: list[bytes] = []
        self.passing = True

    def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.sent.append(bytes(data))
        if self.passing:
            self._stream.send_all(data)

    def recv_into(self, buffer: memoryview) -> int:
        return self._stream.recv_into(buffer)

    def set_deadline(self, at_s: float | None) -> None:
        self._stream.set_deadline(at_s)

    def close(self) -> None:
        self._stream.close()

    def inject(self, data: bytes) -> None:
        self._stream.send_all(data)


def tapped_pair(options: LinkOptions | None = None) -> tuple[End, End, Tap, Tap]:
    there, back = memory_stream_pair(), memory_stream_pair()
    mine, others = Tap(there[0]), Tap(back[1])
    link_id = os.urandom(16)
    links: list[Link] = []
    options = options or LinkOptions()

    def respond() -> None:
        links.append(
            establish_responder(BETA, BETA.roster.member("alpha"), link_id, (others, there[1]), options)
        )

    thread = threading.Thread(target=respond)
    thread.start()
    link = establish_initiator(ALPHA, ALPHA.roster.member("beta"), link_id, (mine, back[0]), options)
    thread.join()
    return End(link).start(), End(links[0]).start(), mine, others


def test_a_reflected_frame_ends_the_link() -> None:
    here, there, mine, others = tapped_pair()
    here.link.send(STEP)
    there.next()
    others.inject(mine.sent[-1])
    error = here.error()
    assert isinstance(error, SealError)
    assert "does not open" in error.message
    assert here.arrived.empty()


def test_a_frame_of_another_link_between_the_same_members_ends_the_link() -> None:
    first, other_end, mine, _ = tapped_pair()
    first.link.send(STEP)
    other_end.next()
    _, there, second, _ = tapped_pair()
    second.inject(mine.sent[-1])
    assert isinstance(there.error(), SealError)
    assert there.arrived.empty()


def test_a_reconnect_has_fresh_keys_so_equal_frames_seal_differently() -> None:
    sealed = []
    for _ in range(2):
        here, there, mine, _ = tapped_pair()
        here.link.send(STEP)
        there.next()
        sealed.append(mine.sent[2])
    assert sealed[0][:HEADER_BYTES] == sealed[1][:HEADER_BYTES]
    assert all(a != b for a, b in zip(_pieces(sealed[0]), _pieces(sealed[1]), strict=True))


def _pieces(frame: bytes) -> list[bytes]:
    body = frame[HEADER_BYTES:]
    return [body[i : i + 4] for i in range(0, len(body) - 3, 4)]


def test_two_frames_of_different_types_cannot_swap_their_headers() -> None:
    here, there, mine, _ = tapped_pair()
    mine.passing = False
    here.link.send(STEP)
    here.link.send_tensor(WireTensor("float32", (2,), bytes(8)), plan_id=0, step=0, boundary=0)
    step, tensor = mine.sent[-2:]
    forged = bytearray(step)
    forged[0] = tensor[0]
    mine.inject(bytes(forged))
    assert isinstance(there.error(), SealError)
    assert there.arrived.empty()


def test_two_tensors_of_one_step_cannot_be_swapped() -> None:
    here, there, mine, _ = tapped_pair()
    mine.passing = False
    for boundary in (4, 8):
        tensor = WireTensor("float32", (2,), bytes([boundary]) * 8)
        here.link.send_tensor(tensor, plan_id=0, step=0, boundary=boundary)
    first, second = mine.sent[-2:]
    mine.inject(first[:HEADER_BYTES] + second[HEADER_BYTES:])
    assert isinstance(there.error(), SealError)
    assert there.arrived.empty()


def test_a_tensor_cannot_be_cut_short_at_a_record_boundary() -> None:
    here, there, mine, _ = tapped_pair()
    mine.passing = False
    here.link.send_tensor(LARGE, plan_id=1, step=1, boundary=1)
    whole = b"".join(mine.sent[2:])
    records = whole[: -(HEADER_BYTES + RECORD_BYTES + 16)]
    mine.inject(records)
    mine.close()
    error = there.error()
    assert isinstance(error, LinkBroken)
    assert there.arrived.empty()


def test_the_last_mark_cannot_be_moved_to_an_earlier_record() -> None:
    here, there, mine, _ = tapped_pair()
    mine.passing = False
    here.link.send_tensor(LARGE, plan_id=1, step=1, boundary=1)
    whole = bytearray(b"".join(mine.sent[2:]))
    second = HEADER_BYTES + 64 + 16
    assert whole[second + 1] == 0
    whole[second + 1] = 1
    mine.inject(bytes(whole[: second + HEADER_BYTES + RECORD_BYTES + 16]))
    assert isinstance(there.error(), FrameError)
    assert there.arrived.empty()


@pytest.mark.parametrize("kind", list(MAX_PAYLOAD_BYTES))
def test_an_oversized_length_is_refused_before_memory_is_taken(kind: FrameType) -> None:
    """A fresh header is not authenticated yet, so its length may not claim more memory than the buffer
    has.
    """
    limit = min(MAX_PAYLOAD_BYTES[kind], RECORD_BYTES) + 16
    for length in (limit + 1, 2**32 - 1):
        _, there, mine, _ = tapped_pair()
        mine.inject(struct.pack(">BBHI40x", kind, 1, 0, length))
        error = there.error()
        assert isinstance(error, FrameTooLong)
        assert f"{kind.name} claims {length} bytes, and its limit is {limit}" in error.message
        assert num_buffer_bytes(there.link) < 1 << 20


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=HEADER_BYTES, max_size=400))
def test_garbage_ends_the_link_and_is_never_delivered(garbage: bytes) -> None:
    _, there, mine, _ = tapped_pair()
    mine.inject(garbage)
    mine.close()
    assert isinstance(there.error(), PeerError)
    assert there.arrived.empty()


def sealed_nonsense(kind: FrameType, payload: bytes, *, flags: int = 1, record: int = 0) -> ConvoyError:
    """Return the error for nonsense that a valid member seals well."""
    here, there, mine, _ = tapped_pair(LinkOptions(max_tensor_bytes=1 << 20))
    frame = bytearray(HEADER_BYTES + len(payload) + 16)
    cluster = mine_header(cluster_of(here.link), kind, flags, len(payload) + 16, record)
    frame[:HEADER_BYTES] = cluster
    view = memoryview(frame)
    sealer_of(here.link).seal_into(view[:HEADER_BYTES], payload, view[HEADER_BYTES:])
    mine.inject(bytes(frame))
    mine.close()
    error = there.error()
    assert there.arrived.empty()
    return error


def mine_header(cluster: bytes, kind: FrameType, flags: int, length: int, record: int) -> bytes:
    return struct.pack(">BBHI8sQQQII", kind, flags, 0, length, cluster, 0, 0, 0, 0, record)


def well_sealed(*frames: tuple[dict[str, Any], bytes]) -> ConvoyError:
    """Return how a link ends after well-sealed frames of a valid member with arbitrary header fields."""
    here, there, mine, _ = tapped_pair()
    sealer = sealer_of(here.link)
    for fields, payload in frames:
        header = FrameHeader(
            FrameType.HIDDEN,
            flags=0,
            boundary=4,
            length=len(payload) + 16,
            cluster=cluster_of(here.link),
            plan_id=1,
            step=2,
            sequence=sealer.sequence,
            tensor=0,
            record=0,
        )._replace(**fields)
        frame = memoryview(bytearray(HEADER_BYTES + len(payload) + 16))
        encode_header_into(frame, 0, header)
        sealer.seal_into(frame[:HEADER_BYTES], payload, frame[HEADER_BYTES:])
        mine.inject(bytes(frame))
    mine.close()
    error = there.error()
    assert there.arrived.empty()
    return error


BEGIN: tuple[dict[str, Any], bytes] = ({}, encode_descriptor(LARGE))
RECORD = bytes(RECORD_BYTES)


@pytest.mark.parametrize(
    ("frames", "named"),
    [
        ([BEGIN, ({"record": 2}, RECORD)], "record 2 of a tensor does not continue it, expected 1"),
        ([BEGIN, ({"record": 0}, RECORD)], "record 0 of a tensor does not continue it, expected 1"),
        ([BEGIN, ({"record": 1}, RECORD), ({"record": 1}, RECORD)], "expected 2"),
        ([BEGIN, ({"record": 1, "boundary": 5}, RECORD)], "does not continue it"),
        ([BEGIN, ({"record": 1, "plan_id": 9}, RECORD)], "does not continue it"),
        ([BEGIN, ({"record": 1, "step": 3}, RECORD)], "does not continue it"),
        ([BEGIN, ({"record": 1, "flags": 1}, RECORD)], "does not continue it"),
        ([BEGIN, ({"record": 1}, RECORD[1:])], "does not continue it"),
        ([BEGIN, ({"record": 1}, RECORD), ({"record": 2}, RECORD)], "does not continue it"),
        ([BEGIN, BEGIN], "record 0 of a tensor does not continue it, expected 1"),
        ([BEGIN, ({"type": FrameType.STEP, "flags": 1, "boundary": 0}, b"")], "which it may not send here"),
    ],
)
def test_records_of_a_tensor_that_do_not_continue_it_are_refused(
    frames: list[tuple[dict[str, Any], bytes]], named: str
) -> None:
    error = well_sealed(*frames)
    assert isinstance(error, FrameError)
    assert named in error.message


@pytest.mark.parametrize("fields", [{"cluster": b"anothers"}, {"tensor": 1}])
def test_a_well_sealed_frame_of_another_cluster_or_tensor_is_refused(fields: dict[str, Any]) -> None:
    error = well_sealed(({"flags": 1, **fields}, SMALL))
    assert isinstance(error, SealError)
    assert "of another cluster" in error.message


LONG: tuple[dict[str, Any], bytes] = (
    {"type": FrameType.STEP, "boundary": 0},
    encode_size(RECORD_BYTES + 8),
)
PIECE: dict[str, Any] = {"type": FrameType.STEP, "boundary": 0, "record": 1}


@pytest.mark.parametrize(
    ("frames", "named"),
    [
        ([LONG, ({**PIECE, "record": 2}, RECORD)], "record 2 of a STEP does not continue it, expected 1"),
        ([LONG, ({**PIECE, "step": 3}, RECORD)], "does not continue it"),
        ([LONG, ({**PIECE, "boundary": 3}, RECORD)], "does not continue it"),
        ([LONG, ({**PIECE, "flags": 1}, RECORD)], "does not continue it"),
        ([LONG, (PIECE, RECORD[1:])], "does not continue it"),
        ([LONG, (PIECE, RECORD), ({**PIECE, "record": 2}, RECORD[:8])], "does not continue it"),
        ([LONG, LONG], "record 0 of a STEP does not continue it, expected 1"),
        ([LONG, ({"record": 1, "boundary": 0}, RECORD)], "which it may not send here"),
        ([LONG, (PIECE, RECORD), ({**PIECE, "record": 2, "flags": 1}, RECORD[:8])], "its type says"),
    ],
)
def test_records_of_a_message_that_do_not_continue_it_are_refused(
    frames: list[tuple[dict[str, Any], bytes]], named: str
) -> None:
    error = well_sealed(*frames)
    assert isinstance(error, FrameError)
    assert named in error.message


def test_a_message_with_a_layer_boundary_is_refused() -> None:
    error = well_sealed(({"type": FrameType.STEP, "flags": 1, "boundary": 777}, encode_message(STEP)))
    assert isinstance(error, FrameError)
    assert "flags, boundary or record of a tensor" in error.message


def test_the_end_of_a_handshake_is_read_in_place_of_the_first_frame_alone() -> None:
    end = encode_handshake(FrameType.HANDSHAKE_END, bytes(42))
    _, there, mine, _ = tapped_pair()
    mine.inject(end)
    error = there.error()
    assert isinstance(error, Incompatible)
    assert "alpha speaks protocol version 0" in error.message
    here, there, mine, _ = tapped_pair()
    here.link.send(STEP)
    there.next()
    mine.inject(end)
    assert "0x43 is not the type of a sealed frame" in there.error().message


def test_another_handshake_frame_in_place_of_the_first_is_refused() -> None:
    _, there, mine, _ = tapped_pair()
    mine.inject(encode_handshake(FrameType.HANDSHAKE_1, bytes(100)))
    error = there.error()
    assert isinstance(error, FrameError)
    assert "sent HANDSHAKE_1 after the handshake" in error.message


SMALL = encode_descriptor(WireTensor("float32", (2,), bytes(8))) + bytes(8)


def huge_descriptor() -> bytes:
    return struct.pack("<BB6xQ6Q", 1, 1, 4 << 40, 1 << 40, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "payload", "flags", "record", "named"),
    [
        (FrameType.STEP, b"nonsense", 1, 0, "is not the message its type says"),
        (FrameType.PING, b"nonsense", 0, 0, "flags, boundary or record of a tensor"),
        (FrameType.STEP, b"nonsense", 0, 0, "a STEP in records begins with 8 bytes, expected 4"),
        (FrameType.STEP, struct.pack(">I", RECORD_BYTES), 0, 0, "comes in records, but fits in one frame"),
        (FrameType.STEP, struct.pack(">I", (64 << 20) + 1), 0, 0, "is over its limit of 67108864"),
        (FrameType.STEP, b"nonsense", 1, 3, "flags, boundary or record of a tensor"),
        (FrameType.HIDDEN, b"", 1, 0, "fewer than 64"),
        (FrameType.HIDDEN, huge_descriptor(), 0, 0, "claims 4398046511104 bytes, and the limit is 1048576"),
        (FrameType.HIDDEN, bytes(64), 1, 0, "dtype 0"),
        (FrameType.HIDDEN, b"x" * 100, 1, 5, "begins with record 5"),
        (FrameType.HIDDEN, SMALL, 0, 0, "tensor of 8 bytes has 72 bytes"),
        (FrameType.HIDDEN, SMALL + b"more", 1, 0, "tensor of 8 bytes has 76 bytes"),
        (FrameType.HIDDEN, encode_descriptor(LARGE), 1, 0, f"tensor of {LARGE.nbytes} bytes has 64 bytes"),
        (FrameType.HIDDEN, encode_descriptor(LARGE) + b"more", 0, 0, "has 68 bytes"),
        (
            FrameType.HIDDEN,
            encode_descriptor(WireTensor("float32", (2,), bytes(8))),
            1,
            0,
            "tensor of 8 bytes has 64 bytes",
        ),
    ],
)
def test_well_sealed_nonsense_of_a_member_is_refused_by_name(
    kind: FrameType, payload: bytes, flags: int, record: int, named: str
) -> None:
    error = sealed_nonsense(kind, payload, flags=flags, record=record)
    assert isinstance(error, FrameError)
    assert named in error.message


def test_one_bad_link_leaves_the_others_alone() -> None:
    _, bad, mine, _ = tapped_pair()
    here, good, _, _ = tapped_pair()
    mine.inject(bytes(HEADER_BYTES))
    bad.error()
    here.link.send_tensor(LARGE, plan_id=1, step=1, boundary=1)
    assert isinstance(good.next(), ReceivedTensor)


@pytest.mark.parametrize(
    "fault",
    [Drop(M1), Cut(M1, 100), Cut(M1, 4), FlipBit(M1, 100), Stall(M1), Drop(M3), Cut(M3, 50), FlipBit(M3, -1)],
)
def test_a_disturbed_handshake_fails_at_both_ends_within_its_deadline(fault: Fault) -> None:
    options = LinkOptions(handshake_timeout_s=0.5)
    with pytest.raises(PeerError):
        memory_link_pair(ALPHA, BETA, faults=[fault], options=options)


def test_memory_streams_fit_the_protocol() -> None:
    stream: Stream = memory_stream_pair()[0]
    assert isinstance(stream, MemoryStream)

"""What can be done to the bytes of a standing link: nothing but end it, by name, at both ends."""

from __future__ import annotations

import socket

import pytest

from adversary.arena import Arena, AttackedLink
from adversary.ledger import Row
from adversary.middle import Change, drop, flip, instead, keep, late, nth, repeat, swap_from
from adversary.process import Event
from adversary.units import FRAME_BOUNDARIES, FRAME_FIELDS, TLS_RECORD_FIELDS
from convoy.crypto.cipher import TAG_BYTES
from convoy.wire.frame import HEADER_BYTES, MAX_PAYLOAD_BYTES, RECORD_BYTES

LARGE_BYTES = 3 * RECORD_BYTES


def outer_or(arena: Arena, inner: str) -> set[str]:
    """Return the listener's error: TLS breaks the link first; alone, the inner layer names it ``inner``."""
    return {inner} if arena.is_bare else {"LinkBroken"}


def check_ends(link: AttackedLink, row: Row, far_errors: set[str]) -> Event:
    """Check that both ends ended, the attacked one with a named error."""
    near, far = link.ends()
    row.tried(far["error"])
    assert far["error"] in far_errors, far
    assert near["error"] == "LinkBroken", near
    return far


@pytest.mark.attack("drop")
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_dropped_frame_ends_the_link_at_the_next(arena: Arena, row: Row, index: int) -> None:
    link = arena.link()
    link.up.tamper = nth(index, drop)
    link.steps(*range(5))
    check_ends(link, row, outer_or(arena, "SealError"))
    assert link.all_arrived() == list(range(index))


@pytest.mark.attack("drop all")
def test_a_network_that_swallows_everything_is_noticed_by_both_ends(arena: Arena, row: Row) -> None:
    alpha = arena.start("alpha", ping_after_s=0.3, gone_after_s=1.5)
    beta = arena.start("beta", ping_after_s=0.3, gone_after_s=1.5)
    middle = arena.middle(target=beta.address)
    near = alpha.dial("beta", middle.address)
    alpha.wait("link", near)
    far = beta.wait("link in")["key"]
    for way in (middle.up(0), middle.down(0), middle.up(1), middle.down(1)):
        way.tamper = drop
    for victim, key in ((alpha, near), (beta, far)):
        ended = victim.wait("ended", key)
        row.tried(ended["error"])
        assert ended["error"] == "LinkBroken"
    for victim in (alpha, beta):
        assert not victim.crashes
        victim.stop()


@pytest.mark.attack("cut")
@pytest.mark.parametrize("connection", [0, 1])
def test_a_cut_of_either_connection_ends_the_link_at_both_ends(
    arena: Arena, row: Row, connection: int
) -> None:
    link = arena.link()
    link.steps(0)
    assert link.arrived()["step"] == 0
    link.middle.cut(connection)
    check_ends(link, row, {"LinkBroken"})


@pytest.mark.attack("truncate at each boundary")
def test_a_frame_cut_short_anywhere_is_never_delivered(arena: Arena, row: Row) -> None:
    boundaries = FRAME_BOUNDARIES if arena.is_bare else (0, 1, 3, 5, 6, 21, 60)
    for num_bytes in boundaries:
        link = arena.link()
        link.up.tamper = nth(1, keep(num_bytes))
        link.steps(0, 1)
        check_ends(link, row, {"LinkBroken"})
        assert link.all_arrived() == [0]


@pytest.mark.attack("truncate a tensor at each record")
@pytest.mark.parametrize("records", [1, 2, 3])
def test_a_tensor_cut_short_at_a_record_is_never_delivered(arena: Arena, row: Row, records: int) -> None:
    link = arena.link()
    frames_to_units = 1 if arena.is_bare else 8
    link.up.tamper = nth(records * frames_to_units, keep(0))
    link.tensor(step=3, boundary=4, size=LARGE_BYTES)
    check_ends(link, row, {"LinkBroken"})
    assert link.all_arrived() == []


@pytest.mark.attack("delay")
def test_a_delay_changes_nothing_but_the_time(arena: Arena, row: Row) -> None:
    link = arena.link()
    link.up.tamper = nth(1, late(0.5))
    link.steps(0, 1, 2)
    assert [link.arrived()["step"] for _ in range(3)] == [0, 1, 2]
    row.tried("arrives late and whole")
    link.middle.close()


@pytest.mark.attack("reorder")
@pytest.mark.parametrize("index", [0, 1, 2])
def test_frames_in_another_order_end_the_link(arena: Arena, row: Row, index: int) -> None:
    link = arena.link()
    link.up.tamper = swap_from(index)
    link.steps(*range(5))
    check_ends(link, row, outer_or(arena, "SealError"))
    assert link.all_arrived() == list(range(index))


@pytest.mark.attack("duplicate")
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_frame_sent_twice_counts_once(arena: Arena, row: Row, index: int) -> None:
    link = arena.link()
    link.up.tamper = nth(index, repeat)
    link.steps(*range(4))
    check_ends(link, row, outer_or(arena, "SealError"))
    assert link.all_arrived() == list(range(index + 1))


@pytest.mark.attack("replay in the same link")
def test_a_frame_played_again_later_ends_the_link(arena: Arena, row: Row) -> None:
    for old in (0, 3):
        link = arena.link()
        before = len(link.up.seen)
        link.steps(*range(5))
        assert [link.arrived()["step"] for _ in range(5)] == list(range(5))
        link.up.inject(link.up.wait_seen(before + 5)[before + old])
        check_ends(link, row, outer_or(arena, "SealError"))
        assert link.all_arrived() == []


@pytest.mark.attack("replay across links")
def test_a_frame_of_an_earlier_link_opens_in_no_other(arena: Arena, row: Row) -> None:
    first = arena.link()
    before = len(first.up.seen)
    first.steps(0, 1)
    first.arrived(), first.arrived()
    recorded = first.up.wait_seen(before + 2)[before : before + 2]
    first.middle.cut(0)
    first.ends()
    for delivered in (0, 1):
        link = arena.link()
        if delivered:
            link.steps(0)
            assert link.arrived()["step"] == 0
        link.up.inject(recorded[delivered])
        check_ends(link, row, outer_or(arena, "SealError"))
        assert link.all_arrived() == []


@pytest.mark.attack("replay of a whole link")
def test_all_that_a_dialler_ever_said_said_again_makes_no_link(arena: Arena, row: Row) -> None:
    link = arena.link()
    link.steps(0)
    link.arrived()
    said = [b"".join(link.middle.up(connection).seen) for connection in (0, 1)]
    link.middle.cut(0)
    link.ends()
    arena.beta.now("refused"), arena.beta.now("link in")
    socks = [socket.create_connection(arena.beta.address) for _ in said]
    for sock, data in zip(socks, said, strict=True):
        sock.sendall(data)
    refused = arena.beta.wait("refused")
    row.tried(refused["error"])
    assert refused["error"] == "HandshakeError"
    assert not arena.beta.now("link in")
    for sock in socks:
        sock.close()


@pytest.mark.attack("reflect")
def test_a_frame_sent_back_to_its_sender_ends_the_link(arena: Arena, row: Row) -> None:
    link = arena.link()
    before = len(link.up.seen)
    link.steps(0)
    link.arrived()
    frame = link.up.wait_seen(before + 1)[before]
    link.down.inject(frame)
    near = link.near_end()
    row.tried(near["error"])
    assert near["error"] in outer_or(arena, "SealError")
    assert not arena.alpha.now("arrived", link.near)
    link.far_end()


@pytest.mark.attack("reflect on the idle way of a connection")
def test_bytes_on_the_way_that_is_not_used_are_never_read(arena: Arena, row: Row) -> None:
    link = arena.link()
    before = len(link.up.seen)
    link.steps(0)
    link.arrived()
    link.middle.down(0).inject(link.up.wait_seen(before + 1)[before])
    link.steps(1)
    assert link.arrived()["step"] == 1
    assert not arena.alpha.now("arrived", link.near)
    row.tried("never read")
    link.middle.cut(0)
    link.ends()


@pytest.mark.attack("splice frames of two links")
def test_a_frame_of_another_living_link_ends_the_link(arena: Arena, row: Row) -> None:
    one, other = arena.link(), arena.link()
    before = len(one.up.seen)
    one.steps(0, 1)
    one.arrived(), one.arrived()
    spliced = one.up.wait_seen(before + 2)[before + 1]
    other.steps(0)
    assert other.arrived()["step"] == 0
    other.up.tamper = nth(0, instead(spliced))
    other.steps(1)
    check_ends(other, row, outer_or(arena, "SealError"))
    assert other.all_arrived() == []
    one.steps(2)
    assert one.arrived()["step"] == 2
    one.middle.cut(0)
    one.ends()


@pytest.mark.attack("splice the ways of two links")
def test_frames_of_a_link_led_into_another_end_both(arena: Arena, row: Row) -> None:
    one, other = arena.link(), arena.link()
    before = [len(link.up.seen) for link in (one, other)]
    held = []
    for link, number in zip((one, other), before, strict=True):
        link.up.tamper = drop
        link.steps(0)
        held.append(link.up.wait_seen(number + 1)[number])
    one.up.inject(held[1])
    other.up.inject(held[0])
    for link in (one, other):
        check_ends(link, row, outer_or(arena, "SealError"))
        assert link.all_arrived() == []


@pytest.mark.attack("swap two tensors of one step")
def test_two_tensors_of_a_step_keep_their_order(arena: Arena, row: Row) -> None:
    link = arena.link()
    link.up.tamper = swap_from(0)
    link.tensor(step=3, boundary=4, size=64, fill=1)
    link.tensor(step=3, boundary=8, size=64, fill=2)
    check_ends(link, row, outer_or(arena, "SealError"))
    assert link.all_arrived() == []


@pytest.mark.attack("swap two frames of different types")
def test_a_composition_and_a_tensor_keep_their_order(arena: Arena, row: Row) -> None:
    link = arena.link()
    link.up.tamper = swap_from(0)
    link.steps(3)
    link.tensor(step=3, boundary=4, size=64)
    check_ends(link, row, outer_or(arena, "SealError"))
    assert link.all_arrived() == []


@pytest.mark.attack("swap the headers of two frames", layer="inner alone")
@pytest.mark.parametrize("arena", ["inner alone"], indirect=True)
@pytest.mark.parametrize("same_type", [True, False])
def test_a_sealed_payload_opens_under_its_own_header_alone(arena: Arena, row: Row, same_type: bool) -> None:
    link = arena.link()
    before = len(link.up.seen)
    link.up.tamper = drop
    link.tensor(step=3, boundary=4, size=64, fill=1)
    if same_type:
        link.tensor(step=3, boundary=8, size=64, fill=2)
    else:
        link.steps(3)
    first, second = link.up.wait_seen(before + 2)[before:]
    forged = first[:4] + second[4:8] + first[8:HEADER_BYTES] + second[HEADER_BYTES:]
    link.up.inject(forged)
    check_ends(link, row, {"SealError"})
    assert link.all_arrived() == []


def flipped(arena: Arena, row: Row, change: Change, errors: set[str]) -> None:
    link = arena.link()
    link.up.tamper = nth(1, change)
    link.steps(0, 1)
    assert link.arrived()["step"] == 0
    # A longer length waits for more: give it what comes next, and then nothing more.
    link.steps(2)
    end = arena.beta.wait_briefly("ended", link.far, 0.05)
    if end is None:
        link.middle.cut(0)
        end = link.far_end()
    link.near_end()
    row.tried(end["error"])
    assert end["error"] in errors, end
    assert link.all_arrived() == []


INNER_ERRORS = {
    "type": {"FrameError", "FrameTooLong", "SealError"},
    "flags": {"FrameError"},
    "boundary": {"FrameError"},
    "length": {"FrameTooLong", "FrameError", "SealError", "LinkBroken"},
    "cluster": {"SealError"},
    "plan_id": {"SealError"},
    "step": {"SealError"},
    "sequence": {"SealError"},
    "tensor": {"SealError"},
    "record": {"FrameError"},
}


@pytest.mark.attack("flip each bit of each header field", layer="inner alone")
@pytest.mark.parametrize("arena", ["inner alone"], indirect=True)
@pytest.mark.parametrize("field", list(FRAME_FIELDS))
def test_a_flipped_bit_of_a_frames_header_ends_the_link(arena: Arena, row: Row, field: str) -> None:
    for bit in range(*FRAME_FIELDS[field]):
        # Without LAST a step's frame tells the size of a long one, until its tag is looked at.
        is_last = field == "flags" and bit == FRAME_FIELDS[field][1] - 1
        flipped(arena, row, flip(bit), {"SealError"} if is_last else INNER_ERRORS[field])


@pytest.mark.attack("flip each bit of each header field", layer="both")
@pytest.mark.parametrize("arena", ["both"], indirect=True)
@pytest.mark.parametrize("field", list(TLS_RECORD_FIELDS))
def test_a_flipped_bit_of_a_records_header_ends_the_link(arena: Arena, row: Row, field: str) -> None:
    for bit in range(*TLS_RECORD_FIELDS[field]):
        flipped(arena, row, flip(bit), {"LinkBroken"})


@pytest.mark.attack("flip bits of payload and tag")
def test_a_flipped_bit_behind_the_header_ends_the_link(arena: Arena, row: Row) -> None:
    start = (HEADER_BYTES if arena.is_bare else 5) * 8
    size = 8 * (20 + TAG_BYTES)  # at least so long is a step
    for bit in range(start, start + size, 11):
        flipped(arena, row, flip(bit), outer_or(arena, "SealError"))


@pytest.mark.attack("an oversized length in every frame type", layer="inner alone")
@pytest.mark.parametrize("arena", ["inner alone"], indirect=True)
def test_a_length_over_its_limit_is_refused_before_memory_is_taken(arena: Arena, row: Row) -> None:
    before = arena.beta.rss_bytes()
    for kind, limit in MAX_PAYLOAD_BYTES.items():
        for length in (limit + TAG_BYTES + 1, 1 << 31, (1 << 32) - 1):
            link = arena.link()
            link.up.inject(bytes([kind, 1, 0, 0]) + length.to_bytes(4, "big") + bytes(40))
            far = link.far_end()
            link.near_end()
            row.tried(far["error"])
            assert far["error"] == "FrameTooLong", far
    assert arena.beta.rss_bytes() - before < 32 << 20

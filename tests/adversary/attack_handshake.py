"""What can be done to a handshake: the link does not come about, and each end says why by name."""

from __future__ import annotations

import time

import pytest

from adversary.arena import CLUSTER, Arena
from adversary.ledger import Row
from adversary.middle import Change, Middle, Tamper, drop, flip, instead, keep, nth, put, repeat
from adversary.process import Event, VictimProcess
from adversary.units import PREAMBLE_FIELDS, message_1_fields, message_2_fields, message_3_fields
from convoy.wire.frame import HANDSHAKE_PREAMBLE_BYTES, MAX_HANDSHAKE_BYTES, encode_handshake
from convoy.wire.messages.control import FrameType

PREAMBLE = HANDSHAKE_PREAMBLE_BYTES
REFUSALS = {"HandshakeError", "Incompatible", "FrameError", "FrameTooLong"}
FAILURES = {*REFUSALS, "HandshakeLate", "PeerUnreachable", "PeerBusy"}
MESSAGE_1 = message_1_fields("alpha", "beta", CLUSTER)
# (connection, unit) of each message where the inner layer stands alone; unit 0 is what stands for TLS.
OPENING_UP, M1, M3 = (0, 1), (0, 2), (0, 3)
OPENING_DOWN, M2 = (1, 1), (1, 1)

only_inner = pytest.mark.parametrize("arena", ["inner alone"], indirect=True)


def dialled_through(arena: Arena, middle: Middle) -> tuple[Event, Event]:
    """Return how a dial that must not succeed failed: (at the dialler, at the listener)."""
    arena.beta.now("refused")
    near = arena.failed_dial(middle)
    far = refusal(arena.beta)
    middle.close()
    return near, far


def refusal(beta: VictimProcess) -> Event:
    """Return the listener's next refusal, without those of connections that earlier dials left unpaired."""
    while "and the other never came" in (event := beta.wait("refused"))["message"]:
        pass
    return event


def up(at: tuple[int, int], change: Change) -> dict[int, Tamper]:
    return {at[0]: nth(at[1], change)}


def check_refused(arena: Arena, row: Row, middle: Middle, far_errors: set[str] = REFUSALS) -> Event:
    near, far = dialled_through(arena, middle)
    row.tried(far["error"])
    assert far["error"] in far_errors, far
    assert near["error"] in FAILURES, near
    return far


def honest_handshake(arena: Arena) -> dict[str, list[int]]:
    """Return how many units there are on each way of a link until it stands."""
    link = arena.link()
    link.steps(0)
    link.arrived()
    ways = {"up": [link.middle.up(i) for i in (0, 1)], "down": [link.middle.down(i) for i in (0, 1)]}
    counts = {name: [len(way.seen) for way in both] for name, both in ways.items()}
    counts["up"][0] -= 1  # the step
    link.middle.cut(0)
    link.ends()
    return counts


@pytest.fixture(scope="module")
def hasty(arena: Arena) -> tuple[VictimProcess, VictimProcess]:
    """Return alpha and beta with a deadline that soon ends a handshake in which something was swallowed.

    An honest handshake of a busy machine needs a longer one.
    """
    return arena.start("alpha", handshake_timeout_s=1.5), arena.start("beta", handshake_timeout_s=1.5)


@pytest.mark.attack("any handshake message dropped, cut, doubled or changed")
@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("drop", drop),
        ("cut before", keep(0)),
        ("cut inside", keep(7)),
        ("double", repeat),
        ("flip", flip(8 * 5 + 3)),
    ],
)
def test_a_disturbed_handshake_makes_no_link_and_ends_in_time(
    arena: Arena, hasty: tuple[VictimProcess, VictimProcess], row: Row, what: str, change: Change
) -> None:
    counts = honest_handshake(arena)
    alpha, beta = hasty
    beta.now("refused")
    dials: list[tuple[str, Middle, bool]] = []
    for way, per_connection in counts.items():
        for connection, number in enumerate(per_connection):
            for index in range(number):
                middle = arena.middle(target=beta.address, **{way: {connection: nth(index, change)}})
                # The listener says nothing on the first connection, the dialler nothing after the opening of
                # the second: what more comes there is never read.
                unread = arena.is_bare and (way, connection) in {("down", 0), ("up", 1)}
                dials.append((alpha.dial("beta", middle.address, 8.0), middle, unread))
    for key, middle, unread in dials:
        found = alpha.wait_either(("failed", "link"), key)
        if found["event"] == "link":
            # M3 is not answered, and TLS has records that mean nothing: the first step tells.
            alpha.tell("steps", key=key, numbers=[1])
            alpha.tell("ping", key=key, timeout_s=4.0)
            answer = alpha.wait_either(("ponged", "ping failed"), key)
            if answer["event"] == "ponged":
                assert unread or not arena.is_bare, "a change of the inner handshake went unnoticed"
                row.tried("no effect on the link")
                alpha.tell("close", key=key)
                continue
            found = alpha.wait("ended", key)
        row.tried(found["error"])
        assert found["error"] in {*FAILURES, "LinkBroken"}, (what, found)
        middle.close()
    refusals = {event["error"] for event in beta.now("refused")}
    assert refusals <= FAILURES, refusals
    assert not [*alpha.crashes, *beta.crashes]


@only_inner
@pytest.mark.attack("flip a bit of each field of M1", layer="inner alone")
@pytest.mark.parametrize("field", [*PREAMBLE_FIELDS, *MESSAGE_1])
def test_a_changed_first_message_makes_no_link(arena: Arena, row: Row, field: str) -> None:
    start, end = PREAMBLE_FIELDS.get(field) or [PREAMBLE + at for at in MESSAGE_1[field]]
    for byte in sorted({start, (start + end) // 2, end - 1}):
        for bit in (0, 7):
            middle = arena.middle(up=up(M1, then_hang_up(flip(8 * byte + bit), field)))
            check_refused(arena, row, middle)


@only_inner
@pytest.mark.attack("flip a bit of each field of M2", layer="inner alone")
@pytest.mark.parametrize("field", [*PREAMBLE_FIELDS, *message_2_fields()])
def test_a_changed_second_message_makes_no_link(arena: Arena, row: Row, field: str) -> None:
    start, end = PREAMBLE_FIELDS.get(field) or [PREAMBLE + at for at in message_2_fields()[field]]
    for byte in sorted({start, (start + end) // 2, end - 1}):
        for bit in (0, 7):
            middle = arena.middle(down=up(M2, then_hang_up(flip(8 * byte + bit), field)))
            near, far = dialled_through(arena, middle)
            row.tried(near["error"])
            # A dialler that waits for more sees only that the attacker hung up.
            assert near["error"] in ({"HandshakeLate"} if field == "length" else set()) | REFUSALS, near
            assert far["error"] in REFUSALS, far


@only_inner
@pytest.mark.attack("flip a bit of each field of M3", layer="inner alone")
@pytest.mark.parametrize("field", [*PREAMBLE_FIELDS, *message_3_fields()])
def test_a_changed_third_message_makes_no_link(arena: Arena, row: Row, field: str) -> None:
    start, end = PREAMBLE_FIELDS.get(field) or [PREAMBLE + at for at in message_3_fields()[field]]
    for byte in sorted({start, (start + end) // 2, end - 1}):
        for bit in (0, 7):
            middle = arena.middle(up=up(M3, then_hang_up(flip(8 * byte + bit), field)))
            near, far = dialled_through_to_end(arena, middle)
            row.tried(far["error"])
            assert far["error"] in REFUSALS, far
            assert near["error"] in {*REFUSALS, "LinkBroken"}, near


def then_hang_up(change: Change, field: str) -> Change:
    """Hang up after a change. A changed length makes the other end wait for more, up to its deadline."""
    if field != "length":
        return change

    def changed(unit: bytes) -> tuple[bytes, ...]:
        (said,) = change(unit)
        return tuple(keep(len(said))(said))

    return changed


def dialled_through_to_end(arena: Arena, middle: Middle) -> tuple[Event, Event]:
    """Dial as `dialled_through`, for a dialler that may believe in its link until the first frame."""
    alpha, beta = arena.alpha, arena.beta
    beta.now("refused")
    key = alpha.dial("beta", middle.address)
    near = alpha.wait_either(("failed", "ended"), key)
    far = refusal(beta)
    middle.close()
    return near, far


def refused_by_the_listener(arena: Arena, middle: Middle) -> Event:
    """Dial through ``middle``, and end the dialler's wait once the listener has refused it."""
    arena.beta.now("refused")
    key = arena.alpha.dial("beta", middle.address)
    # A connection that only ended is the other one of this dial, or one of the dial before.
    while "closed the connection during the handshake" in (far := refusal(arena.beta))["message"]:
        pass
    middle.close()
    arena.alpha.wait_either(("failed", "ended"), key)
    return far


@only_inner
@pytest.mark.attack("a downgrade of the AEAD", layer="inner alone")
@pytest.mark.parametrize(
    "offer", [b"\2\2\2", b"\2\x63\2", b"\2\x01\x01", b"\0\1\2", b"\1\2\2", b"\2\x63\x63", b"\xff\1\2"]
)
def test_another_offer_of_ciphers_is_noticed(arena: Arena, row: Row, offer: bytes) -> None:
    at = PREAMBLE + MESSAGE_1["ciphers"][0]
    link = arena.link()
    honest = link.middle.up(0).seen[M1[1]][at:]
    link.middle.cut(0)
    link.ends()
    assert offer != honest
    check_refused(arena, row, arena.middle(up=up(M1, put(at, offer))), {"HandshakeError"})


@only_inner
@pytest.mark.attack("a downgrade of the AEAD", layer="inner alone")
@pytest.mark.parametrize("cipher", [0, 1, 2, 3, 0xFF])
def test_another_choice_of_cipher_is_noticed(arena: Arena, row: Row, cipher: int) -> None:
    at = PREAMBLE + message_2_fields()["cipher"][0]
    link = arena.link()
    honest = link.middle.down(1).seen[M2[1]][at]
    link.middle.cut(0)
    link.ends()
    if cipher == honest:
        return
    near, _ = dialled_through(arena, arena.middle(down=up(M2, put(at, bytes([cipher])))))
    row.tried(near["error"])
    assert near["error"] == "HandshakeError", near


@only_inner
@pytest.mark.attack("another protocol version", layer="inner alone")
@pytest.mark.parametrize("version", [0, 2, 0xFFFF])
def test_a_changed_version_is_named_and_nothing_is_negotiated(arena: Arena, row: Row, version: int) -> None:
    changed = put(PREAMBLE, version.to_bytes(2, "big"))
    near, far = dialled_through(arena, arena.middle(up=up(M1, changed)))
    row.tried(far["error"])
    assert far["error"] == "Incompatible"
    assert near["error"] in {"HandshakeError", "Incompatible"}
    near, far = dialled_through(arena, arena.middle(down=up(M2, changed)))
    row.tried(near["error"])
    assert near["error"] == "Incompatible"


@only_inner
@pytest.mark.attack("an oversized length in every handshake frame type", layer="inner alone")
@pytest.mark.parametrize("kind", list(MAX_HANDSHAKE_BYTES))
@pytest.mark.parametrize("at", [OPENING_UP, M1, M3])
def test_a_handshake_length_over_its_limit_is_refused_before_memory_is_taken(
    arena: Arena, row: Row, kind: FrameType, at: tuple[int, int]
) -> None:
    for length in (MAX_HANDSHAKE_BYTES[kind] + 1, 0xFFFF):
        said = b"CNVY" + bytes([kind, 0]) + length.to_bytes(2, "big") + bytes(1000)
        far = refused_by_the_listener(arena, arena.middle(up=up(at, instead(said))))
        row.tried(far["error"])
        assert far["error"] == "FrameTooLong", far


@only_inner
@pytest.mark.attack("a handshake frame in the place of another", layer="inner alone")
@pytest.mark.parametrize("kind", list(MAX_HANDSHAKE_BYTES))
@pytest.mark.parametrize("at", [OPENING_UP, M1, M3])
def test_a_handshake_frame_out_of_turn_is_refused(
    arena: Arena, row: Row, kind: FrameType, at: tuple[int, int]
) -> None:
    said = encode_handshake(kind, bytes(min(42, MAX_HANDSHAKE_BYTES[kind])))
    far = refused_by_the_listener(arena, arena.middle(up=up(at, instead(said))))
    row.tried(far["error"])
    assert far["error"] in {"HandshakeError", "Incompatible"}, far


@only_inner
@pytest.mark.attack("a forged end of a handshake", layer="inner alone")
@pytest.mark.parametrize("version", [1, 9])
def test_a_forged_end_denies_service_and_does_nothing_else(arena: Arena, row: Row, version: int) -> None:
    end = encode_handshake(
        FrameType.HANDSHAKE_END,
        version.to_bytes(2, "big") + arena.roster.epoch.to_bytes(8, "big") + arena.roster.digest,
    )
    near, far = dialled_through(arena, arena.middle(down=up(M2, instead(end))))
    row.tried(near["error"])
    assert near["error"] == ("HandshakeError" if version == 1 else "Incompatible"), near
    assert far["error"] in REFUSALS


@only_inner
@pytest.mark.attack("pair connections of two links", layer="inner alone")
def test_connections_of_two_links_never_make_one(arena: Arena, row: Row) -> None:
    openings: dict[int, bytes] = {}

    def exchanged(mine: int, other: int) -> Change:
        def change(unit: bytes) -> tuple[bytes, ...]:
            openings[mine] = unit
            deadline_s = time.monotonic() + 2
            while other not in openings and time.monotonic() < deadline_s:
                time.sleep(0.005)  # the two dials run at once
            return (openings[other],)

        return change

    arena.beta.now("refused")
    middles = [arena.middle(up={1: nth(1, exchanged(index, 1 - index))}) for index in (0, 1)]
    keys = [arena.alpha.dial("beta", middle.address) for middle in middles]
    for key in keys:
        near = arena.alpha.wait_either(("failed", "ended"), key)
        row.tried(near["error"])
        assert near["error"] in FAILURES
    for _ in keys:
        assert arena.beta.wait("refused")["error"] in REFUSALS


@only_inner
@pytest.mark.attack("pair connections of two links", layer="inner alone")
def test_a_link_id_changed_on_both_connections_is_noticed(arena: Arena, row: Row) -> None:
    other = put(PREAMBLE + 1, bytes(16))
    middle = arena.middle(up={0: nth(1, other), 1: nth(1, other)})
    far = check_refused(arena, row, middle, {"HandshakeError"})
    assert "M1 names another link than its connections" in far["message"]


@only_inner
@pytest.mark.attack("pair connections of two links", layer="inner alone")
def test_two_connections_of_one_direction_do_not_pair(arena: Arena, row: Row) -> None:
    middle = arena.middle(up={1: nth(1, put(PREAMBLE, b"\0"))})
    check_refused(arena, row, middle, {"HandshakeError"})


@pytest.mark.attack("lead a connection to another member")
@pytest.mark.parametrize("connections", [(0,), (1,), (0, 1)])
def test_a_connection_led_to_another_member_makes_no_link(
    arena: Arena, row: Row, connections: tuple[int, ...]
) -> None:
    gamma = arena.start("gamma")
    middle = arena.middle(targets=dict.fromkeys(connections, gamma.address))
    near = arena.failed_dial(middle)
    row.tried(near["error"])
    assert near["error"] == "HandshakeError", near
    assert not gamma.now("link in")
    assert not gamma.crashes
    gamma.stop()


@only_inner
@pytest.mark.attack("splice the handshakes of two links", layer="inner alone")
@pytest.mark.parametrize("way", ["M1", "M2", "M3"])
def test_a_handshake_message_of_another_link_is_refused(arena: Arena, row: Row, way: str) -> None:
    link = arena.link()
    connection, unit = {"M1": M1, "M2": M2, "M3": M3}[way]
    ways = link.middle.down if way == "M2" else link.middle.up
    recorded = ways(connection).seen[unit]
    link.middle.cut(0)
    link.ends()
    side = "down" if way == "M2" else "up"
    middle = arena.middle(**{side: {connection: nth(unit, instead(recorded))}})
    near, far = dialled_through_to_end(arena, middle)
    row.tried(near["error"] if way == "M2" else far["error"])
    assert far["error"] == "HandshakeError", far
    assert near["error"] == "HandshakeError", near


@only_inner
@pytest.mark.attack("reflect a handshake", layer="inner alone")
def test_a_first_message_sent_back_is_no_second_one(arena: Arena, row: Row) -> None:
    middle = arena.middle(down=up(M2, drop))
    arena.beta.now("refused")
    key = arena.alpha.dial("beta", middle.address)
    first = middle.up(0).wait_seen(3)[2]
    middle.down(1).wait_seen(2)
    middle.down(1).inject(first)
    near = arena.alpha.wait("failed", key)
    row.tried(near["error"])
    assert near["error"] == "HandshakeError", near
    assert arena.beta.wait("refused")["error"] in REFUSALS
    middle.close()

"""Counters that never repeat, keys that turn, and secrets that are gone when they are done.

Tests named after a defect of the lineage (docs: lineage, section 8) say which one they prevent.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

import pytest

from convoy.crypto import keys, seal
from convoy.crypto.cipher import TAG_BYTES, Aead, Cipher
from convoy.crypto.handshake import Initiator, Responder, Secrets
from convoy.crypto.seal import Opener, Sealer, SealLimits, make_sealing
from convoy.errors import FrameError, HandshakeError, LinkBroken, SealError
from convoy.testing.links import memory_link_pair
from convoy.testing.streams import FlipBit
from convoy.transport.link.link import LinkOptions, ReceivedTensor
from convoy.wire.frame import RECORD_BYTES
from convoy.wire.messages.control import BlockGrant, Row, Step
from convoy.wire.tensor import WireTensor
from crypto.test_handshake import both_ends, run
from support.link_parts import opener_of, sealer_of, threads_of
from support.links import End
from support.members import make_local_members

ALPHA, BETA = make_local_members(["alpha", "beta"])
HEADER = bytes(48)


@pytest.fixture
def nonces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bytes]]:
    """Return (key, nonce) of everything that is sealed while the test runs."""
    used: list[tuple[bytes, bytes]] = []

    class Noting:
        def __init__(self, key: bytes, aead: Aead) -> None:
            self._key = key
            self._aead = aead

        def encrypt_into(self, nonce: bytes, data: bytes, aad: bytes, out: memoryview) -> int:
            used.append((self._key, nonce))
            return self._aead.encrypt_into(nonce, data, aad, out)

        def decrypt_into(self, nonce: bytes, data: bytes, aad: bytes, out: memoryview) -> int:
            return self._aead.decrypt_into(nonce, data, aad, out)

    make = Cipher.make
    monkeypatch.setattr(Cipher, "make", lambda cipher, key: Noting(bytes(key), make(cipher, key)))
    return used


def links_that_talk(
    num_requests: int,
    options: LinkOptions | None = None,
    goes_on: Callable[[], bool] = lambda: False,
) -> None:
    """Run requests one after the other over one link, as head and peer speak: both ways, several steps each.

    More than ``num_requests`` as long as it ``goes_on``: what happens beside takes the time it takes.
    """
    links = memory_link_pair(ALPHA, BETA, options=options or LinkOptions())
    head, peer = End(links[0]).start(), End(links[1]).start()
    hidden = WireTensor("float32", (1, 8), bytes(32))
    for request in range(100_000):
        if request >= num_requests and not goes_on():
            break
        for number in range(3):  # admit, then two decodes
            admit = [BlockGrant.append(request, 0, [1])] if number == 0 else []
            step = Step(number, [], admit, [Row(request, number, 1, 1)], b"\1\0\0\0")
            head.link.send(step, plan_id=1, step=number)
            head.link.send_tensor(hidden, plan_id=1, step=number, boundary=2)
            peer.next(), peer.next()
            peer.link.send_tensor(hidden, plan_id=1, step=number, boundary=4)
            assert isinstance(head.next(), ReceivedTensor)
    head.link.close()
    peer.error()


def test_lineage_s1_no_nonce_comes_twice_from_one_request_to_the_next(
    nonces: list[tuple[bytes, bytes]],
) -> None:
    # The lineage began each request's counter at 0 under the same key.
    links_that_talk(4)
    assert len(nonces) > 4 * 3 * 3
    assert len(set(nonces)) == len(nonces)


def test_lineage_s1_no_nonce_comes_twice_over_reconnects(nonces: list[tuple[bytes, bytes]]) -> None:
    for _ in range(3):
        links_that_talk(1)
    assert len(set(nonces)) == len(nonces)
    assert len({key for key, _ in nonces}) == 6  # two directions, three links


def test_lineage_s1_no_nonce_comes_twice_over_turns_of_the_ratchet(nonces: list[tuple[bytes, bytes]]) -> None:
    links_that_talk(4, LinkOptions(key_limits=SealLimits(max_records=2)))
    assert len(set(nonces)) == len(nonces)
    assert len({key for key, _ in nonces}) > 10


def test_lineage_s1_no_nonce_comes_twice_when_connections_are_replaced(
    nonces: list[tuple[bytes, bytes]],
) -> None:
    def num_keys() -> int:
        return len({key for key, _ in nonces})

    options = LinkOptions(replace_after_records=10, replace_retry_s=0.01)
    links_that_talk(20, options, lambda: num_keys() < 4)
    assert num_keys() >= 4
    assert len(set(nonces)) == len(nonces)


def test_lineage_s5_each_direction_has_a_key_of_its_own(nonces: list[tuple[bytes, bytes]]) -> None:
    # The lineage sealed both directions, and both layers, with one key.
    links_that_talk(1)
    assert len({key for key, _ in nonces}) == 2


def sealed_by(sealer: Sealer, header: bytes, text: bytes) -> bytes:
    out = bytearray(len(text) + TAG_BYTES)
    sealer.seal_into(header, text, memoryview(out))
    return bytes(out)


def test_lineage_s5_a_frame_that_comes_back_to_its_sender_does_not_open() -> None:
    mine, _ = run(*both_ends())
    sealer, opener = make_sealing(mine, SealLimits())
    sealed = sealed_by(sealer, HEADER, b"text")
    with pytest.raises(SealError, match="does not open"):
        opener.open_into(0, HEADER, sealed, memoryview(bytearray(4)))


def test_lineage_s5_a_frame_under_another_header_does_not_open() -> None:
    sealed = sealed_by(Sealer(bytes(32), Cipher.AES_256_GCM), HEADER, b"text")
    with pytest.raises(SealError, match="does not open"):
        Opener(bytes(32), Cipher.AES_256_GCM).open_into(
            0, b"\1" + HEADER[1:], sealed, memoryview(bytearray(4))
        )


def test_lineage_8_2_10_counters_stay_together_whatever_the_frames_are_for() -> None:
    # The lineage's counters went apart between admitting a request and decoding it: each kind of work had
    # its own idea of what had been sent. Here one counter counts frames, and nothing else.
    links = memory_link_pair(ALPHA, BETA, options=LinkOptions(key_limits=SealLimits(max_records=5)))
    head, peer = End(links[0]).start(), End(links[1]).start()
    for number in range(20):
        admit = [BlockGrant.append(number, 0, [1])] if number % 3 == 0 else []
        rows = [] if number % 4 == 0 else [Row(number, 0, 1, 1)]
        head.link.send(Step(number, [], admit, rows, b"\1\0\0\0" * len(rows)), plan_id=1 + number % 2)
        peer.next()
        size = (1, 3 * RECORD_BYTES)[number % 2]
        head.link.send_tensor(
            WireTensor("float16", (size,), bytes(2 * size)), plan_id=1, step=number, boundary=1
        )
        assert isinstance(peer.next(), ReceivedTensor)
        sealer, opener = sealer_of(links[0]), opener_of(links[1])
        assert sealer.sequence == opener.sequence == links[0].sent_frames == links[1].received_frames
        assert sealer._key.prefix == opener._key.prefix  # type: ignore[attr-defined]
    head.link.close()


# The ratchet.


@pytest.mark.parametrize("max_records", [1, 2, 3, 7])
def test_a_tensor_may_span_turns_of_the_ratchet_by_records(max_records: int) -> None:
    check_tensors_under(SealLimits(max_records=max_records))


@pytest.mark.parametrize("max_bytes", [1, RECORD_BYTES + TAG_BYTES, RECORD_BYTES + TAG_BYTES + 1, 300_000])
def test_a_tensor_may_span_turns_of_the_ratchet_by_bytes(max_bytes: int) -> None:
    check_tensors_under(SealLimits(max_bytes=max_bytes))


def check_tensors_under(limits: SealLimits) -> None:
    links = memory_link_pair(ALPHA, BETA, options=LinkOptions(key_limits=limits))
    here, there = End(links[0]).start(), End(links[1]).start()
    for number in range(4):
        data = bytes((i + number) % 251 for i in range(5 * RECORD_BYTES + 10))
        tensor = WireTensor("float16", (len(data) // 2,), data)
        here.link.send_tensor(tensor, plan_id=1, step=number, boundary=1)
        item = there.next()
        assert isinstance(item, ReceivedTensor)
        assert bytes(item.tensor.data) == data
    assert sealer_of(links[0])._key.turn > 0  # type: ignore[attr-defined]
    here.link.close()


@pytest.mark.parametrize("limits", [SealLimits(max_records=3), SealLimits(max_bytes=3 * (10 + TAG_BYTES))])
def test_the_frame_at_the_limit_is_under_the_old_key_and_the_next_under_the_new(
    limits: SealLimits, nonces: list[tuple[bytes, bytes]]
) -> None:
    sealer = Sealer(bytes(32), Cipher.AES_256_GCM, limits)
    for _ in range(7):
        sealed_by(sealer, HEADER, bytes(10))
    used = [key for key, _ in nonces]
    assert [a == b for a, b in pairwise(used)] == [True, True, False, True, True, False]
    assert [int.from_bytes(nonce[4:], "big") for _, nonce in nonces] == list(range(7))


def test_one_byte_under_the_limit_does_not_turn_the_ratchet() -> None:
    sealer = Sealer(bytes(32), Cipher.AES_256_GCM, SealLimits(max_bytes=1000))
    sealed_by(sealer, HEADER, bytes(1000 - TAG_BYTES - 1))
    assert sealer.turn == 0
    sealed_by(sealer, HEADER, b"")
    assert sealer.turn == 1


def test_a_new_secret_does_not_give_the_old_one() -> None:
    # One way: the next secret is HKDF of the old, and the old is overwritten.
    sealer = Sealer(bytes(range(32)), Cipher.AES_256_GCM, SealLimits(max_records=1))
    old = sealer._key._secret
    sealed_by(sealer, HEADER, b"")
    assert not any(old)
    assert sealer._key._secret == keys.next_secret(bytes(range(32)))


# Wiping.


@pytest.fixture
def cipher_keys(monkeypatch: pytest.MonkeyPatch) -> list[bytearray]:
    """Return every buffer that held an AEAD key."""
    held: list[bytearray] = []
    derive = keys.traffic_key

    def noting(secret: keys.Secret) -> bytearray:
        held.append(derive(secret))
        return held[-1]

    monkeypatch.setattr(seal, "traffic_key", noting)
    return held


def test_an_aead_key_is_wiped_as_soon_as_its_cipher_has_it(cipher_keys: list[bytearray]) -> None:
    sealer = Sealer(bytes(32), Cipher.AES_256_GCM, SealLimits(max_records=1))
    sealed_by(sealer, HEADER, b"")
    assert len(cipher_keys) == 2
    assert not any(any(key) for key in cipher_keys)


def test_traffic_secrets_are_wiped_once_the_directions_have_them() -> None:
    secrets, _ = run(*both_ends())
    sealer, opener = make_sealing(secrets, SealLimits())
    assert not any(secrets.send + secrets.receive)
    assert sealer._key._secret != opener._key._secret
    assert any(sealer._key._secret)


@pytest.mark.parametrize("make", [Sealer, Opener])
def test_a_wiped_direction_holds_no_secret_and_does_nothing_more(
    make: Callable[..., Sealer | Opener],
) -> None:
    end = make(bytes(range(32)), Cipher.AES_256_GCM)
    end.wipe()
    end.wipe()
    assert not any(end._key._secret)
    assert not hasattr(end._key, "aead")
    with pytest.raises(SealError, match="this direction has ended"):
        use(end)


def use(end: Sealer | Opener) -> None:
    if isinstance(end, Sealer):
        sealed_by(end, HEADER, b"text")
    else:
        end.open_into(0, HEADER, bytes(20), memoryview(bytearray(4)))


@pytest.mark.parametrize("started", [True, False])
def test_the_secrets_of_a_link_are_wiped_when_it_ends(started: bool) -> None:
    links = memory_link_pair(ALPHA, BETA)
    held = [
        key._secret
        for link in links
        for key in (sealer_of(link)._key, opener_of(link)._key)  # type: ignore[attr-defined]
    ]
    assert all(any(secret) for secret in held)
    if started:
        ends = [End(link).start() for link in links]
        links[0].close()
        for end in ends:
            end.error()
        for link in links:
            for thread in threads_of(link):
                thread.join(10)
    else:
        for link in links:
            link.close()
    assert not any(any(secret) for secret in held)


def secrets_of(end: Initiator | Responder) -> list[bytearray]:
    return [end._secret, end._traffic.to_responder, end._traffic.to_initiator]


def test_a_handshake_that_succeeds_leaves_no_secret_behind() -> None:
    initiator, responder = both_ends()
    with initiator, responder:
        mine, _ = run(initiator, responder)
        assert any(mine.send)
        held = [*secrets_of(initiator), *secrets_of(responder)]
        assert any(any(secret) for secret in held)
    assert not any(any(secret) for secret in held)
    assert not any(mine.send)


@pytest.mark.parametrize("byte", [60, -1])
def test_a_handshake_that_fails_leaves_no_secret_behind(byte: int) -> None:
    initiator, responder = both_ends()
    responder.consume_1(initiator.create_1())
    message = bytearray(responder.create_2())
    message[byte] ^= 1
    with pytest.raises(HandshakeError):
        initiator.consume_2(bytes(message))
    assert not any(any(secret) for secret in secrets_of(initiator))
    assert any(responder._secret)
    held = responder._secret
    with pytest.raises(HandshakeError):
        responder.consume_3(bytes(96))
    assert not any(held)


def test_a_handshake_that_is_given_up_leaves_no_secret_behind() -> None:
    initiator, responder = both_ends()
    with responder:
        responder.consume_1(initiator.create_1())
        responder.create_2()
        held = responder._secret
        assert any(held)
    assert not any(held)


def test_secrets_are_never_shown() -> None:
    secrets, _ = run(*both_ends())
    assert isinstance(secrets, Secrets)
    for shown in (repr(secrets), str(secrets)):
        assert bytes(secrets.send).hex() not in shown
        assert repr(bytes(secrets.send))[2:-1] not in shown


# The last record of a tensor is marked in the header, which is what the seal covers.

DESCRIPTOR, INNER, LAST = 2, 3, 4  # the writes of the sender: 0 and 1 are of the handshake
MARK = 8  # the bit of the header's flags


@pytest.mark.parametrize(
    "flipped",
    [(LAST,), (INNER,), (DESCRIPTOR,), (INNER, LAST)],
    ids=["taken away", "set too early", "set on the descriptor", "moved"],
)
def test_the_last_mark_of_a_tensor_cannot_be_changed_on_its_way(flipped: tuple[int, ...]) -> None:
    links = memory_link_pair(ALPHA, BETA, faults=[FlipBit(at, MARK) for at in flipped])
    here, there = End(links[0]).start(), End(links[1]).start()
    data = bytes(2 * RECORD_BYTES)
    with suppress(LinkBroken):
        here.link.send_tensor(WireTensor("float16", (RECORD_BYTES,), data), plan_id=1, step=1, boundary=1)
        here.link.send_tensor(WireTensor("float16", (1,), bytes(2)), plan_id=1, step=2, boundary=1)
    assert isinstance(there.error(), SealError | FrameError)
    assert there.arrived.empty()


def test_a_mark_that_agrees_with_the_descriptor_but_not_with_the_seal_does_not_open() -> None:
    # The order of the checks is only a matter of speed: the seal alone refuses the other mark.
    sealer, opener = Sealer(bytes(32), Cipher.AES_256_GCM), Opener(bytes(32), Cipher.AES_256_GCM)
    marked, unmarked = b"\x21\x01" + bytes(46), b"\x21\x00" + bytes(46)
    sealed = sealed_by(sealer, unmarked, b"record")
    with pytest.raises(SealError, match="does not open"):
        opener.open_into(0, marked, sealed, memoryview(bytearray(6)))

"""What crosses, recorded outside TLS and between the two layers, and searched for what a link must hide."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from confidentiality.search import Secrets as Hidden
from confidentiality.search import find_secrets
from convoy.crypto.handshake import Secrets
from convoy.crypto.seal import TAG_BYTES, Bytes, SealLimits
from convoy.testing.streams import RecordedStream
from convoy.transport.link.link import Link
from convoy.transport.streams.stream import Stream
from convoy.wire.messages.control import Refuse, Row, Step
from convoy.wire.tensor import WireTensor
from support.links import End, tls_link_pair
from support.members import make_local_members
from support.relay import Relay

TEXT = "the quarterly figures of the unannounced merger"
WIDE_IDS = [70_001 + 977 * i for i in range(24)]
SMALL_IDS = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84]
HIDDEN = np.random.default_rng(5).standard_normal((3, 512)).astype("<f4").tobytes()
LARGE = np.random.default_rng(6).standard_normal((40, 1024)).astype("<f4").tobytes()
SECRETS = Hidden(texts=[TEXT], token_ids=[WIDE_IDS, SMALL_IDS], activations=[HIDDEN, LARGE[:4096]])


class NullSealer:
    """Seal nothing. It lives in this test alone; the product has no such thing."""

    def __init__(self) -> None:
        self.sequence = 0

    def seal_into(self, header: Bytes, plaintext: Bytes, out: memoryview) -> None:
        self.sequence += 1
        out[: len(out) - TAG_BYTES] = bytes(plaintext)

    def wipe(self) -> None: ...


class NullOpener:
    def __init__(self) -> None:
        self.sequence = 0

    def open_into(self, sequence: int, header: Bytes, sealed: Bytes, out: memoryview) -> None:
        self.sequence += 1
        out[:] = bytes(sealed)[: len(sealed) - TAG_BYTES]

    def wipe(self) -> None: ...


def null_sealing(_secrets: Secrets, _limits: SealLimits) -> tuple[NullSealer, NullOpener]:
    return NullSealer(), NullOpener()


def send_everything(mine: Link, others: Link) -> None:
    there, here = End(others).start(), End(mine).start()
    for ids in (WIDE_IDS, SMALL_IDS):
        tokens = struct.pack(f"<{len(ids)}I", *ids)
        mine.send(Step(1, [], [], [Row(1, 0, len(ids), 1)], tokens), plan_id=1, step=1)
    mine.send(Refuse(1, TEXT, TEXT))
    mine.send_tensor(WireTensor("float32", (3, 512), HIDDEN), plan_id=1, step=1, boundary=4)
    mine.send_tensor(WireTensor("float32", (40, 1024), LARGE), plan_id=1, step=1, boundary=4)
    others.send_tensor(WireTensor("float32", (3, 512), HIDDEN), plan_id=1, step=1, boundary=8)
    received = [there.next() for _ in range(5)]
    assert here.next() is not None
    assert bytes(received[-1].tensor.data) == LARGE  # type: ignore[union-attr]
    mine.close("done")
    there.error()


def record(tmp_path: Path) -> tuple[bytes, bytes]:
    """Send all the secrets over real sockets; (what crossed outside TLS, what TLS was given)."""
    alpha, beta = make_local_members(["alpha", "beta"], tmp_path)
    between: list[bytearray] = []
    relays: list[Relay] = []

    def wrap(stream: Stream) -> Stream:
        between.append(bytearray())
        return RecordedStream(stream, between[-1])

    def through(address: tuple[str, int]) -> tuple[str, int]:
        relays.append(Relay(address))
        return relays[0].address

    try:
        send_everything(*tls_link_pair(alpha, beta, through=through, wrap=wrap))
    finally:
        relays[0].close()
    return relays[0].everything(), b"\n".join(bytes(part) for part in between)


def test_nothing_can_be_read_outside_tls_nor_between_the_layers(tmp_path: Path) -> None:
    outside, between = record(tmp_path)
    assert len(outside) > len(between) > len(HIDDEN) + len(LARGE)
    assert find_secrets(outside, SECRETS) == []
    assert find_secrets(between, SECRETS) == []


def test_the_search_finds_everything_once_the_inner_layer_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoy.transport.link.establish.make_sealing", null_sealing)
    outside, between = record(tmp_path)
    assert find_secrets(outside, SECRETS) == []  # the outer layer stands alone
    found = find_secrets(between, SECRETS)
    assert any(item.startswith("text") for item in found)
    for prompt in (0, 1):
        assert f"token ids 0-8 of prompt {prompt} as 32-bit little-endian" in found
    for activation in (0, 1):
        assert f"activation {activation} at byte 0" in found


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("order", ["little", "big"])
def test_the_search_knows_every_width_and_byte_order(width: int, order: str) -> None:
    ids = SMALL_IDS if width == 1 else [i % (1 << min(8 * width, 17)) for i in WIDE_IDS]
    packed = b"".join(i.to_bytes(width, order) for i in ids[1:9])  # type: ignore[arg-type]
    found = find_secrets(b"noise" + packed + b"noise", Hidden(token_ids=[ids]))
    assert any(item.startswith("token ids 1-9") for item in found)


def test_the_search_finds_sixteen_bytes_at_any_offset() -> None:
    found = find_secrets(b"abc" + HIDDEN[1001:1017] + b"def", Hidden(activations=[HIDDEN]))
    assert found == ["activation 0 at byte 1001"]


def test_the_search_finds_nothing_in_noise() -> None:
    assert find_secrets(np.random.default_rng(1).bytes(100_000), SECRETS) == []

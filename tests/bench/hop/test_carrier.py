"""The lean carrier over streams: small and large tensors, split and joined as a network may."""

from __future__ import annotations

import socket
import threading

import pytest

from convoy.bench.hop.carrier import HopTask, StreamCarrier
from convoy.bench.hop.plain import PlainStream
from convoy.errors import LinkBroken
from convoy.wire.tensor import WireTensor

SIZES = [4, 8192, 8192, 262_136, 262_140, 262_144, 262_148, 1_000_000, 12, 262_144, 8]


def pair() -> tuple[StreamCarrier, StreamCarrier]:
    one, two = socket.socketpair()
    three, four = socket.socketpair()
    return (
        StreamCarrier(PlainStream(one), PlainStream(four)),
        StreamCarrier(PlainStream(three), PlainStream(two)),
    )


def tensor(size: int, number: int) -> WireTensor:
    return WireTensor("float32", (size // 4,), bytes([number]) * size)


@pytest.mark.parametrize("order", [SIZES, SIZES[::-1]], ids=["as listed", "reversed"])
def test_tensors_of_any_size_arrive_whole_and_in_order(order: list[int]) -> None:
    here, there = pair()
    tensors = [tensor(size, number) for number, size in enumerate(order)]

    def send_all() -> None:
        for item in tensors:
            here.send(item, HopTask.KEEP)

    sender = threading.Thread(target=send_all)
    sender.start()
    for item in tensors:
        ask, data = there.receive()
        assert (ask, bytes(data)) == (HopTask.KEEP, item.data)
    sender.join()
    here.close()
    there.close()


def test_the_end_of_the_other_process_is_an_error() -> None:
    here, there = pair()
    here.close()
    with pytest.raises(LinkBroken):
        there.receive()
    there.close()

"""Run the second process of the hop bench: dial the first, and treat each tensor by its task.

Started as ``python -m convoy.bench.hop.echo DIRECTORY OPERATOR_KEY LINK_PORT TLS_PORT PLAIN_PORT``. It ends
when the connections do, however the first process ends.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

from convoy.bench.hop.carrier import Carrier, HopTask, LinkCarrier, StreamCarrier
from convoy.bench.hop.connection import bench_member, dial_plain, dial_tls
from convoy.bench.hop.names import ECHO, HOME, HOST
from convoy.errors import ConvoyError
from convoy.transport.dial import dial
from convoy.wire.tensor import WireTensor

_START_S = 10.0
_CONFIRMED = WireTensor("float32", (1,), bytes(4))


def main(arguments: list[str]) -> None:
    """Connect all three ways, answer on each, return when all have ended."""
    directory, operator_key = Path(arguments[0]), bytes.fromhex(arguments[1])
    link_port, tls_port, plain_port = map(int, arguments[2:])
    me = bench_member(directory, ECHO, operator_key)
    link = dial((HOST, link_port), me=me, peer_name=HOME, timeout_s=_START_S)
    carriers: list[Carrier] = [
        LinkCarrier(link, wait_s=None),
        StreamCarrier(*dial_tls(tls_port, me.current, _START_S)),
        StreamCarrier(*dial_plain(plain_port, _START_S)),
    ]
    threads = [threading.Thread(target=_answer, args=(carrier,), daemon=True) for carrier in carriers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _answer(carrier: Carrier) -> None:
    # The connections end when the first process is done, so an end is no error of this one.
    with contextlib.suppress(ConvoyError):
        while True:
            ask, data = carrier.receive()
            if ask is HopTask.RETURN:
                carrier.send(WireTensor("float32", (len(data) // 4,), data), HopTask.KEEP)
            elif ask is HopTask.CONFIRM:
                carrier.send(_CONFIRMED, HopTask.KEEP)
    carrier.close()


if __name__ == "__main__":
    main(sys.argv[1:])

"""Crowds before a real listener in a process of its own: its memory stays, and members still get in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.listener_process import Crowd, ListenerProcess, Peak, client_hello, link_within

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="binds many addresses of 127.0.0.0/8, which other systems do not have"
)

NUM_SILENT = 10_000
STRANGERS = [f"127.0.{i}.{j}" for i in range(1, 5) for j in range(1, 51)]
# What a half-open connection may cost: a thread's stack in use, TLS state, buffers.
MAX_GROWTH_BYTES = 64 * 1024 * 1024
MAX_THREADS = 200
# A link waits for no flood to end, and on a busy machine for processor time.
LINK_WITHIN_S, USUAL_LINK_S = 60.0, 5.0


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[ListenerProcess]:
    with ListenerProcess(tmp_path, ["beta", "alpha"]) as listener:
        yield listener


def settle(listener: ListenerProcess) -> int:
    """Return the memory once everything that a link imports and allocates for good is there."""
    for _ in range(3):
        link_within(listener.members[1], "beta", listener.address, 20)[0].close()
    return listener.rss_bytes()


@pytest.mark.parametrize(
    ("hosts", "per_s"),
    [(STRANGERS, 3000), (["127.0.0.9"], 3000), (["127.0.0.1"], 2000)],
    ids=["from-200-addresses", "from-one-stranger", "from-the-members-own-address"],
)
@pytest.mark.long
def test_ten_thousand_connections_that_say_nothing(
    listener: ListenerProcess, hosts: list[str], per_s: float
) -> None:
    before = settle(listener)
    with Peak(listener) as peak:
        crowd = Crowd(listener.address, hosts, NUM_SILENT, per_s=per_s)
        times: list[float] = []
        while not crowd.done.is_set() or not times:
            link, took_s = link_within(listener.members[1], "beta", listener.address, LINK_WITHIN_S)
            times.append(took_s)
            link.close()
            crowd.done.wait(0.2)
    crowd.close()
    growth = peak.rss_bytes - before
    print(
        f"{crowd.opened} opened, {crowd.hung_up} hung up on; growth {growth / 1e6:.1f} MB, "
        f"{peak.num_threads} threads, {peak.num_descriptors} descriptors; {len(times)} links in "
        f"{max(times):.2f} s at most; log {listener.log.stat().st_size} bytes"
    )
    assert crowd.opened == NUM_SILENT
    assert growth < MAX_GROWTH_BYTES
    assert peak.num_threads < MAX_THREADS
    # Links are made during the flood, not behind it. On a busy machine one dial may come to its deadline.
    assert sum(took_s >= USUAL_LINK_S for took_s in times) <= 1
    assert listener.log.stat().st_size < 100_000


@pytest.mark.long
def test_writers_of_one_byte_at_a_time_hold_a_place_no_longer_than_a_handshake(
    listener: ListenerProcess,
) -> None:
    before = settle(listener)
    hello = client_hello(listener.members[1])
    assert len(hello) > 100
    with Peak(listener) as peak:
        crowd = Crowd(listener.address, STRANGERS, 200, per_s=100, greeting=hello, byte_every_s=0.2)
        assert crowd.done.wait(20)
        _, took_s = link_within(listener.members[1], "beta", listener.address, LINK_WITHIN_S)
        while crowd.hung_up < 200:  # each at its total deadline, though it never stopped writing
            assert not crowd.over.wait(0.05)
    crowd.close()
    print(f"growth {(peak.rss_bytes - before) / 1e6:.1f} MB, a link in {took_s:.2f} s")
    assert took_s < USUAL_LINK_S
    assert peak.rss_bytes - before < MAX_GROWTH_BYTES

"""What two ranks add up, recorded outside TLS and between the two layers: no part of a sum can be found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from confidentiality.search import Secrets, find_secrets
from confidentiality.test_recording_link import null_sealing
from convoy.engine.ranks.sums.sealed import RANK_TYPES, SealedCollective
from convoy.testing.streams import RecordedStream
from convoy.transport.link.link import Link
from convoy.transport.streams.stream import Stream
from convoy.wire.messages.ranks import Agree
from support.links import tls_link_pair
from support.members import make_local_members
from support.relay import Relay
from support.rings import run_at_once

SMALL = [np.random.default_rng([1, rank]).standard_normal((1, 512)).astype("<f4") for rank in (0, 1)]
LARGE = [np.random.default_rng([2, rank]).standard_normal((40, 1024)).astype("<f4") for rank in (0, 1)]
SHARES = [np.random.default_rng([3, rank]).standard_normal((1, 300)).astype("<f4") for rank in (0, 1)]
SHOWN = [SMALL[0], SMALL[1], LARGE[0][:1], LARGE[1][:1], SHARES[1]]  # what crosses
SECRETS = Secrets(activations=[x.tobytes() for x in (*SHOWN, SMALL[0] + SMALL[1])])


def work(one: SealedCollective) -> None:
    one.agree(Agree(1, one.rank, 2, bytes(32), "float32", ""))
    for parts in (SMALL, LARGE):
        total = one.all_reduce(torch.from_numpy(parts[one.rank]))
        assert np.array_equal(total.numpy(), parts[0] + parts[1])
    one.gather(torch.from_numpy(SHARES[one.rank]))
    one.all_reduce(torch.ones(1))  # the share has come


def record(tmp_path: Path) -> tuple[bytes, bytes]:
    """Return (the bytes that crossed outside TLS, the bytes that TLS was given)."""
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
        links = tls_link_pair(alpha, beta, through=through, wrap=wrap)
        ranks = [start(rank, link) for rank, link in enumerate(links)]
        assert run_at_once([lambda one=one: work(one) for one in ranks]) == [None, None]  # type: ignore[misc]
        links[0].close()
    finally:
        relays[0].close()
    return relays[0].everything(), b"\n".join(bytes(part) for part in between)


def start(rank: int, link: Link) -> SealedCollective:
    one = SealedCollective(rank, 2, {1 - rank: link}, 1, 10.0)
    link.start(lambda link, received: one.deliver(link, received) and None, one.link_ended, RANK_TYPES)  # type: ignore[arg-type]
    return one


def test_no_part_of_a_sum_can_be_read_outside_tls_nor_between_the_layers(tmp_path: Path) -> None:
    outside, between = record(tmp_path)
    assert len(outside) > len(between) > 2 * LARGE[0].nbytes
    assert find_secrets(outside, SECRETS) == []
    assert find_secrets(between, SECRETS) == []


def test_parts_of_sums_are_found_once_the_inner_sealing_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoy.transport.link.establish.make_sealing", null_sealing)
    outside, between = record(tmp_path)
    assert find_secrets(outside, SECRETS) == []  # the outer layer stands alone
    found = find_secrets(between, SECRETS)
    assert all(f"activation {shown} at byte 0" in found for shown in range(len(SHOWN)))

"""A cluster answers on while the connections under it are replaced: its parts notice nothing."""

from __future__ import annotations

import logging

import pytest

from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import LinkOptions
from support.cluster import MEMBER, PeerThread
from support.link_parts import streams_of
from support.members import make_local_members, membership_of

PROMPTS = ("What is 8+9? Answer with just the number.", "Name a colour.", "What is 3+4?")


def answers(options: LinkOptions, caplog: pytest.LogCaptureFixture) -> tuple[list[str], int, list[str]]:
    """Return the texts of a ring of three, the number of replaced links of the head, and the log lines.

    The lines are those before any link ended: a replacement that is under way then may be told.
    """
    network = MemoryNetwork(options)
    alpha, *others = make_local_members(["alpha", "beta", "gamma"])
    peers = [PeerThread(me, PeerOptions(MEMBER), network) for me in others]
    cluster = RunningCluster.start(
        membership_of(alpha),
        ModelSource.resolve("demo-mini"),
        HeadOptions(MEMBER, wait_s=60, num_blocks=32),
        network=network,
    )
    links = list(cluster.head.links.values())
    before = [streams_of(link) for link in links]
    said = []
    for prompt in PROMPTS * 2:
        ids = tuple(cluster.tokenizer.encode_chat([{"role": "user", "content": prompt}]))
        request = GenerationRequest(ids, SamplingParams(temperature=0.0), 24)
        said.append(generate(cluster.engine, request).text)
    assert list(cluster.head.links.values()) == links
    logged = [record.getMessage() for record in caplog.records]
    replaced = sum(streams_of(link) != old for link, old in zip(links, before, strict=True))
    cluster.close()
    for peer in peers:
        peer.stop()
    return said, replaced, logged


def test_answers_are_the_same_while_every_connection_is_replaced_many_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="convoy.transport"):
        expected, none, _ = answers(LinkOptions(), caplog)
        caplog.clear()
        said, replaced, logged = answers(LinkOptions(replace_after_records=8, replace_retry_s=0.01), caplog)
    assert said == expected
    assert (none, replaced) == (0, 2)
    assert not [line for line in logged if "needs new connections" in line]

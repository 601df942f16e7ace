"""A program that uses the Python API, for mypy: every result has its type, and nothing is Any by accident."""

from __future__ import annotations

from typing import assert_type

import convoy
from convoy.testing import Cut, MemoryNetwork


def use(server: convoy.Server) -> str:
    """Use each part once. It is checked, and never called."""
    client: convoy.Client = convoy.connect(server.url, key="key")
    reply = client.chat("hello", max_tokens=3, temperature=0.5, stop=["."])
    assert_type(reply, convoy.Reply)
    assert_type(reply.completion_tokens, int)
    assert_type(client.status(), convoy.ClusterStatus)
    with server.session(convoy.SamplingParams(temperature=0.0)) as session:
        assert_type(session, convoy.Session)
        assert_type(session.sync(server.tokenizer.encode("hello")), int)
    assert_type(convoy.plan("demo", members={"alpha": 8.0}), convoy.PlanReport)
    assert_type(convoy.verify("demo-mini").passed, bool)
    try:
        return "".join(client.stream([{"role": "user", "content": "hello"}]))
    except convoy.ServerBusy as error:
        raise convoy.errors.ConfigError(error.message) from error


def start() -> convoy.Server:
    """Start a server with all of its arguments."""
    return convoy.serve("demo", members=2, layers=["0:5,output", "6:11"], engine={"max_batch": 4}, port=0)


NETWORK, FAULT = MemoryNetwork(), Cut(at=3)

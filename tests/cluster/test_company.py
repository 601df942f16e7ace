"""Whom the head dials, and how often."""

from __future__ import annotations

import contextlib
import threading

import pytest

from convoy.cluster.company import Company
from convoy.cluster.options import HeadOptions
from convoy.errors import ConvoyError
from convoy.transport.link import Link
from convoy.transport.network import MemoryNetwork
from convoy.wire.messages import FrameType, Hello
from support.cluster import MEMBER
from support.members import make_local_members, membership_of

HELLO = Hello("test", ["float32"], ["plain-f32"], 1 << 30, 1, "test")


def test_a_member_that_greets_and_goes_at_once_is_not_dialled_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alpha, beta = make_local_members(("alpha", "beta"))
    network = MemoryNetwork()
    links: list[Link] = []
    twice = threading.Event()

    def greet_and_go(link: Link) -> None:
        links.append(link)
        if len(links) > 1:
            twice.set()
        link.start(lambda *_: None, lambda *_: None, frozenset({FrameType.HELLO, FrameType.CHALLENGE}))
        with contextlib.suppress(ConvoyError):  # the head is closed meanwhile
            link.send(HELLO)
        company_has.wait(10)
        company_has.clear()
        link.dismiss("never mind", revoke=True)

    company_has = threading.Event()
    network.listen(membership_of(beta), beta.member.address, lambda link: _on_thread(greet_and_go, link))
    company = Company(
        membership_of(alpha),
        network,
        HeadOptions(MEMBER),
        receive=lambda *_: None,
        lost=lambda *_: None,
        joined=lambda _name: company_has.set(),
    )
    monkeypatch.setattr(company.vetting, "admit", lambda *_: None)  # and nobody is asked for evidence
    company.seek()
    assert twice.wait(20)
    threading.Event().wait(1.0)  # the time in which it would dial a hundred times
    num_dials = len(links)
    company.close("done")
    assert num_dials <= 10


def _on_thread(run: object, link: Link) -> None:
    threading.Thread(target=run, args=(link,), daemon=True).start()  # type: ignore[arg-type]

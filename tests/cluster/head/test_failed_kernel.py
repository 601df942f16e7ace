"""A kernel that passes the self-check of a machine, and fails for a shape of the model as it is loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.weights.test_peer_weights import answer_of, started
from convoy.cluster.options import PeerOptions
from convoy.config.kernels import EXACT, PLAIN
from convoy.errors import Incompatible, PeerRefused, SelfCheckError
from convoy.model.backends.host.checks import selfcheck
from support.cluster import MEMBER

Fails = Callable[[], bool]


@pytest.fixture
def fail_where(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fails], None]:
    """Make the gate's projection fail where the fixture's argument says so: no sample has its shape."""

    def install(fails: Fails) -> None:
        check = selfcheck.check_linear

        def checked(linear: Any, *more: Any) -> None:
            if (linear.in_features, linear.out_features) == (40, 44) and fails():
                raise SelfCheckError(
                    "exact mode does not hold here: a linear of 40 to 44 changes a row's bits"
                )
            check(linear, *more)

        monkeypatch.setattr(selfcheck, "check_linear", checked)

    return install


def on_the_head() -> bool:
    return threading.current_thread() is threading.main_thread()


def on_a_peer() -> bool:
    return not on_the_head()


@pytest.mark.parametrize(("fails", "who"), [(on_the_head, "alpha"), (on_a_peer, "beta")])
def test_where_exact_mode_fails_for_the_model_all_run_plain_and_status_says_why(
    model: Path,
    fail_where: Callable[[Fails], None],
    caplog: pytest.LogCaptureFixture,
    fails: Fails,
    who: str,
) -> None:
    fail_where(fails)
    with started(model, PeerOptions(MEMBER, model_path=model)) as (cluster, _):
        assert len(answer_of(cluster)) == 12
        status = cluster.status()
    assert {status.kernel, *(stage.kernel for stage in status.stages)} == {PLAIN}
    assert status.why_kernel == f"{EXACT} does not hold on {who} for this model"
    assert f"{status.why_kernel}, and another kernel is taken" in caplog.text


def test_where_exact_mode_was_asked_for_by_name_its_failure_ends_the_start(
    model: Path, fail_where: Callable[[Fails], None]
) -> None:
    fail_where(on_a_peer)
    exact = replace(MEMBER, kernel=EXACT)
    with pytest.raises((PeerRefused, Incompatible), match="a linear of 40 to 44"):
        started(model, PeerOptions(exact, model_path=model), member=exact).__enter__()


def test_a_kernel_that_was_never_offered_is_none_to_go_without(model: Path) -> None:
    with started(model, PeerOptions(MEMBER, model_path=model)) as (cluster, _):
        peers = cluster.head.peers
        before = peers.hellos["beta"].kernels
        assert not peers.drop_kernel("beta", "imagined", "why")
        assert not peers.drop_kernel("nobody", EXACT, "why")
        assert peers.hellos["beta"].kernels == before
        assert peers.why_kernel == ""

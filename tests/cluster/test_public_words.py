"""What a peer writes goes to the head's log: not to `/health`, which asks for no key, nor to clients."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cluster.recovery.test_recovery import LONG, ask, scene, small
from convoy.api.problem import body_for
from convoy.cluster.peer.peer import Peer
from convoy.engine.completion import generate
from convoy.errors import StageLost, StepError
from convoy.model.backends.host.stage import HostStage
from convoy.wire.messages.control import Step, StepFailed
from support.waiting import wait_until

SECRET = "tokens 17 23 42 of alice at 10.1.2.3:7000"


def fail_with_the_secret(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    run = HostStage.run

    def refuse(stage: HostStage, step: Step, hidden: Any, tokens: Any) -> Any:
        loaded = peer.loaded
        if loaded is not None and loaded.stage is stage and any(row.num_tokens > 20 for row in step.rows):
            raise StepError(SECRET)
        return run(stage, step, hidden, tokens)

    monkeypatch.setattr(HostStage, "run", refuse)


@pytest.mark.long
def test_why_a_peer_could_not_run_a_step_is_for_the_log_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with scene("beta") as s:
        s.join("beta")
        cluster = s.serve(member=small(), prefill_chunk=64)
        fail_with_the_secret(s.peers["beta"].peer, monkeypatch)
        with pytest.raises(StageLost, match="failed at the request") as lost:
            generate(cluster.engine, LONG)
        assert SECRET in caplog.text
        said = body_for(lost.value).error.message
        assert said == "the stages failed at the request 8 times in a row"


def test_why_a_peer_refuses_a_plan_is_not_in_the_health(caplog: pytest.LogCaptureFixture) -> None:
    with scene("beta") as s:
        caplog.set_level("INFO")
        stubborn = s.join("beta")
        cluster = s.serve(member=small(), recover_wait_s=1.0)
        assert cluster.head.active_plan is not None
        stubborn.peer.hello = msgspec.structs.replace(stubborn.peer.hello, kernels=[SECRET])
        link = stubborn.peer.head
        assert link is not None
        link.send(StepFailed(0, SECRET), plan_id=cluster.head.active_plan.plan.plan_id)
        told: set[str] = set()

        def over() -> bool:
            told.update((cluster.health()[1], cluster.status().reason))
            return any("nobody took over" in reason for reason in told)

        wait_until(over)
        assert "a plan could not be made to run" in caplog.text
        assert SECRET in caplog.text
        assert not any(SECRET in reason for reason in told)
        with pytest.raises(StageLost) as lost:
            ask(cluster)
        assert SECRET in lost.value.message
        assert body_for(lost.value).error.message == "nobody took over within 1 s"

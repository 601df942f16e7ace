"""Peers die, hang and come back at random, under load: no request is lost, no text differs, no block leaks.

Its name is not test_*, so that ``make test`` leaves it out: ``make test-chaos`` runs it, for ten minutes.
"""

from __future__ import annotations

import random
import time

import pytest

from chaos.disorder import Disorder
from chaos.load import Load, make_questions
from convoy.cli.local.served_cluster import ServedCluster, ServedOptions
from convoy.model.checkpoints.source import ModelSource
from convoy.sdk.local_cluster import LocalOptions

MODEL = "demo-mini"
NUM_QUESTIONS = 16
ENGINE = {"num_blocks": 512, "prefill_chunk": 32, "max_batch": 8}
ENDING_S = 180.0


@pytest.mark.timeout(0)
def test_streams_survive_whatever_becomes_of_peers(
    chaos_seconds: float, chaos_seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\nseed {chaos_seed}, {chaos_seconds:g} s")
    vocab_size = ModelSource.resolve(MODEL).spec.vocab_size
    local = LocalOptions(4, num_threads=1, engine=ENGINE)
    with ServedCluster(ServedOptions(MODEL, local)) as cluster:
        questions = make_questions(cluster, MODEL, vocab_size, NUM_QUESTIONS)
        load = Load(cluster, questions, chaos_seed)
        disorder = Disorder(cluster, load, random.Random(chaos_seed))
        load.start()
        try:
            disorder.go_on(chaos_seconds)
        finally:
            failures = load.stop(ENDING_S)
        if failures:
            failures += [*disorder.told[-30:], cluster.last_words(cluster.names[0])]
        assert not failures, "\n".join(failures)
        assert blocks_in_use(cluster) == 0
        with capsys.disabled():
            print(
                f"{load.num_answered} answers, {load.num_hung_up} hung up on, "
                + ", ".join(f"{count} x {kind}" for kind, count in disorder.dealt.items())
                + "; stages when hit: "
                + ", ".join(f"{count} x {stages}" for stages, count in sorted(disorder.num_stages.items()))
            )
    assert load.num_answered > 0
    assert max(disorder.num_stages) > 1, "nothing was there to lose"


def blocks_in_use(cluster: ServedCluster) -> int:
    """Return the blocks in use of an idle cluster, which checks its account whenever it becomes idle."""
    end_s = time.monotonic() + ENDING_S
    while True:
        status = cluster.status()
        used: int = status["num_blocks"] - status["free_blocks"]
        idle = status["ready"] and status["running"] == status["waiting"] == used == 0
        if idle or time.monotonic() > end_s:
            assert status["ready"], status["reason"]
            return used
        time.sleep(0.1)  # an HTTP API has no event to wait on

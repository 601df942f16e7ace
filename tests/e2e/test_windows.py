"""A model with windows over two processes, sockets and TLS: bit for bit what one stage says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from convoy.cluster.head.head import Head
from convoy.model.checkpoints.source import ModelSource
from convoy.sdk.local_cluster import LocalCluster, LocalOptions
from convoy.sdk.options import head_options, load_head
from parity.test_windows import PROMPTS, driver, limits
from support.driver import Driver, assert_equal_to_the_bit
from support.odd_models import make_windowed_qwen3


@pytest.mark.slow
@pytest.mark.long
def test_rings_on_two_processes_hold_what_tables_that_keep_everything_hold(tmp_path: Path) -> None:
    source = ModelSource.resolve(str(make_windowed_qwen3(tmp_path / "windows")))
    alone = driver(source, limits(None, None, max_step_tokens=512, prefill_chunk=512))
    whole = [run for one in PROMPTS for run in alone.run([one], 20)]
    with LocalCluster(LocalOptions(2, ["0:1,output", "2:4"], kernel="exact-f32", num_threads=1)) as local:
        local.start_peers(str(source.path))
        config = local.config(local.head)
        options = replace(head_options(config), prefill_chunk=16)
        head = Head(load_head(config), source, options, watch=local.check_alive)
        try:
            head.bring_up()
            assert head.executor is not None
            assert head.active_plan is not None
            chosen = options.limits(
                source.spec,
                num_stages=2,
                num_blocks=head.active_plan.num_blocks,
                block_size=options.block_size,
            )
            assert [group.ring for group in chosen.groups] == [None, 7]  # of 112 positions
            runs = Driver(head.executor, chosen).run(PROMPTS, 20)
            assert head.sealed_bytes() > 10_000
        finally:
            head.close()
    assert_equal_to_the_bit(whole, runs)

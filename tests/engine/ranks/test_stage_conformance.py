"""Ranks keep the contract of a stage: as threads of one member, and as members behind rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from convoy.engine.ranks.load import load_member_slice, load_member_stage
from convoy.model.collective import Collective
from convoy.model.stage import LoadedStage, RankSlice, Stage, StageOptions
from convoy.plan.spec.sharding import Shard
from support.rank_pair import rank_pair
from support.stage_conformance import SOURCE, WHOLE, LoadedStageConformance, StageConformance

OPTIONS = StageOptions(num_threads=1, require_tags=False)


class TestHostRankStages(LoadedStageConformance):
    """Run the suite over two threads that share every layer."""

    @pytest.fixture(scope="class")
    @classmethod
    def stage(cls) -> Iterator[LoadedStage]:
        found = load_member_stage(SOURCE, WHOLE, StageOptions(device="cpu+cpu", require_tags=False))
        yield found
        found.give_up()


class TestLeaderStage(StageConformance):
    """Run the suite over rank 0 with another member's rank behind it."""

    @pytest.fixture(scope="class")
    @classmethod
    def slices(cls) -> Sequence[RankSlice[Collective]]:
        return [load_member_slice(SOURCE, WHOLE, OPTIONS, Shard(rank, 2)) for rank in (0, 1)]

    @pytest.fixture
    def stage(self, slices: Sequence[RankSlice[Collective]]) -> Iterator[Stage]:
        with rank_pair(slices, num_kv_heads=SOURCE.spec.cache_groups[0].num_kv_heads) as pair:
            pair.follow()
            yield pair.leader

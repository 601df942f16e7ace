"""Load a stage on one device, or on several devices of one host that share its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from convoy.engine.ranks.host_ranks import JOIN, RankStages
from convoy.errors import ModelError, PlanError
from convoy.model.backends.host.stage import Stage, StageOptions
from convoy.model.checkpoints.source import ModelSource
from convoy.model.device import HOST
from convoy.plan.spec.sharding import Shard, check_sharding
from convoy.wire.messages.control import StageAssignment

if TYPE_CHECKING:
    from convoy.model.checkpoints.stage_tensors import LoadProgress


def load_stage(
    source: ModelSource,
    assignment: StageAssignment,
    options: StageOptions,
    progress: LoadProgress | None = None,
    *,
    before: Stage | None = None,
    shard: Shard | None = None,
) -> Stage:
    """Load a stage as `Stage.load` does; a device such as cpu+cpu gives a stage with one thread a rank.

    Raises PlanError too: for ranks that cannot share these layers, or that share them with other members
    already.
    """
    devices = options.device.split(JOIN)
    size = len(devices)
    if size > 1:
        check_sharding(source.spec, size)
        if shard is not None and shard.world_size > 1:
            raise PlanError(f"a rank of several members cannot be split over {options.device} again")
    if size == 1:
        old = before.release() if isinstance(before, RankStages) else [before]
        return Stage.load(source, assignment, options, progress, before=old[0], shard=shard)
    kept = before.release() if isinstance(before, RankStages) else [before]
    stage = _kind_of(devices).load(source, assignment, options, progress, kept)
    # The class shares the methods of `Stage`, but none of its code.
    return cast("Stage", stage)


def _kind_of(devices: Sequence[str]) -> type[RankStages]:
    """Return the class for ranks on ``devices``. Raises ModelError for CUDA devices without Triton."""
    if devices[0] == HOST:
        return RankStages
    try:
        # Imported only here, because it needs Triton.
        from convoy.engine.ranks.device_ranks import DeviceRankStages
    except ImportError as error:
        raise ModelError(
            f"ranks on {JOIN.join(devices)} need Triton, which is not installed",
            hint="install the CUDA build of torch, which brings it",
        ) from error
    return DeviceRankStages

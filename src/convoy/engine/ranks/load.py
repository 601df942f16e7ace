"""Load a member's stage: on one device, or on several devices of its host that share every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from convoy.engine.ranks.host_ranks import JOIN, HostRankStages, RankStages
from convoy.errors import ModelError, PlanError
from convoy.model.backends.registry import load_slice, load_stage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.collective import Collective
from convoy.model.device import HOST, MLX
from convoy.model.stage import LoadedStage, RankSlice, StageOptions
from convoy.plan.spec.sharding import Shard, check_sharding
from convoy.wire.messages.control import StageAssignment

if TYPE_CHECKING:
    from convoy.model.checkpoints.stage_tensors import LoadProgress


def load_member_stage(
    source: ModelSource,
    assignment: StageAssignment,
    options: StageOptions,
    progress: LoadProgress | None = None,
    *,
    before: LoadedStage | None = None,
) -> LoadedStage:
    """Load a stage as `load_stage` does; a device such as cpu+cpu gives a stage with one thread a rank.

    Raises PlanError too, for ranks that cannot share these layers.
    """
    devices = options.device.split(JOIN)
    kept = _parts(before)
    if len(devices) == 1:
        return load_stage(source, assignment, options, progress, before=kept[0])
    check_sharding(source.spec, len(devices))
    return _kind_of(devices).load(source, assignment, options, progress, kept)


def load_member_slice(
    source: ModelSource,
    assignment: StageAssignment,
    options: StageOptions,
    shard: Shard,
    progress: LoadProgress | None = None,
    *,
    before: LoadedStage | None = None,
) -> RankSlice[Collective]:
    """Load a member's slice of a stage that several members hold, as `load_slice` does.

    Raises PlanError too, for a member that would split its slice over several devices.
    """
    num_devices = len(options.device.split(JOIN))
    if num_devices > 1:
        check_sharding(source.spec, num_devices)
        raise PlanError(f"a rank of several members cannot be split over {options.device} again")
    return load_slice(source, assignment, options, shard, progress, before=_parts(before)[0])


def _parts(before: LoadedStage | None) -> Sequence[LoadedStage | None]:
    """Return the stages of ``before`` by rank, as far as it has ranks."""
    return before.release() if isinstance(before, RankStages) else [before]


def _kind_of(devices: Sequence[str]) -> type[RankStages[Any, Any]]:
    """Return the class for ranks on ``devices``. Raises ModelError for CUDA devices without Triton."""
    if devices[0] in {HOST, MLX}:
        return HostRankStages
    try:
        # Imported only here, because it needs Triton.
        from convoy.engine.ranks.device_ranks import DeviceRankStages
    except ImportError as error:
        raise ModelError(
            f"ranks on {JOIN.join(devices)} need Triton, which is not installed",
            hint="install the CUDA build of torch, which brings it",
        ) from error
    return DeviceRankStages

"""Load a stage by the backend of its device. A further backend is a package beside this file and a row here.

Its devices are words of `model.device`, and its kernels rows of `config.kernels`. A member's devices may also
be joined as ranks: `engine.ranks.load` divides them, and comes here for one of them.

A backend's modules are imported only once a stage of it is loaded: each needs libraries of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from convoy.errors import ModelError
from convoy.model import mlx_device
from convoy.model.checkpoints.source import ModelSource
from convoy.model.collective import Collective
from convoy.model.device import CUDA, HOST, MLX
from convoy.model.stage import LoadedStage, RankSlice, StageOptions
from convoy.plan.spec.sharding import Shard
from convoy.wire.messages.control import StageAssignment

if TYPE_CHECKING:
    from convoy.model.checkpoints.stage_tensors import LoadProgress


class LoadStage(Protocol):
    """Load a stage for `load_stage`."""

    def __call__(
        self,
        source: ModelSource,
        assignment: StageAssignment,
        options: StageOptions,
        progress: LoadProgress | None,
        before: LoadedStage | None,
    ) -> LoadedStage: ...


class LoadSlice(Protocol):
    """Load one rank's slice of a stage for `load_slice`."""

    def __call__(
        self,
        source: ModelSource,
        assignment: StageAssignment,
        options: StageOptions,
        progress: LoadProgress | None,
        before: LoadedStage | None,
        *,
        shard: Shard,
    ) -> RankSlice[Collective]: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """Hold a backend's functions. ``load_slice`` is None if ranks of several members cannot share a stage."""

    load: LoadStage
    load_slice: LoadSlice | None


def _load_host(
    source: ModelSource,
    assignment: StageAssignment,
    options: StageOptions,
    progress: LoadProgress | None,
    before: LoadedStage | None,
    *,
    shard: Shard | None = None,
) -> RankSlice[Collective]:
    from convoy.model.backends.host.stage import HostStage

    return HostStage.load(source, assignment, options, progress, before=before, shard=shard)


def _load_cuda(
    source: ModelSource,
    assignment: StageAssignment,
    options: StageOptions,
    progress: LoadProgress | None,
    before: LoadedStage | None,
) -> LoadedStage:
    try:
        # It needs Triton.
        from convoy.model.backends.cuda.options import check_kv_dtype
        from convoy.model.backends.cuda.several_stages import load_on_devices
    except ImportError as error:
        raise ModelError(
            f"a stage on {options.device} needs Triton, which is not installed",
            hint="install the CUDA build of torch, which brings it",
        ) from error
    check_kv_dtype(options.kernel, options.kv_dtype)
    return load_on_devices(
        *(source, assignment),
        devices=options.device.split(","),
        kernel=options.kernel,
        block_size=options.block_size,
        require_tags=options.require_tags,
        captured=options.captured,
        progress=progress,
        before=before,
    )


def _load_mlx(
    source: ModelSource,
    assignment: StageAssignment,
    options: StageOptions,
    progress: LoadProgress | None,
    before: LoadedStage | None,
    *,
    shard: Shard | None = None,
) -> RankSlice[Collective]:
    if reason := mlx_device.why_no_mlx():
        raise ModelError(f"a stage on mlx cannot be loaded: {reason}", hint=mlx_device.how_to_run())
    # It needs mlx.
    from convoy.model.backends.mlx.stage import MlxStage

    return MlxStage.load(source, assignment, options, progress, before=before, shard=shard)


# By the kind of a device: the name before its number.
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        HOST: Backend(_load_host, _load_host),
        CUDA: Backend(_load_cuda, None),
        MLX: Backend(_load_mlx, _load_mlx),
    }
)


def load_stage(
    source: ModelSource,
    assignment: StageAssignment,
    options: StageOptions,
    progress: LoadProgress | None = None,
    *,
    before: LoadedStage | None = None,
) -> LoadedStage:
    """Load the assignment's weights onto the devices of ``options``, and return the stage.

    ``progress`` is called with (loaded, total) bytes. ``before`` is the stage that this one replaces: weights
    that both own are not read again. ``before`` is unusable afterwards, also where this call raises.

    Raises ModelError, also for an unknown device, a missing library and layers that do not run; PlanError for
    weights that do not fit; SelfCheckError if exact mode does not hold on this machine.
    """
    return _backend_of(options.device).load(source, assignment, options, progress, before)


def why_not_on_mlx(source: ModelSource) -> str:
    """Return the model's name and the part of it that no stage on MLX runs, or "". Needs no MLX."""
    from convoy.model.backends.mlx.supported import why_not

    reason = why_not(source)
    return reason and f"{source.name} does not run on mlx: {reason}"


def why_not_chosen(source: ModelSource) -> str:
    """Return the reason why `auto` does not choose MLX for a model on this machine, or ""."""
    return mlx_device.why_not_default() or why_not_on_mlx(source)


def load_slice(
    source: ModelSource,
    assignment: StageAssignment,
    options: StageOptions,
    shard: Shard,
    progress: LoadProgress | None = None,
    *,
    before: LoadedStage | None = None,
) -> RankSlice[Collective]:
    """Load one rank's slice of a stage that several members hold. Raises as `load_stage`.

    Raises PlanError too, for ranks that cannot share these layers.
    """
    load = _backend_of(options.device).load_slice
    if load is None:
        raise ModelError(
            f"ranks of several members share the layers of a stage on cpu or mlx, not on {options.device}",
            hint="use --parallel pipeline (whole layers each), or join one member's devices: cuda:0+cuda:1",
        )
    return load(source, assignment, options, progress, before, shard=shard)


def _backend_of(device: str) -> Backend:
    """Return the backend of a device, or of several of one kind such as ``cuda:0,cuda:1``."""
    kind = device.partition(",")[0].partition(":")[0]
    found = BACKENDS.get(kind)
    if found is None:
        raise ModelError(f"device {device!r} is not supported, expected {', '.join(BACKENDS)}")
    return found

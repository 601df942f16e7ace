"""The way to a stage on a device, which brings Triton: only where one is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from convoy.errors import ModelError
from convoy.model.checkpoints.source import ModelSource
from convoy.plan.spec.sharding import Shard
from convoy.wire.messages.control import StageAssignment

if TYPE_CHECKING:
    from convoy.model.checkpoints.reading import LoadProgress


def load_on_device(
    source: ModelSource,
    assignment: StageAssignment,
    options: Any,
    progress: LoadProgress | None,
    *,
    before: Any,
    shard: Shard,
) -> Any:
    """A class by itself with the face of `Stage`: derived from it, it could not be loaded from there.

    Of a slice that ranks of several members share there is none. Raises ModelError.
    """
    if shard.world_size > 1:
        raise ModelError(
            f"ranks of several members share the layers of a stage on cpu, not on {options.device}",
            hint="hold whole layers on each: --parallel pipeline; or join one's devices: cuda:0+cuda:1",
        )
    try:
        from convoy.model.backends.cuda.several import load_on_devices  # Triton, where a device is wanted
    except ImportError as error:
        raise ModelError(
            f"a stage on {options.device} needs Triton, which is not installed",
            hint="install the CUDA build of torch, which brings it",
        ) from error
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

"""Load a stage on a device. This imports Triton, so it happens only where a device is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from convoy.errors import ModelError
from convoy.model.checkpoints.source import ModelSource
from convoy.plan.spec.sharding import Shard
from convoy.wire.messages.control import StageAssignment

if TYPE_CHECKING:
    from convoy.model.checkpoints.stage_tensors import LoadProgress


def load_on_device(
    source: ModelSource,
    assignment: StageAssignment,
    options: Any,
    progress: LoadProgress | None,
    *,
    before: Any,
    shard: Shard,
) -> Any:
    """Return a stage on a device.

    Its class implements `Stage` and is not derived from it: a derived class could not be loaded from the
    base. Raises ModelError, also for a slice that ranks of several members share, which devices do not
    support.
    """
    if shard.world_size > 1:
        raise ModelError(
            f"ranks of several members share the layers of a stage on cpu, not on {options.device}",
            hint="use --parallel pipeline (whole layers each), or join one member's devices: cuda:0+cuda:1",
        )
    try:
        # Imported late: it needs Triton.
        from convoy.model.backends.cuda.several import load_on_devices
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

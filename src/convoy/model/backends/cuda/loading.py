"""Choose and load the layers of a stage on a device: ours, or the library's over our pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from convoy.errors import PlanError
from convoy.model.backends.cuda.decoder import DeviceDecoder
from convoy.model.backends.cuda.device_model import Model
from convoy.model.backends.cuda.kernels.float8 import require_float8
from convoy.model.backends.cuda.memory.weights import LoadProgress, StageWeights, load_weights, why_not_ours
from convoy.model.backends.cuda.options import CHECK_KERNEL, DeviceOptions
from convoy.model.backends.cuda.rope import make_rotation
from convoy.model.checkpoints.source import ModelSource
from convoy.model.library import LIBRARY
from convoy.plan.spec.sharding import Shard
from convoy.wire.messages.control import StageAssignment

if TYPE_CHECKING:
    from convoy.model.checkpoints.slices import Slices


def load_model(
    source: ModelSource,
    assignment: StageAssignment,
    options: DeviceOptions,
    progress: LoadProgress | None,
    kept: StageWeights | None,
    shard: Shard,
) -> Model:
    """Return the loaded model. Layers in ``kept`` are not read again. Raises as `CudaStage.load` does."""
    if options.form.floats:
        require_float8(options.device)
    try:
        with torch.cuda.device(options.device), torch.inference_mode():
            if options.kernel != CHECK_KERNEL and why_not_ours(source) is None:
                weights = load_weights(
                    *(source, assignment, options.device, progress, kept, options.form),
                    slices=_slices(source, shard),
                )
                head_dim = source.spec.cache_groups[0].head_dim
                return DeviceDecoder(weights, make_rotation(source, head_dim, options.device))
            with LIBRARY:
                # Imported late: transformers takes seconds to import, and our own layers do not need it.
                from convoy.model.backends.cuda.library_layers import load_library_decoder

            return load_library_decoder(
                *(source, assignment, options.device, options.dtype, progress), form=options.form, shard=shard
            )
    except torch.cuda.OutOfMemoryError as error:
        layers = f"layers {assignment.start} to {assignment.end - 1}"
        raise PlanError(
            f"{source.name}: {layers} do not fit on {options.device}",
            hint="give this member fewer layers, or serve with --quantize q8 or q4",
        ) from error


def _slices(source: ModelSource, shard: Shard) -> Slices | None:
    if shard.world_size == 1:
        return None
    with LIBRARY:
        # Imported late, as above: this module imports transformers.
        from convoy.model.checkpoints.slices import Slices

    return Slices(source.spec, shard)

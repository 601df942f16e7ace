"""Compute cos and sin of every position, on the device, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from convoy.errors import ModelError
from convoy.model.backends.cuda.kernels.pointwise import Rotation
from convoy.model.checkpoints.source import ModelSource
from convoy.model.library import FAILURES, LIBRARY, reason

# These kinds change their frequencies with the length of the batch, so a position would not have one value.
_UNSTEADY = frozenset({"dynamic", "longrope"})
_DEFAULT_THETA = 10000.0


def make_rotation(source: ModelSource, head_dim: int, device: torch.device) -> Rotation:
    """Return the rotation for all positions of the model's context.

    Raises ModelError for a kind of rotation that is not supported.
    """
    rope = _parameters(source.config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in _UNSTEADY:
        raise ModelError(f"{source.name}: rope type {kind!r} is not supported")
    if kind == "default":
        theta = rope.get("rope_theta") or source.config.get("rope_theta") or _DEFAULT_THETA
        if not isinstance(theta, int | float):
            raise ModelError(f"{source.name}: config.json says rope_theta = {theta!r}, expected a number")
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies, scaling = 1.0 / (float(theta) ** exponents), 1.0
    else:
        frequencies, scaling = _library_frequencies(source, str(kind))
    # The kernels rotate whole heads.
    if 2 * len(frequencies) != head_dim:
        raise ModelError(
            f"{source.name}: config.json turns {2 * len(frequencies)} dimensions of heads of {head_dim}, but "
            f"{device.type} supports only heads that are turned whole"
        )
    positions = torch.arange(source.spec.max_context, device=device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies.to(device=device, dtype=torch.float32))
    return Rotation(angles.cos() * scaling, angles.sin() * scaling)


def _parameters(config: Mapping[str, object]) -> Mapping[str, object]:
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found if isinstance(found, Mapping) else {}


def _library_frequencies(source: ModelSource, kind: str) -> tuple[torch.Tensor, float]:
    with LIBRARY:
        # Imported late: it takes seconds, and only formulas that are not our own need it.
        import transformers
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if kind not in ROPE_INIT_FUNCTIONS:
            raise ModelError(f"{source.name}: rope type {kind!r} is not supported")
        try:
            config: Any = transformers.CONFIG_MAPPING[source.spec.family].from_dict(dict(source.config))
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        except FAILURES as error:
            raise ModelError(f"{source.name}: config.json is not accepted: {reason(error)}") from error
    return frequencies, float(scaling)

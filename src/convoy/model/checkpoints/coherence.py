"""Check that a checkpoint's headers and its config.json describe the same model, before a weight is read.

A stage compares every tensor that it needs, and its shape, once more when it is built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.formats.unpacking import StoredLayout

_FLOATS = ("F64", "F32", "BF16", "F16")
_LAYER = re.compile(
    r"(?:model\.|model\.language_model\.|language_model\.model\.)layers\.([0-9]{1,6})\.", re.ASCII
)


def check_tensors(
    config: Mapping[str, object], num_layers: int, tensors: Mapping[str, StoredTensor], layout: StoredLayout
) -> None:
    """Raise ModelError, naming file and tensor, for weights of a non-float dtype and for surplus layers."""
    most = num_layers + _num_beside(config)
    for name, tensor in tensors.items():
        is_packed = name in layout.made or layout.whole(name) != name or name in layout.unused
        if not is_packed and name.endswith((".weight", ".bias")) and tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{tensor.path}: {name} has the dtype {tensor.dtype}, expected one of {', '.join(_FLOATS)}",
                hint="config.json names no quantisation that would explain this dtype",
            )
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) >= most:
            raise ModelError(
                f"{tensor.path}: {name} is of layer {int(layer[1])}, and config.json says that there are "
                f"{num_layers}",
                hint="config.json is of another model, or was changed",
            )


def _num_beside(config: Mapping[str, object]) -> int:
    """Return the number of layers behind the last that predict further tokens; Convoy does not run them."""
    text = config.get("text_config")
    for settings in (config, text if isinstance(text, Mapping) else {}):
        number = settings.get("num_nextn_predict_layers")
        if isinstance(number, int) and 0 < number < 100:
            return number
    return 0

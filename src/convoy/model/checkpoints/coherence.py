"""Whether a checkpoint's headers and its config.json speak of one model, before a weight is read.

What a stage reads is compared once more when it is built: every tensor that it needs, and its shape.
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
    """Raises ModelError, naming file and tensor, for weights that are no numbers, and for layers too many."""
    most = num_layers + _num_beside(config)
    for name, tensor in tensors.items():
        is_packed = name in layout.made or layout.whole(name) != name or name in layout.unused
        if not is_packed and name.endswith((".weight", ".bias")) and tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{tensor.path}: {name} has the dtype {tensor.dtype}, expected one of {', '.join(_FLOATS)}",
                hint="config.json says of no quantisation that it could be of",
            )
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) >= most:
            raise ModelError(
                f"{tensor.path}: {name} is of layer {int(layer[1])}, and config.json says that there are "
                f"{num_layers}",
                hint="config.json is of another model, or was changed",
            )


def _num_beside(config: Mapping[str, object]) -> int:
    """Layers behind the last that guess further tokens, which nobody runs here."""
    text = config.get("text_config")
    for settings in (config, text if isinstance(text, Mapping) else {}):
        number = settings.get("num_nextn_predict_layers")
        if isinstance(number, int) and 0 < number < 100:
            return number
    return 0

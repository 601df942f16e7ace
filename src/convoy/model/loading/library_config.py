"""Read a model's configuration with the classes of `transformers`, which know each family's defaults.

It is apart from `decoder`, which imports the library's models too and takes seconds to import.
"""

from __future__ import annotations

from typing import Any

from convoy.errors import ModelError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.library import FAILURES, LIBRARY, reason


def text_config(source: ModelSource) -> Any:
    """Return the library's configuration of the text decoder. Raises ModelError if it is invalid.

    Frequencies of rotations that change with the batch's length are refused: a position would not have one
    fixed value.
    """
    with LIBRARY:
        # Imported late, under the lock.
        import transformers
        from huggingface_hub.errors import StrictDataclassError

        try:
            if source.seed is not None or source.is_one_file:
                config: Any = transformers.CONFIG_MAPPING[source.spec.family].from_dict(dict(source.config))
            else:
                config = transformers.AutoConfig.from_pretrained(
                    str(source.path), local_files_only=True, trust_remote_code=False
                )
            config = config.get_text_config()
        except (*FAILURES, StrictDataclassError) as error:
            raise ModelError(f"{source.name}: config.json is not accepted: {reason(error)}") from error
    _check_rope(source, getattr(config, "rope_parameters", None) or {})
    return config


def _check_rope(source: ModelSource, parameters: dict[str, Any]) -> None:
    of_types = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in of_types or [parameters]:
        kind = rope.get("rope_type")
        # longrope changes once, beyond the context for which the model was trained
        original = rope.get("original_max_position_embeddings") or 0
        steady = kind == "longrope" and source.spec.max_context <= original
        if kind in ("dynamic", "longrope") and not steady:
            raise ModelError(f"{source.name}: rope type {kind!r} is not supported")

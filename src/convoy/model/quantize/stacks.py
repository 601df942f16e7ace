"""Take stacks of experts apart: compressed-tensors holds matrices of one expert each.

It is apart because it depends on the names that the library's loader knows, and rounds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from convoy.errors import ModelError
from convoy.model.checkpoints.source import ModelSource
from convoy.plan.spec.registry import FAMILIES

# an expert's matrices, by the names of files with single experts: those of gate and up, and that of down
_NAMES = ((("gate_proj", "up_proj"), ("down_proj",)), (("w1", "w3"), ("w2",)))


def single_experts(
    source: ModelSource, name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, int], tuple[int | slice, ...]]]:
    """Yield name, shape and place in the stack of each expert's matrices.

    ``name`` is that of the stack, which has the ``shape`` [experts, outputs, inputs].

    Raises ModelError for a family that the library loads from stacks only.
    """
    prefix, _, leaf = name.rpartition(".")
    num_experts, num_rows, width = shape
    parts = _parts(source, name)[leaf == "down_proj"]
    each = num_rows // len(parts)
    for expert in range(num_experts):
        for number, part in enumerate(parts):
            rows = slice(number * each, (number + 1) * each)
            yield f"{prefix}.{expert}.{part}.weight", (each, width), (expert, rows)


def _parts(source: ModelSource, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names under which the library joins experts of the source's family."""
    # the library's table of conversions takes seconds to import, and dense models do not need it
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    found = get_checkpoint_conversion_mapping(source.spec.family)  # type: ignore[no-untyped-call]
    patterns = [text for one in found or () for text in one.source_patterns]
    for parts in () if FAMILIES[source.spec.family].transposed_experts else _NAMES:
        if all(any(text.endswith(f"experts.*.{part}.weight") for text in patterns) for part in parts[0]):
            return parts
    raise ModelError(
        f"{source.name}: {name} holds all experts of a layer, and {source.spec.family} has no form in "
        "which each is rounded by itself",
        hint="use a checkpoint of the model that is quantised already, such as MXFP4, MLX or GGUF",
    )

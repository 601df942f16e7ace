"""Decide which matrices of a model are rounded, and to how many bits.

The linears of attention, MLP and experts get the bits of the format, and `lm_head` gets 8. Its error reaches
every logit, and in most models it is the largest matrix. Everything else stays as it is: embeddings, norms,
biases, routers, and matrices whose inputs do not fill groups.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from convoy.errors import ModelError
from convoy.model.checkpoints.names import decoder_name, is_matrix
from convoy.model.checkpoints.source import ModelSource
from convoy.model.quantize.search import GROUP
from convoy.plan.spec.registry import FAMILIES

# of `lm_head`, in every format
_OUTPUT_BITS = 8
_OUTPUT = "lm_head.weight"
# an expert's matrices, by the names of files with single experts: those of gate and up, and that of down
_NAMES = ((("gate_proj", "up_proj"), ("down_proj",)), (("w1", "w3"), ("w2",)))

# the names of a stack's matrices in an expert: of gate and up, and of down
ExpertNames = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class MatrixPart:
    """Describe a matrix [outputs, inputs] that is rounded by itself; without ``bits`` it stays as it is.

    ``index`` is its place in the model's tensor, of which it may be a part.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    index: tuple[int | slice, ...] = ()


def matrix_parts(source: ModelSource, name: str, shape: tuple[int, ...], bits: int) -> list[MatrixPart]:
    """Return the matrices of a tensor of the model, which has the ``shape``.

    The list is empty for a tensor that is no matrix. The experts of a stack have the names of files with
    single experts, or, in a family without such names, that of the stack.
    """
    known = decoder_name(name)
    if not is_matrix(known, shape):
        return []
    if len(shape) == 2:
        return [MatrixPart(name, (shape[0], shape[1]), _bits(known, shape[1], source, bits))]
    return list(_experts(source, name, shape, bits))


def require_rounded(source: ModelSource, bits: int) -> None:
    """Raise ModelError for a model without a matrix that is rounded."""
    shapes = source.layout.shapes(source.tensors).items()
    if not any(part.bits for name, shape in shapes for part in matrix_parts(source, name, shape, bits)):
        raise ModelError(
            f"{source.name} has no matrix with a multiple of {GROUP} inputs, so none can be rounded"
        )


def _experts(source: ModelSource, name: str, shape: tuple[int, ...], bits: int) -> Iterator[MatrixPart]:
    count, num_rows, width = shape
    names = expert_names(source.spec.family)
    if names is None:
        if FAMILIES[source.spec.family].transposed_experts:
            num_rows, width = width, num_rows
        for expert in range(count):
            yield MatrixPart(name, (num_rows, width), _bits(name, width, source, bits), (expert,))
        return
    prefix, _, leaf = name.rpartition(".")
    parts = names[leaf == "down_proj"]
    each = num_rows // len(parts)
    for expert in range(count):
        for number, part in enumerate(parts):
            rows = slice(number * each, (number + 1) * each)
            own = f"{prefix}.{expert}.{part}.weight"
            yield MatrixPart(own, (each, width), _bits(own, width, source, bits), (expert, rows))


# Kept, as the library copies its whole table for each question, and each layer of each stage asks.
@functools.cache
def expert_names(family: str) -> ExpertNames | None:
    """Return the names under which the library joins single experts of a family to stacks.

    Returns None for a family that the library loads from stacks only.
    """
    # the library's table of conversions takes seconds to import, and dense models do not need it
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    if FAMILIES[family].transposed_experts:
        return None
    found = get_checkpoint_conversion_mapping(family)  # type: ignore[no-untyped-call]
    patterns = [text for one in found or () for text in one.source_patterns]
    for parts in _NAMES:
        if all(any(text.endswith(f"experts.*.{part}.weight") for text in patterns) for part in parts[0]):
            return parts
    return None


def _bits(name: str, width: int, source: ModelSource, bits: int) -> int:
    """Return the bits of a matrix with rows of ``width``, or 0 if it stays as it is."""
    if width % GROUP or name.startswith("model.embed_tokens."):
        return 0
    if name == _OUTPUT:
        # tied, it is the embedding
        return 0 if source.spec.tied_embeddings else _OUTPUT_BITS
    return bits

"""The host memory of a step beside weights and K/V: hidden states, heads, scores and logits.

It is an upper bound, fitted to the allocator's measured peak
(`tests/model/backends/host/test_working_memory.py`). On CUDA devices the memory is measured after loading
instead, with the graphs (`model.backends.cuda.working_memory`).
"""

from __future__ import annotations

from convoy.config.table import ENGINE
from convoy.plan.spec.cache import CacheGroup
from convoy.plan.spec.model import ModelSpec
from convoy.plan.spec.weights import LayerWeights

# A larger step takes more memory.
STEP_TOKENS = ENGINE.max_step_tokens
# Rows of them that need logits.
STEP_OUTPUTS = 64
# Of attention's matmuls; `model.kv.packed` bounds them.
_PAIRS_BYTES = 5 << 20


def working_bytes(
    spec: ModelSpec, start: int, end: int, *, output: bool, num_tokens: int = STEP_TOKENS
) -> int:
    """Return the most bytes in use at once while a stage of layers [start, end) runs ``num_tokens``."""
    groups = [g for g in spec.cache_groups if any(start <= layer < end for layer in g.layers)]
    heads = max((_heads_width(group) for group in groups), default=0)
    between = max((_between(layer, spec) for layer in spec.layers[start:end]), default=0)
    states = (3 + 2 * spec.num_streams) * spec.hidden_size
    layers = num_tokens * (states + max(6 * heads, 2 * heads + between))
    logits = min(num_tokens, STEP_OUTPUTS) * 3 * spec.vocab_size if output else 0
    return _PAIRS_BYTES + 4 * max(layers, logits)


def _heads_width(group: CacheGroup) -> int:
    keys = 2 * group.num_kv_heads if group.has_heads else 1
    return (group.num_heads + keys) * max(group.head_dim, group.value_dim)


def _between(layer: LayerWeights, spec: ModelSpec) -> int:
    """Return the widest values of a token between two linears, in elements.

    Values computed from them are included.
    """
    dense = 3 * max((matrix.outputs for matrix in layer.each.linears), default=0)
    chosen = min(spec.experts_per_token, layer.num_experts)
    return dense + chosen * 3 * spec.hidden_size

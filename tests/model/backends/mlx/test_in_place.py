"""Steps write keys, values and states in place; a second reference to an array would copy the pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from convoy.model.mlx_device import why_no_mlx
from support.mlx_stages import Loader
from support.tiny_models import Chain, Models

if why_no_mlx():
    pytest.skip(f"{why_no_mlx()}: `make test-mlx` installs it", allow_module_level=True)

import mlx.core as mx

from convoy.model.backends.mlx.layers.attention import AttentionBatch, MlxPool
from convoy.model.backends.mlx.layers.delta import DeltaMemory, DeltaNet

NUM_BLOCKS = 512


def growing(chain: Chain) -> Callable[[], int]:
    """Return a function that runs a decode, and tells by how many bytes MLX's memory grew meanwhile."""

    def grown() -> int:
        mx.reset_peak_memory()
        before = int(mx.get_active_memory())
        chain.run((0, [6]))
        return int(mx.get_peak_memory()) - before

    return grown


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_a_decode_takes_no_memory_of_the_size_of_a_pool_unless_a_view_of_it_is_kept(
    kind: str, load: Loader, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models.source(kind)
    (stage,) = load(source)
    chain = Chain([stage], NUM_BLOCKS, [group.ring_blocks(16, 40) for group in source.spec.cache_groups])
    pools = NUM_BLOCKS * sum(stage.block_bytes)
    chain.run((0, list(range(3, 12))))
    chain.run((0, [5]))
    grown = growing(chain)
    assert grown() < pools / 20
    held: list[mx.array] = []
    write, recur = MlxPool.write, DeltaNet.__call__

    def keep(pool: MlxPool, batch: AttentionBatch, keys: mx.array, values: mx.array | None) -> None:
        held.append(pool.keys[None])
        write(pool, batch, keys, values)

    def keep_state(net: DeltaNet, x: mx.array, memory: DeltaMemory) -> mx.array:
        held.append(memory.pool.states[None])
        return recur(net, x, memory)

    monkeypatch.setattr(MlxPool, "write", keep)
    monkeypatch.setattr(DeltaNet, "__call__", keep_state)
    # A state is written when the next step reads it.
    assert max(grown(), grown()) > pools / 4
    assert held

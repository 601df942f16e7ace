"""Test stages with rounded K/V: no cut, chunk, neighbour or thread changes a bit of the chosen tokens."""

from __future__ import annotations

import pytest
import torch

from convoy.errors import ModelError
from convoy.model.backends.host.checks.attention_check import attention_holds
from convoy.model.backends.host.stage import HostStage
from convoy.model.kernels.native.library import native_library, why_no_native
from convoy.model.kv.packed import HeadShape
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import StageAssignment
from support.cases import cases
from support.tiny_models import Models, Prompt, Threads

# Of logits that reach about 3, from those of float32 K/V.
ERRORS = {"bf16": 0.05, "f16": 0.01, "q8": 0.1}


def decoded(
    models: Models, kind: str, prompts: dict[int, list[int]], kv_dtype: str, *cuts: int
) -> torch.Tensor:
    """Return the logits of the prompts' tokens: beside each other, in chunks, the last ones one by one."""
    chain = models.chain(kind, *cuts, kv_dtype=kv_dtype, ring_tokens=64)
    found: dict[int, list[torch.Tensor]] = {sequence: [] for sequence in prompts}
    done = dict.fromkeys(prompts, 0)
    for sizes in ((50, 1, 7), (17, 33, 64), *[(1, 1, 1)] * 3, (64, 64, 64)):
        rows = [
            (sequence, tokens[done[sequence] : done[sequence] + size])
            for (sequence, tokens), size in zip(prompts.items(), sizes, strict=True)
        ]
        rows = [row for row in rows if row[1]]
        for (sequence, part), logits in zip(rows, chain.run(*rows), strict=True):
            found[sequence].append(logits)
            done[sequence] += len(part)
    assert done == {sequence: len(tokens) for sequence, tokens in prompts.items()}
    return torch.cat([part for parts in found.values() for part in parts])


@pytest.mark.parametrize("kv_dtype", cases(ERRORS, ("bf16", "q8").__contains__))
@pytest.mark.parametrize("kind", cases(["even", "gemma3"], "even".__eq__))
def test_no_cut_chunk_neighbour_or_thread_changes_a_bit(
    models: Models, prompt: Prompt, threads: Threads, kind: str, kv_dtype: str
) -> None:
    prompts = {0: prompt(130), 1: prompt(70, seed=1), 2: prompt(90, seed=2)}
    threads(1)
    whole = [models.chain(kind, kv_dtype=kv_dtype).run((s, t))[0] for s, t in prompts.items()]
    for count, cuts in ((1, ()), (2, (3,))):
        threads(count)
        assert torch.equal(decoded(models, kind, prompts, kv_dtype, *cuts), torch.cat(whole))
    plain = models.chain(kind).run((0, prompts[0]))[0]
    apart = (whole[0] - plain).abs().max()
    assert 0 < apart < ERRORS[kv_dtype]


# Shared K/V, latents, states beside K/V, and sinks.
@pytest.mark.parametrize(
    "kind",
    cases(["gemma4 e", "deepseek_v3", "qwen3_5", "gpt_oss"], ("deepseek_v3", "gpt_oss").__contains__),
)
def test_every_kind_of_attention_rounds_its_keys_and_values(
    models: Models, prompt: Prompt, kind: str
) -> None:
    tokens = prompt(120)
    (whole,) = models.chain(kind, kv_dtype="bf16").run((0, tokens))
    cut = next(n for n in range(1, 5) if n not in models.source(kind).spec.forbidden_cuts)
    chain = models.chain(kind, cut, kv_dtype="bf16")
    parts = [chain.run((0, part))[0] for part in (tokens[:50], tokens[50:51], tokens[51:])]
    assert torch.equal(torch.cat(parts), whole)
    (plain,) = models.chain(kind).run((0, tokens))
    assert not torch.equal(plain, whole)


@pytest.mark.parametrize("kv_dtype", ["bf16", "f16"])
@pytest.mark.skipif(native_library() is None, reason=f"nothing is compiled here: {why_no_native()}")
def test_compiled_attention_has_torchs_bits_over_two_bytes(kv_dtype: str) -> None:
    for window in (None, 70):
        shape = HeadShape(6, 2, 80, 16, 12, window, kv_dtype=kv_dtype)
        assert attention_holds(shape)
    assert not attention_holds(HeadShape(6, 2, 64, 16, 12, kv_dtype="q8"))


@pytest.mark.parametrize("kv_dtype", ["f32", *ERRORS])
def test_carried_kv_come_back_with_their_bits(models: Models, prompt: Prompt, kv_dtype: str) -> None:
    chain, tokens = models.chain("even", kv_dtype=kv_dtype), prompt(48)
    chain.run((0, tokens))
    (stage,) = chain.stages
    blocks = chain.tables[0][0]
    carried = stage.read_blocks(0, 6, blocks)
    others = [block for block in range(chain.num_blocks) if block not in blocks][: len(blocks)]
    stage.write_blocks(0, others, [bytes([1 + n]) * 16 for n in range(len(others))], carried)
    assert torch.equal(stage.read_blocks(0, 6, others), carried)


@pytest.mark.parametrize("kv_dtype", ["auto", "f32", "bf16", "f16", "q8"])
@pytest.mark.parametrize("kind", ["even", "gemma3"])
def test_a_block_takes_the_bytes_that_the_plan_counts(models: Models, kind: str, kv_dtype: str) -> None:
    spec = models.source(kind).spec.with_kv_dtype(kv_dtype)
    # of gemma3, layer 2 has full attention and layer 3 a window
    mine = StageAssignment("a", 2, 4, embed=False, output=False)
    stage = HostStage.load(models.source(kind), mine, StageOptions(kv_dtype=kv_dtype))
    layers = (2, 4, 16, "exact-f32")
    assert stage.block_bytes == tuple(group.block_bytes(*layers) for group in spec.cache_groups)
    held = [len({2, 3} & set(group.layers)) for group in spec.cache_groups]
    values = [
        count * 16 * g.num_kv_heads * 2 * g.head_dim for count, g in zip(held, spec.cache_groups, strict=True)
    ]
    each = {"auto": 4.0, "f32": 4.0, "bf16": 2.0, "f16": 2.0, "q8": 34 / 32}[kv_dtype]
    assert stage.block_bytes == tuple(count * each for count in values)


@pytest.mark.parametrize(
    ("kind", "kv_dtype", "message"),
    [
        ("odd", "q8", r"kv_dtype is q8, with a scale for each 32 values of a head, and .* has heads of 8"),
        ("odd", "int3", "kv_dtype is 'int3', expected auto, f32, bf16, f16, q8"),
        ("deepseek_v4", "bf16", "kv_dtype is bf16, and .* keeps compressed entries, which are float32"),
    ],
)
def test_a_dtype_that_cannot_be_is_refused_with_both_values(
    models: Models, kind: str, kv_dtype: str, message: str
) -> None:
    whole = StageAssignment("a", 0, 1, embed=True, output=False)
    with pytest.raises(ModelError, match=message):
        HostStage.load(models.source(kind), whole, StageOptions(kv_dtype=kv_dtype))

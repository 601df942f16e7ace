"""Layers with a window keep no more blocks than it takes, whatever they looked back on before."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from convoy.errors import StepError
from convoy.model.kv.packed import HeadShape, describe_group
from convoy.model.kv.pool import ApartPool, KvPool, make_pool
from convoy.model.kv.pools import BlockTable, BlockTables, GroupBlocks
from convoy.model.layers.attention import LayerBatch, attend
from convoy.wire.messages.control import BlockGrant, Row, Step
from support.cases import cases
from support.tiny_models import Chain, Models, Prompt

KINDS = ["mistral", "mixed"]  # windows of 24 tokens alone, and beside full attention
REWOUND = [*KINDS, "deepseek_v4"]  # beside windows, entries made of tokens that the step before it had
WINDOW = 24
SIZES = (1, 7, 16, 50)
TOLERANCE = 2e-5


def fed(chain: Chain, sequence: int, tokens: list[int], size: int) -> torch.Tensor:
    """Return logits of a prompt in chunks of ``size``."""
    chunks = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    return torch.cat([chain.run((sequence, chunk))[0] for chunk in chunks])


@pytest.mark.parametrize("kernel", ["exact-f32", "plain-f32"])
def test_windows_and_full_attention_in_one_model_give_the_librarys_logits(
    models: Models, prompt: Prompt, kernel: str
) -> None:
    tokens = prompt(200)
    (found,) = models.chain("mixed", kernel=kernel).run((0, tokens))
    assert (found - models.reference("mixed", tokens)).abs().max() <= TOLERANCE


# Each size with one of the kinds.
QUICK = list(zip(KINDS * 2, SIZES, strict=True))


@pytest.mark.parametrize(("kind", "size"), cases(itertools.product(KINDS, SIZES), QUICK.__contains__))
def test_a_ring_gives_the_bits_of_a_table_that_keeps_everything(
    models: Models, prompt: Prompt, kind: str, size: int
) -> None:
    # round the smallest rings twice as well
    tokens = prompt(110 if size == 1 else 230)
    (whole,) = models.chain(kind).run((0, tokens))
    chain = models.chain(kind, ring_tokens=size)
    assert torch.equal(fed(chain, 0, tokens, size), whole)
    windows = [len(table) for table, ring in zip(chain.tables[0], chain.rings, strict=True) if ring]
    assert windows == [-(-(WINDOW - 1 + size) // 16) + 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_rings_of_many_sequences_go_round_beside_each_other_over_any_cut(
    models: Models, prompt: Prompt, kind: str
) -> None:
    prompts = {s: prompt(60 + 31 * s, seed=s) for s in range(4)}
    alone = {s: models.chain(kind).run((s, tokens))[0] for s, tokens in prompts.items()}
    for cuts in [(), (1,), (2, 4), (0, 5)]:
        chain = models.chain(kind, *cuts, ring_tokens=20)
        found: dict[int, list[torch.Tensor]] = {s: [] for s in prompts}
        for start in range(0, 160, 20):
            rows = [(s, part) for s, tokens in prompts.items() if (part := tokens[start : start + 20])]
            for (s, _), logits in zip(rows, chain.run(*rows), strict=True):
                found[s].append(logits)
        for s in prompts:
            assert torch.equal(torch.cat(found[s]), alone[s]), f"sequence {s}, cut before {cuts}"


@pytest.mark.parametrize("kind", cases(REWOUND, "mixed".__ne__))
def test_what_a_ring_forgot_was_of_no_use_and_its_blocks_go_to_others(
    models: Models, prompt: Prompt, kind: str
) -> None:
    first, second = prompt(120), prompt(90, seed=1)
    (whole,) = models.chain(kind).run((0, second))
    chain = models.chain(kind, ring_tokens=30)
    fed(chain, 0, first, 30)
    chain.release(0)
    assert torch.equal(fed(chain, 1, second, 30), whole)


@pytest.mark.parametrize("kind", cases(REWOUND, "mistral".__ne__))
def test_guesses_that_were_wrong_are_written_over_in_a_ring_too(
    models: Models, prompt: Prompt, kind: str
) -> None:
    tokens, wrong = prompt(105), prompt(8, seed=9)
    (whole,) = models.chain(kind).run((0, tokens))
    chain = models.chain(kind, ring_tokens=9)
    fed(chain, 0, tokens[:75], 9)
    for start in range(75, 105, 5):
        chain.run((0, [tokens[start], *wrong]))  # one token and eight guesses
        (again,) = chain.run((0, tokens[start : start + 5]), start=start)
        assert torch.equal(again, whole[start : start + 5]), f"after guesses behind {start}"


def tables(**changes: object) -> BlockTables:
    """Make a full group, a window of 10, and a state; blocks of 4; sequence 1 is 22 tokens long."""
    groups = [GroupBlocks(16), GroupBlocks(8, window=10), GroupBlocks(2, recurrent=True)]
    made = BlockTables(groups, block_size=4, max_context=64, require_tags=False)
    grants = [
        BlockGrant.append(1, 0, list(range(8))),
        BlockGrant.append(1, 1, [5, 2, 7, 0]),
        BlockGrant.append(1, 2, [1]),
    ]
    take(made, grants, Row(1, 0, 7, 0))
    for start in range(7, 22, 5):
        take(made, [], Row(1, start, 5, 0))
    return made


def take(made: BlockTables, grants: list[BlockGrant], *rows: Row) -> None:
    made.commit(made.stage(Step(0, [], grants, list(rows), b"")))


REFUSED: dict[str, tuple[list[BlockGrant], list[Row], str]] = {
    "a row that writes over what its first token sees": (
        [],
        [Row(1, 22, 8, 0)],
        "a ring for 16 positions, its row looks back from 30 on 13, and 22 were written",
    ),
    "a ring that grows after it went round": ([BlockGrant.append(1, 1, [3])], [], "wrapped around its ring"),
    "a rewind behind a state": ([], [Row(1, 20, 2, 0)], "its state covers 22 positions"),
    "a prefix that is shared": (
        [BlockGrant.append(2, 0, [9], bytes(16))],
        [],
        "shares block 9, which holds another prefix",
    ),
    "a sequence without a ring": (
        [BlockGrant.append(2, 0, [9]), BlockGrant.append(2, 2, [0])],
        [Row(2, 0, 3, 0)],
        "a ring for 0 positions",
    ),
    "a sequence without a state": (
        [BlockGrant.append(2, 0, [9]), BlockGrant.append(2, 1, [1])],
        [Row(2, 0, 3, 0)],
        "no block for its state",
    ),
    "a block that another ring has": ([BlockGrant.append(2, 1, [7])], [], "gives away block 7"),
    "a block that the other group has, and this one not": (
        [BlockGrant.append(2, 1, [8])],
        [],
        "names block 8, but the pool has 8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_a_ring_or_a_state_cannot_take_is_refused_and_changes_nothing(name: str) -> None:
    grants, rows, told = REFUSED[name]
    made = tables()
    with pytest.raises(StepError, match=told):
        take(made, grants, *rows)
    take(made, [], Row(1, 22, 7, 1))


def test_a_rewind_within_what_a_ring_retains_is_taken_and_behind_it_refused() -> None:
    made = BlockTables([GroupBlocks(8, window=10)], block_size=4, max_context=64, require_tags=False)
    take(made, [BlockGrant.append(1, 0, [0, 1, 2, 3])], Row(1, 0, 7, 0))
    take(made, [], Row(1, 7, 7, 0))
    take(made, [], Row(1, 14, 6, 0))
    take(made, [], Row(1, 13, 2, 0))  # of 20 positions that were written, 4 to 19 are there
    with pytest.raises(StepError, match="looks back from 14 on 3, and 20 were written"):
        take(made, [], Row(1, 12, 2, 0))
    take(made, [], Row(1, 15, 5, 0))


def test_blocks_of_a_ring_or_of_several_groups_are_not_carried() -> None:
    ring = BlockTables([GroupBlocks(8, window=10)], block_size=4, max_context=64)
    for made in (ring, tables()):
        with pytest.raises(StepError, match="carried only if all layers keep all of it"):
            made.check_carried([0])
        with pytest.raises(StepError, match="carried only if all layers keep all of it"):
            made.fill([0], [bytes(16)])


def attended(shape: HeadShape, chunks: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, K and V as `attend` takes them, and its output for them in chunks."""
    generator = torch.Generator().manual_seed(5)
    length = sum(chunks)
    query = torch.randn(length, shape.num_heads, shape.head_dim, generator=generator)
    kv = torch.randn(length, *shape.kv_rows, generator=generator)
    pool, table = make_pool(shape), BlockTable([list(range(shape.num_blocks))[::-1]])
    outs, start = [], 0
    for count in chunks:
        group = describe_group([(Row(0, start, count, 0), table)], 0, shape)
        part = slice(start, start + count)
        outs.append(attend(query[part], kv[part], LayerBatch(group, pool)))
        start += count
    return query, kv, torch.cat(outs)


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Compute causal attention in one piece: [T, heads, value_dim]."""
    group = query.shape[1] // key.shape[1]
    keys, values = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (key, value))
    mask = torch.ones(len(query), len(query), dtype=torch.bool).tril()
    scores = query.transpose(0, 1) @ keys.transpose(1, 2)
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ values).transpose(0, 1)


SPLITS: dict[str, tuple[HeadShape, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]] = {
    "alike": (HeadShape(6, 2, 8, 16, 9), lambda kv: (kv[:, :2], kv[:, 2:])),
    "wider keys": (HeadShape(6, 2, 12, 16, 9, value_dim=8), lambda kv: (kv[..., :12], kv[..., 12:])),
    "wider values": (HeadShape(4, 4, 8, 16, 9, value_dim=20), lambda kv: (kv[..., :8], kv[..., 8:])),
    "a latent": (HeadShape(5, 1, 20, 16, 9, value_dim=16, latent=True), lambda kv: (kv, kv[..., :16])),
}


@pytest.mark.parametrize("name", SPLITS)
def test_keys_and_values_of_any_width_attend_alike_and_in_chunks_to_the_bit(name: str) -> None:
    shape, split = SPLITS[name]
    assert isinstance(make_pool(shape), KvPool if name == "alike" else ApartPool)
    query, kv, whole = attended(shape, [140])
    expected = plain(query, *split(kv))
    assert whole.shape == expected.shape
    assert (whole - expected).abs().max() <= TOLERANCE
    for chunks in ([1] * 140, [50, 90], [3, 60, 77]):
        assert torch.equal(attended(shape, chunks)[2], whole), f"chunks of {chunks}"

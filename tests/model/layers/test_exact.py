"""Exact mode: a row's bits depend on no batch, chunk, thread count, cut or replay. The difference is 0."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from convoy.wire.messages.control import BlockGrant, Row, Step
from support.cases import cases
from support.tiny_models import Models, Prompt, Threads

EXACT_KINDS = ["odd", "even", "biased", "mistral", "qwen3"]
QUICK_THEN_ALL = [pytest.param(False, id="few"), pytest.param(True, id="all", marks=pytest.mark.long)]


def in_chunks(chain: Any, sequence: int, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    """Return logits of a prompt fed in chunks of these sizes, in turn."""
    parts, start = [], 0
    for size in itertools.cycle(sizes):
        if start >= len(tokens):
            break
        parts += chain.run((sequence, tokens[start : start + size]))
        start += size
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("kind", "num_threads"), cases([("odd", 1), ("even", 1), ("odd", 2)], ("odd", 2).__eq__)
)
def test_a_prefix_has_the_same_logits_at_every_length(
    models: Models, prompt: Prompt, threads: Threads, kind: str, num_threads: int
) -> None:
    tokens = prompt(512)
    threads(1)
    (whole,) = models.chain(kind).run((0, tokens))
    threads(num_threads)
    chain = models.chain(kind)
    # of tiles and blocks
    around = [*range(1, 19), *range(31, 34), *range(47, 50), *range(63, 67), 100, 511, 512]
    for count in around if num_threads == 1 else [1, 2, 3, 17, 33, 64, 512]:
        (found,) = chain.run((count, tokens[:count]))
        chain.release(count)
        assert torch.equal(found, whole[:count]), f"{count} rows"


@pytest.mark.parametrize("every", QUICK_THEN_ALL)
@pytest.mark.parametrize(
    ("kind", "num_threads"),
    cases(
        [*((kind, 1) for kind in EXACT_KINDS), ("odd", 2), ("qwen3", 2)],
        [("mistral", 1), ("qwen3", 2)].__contains__,
    ),
)
def test_chunks_do_not_change_a_prompts_logits(
    models: Models, prompt: Prompt, threads: Threads, kind: str, num_threads: int, every: bool
) -> None:
    # beyond a key block of 64 and a window of 24, wherever these begin
    tokens = prompt(150 if every else 100)
    threads(1)
    (whole,) = models.chain(kind).run((0, tokens))
    threads(num_threads)
    chain = models.chain(kind)
    # few steps on two threads: where cores are shared, every small parallel region waits for its turn
    few = [[64], [len(tokens) - 1, 1], [40, 1, 60]]
    # steps of one row, which are the most, for each kind of attention: plain, within a window, normalised
    many = [[1], [3], [7], [16], [150]] if every or kind in {"odd", "mistral", "qwen3"} else []
    for sequence, sizes in enumerate([[15, 2, 17], *many, *few] if num_threads == 1 else few):
        assert torch.equal(in_chunks(chain, sequence, tokens, sizes), whole), f"chunks of {sizes}"
        chain.release(sequence)


@pytest.mark.parametrize("kind", cases(EXACT_KINDS, ("odd", "mistral").__contains__))
def test_neighbours_do_not_change_a_rows_logits(
    models: Models, prompt: Prompt, threads: Threads, kind: str
) -> None:
    dice = random.Random(11)
    prompts = {s: prompt(dice.choice([1, 5, 40, 70, 130]), seed=s) for s in range(9)}
    threads(1)
    alone = {s: models.chain(kind).run((s, tokens))[0] for s, tokens in prompts.items()}
    for num_threads in (1, 2) if kind == "even" else (1,):
        threads(num_threads)
        chain = models.chain(kind)
        found: dict[int, list[torch.Tensor]] = {s: [] for s in prompts}
        done = dict.fromkeys(prompts, 0)
        while open_ones := [s for s in prompts if done[s] < len(prompts[s])]:
            chosen = dice.sample(open_ones, dice.randint(1, len(open_ones)))
            rows = [(s, prompts[s][done[s] : done[s] + dice.choice([1, 1, 2, 9, 33])]) for s in chosen]
            for (s, tokens), logits in zip(rows, chain.run(*rows), strict=True):
                found[s].append(logits)
                done[s] += len(tokens)
        for s in prompts:
            assert torch.equal(torch.cat(found[s]), alone[s]), f"sequence {s} on {num_threads} threads"


@pytest.mark.parametrize("every", QUICK_THEN_ALL)
@pytest.mark.parametrize("kind", cases(["odd", "even"], "odd".__eq__))
def test_no_cut_changes_the_logits(models: Models, prompt: Prompt, kind: str, every: bool) -> None:
    tokens, other = prompt(90), prompt(33, seed=1)
    (whole,) = models.chain(kind).run((0, tokens))
    (beside,) = models.chain(kind).run((0, other))
    num_layers = models.source(kind).spec.num_layers
    # each end alone, both alone, one in the middle, one of three
    cuts = {"odd": [(0,), (num_layers,), (1, 2)], "even": [(0, num_layers), (3,), (1, 4)]}[kind]
    if every:
        cuts = [*((cut,) for cut in range(num_layers + 1)), (1, 2), (1, 4), (2, 3), (0, num_layers)]
    for cut in cuts:
        chain = models.chain(kind, *cut)
        first = chain.run((1, tokens[:20]), (2, other[:32]))
        second = chain.run((2, other[32:]), (1, tokens[20:]))
        assert torch.equal(torch.cat([first[0], second[1]]), whole), f"cut at {cut}"
        assert torch.equal(torch.cat([first[1], second[0]]), beside), f"cut at {cut}"


def test_a_replay_in_other_blocks_has_the_same_logits(models: Models, prompt: Prompt) -> None:
    tokens = prompt(80)
    chain = models.chain("odd")
    decoded = in_chunks(chain, 0, tokens, [50, *[1] * 30])
    chain.run((5, prompt(60, seed=2)))
    chain.release(0)
    (replayed,) = chain.run((1, tokens))
    assert torch.equal(replayed, decoded)


def test_a_rewound_sequence_goes_on_as_if_it_had_never_run_ahead(models: Models, prompt: Prompt) -> None:
    tokens = prompt(70)
    (whole,) = models.chain("odd").run((0, tokens))
    chain = models.chain("odd")
    chain.run((0, tokens[:40] + prompt(20, seed=3)))
    (again,) = chain.run((0, tokens[40:]), start=40)
    assert torch.equal(again, whole[40:])


def test_a_batch_of_many_decodes_equals_each_alone(models: Models, prompt: Prompt) -> None:
    # more than a tile of 16 queries
    prompts = [prompt(5 * n + 1, seed=n) for n in range(18)]
    together = models.chain("even")
    together.run(*enumerate(prompts))
    batched = together.run(*((s, [s]) for s in range(18)))
    alone = models.chain("even")
    for s in range(18):
        alone.run((s, prompts[s]))
        (logits,) = alone.run((s, [s]))
        assert torch.equal(batched[s], logits), f"sequence {s}"
        alone.release(s)


def test_broken_numbers_of_one_sequence_do_not_reach_the_next_owner_of_its_blocks(
    models: Models, prompt: Prompt
) -> None:
    tokens = prompt(20)
    source = models.source("odd")
    chain = models.chain("odd", 2)
    (clean,) = chain.run((0, tokens))
    chain.release(0)
    later = chain.stages[1]
    table = list(range(chain.num_blocks))
    poison = torch.full((500, source.spec.hidden_size), float("inf"))
    later.make_pools(chain.num_blocks)
    later.run(Step(0, [], [BlockGrant.append(0, 0, table)], [Row(0, 0, 500, 0)], b""), poison, None)
    later.apply(Step(1, [0], [], [], b""))
    chain.stages[0].make_pools(chain.num_blocks)
    chain.lengths.clear()
    chain.tables.clear()
    chain.released.clear()
    (found,) = chain.run((1, tokens))
    assert torch.equal(found, clean)


def test_an_activation_with_an_epsilon_is_no_norm(models: Models, prompt: Prompt) -> None:
    tokens = prompt(40)
    (found,) = models.chain("apertus").run((0, tokens))
    assert models.distance("apertus", tokens, found, allowed=2e-5) <= 2e-5

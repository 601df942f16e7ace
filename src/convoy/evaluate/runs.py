"""Run prompts in every way that a step may meet them: in one piece, in chunks, by token, beside others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from convoy.evaluate.chain import StageChain

Prompts = Sequence[Sequence[int]]
# The chunk of every other prompt in a batch, in tokens.
_EARLY_CHUNK = 7


@dataclass(frozen=True)
class Run:
    """Hold one prompt's run in one way. ``logits`` [n, vocabulary] are of positions from ``start`` on."""

    way: str
    # The index of the prompt.
    prompt: int
    start: int
    logits: torch.Tensor
    # The sampled tokens, if this way samples any.
    tokens: tuple[int, ...] = ()


def alone(chain: StageChain, prompts: Prompts, num_tokens: int, told: Prompts | None = None) -> Iterator[Run]:
    """Run each prompt by itself in one row, and then sample ``num_tokens`` greedy tokens, one a step.

    ``told`` holds the tokens to continue with after each prompt, whatever is sampled. So one near tie does
    not cause further differences.
    """
    for index, prompt in enumerate(prompts):
        (logits,) = chain.run([(index, prompt)], len(prompt))
        yield Run("one piece", index, 0, logits)
        tokens, steps = [_best(logits)], []
        while len(tokens) < num_tokens:
            said = tokens if told is None else told[index]
            (last,) = chain.run([(index, [said[len(tokens) - 1]])], len(prompt))
            steps.append(last)
            tokens.append(_best(last))
        chain.release(index)
        rest = torch.cat(steps) if steps else logits[:0]
        yield Run("decode", index, len(prompt), rest, tuple(tokens))


def chunked(chain: StageChain, texts: Prompts, chunk: int) -> Iterator[Run]:
    """Run each text by itself, known to its end, in chunks of ``chunk`` tokens."""
    for index, text in enumerate(texts):
        parts = [chain.run([(index, text[at : at + chunk])], chunk)[0] for at in range(0, len(text), chunk)]
        chain.release(index)
        yield Run("chunks", index, 0, torch.cat(parts))


def batched(
    chain: StageChain, prompts: Prompts, num_tokens: int, told: Prompts | None = None
) -> Iterator[Run]:
    """Run all prompts, of unequal lengths, in the same steps.

    One more prompt joins at each step, every other one in chunks, while those before it decode. ``told`` is
    that of `alone`.
    """
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    sampled: list[list[int]] = [[] for _ in prompts]
    waiting = [list(prompt) for prompt in prompts]
    joined, longest = 0, max(map(len, prompts))
    while any(len(tokens) < num_tokens for tokens in sampled):
        joined = min(joined + 1, len(prompts))
        rows = []
        for index in range(joined):
            if waiting[index]:
                size = _EARLY_CHUNK if index % 2 else len(waiting[index])
                rows.append((index, waiting[index][:size]))
                del waiting[index][:size]
            elif len(sampled[index]) < num_tokens:
                said = sampled[index] if told is None else told[index]
                rows.append((index, [said[len(sampled[index]) - 1]]))
        for (index, _), logits in zip(rows, chain.run(rows, longest), strict=True):
            found[index].append(logits)
            if not waiting[index]:
                sampled[index].append(_best(logits))
    for index, parts in enumerate(found):
        chain.release(index)
        yield Run("batch", index, 0, torch.cat(parts), tuple(sampled[index]))


def _best(logits: torch.Tensor) -> int:
    """Return the greatest logit's token; of several the lowest id, as sampling does."""
    return int(logits[-1].numpy().argmax())

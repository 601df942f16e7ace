"""Sampling against a slow reference, and its promise that nothing but the logits and three numbers matter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convoy.errors import RequestError, StepError
from convoy.model.sampling.params import SamplingParams
from convoy.model.sampling.sample import Sampled, best_ids, prompt_logprob, sample, uniform

Logits = npt.NDArray[np.float32]


def sample_with(logits: Logits, *, choice: int = 0, position: int = 0, **params: Any) -> Sampled:
    prompt = params.pop("prompt_ids", ())
    generated = params.pop("generated_ids", ())
    rules = {name: params.pop(name) for name in ("allowed", "banned", "mask") if name in params}
    return sample(
        logits,
        SamplingParams(**params),
        choice=choice,
        position=position,
        prompt_ids=prompt,
        generated_ids=generated,
        **rules,
    )


def some_logits(seed: int, vocab_size: int = 105) -> Logits:
    return (np.random.default_rng(seed).standard_normal(vocab_size) * 3).astype(np.float32)


def reference(logits: Logits, params: SamplingParams, random: float) -> int:
    """Sample by the definition: sort by (-logit, id), cut, renormalise, walk the CDF in id order."""
    ranked = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    peak = float(logits[ranked[0]])
    weights = {i: math.exp((float(logits[i]) - peak) / params.temperature) for i in ranked}
    ranked = [i for i in ranked if weights[i] >= params.min_p]
    total, kept, mass = sum(weights[i] for i in ranked), [], 0.0
    for i in ranked:
        kept.append(i)
        mass += weights[i]
        if mass >= params.top_p * total and params.top_p < 1:
            break
    target = random * sum(weights[i] for i in kept)
    mass = 0.0
    for i in sorted(kept):
        mass += weights[i]
        if mass > target:
            return i
    return max(kept)


@given(
    logits=st.lists(st.integers(-40, 40), min_size=1, max_size=40),
    temperature=st.sampled_from([0.01, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.41, 1.0]),
    position=st.integers(0, 10**6),
)
def test_every_cut_equals_the_definition(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float, position: int
) -> None:
    # quarters make ties common: those must go to the lowest id
    values = (np.array(logits) / 4).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=9)
    sampled = sample(values, params, choice=1, position=position, prompt_ids=(), generated_ids=())
    assert sampled.token_id == reference(values, params, uniform(9, 1, position))


def test_top_p_over_a_wide_flat_vocabulary_equals_the_definition() -> None:
    logits = some_logits(3, 40_000) / np.float32(10)  # so flat that the first cuts hold too little
    params = SamplingParams(top_p=0.9, seed=4)
    for position in range(3):
        sampled = sample(logits, params, choice=0, position=position, prompt_ids=(), generated_ids=())
        assert sampled.token_id == reference(logits, params, uniform(4, 0, position))


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = np.array([1, 5, 2, 5, 5], dtype=np.float32)
    assert sample_with(logits, temperature=0).token_id == 1


def test_the_random_number_is_that_of_the_published_recipe() -> None:
    # vectors, so that no later change can silently alter every seeded text
    assert uniform(0, 0, 0) == 0.36313778886069825
    assert uniform(1, 2, 3) == 0.6238982253039932
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
    assert len({uniform(s, c, p) for s in range(4) for c in range(4) for p in range(4)}) == 64


def test_samples_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    counts = np.bincount([sample_with(logits, position=p).token_id for p in range(4000)], minlength=4) / 4000
    assert np.abs(counts - [0.5, 0.25, 0.125, 0.125]).max() < 0.025


def test_seed_choice_and_position_each_change_the_sample() -> None:
    logits = np.zeros(10_000, dtype=np.float32)
    base = sample_with(logits, seed=1).token_id
    assert base == sample_with(logits.copy(), seed=1).token_id
    assert base != sample_with(logits, seed=2).token_id
    assert base != sample_with(logits, seed=1, choice=1).token_id
    assert base != sample_with(logits, seed=1, position=1).token_id


def test_a_torch_view_and_a_row_of_a_batch_give_the_same_sample() -> None:
    logits = some_logits(1)
    batch = torch.zeros(3, 105)
    batch[1] = torch.from_numpy(logits)
    for position in range(20):
        alone = sample_with(logits, position=position, top_p=0.9, logprobs=3)
        assert alone == sample_with(batch.numpy()[1], position=position, top_p=0.9, logprobs=3)


def test_a_vanishing_temperature_is_greedy_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    logits = some_logits(2)
    assert sample_with(logits, temperature=1e-300).token_id == int(logits.argmax())
    assert not recwarn.list


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = np.array([4.0, 3.0, -1.0], dtype=np.float32)
    assert sample_with(logits, temperature=0, repetition_penalty=2.0, prompt_ids=[0]).token_id == 1
    assert sample_with(logits, temperature=0, repetition_penalty=2.0, generated_ids=[0]).token_id == 1
    logits = np.array([-1.0, -1.5], dtype=np.float32)
    assert sample_with(logits, temperature=0, repetition_penalty=2.0, prompt_ids=[0, 0]).token_id == 1


def test_presence_and_frequency_penalties_see_generated_tokens_alone() -> None:
    logits = np.array([4.0, 3.0], dtype=np.float32)
    assert sample_with(logits, temperature=0, presence_penalty=1.5, prompt_ids=[0] * 9).token_id == 0
    assert sample_with(logits, temperature=0, presence_penalty=1.5, generated_ids=[0]).token_id == 1
    assert sample_with(logits, temperature=0, presence_penalty=0.5, generated_ids=[0] * 9).token_id == 0
    assert sample_with(logits, temperature=0, frequency_penalty=0.4, generated_ids=[0] * 2).token_id == 0
    assert sample_with(logits, temperature=0, frequency_penalty=0.4, generated_ids=[0] * 3).token_id == 1


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.7, "min_p": 0.01},
        {"temperature": 0, "logit_bias": {3: 100.0, 4: 100.0}, "repetition_penalty": 1.4, "prompt_ids": [3]},
    ],
)
def test_no_token_is_sampled_that_is_banned_or_not_allowed(params: dict[str, Any]) -> None:
    logits = some_logits(8)
    logits[[3, 4]] += 50
    sampled = {sample_with(logits, position=i, banned=[3, 4], **params).token_id for i in range(200)}
    assert not sampled & {3, 4}
    allowed = [9, 7, 8, 3]
    sampled = {
        sample_with(logits, position=i, allowed=allowed, banned=[3], **params).token_id for i in range(200)
    }
    assert sampled <= {7, 8, 9}


def test_a_ban_changes_nothing_of_the_sample_but_the_token_that_is_banned() -> None:
    logits = some_logits(9)
    removed = logits.copy()
    removed[[2, 50]] = -np.float32(3e38)
    for position in range(200):
        banned = sample_with(logits, position=position, temperature=1.3, banned=[2, 50])
        assert banned.token_id == sample_with(removed, position=position, temperature=1.3).token_id
    everything = list(range(len(logits)))
    assert (
        sample_with(logits, position=7, allowed=everything)
        == sample_with(logits, position=7)
        == sample_with(logits, position=7, allowed=everything)
    )


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.7}, {"top_k": 40, "top_p": 0.5}])
def test_a_mask_allows_the_tokens_of_its_bits_as_a_list_does(params: dict[str, Any]) -> None:
    logits, allowed = some_logits(5), [3, 64, 100, 104]
    mask = sum(1 << token for token in allowed).to_bytes(16, "little")
    for position in range(60):
        masked = sample_with(logits, position=position, mask=mask, logprobs=2, **params)
        assert masked == sample_with(logits, position=position, allowed=allowed, logprobs=2, **params)
        assert sample_with(logits, position=position, mask=mask, banned=[64], **params).token_id in {
            3,
            100,
            104,
        }


@pytest.mark.parametrize("mask", [bytes(16), (1 << 120).to_bytes(16, "little"), b"\xff" * 12])
def test_a_mask_without_a_token_of_the_vocabulary_or_too_short_is_an_error(mask: bytes) -> None:
    with pytest.raises(
        StepError, match=r"none of 105 tokens may be sampled|a mask has 96 tokens, expected 105"
    ):
        sample_with(some_logits(5), mask=mask)


def test_log_probabilities_are_of_all_tokens_whatever_is_banned() -> None:
    logits = some_logits(8)
    best = int(logits.argmax())
    sampled = sample_with(logits, temperature=0, banned=[best], logprobs=2)
    assert sampled.token_id != best
    assert sampled.top[0][0] == best
    assert sampled.top == sample_with(logits, temperature=0, logprobs=2).top


def test_where_no_token_is_left_the_sampler_fails() -> None:
    logits = some_logits(8)
    with pytest.raises(StepError, match="none of 105 tokens may be sampled"):
        sample_with(logits, allowed=[3], banned=[3])
    with pytest.raises(StepError, match="none of 105 tokens"):
        sample_with(logits, banned=range(105))
    with pytest.raises(StepError, match="outside the vocabulary of 105"):
        sample_with(logits, allowed=[105])
    with pytest.raises(StepError, match="outside the vocabulary of 105"):
        sample_with(logits, banned=[-1])


def test_a_rank_is_the_place_among_the_best_first_with_ties_to_the_lower_id() -> None:
    logits = some_logits(10)
    logits[[20, 40, 60]] = logits.max() + 1
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    assert [prompt_logprob(logits, token, 0).rank for token in order] == list(range(1, 106))
    top = prompt_logprob(logits, 60, 3).top
    assert [token for token, _ in top] == [20, 40, 60]
    assert sample_with(logits, logprobs=0).rank == 0


def test_logit_bias_can_force_and_ban_a_token() -> None:
    logits = some_logits(5)
    best = int(logits.argmax())
    assert sample_with(logits, temperature=0, logit_bias={7: 100.0}).token_id == 7
    assert sample_with(logits, temperature=0, logit_bias={best: -100.0}).token_id != best
    with pytest.raises(RequestError, match="outside the vocabulary"):
        sample_with(logits, logit_bias={105: 1.0})


def test_the_given_logits_are_never_changed() -> None:
    logits = some_logits(6)
    before = logits.copy()
    sample_with(
        logits, repetition_penalty=1.5, prompt_ids=[1, 2], logit_bias={3: 5}, top_p=0.5, min_p=0.1, logprobs=2
    )
    assert np.array_equal(logits, before)


def test_logprobs_are_of_the_raw_distribution_whatever_reshapes_the_logits() -> None:
    logits = some_logits(7)
    exact = logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64))
    sampled = sample_with(logits, temperature=0.3, top_k=5, logit_bias={9: 100.0}, logprobs=4)
    assert sampled.token_id == 9
    assert sampled.logprob == pytest.approx(exact[9], abs=1e-5)
    best = np.argsort(-logits, kind="stable")[:4]
    assert [token for token, _ in sampled.top] == best.tolist()
    assert [value for _, value in sampled.top] == pytest.approx(exact[best].tolist(), abs=1e-5)


def test_tied_alternatives_are_listed_by_id() -> None:
    logits = np.array([0, 2, 1, 2, 1, 1], dtype=np.float32)
    assert [token for token, _ in sample_with(logits, logprobs=4).top] == [1, 3, 2, 4]
    assert best_ids(logits, 4).tolist() == [1, 2, 3, 4]


def test_a_prompts_token_is_scored_without_a_sample() -> None:
    logits = some_logits(8)
    scored = prompt_logprob(logits, 11, 2)
    exact = logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64))
    assert scored.token_id == 11
    assert scored.logprob == pytest.approx(exact[11], abs=1e-5)
    assert len(scored.top) == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_not_finite_is_an_error_and_never_a_token(bad: float, temperature: float) -> None:
    logits = some_logits(9)
    logits[[3, 50]] = bad
    with pytest.raises(StepError, match="2 of 105 logits are not finite"):
        sample_with(logits, temperature=temperature)


def test_logits_whose_sum_overflows_are_still_honest() -> None:
    logits = np.full(105, 3e38, dtype=np.float32)
    assert sample_with(logits, temperature=0).token_id == 0

"""`convoy verify --leak`: a prompt recovered from the activations that a peer is sent, and nothing else."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from convoy.cli import main
from convoy.config.kernels import INT8_Q8, PLAIN
from convoy.engine.ranks.load import load_member_stage
from convoy.errors import InputError
from convoy.evaluate.candidates import CachedPrefix, RepeatedPrefix, candidates_of
from convoy.evaluate.leak import AT_MOST, LeakOptions, check_depths, default_depths, leak, search
from convoy.model.checkpoints.source import ModelSource
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import StageAssignment
from support.tiny_models import Models

PROMPT = (3, 77, 5, 5, 104, 0, 19)
OTHER = (88, 1, 40, 2, 61, 90, 7)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def first_layers(source: ModelSource, depth: int) -> CachedPrefix | RepeatedPrefix:
    options = StageOptions(kernel=PLAIN, block_size=1, num_threads=1, require_tags=False)
    stage = load_member_stage(source, StageAssignment("x", 0, depth, embed=True, output=False), options)
    found = candidates_of(source.spec, stage, len(PROMPT))
    assert isinstance(found, CachedPrefix | RepeatedPrefix)
    return found


@pytest.mark.parametrize("kernel", [PLAIN, INT8_Q8])
def test_every_token_is_recovered_at_every_depth(models: Models, kernel: str) -> None:
    clock = itertools.count(0.0, 14.0)
    found = leak(models.source("even"), PROMPT, LeakOptions(kernel, (1, 2, 3, 4), 1), now=lambda: next(clock))
    assert [row.depth for row in found.depths] == [1, 2, 3, 4]
    assert {(row.reads, row.recovered, row.num_tokens, row.ties) for row in found.depths} == {
        ("activations", 7, 7, 0)
    }
    assert {row.seconds_per_token for row in found.depths} == {2.0}, "14 s for 7 tokens"
    assert found.bound == AT_MOST == "at most: a better attacker is faster"


def test_a_prefix_that_cannot_be_shared_is_run_again_with_each_candidate(models: Models) -> None:
    windowed, full = models.source("mistral"), models.source("odd")
    assert isinstance(first_layers(windowed, 2), RepeatedPrefix)
    assert isinstance(first_layers(full, 2), CachedPrefix)
    (row,) = leak(windowed, PROMPT, LeakOptions(PLAIN, (3,), 1)).depths
    assert (row.recovered, row.num_tokens) == (7, 7)


def test_the_search_finds_what_the_activations_say_and_not_what_was_asked_before(models: Models) -> None:
    candidates = first_layers(models.source("odd"), 3)
    candidates.sent(PROMPT)
    found = search(candidates, candidates.sent(OTHER))
    assert found.tokens == OTHER
    assert not any(mine == theirs for mine, theirs in zip(found.tokens, PROMPT, strict=True))


def test_activations_of_no_prompt_give_none_away(models: Models) -> None:
    candidates = first_layers(models.source("odd"), 3)
    noise = torch.randn(candidates.sent(PROMPT).shape, generator=torch.Generator().manual_seed(3))
    found = search(candidates, noise)
    right = sum(mine == theirs for mine, theirs in zip(found.tokens, PROMPT, strict=True))
    assert right <= 1, "one of 105 tokens may be right by chance"


class Twins:
    """Give tokens 0 and 1 the same activation."""

    def sent(self, prompt: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[float(max(1, token))] for token in prompt])

    def rows(self, known: Sequence[int]) -> list[torch.Tensor]:
        assert len(known) < 3
        return [self.sent((0, 1)), self.sent((2, 3))]


def test_tokens_with_the_same_activation_are_a_tie_and_the_lowest_counts() -> None:
    candidates = Twins()
    found = search(candidates, candidates.sent((3, 1, 2)))
    assert (found.tokens, found.ties) == ((3, 0, 2), 1)


def test_a_row_that_is_not_finite_is_never_the_nearest() -> None:
    class Broken(Twins):
        def rows(self, known: Sequence[int]) -> list[torch.Tensor]:
            return [torch.tensor([[float("nan")], [9.0]])]

    assert search(Broken(), torch.tensor([[4.0]])).tokens == (1,)


def test_where_the_peer_gets_token_ids_there_is_no_search(models: Models) -> None:
    found = leak(models.source("gemma4 e"), PROMPT, LeakOptions(PLAIN, (1,), 1))
    (row,) = found.depths
    assert (row.reads, row.recovered, row.seconds_per_token) == ("tokens", 7, None)


def test_depths_are_cuts_that_the_model_allows(models: Models) -> None:
    spec = models.source("odd").spec
    assert default_depths(spec) == (1, 2, 4)
    with pytest.raises(InputError, match="--leak-depths has 5: expected a cut behind 1 to 4 layers"):
        check_depths(spec, [1, 5])
    forbidden = replace(spec, forbidden_cuts={2: "layer 2 reads layer 1's K/V"})
    with pytest.raises(InputError, match="has 2: layer 2 reads layer 1's K/V"):
        check_depths(forbidden, [2])
    with pytest.raises(InputError, match="has no cut between layers"):
        check_depths(replace(spec, forbidden_cuts=dict.fromkeys(range(1, 5), "")), [])


def test_the_verb_shows_each_depth_and_what_the_figure_means(
    models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--leak", "--leak-tokens", "4", "--prompts", "1", "--threads", "1"]
    arguments = ["verify", str(models.directory("odd")), *flags]
    assert main.run(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in lines[2:5]] == [
        [layers, "activations", "4", "of", "4"] for layers in ("0-0", "0-1", "0-3")
    ]
    assert lines[-1] == "seconds per token are at most: a better attacker is faster"
    assert main.run([*arguments, "--leak-depths", "2", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [(row["depth"], row["recovered"]) for row in value["depths"]] == [(2, 4)]
    assert value["bound"] == AT_MOST


def test_a_model_without_files_is_searched_too(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    config = f"{tmp_path}/config.json"
    shape = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300}
    with open(config, "w", encoding="utf-8") as file:
        json.dump({**shape, **heads, "max_position_embeddings": 256}, file)
    flags = ["--leak", "--leak-tokens", "3", "--leak-depths", "all", "--json", "--threads", "1"]
    assert main.run(["verify", f"synthetic:{config}@3", *flags]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [(row["depth"], row["recovered"]) for row in value["depths"]] == [(1, 3), (2, 3)]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--leak", "--leak-depths", "one"], "--leak-depths"),
        (["--leak", "--leak-depths", "9"], "--leak-depths has 9"),
        (["--leak", "--leak-tokens", "0"], "--leak-tokens"),
        (["--leak", "--ranks", "2"], "--ranks 2"),
        (["--leak-tokens", "3"], "--leak-tokens and --leak-depths are for --leak"),
    ],
)
def test_flags_that_make_no_sense_are_refused_by_name(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["verify", "demo-mini", "--threads", "1", *flags]) != 0
    assert named in capsys.readouterr().err

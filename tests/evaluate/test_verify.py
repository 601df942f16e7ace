"""The parity certificate: it passes where a split equals the whole, and fails wherever one does not."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from convoy.cli import main
from convoy.cli.verify import report
from convoy.config.kernels import EXACT, INT8_Q8, PLAIN
from convoy.engine.ranks.load import load_member_stage
from convoy.errors import InputError, SelfCheckError, StepError
from convoy.evaluate.certificate import Certificate, limits_of
from convoy.evaluate.chain import StageLoader
from convoy.evaluate.cuts import allowed_cuts, layout_text, layouts, spread, whole
from convoy.evaluate.library_model import library_logits
from convoy.evaluate.prompts import draw_prompts, read_prompts, text_prompts, unreached_windows
from convoy.evaluate.verify import VerifyOptions, verify
from convoy.model.backends.host.checks.selfcheck import check_exact
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.quantize.checkpoint import quantize
from convoy.model.stage import LoadedStage, StageOptions
from convoy.model.text.tokens import Tokenizer
from convoy.wire.messages.control import StageAssignment
from evaluate import broken_stages as broken
from support.cases import cases
from support.odd_models import make_odd_llama
from support.tiny_models import Models


@pytest.fixture(scope="module", autouse=True)
def exact_mode() -> None:
    try:
        check_exact(1)
    except SelfCheckError as error:
        pytest.skip(f"exact mode is refused on this machine: {error.message}")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def certify(
    source: ModelSource,
    max_cuts: int | None = None,
    *,
    load: StageLoader = load_member_stage,
    prompts: Sequence[Sequence[int]] | None = None,
    **changes: Any,
) -> Certificate:
    """Certify with prompts that reach over a block and a tiny model's window, and few steps."""
    few: dict[str, Any] = {"kernel": EXACT, "num_tokens": 3, "chunks": (7, 16), "num_threads": 1}
    options = VerifyOptions(**few | changes, max_cuts=max_cuts)
    drawn = draw_prompts(source.spec, 3, options.num_tokens)
    return verify(source, prompts or [drawn[0][:41], drawn[1][:3]], options, load=load)


def failures(found: Certificate) -> list[str]:
    return [failure for result in found.results for failure in result.failures]


@pytest.mark.parametrize("kind", ["odd", "mistral"])
@pytest.mark.long
def test_every_cut_of_a_tiny_model_is_the_whole_to_the_bit(models: Models, kind: str) -> None:
    found = certify(models.source(kind))
    assert failures(found) == []
    assert found.passed
    cuts = [result for result in found.results if result.num_stages == 2 and "output + " in result.spans]
    assert len(cuts) == 4, "a model of five layers has four places to cut"
    assert sum(result.num_stages == 3 for result in found.results) >= 4
    for result in found.results:
        assert set(result.from_unsplit.values()) == {0.0}
        assert result.library is not None
        assert 0 < result.library.greatest <= 2e-5
        assert result.layers_once == 5


def test_demo_mini_has_its_certificate() -> None:
    source = ModelSource.resolve("demo-mini")
    found = certify(source, 0, prompts=text_prompts(Tokenizer(source), source.spec, 2, 3))
    assert failures(found) == []
    assert found.results[0].library is not None
    assert found.results[0].library.greatest_logit > 10, "the limit grows with logits, and is stated"


@pytest.mark.long
def test_ranks_have_one_pattern_of_bits_over_cuts_and_are_near_the_library(models: Models) -> None:
    found = certify(models.source("odd"), 1, ranks=2)
    assert failures(found) == []
    assert (found.ranks, found.limits.library) == (2, 4e-5)
    for result in found.results:
        assert set(result.from_unsplit.values()) == {0.0}
        assert result.layers_once == 5


@pytest.mark.long
def test_plain_kernels_agree_to_rounding(models: Models) -> None:
    found = certify(models.source("odd"), 0, kernel=PLAIN)
    assert failures(found) == []
    assert found.limits.unsplit == 2e-5


@pytest.mark.long
def test_8_bit_products_change_the_logits_and_no_cut_changes_a_bit_of_them(models: Models) -> None:
    found = certify(models.source("even"), 0, kernel=INT8_Q8)
    assert failures(found) == []
    for result in found.results:
        assert set(result.from_unsplit.values()) == {0.0}
        assert result.library is not None
        assert 1e-3 < result.library.greatest < 1
    (broken_cut,) = certify(
        models.source("even"), 0, kernel=INT8_Q8, load=broken.split_only(broken.perturb)
    ).results[1:2]
    assert not broken_cut.passed


@pytest.mark.long
def test_weights_rounded_at_load_have_the_librarys_logits_over_the_same_weights() -> None:
    found = certify(ModelSource.resolve("demo-mini"), 1, kernel="exact-q4")
    assert failures(found) == []
    assert found.limits == limits_of("exact-f32", has_experts=False)
    assert found.rounded is not None
    assert found.rounded.format == "q4"
    assert 0.01 < found.rounded.error < min(0.2, found.rounded.nearest_error)
    assert all(set(result.from_unsplit.values()) == {0.0} for result in found.results)


@pytest.mark.parametrize("kv_dtype", ["f16", pytest.param("q8", marks=pytest.mark.long)])
def test_rounded_kv_change_the_logits_and_no_cut_changes_a_bit_of_them(models: Models, kv_dtype: str) -> None:
    found = certify(models.source("even"), 1, kv_dtype=kv_dtype)
    assert failures(found) == []
    assert found.kv_dtype == kv_dtype
    assert found.limits.unsplit == 0.0
    (library,) = {result.library.greatest for result in found.results if result.library is not None}
    assert limits_of("exact-f32", has_experts=False).library < library < found.limits.library


def test_a_model_without_files_has_its_certificate(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    shape = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300}
    config.write_text(json.dumps({**shape, **heads, "max_position_embeddings": 256}))
    assert failures(certify(ModelSource.resolve(f"synthetic:{config}@3"))) == []


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    directory = tmp_path_factory.mktemp("deep") / "deep"
    return ModelSource.resolve(str(make_odd_llama(directory, num_hidden_layers=61, initializer_range=0.1)))


@pytest.mark.long
def test_all_of_61_layers_run_once_on_two_members(deep: ModelSource) -> None:
    found = certify(deep, 0, prompts=[list(range(9))], chunks=(4,), num_tokens=2)
    assert failures(found) == []
    planned = [result for result in found.results if result.num_stages == 2]
    assert {result.layers_once for result in planned} == {61}
    assert any(result.spans in {"0:30,output + 31:60", "0:29,output + 30:60"} for result in planned)


@pytest.mark.long
def test_a_61st_layer_that_nobody_runs_is_seen(deep: ModelSource) -> None:
    found = certify(deep, 0, prompts=[[3, 4]], chunks=(), num_tokens=1, load=broken.drop_last_of_the_first)
    assert found.num_failed == len(found.results) - 1, "the whole is as it was"
    for result in found.results[1:]:
        last = result.spans.partition(",")[0].partition(" ")[0].removeprefix("0:")
        assert f"layer {last} ran 0 times in a step, expected once" in result.failures
        assert result.layers_once == 60


BREAKS = {
    "a layer skipped": (broken.skip, "layer 2 ran 0 times in a step, expected once"),
    "a layer run twice": (broken.run_twice, "layer 2 ran 2 times in a step, expected once"),
    "positions shifted": (broken.shift_positions, "logits differ from the unsplit stage's"),
    "a weight perturbed": (broken.perturb, "logits differ from the unsplit stage's"),
}


BrokenSplit = Callable[[str], Certificate]


@pytest.fixture(scope="module")
def broken_split(models: Models) -> BrokenSplit:
    """Give broken_split(what): the certificate of the odd model with this break, which is made once."""

    @functools.cache
    def make(what: str) -> Certificate:
        return certify(models.source("odd"), 0, load=broken.split_only(BREAKS[what][0]))

    return make


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(
            what, marks=[] if what in {"a layer skipped", "a weight perturbed"} else [pytest.mark.long]
        )
        for what in BREAKS
    ],
)
def test_a_split_that_is_broken_fails(broken_split: BrokenSplit, what: str) -> None:
    _, expected = BREAKS[what]
    found = broken_split(what)
    assert found.results[0].passed, "the whole is as it was"
    assert found.num_failed == len(found.results) - 1, "each cut has a stage with that layer"
    assert all(any(expected in failure for failure in result.failures) for result in found.results[1:])


@pytest.mark.parametrize("change", [pytest.param(broken.skip, marks=pytest.mark.long), broken.perturb])
def test_what_is_broken_in_the_whole_too_is_seen_by_the_library(models: Models, change: Any) -> None:
    found = certify(models.source("odd"), 0, load=broken.everywhere(change))
    assert found.num_failed == len(found.results)
    assert any("differ from those of transformers" in failure for failure in failures(found))
    assert not any("unsplit" in failure for failure in failures(found))


@pytest.mark.parametrize("max_cuts", cases([None, 0], [0].__contains__))
def test_a_stage_that_refuses_a_step_fails_its_layout_and_the_next_is_still_checked(
    models: Models, max_cuts: int | None
) -> None:
    class Refusing(HostStage):
        def run(self, *_: Any) -> torch.Tensor:
            raise StepError("no")

    def load(
        source: ModelSource,
        assignment: StageAssignment,
        options: StageOptions,
        *,
        before: LoadedStage | None = None,
    ) -> LoadedStage:
        kind = Refusing if assignment.start == 2 else HostStage
        return kind.load(source, assignment, options, before=before)

    found = certify(models.source("odd"), max_cuts, load=load)
    assert found.results[0].passed
    refused = [result for result in found.results if "no" in result.failures]
    assert refused
    assert found.num_failed == len(refused)


def test_a_cut_that_the_model_forbids_is_not_tried(models: Models) -> None:
    spec = models.source("odd").spec
    shared = replace(spec, forbidden_cuts={3: "layer 3 reads layer 2's K/V"})
    assert allowed_cuts(shared) == [1, 2, 4]
    assert all(stage.start != 3 for layout in layouts(shared) for stage in layout)
    assert layouts(spec) != layouts(shared)


def test_layouts_cover_every_layer_once_with_one_output(models: Models) -> None:
    spec = models.source("odd").spec
    every = [whole(spec), *layouts(spec)]
    assert len({layout_text(spec, layout) for layout in every}) == len(every)
    for layout in every:
        held = [layer for stage in layout for layer in range(stage.start, stage.end)]
        assert held == list(range(spec.num_layers))
        assert sum(stage.output for stage in layout) == 1
        assert [stage.embed for stage in layout] == [True, *[False] * (len(layout) - 1)]
    owners = {[stage.output for stage in layout].index(True) == 0 for layout in every if len(layout) == 2}
    assert owners == {True, False}, "both ends of a model hold the output somewhere"


def test_a_sample_keeps_both_ends() -> None:
    assert spread(range(10), 3) == [0, 4, 9]
    assert spread(range(3), 5) == [0, 1, 2]
    assert spread(range(9), 1) == [4]
    assert spread(range(9), 0) == []


def test_a_prompt_is_longer_than_each_short_window(models: Models) -> None:
    spec = models.source("mistral").spec
    prompts = draw_prompts(spec, 3, 6)
    assert len(prompts[0]) > 24
    assert len({len(prompt) for prompt in prompts}) == 3
    assert unreached_windows(spec, prompts) == ()
    assert unreached_windows(spec, [[1] * 24]) == (24,)
    with pytest.raises(InputError, match="the context has 1024"):
        draw_prompts(spec, 1, 1024)


def test_texts_are_cut_to_the_context_and_repeated_beyond_a_window() -> None:
    source = ModelSource.resolve("demo-mini")
    tokenizer, spec = Tokenizer(source), source.spec
    prompts = text_prompts(tokenizer, spec, 8, 6)
    assert len({len(prompt) for prompt in prompts}) >= 6, "unequal lengths"
    windowed = replace(spec, cache_groups=(replace(spec.cache_groups[0], window=200),))
    assert len(text_prompts(tokenizer, windowed, 1, 6)[0]) >= 240
    assert max(map(len, text_prompts(tokenizer, replace(spec, max_context=16), 8, 6))) == 10


class Mute(Tokenizer):
    """Make no token of any text."""

    def __init__(self) -> None: ...

    def encode(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        return []


def test_a_tokeniser_that_makes_nothing_of_text_is_refused(models: Models, tmp_path: Path) -> None:
    spec = models.source("mistral").spec  # with a window, beyond which its prompts are repeated
    (tmp_path / "prompts.txt").write_text("The cat sat.\n")
    with pytest.raises(InputError, match="no token of a text of 235 characters"):
        text_prompts(Mute(), spec, 2, 3)
    with pytest.raises(InputError, match="no token of a text of 12 characters"):
        read_prompts(tmp_path / "prompts.txt", Mute(), spec, 3)


def test_own_prompts_are_one_on_each_line(tmp_path: Path) -> None:
    source = ModelSource.resolve("demo-mini")
    tokenizer = Tokenizer(source)
    file = tmp_path / "prompts.txt"
    file.write_text("The cat sat.\n\nWhat is 2+3?\n")
    prompts = read_prompts(file, tokenizer, source.spec, 6)
    assert prompts == [tokenizer.encode("The cat sat."), tokenizer.encode("What is 2+3?")]
    file.write_text("\n")
    with pytest.raises(InputError, match="holds no prompts"):
        read_prompts(file, tokenizer, source.spec, 6)
    file.write_text("word " * 3000)
    with pytest.raises(InputError, match="the context has"):
        read_prompts(file, tokenizer, source.spec, 6)


def test_a_checkpoint_of_convoy_quantize_has_its_error_in_the_certificate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = quantize(ModelSource.resolve("demo-mini"), "q4", tmp_path / "out")
    found = certify(ModelSource.resolve(str(tmp_path / "out")), 0)
    assert failures(found) == []
    assert found.rounded == made.record
    report(found, as_json=False)
    assert f"weighted error of {100 * made.record.error:.3g} %" in capsys.readouterr().out
    report(found, as_json=True)
    value = json.loads(capsys.readouterr().out)
    assert value["rounded"]["format"] == "q4"


def test_the_verb_prints_a_table_or_one_json_value(
    models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["verify", str(models.directory("odd")), "--cuts", "0", "--prompts", "1", "--tokens", "2"]
    assert main.run(arguments) == 0
    text = capsys.readouterr().out
    assert "0:1,output + 2:4" in text
    assert "passed: " in text
    assert main.run([*arguments, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["passed"] is True
    assert value["results"][0]["spans"] == "whole"
    assert value["limits"] == {"unsplit": 0.0, "library": 2e-5, "median": 2e-5}
    assert f"bits of the whole: {value['bits'][:12]}, computed with " in text


def test_the_verb_exits_with_1_where_anything_failed(
    broken_split: BrokenSplit, capsys: pytest.CaptureFixture[str]
) -> None:
    found = broken_split("a layer skipped")
    with pytest.raises(typer.Exit) as ended:
        report(found, as_json=False)
    assert ended.value.exit_code == 1
    captured = capsys.readouterr()
    assert "FAILED 0:1,output + 2:4: layer 2 ran 0 times" in captured.out
    assert "are not as they must be" in captured.err
    with pytest.raises(typer.Exit):
        report(found, as_json=True)
    assert json.loads(capsys.readouterr().out)["passed"] is False


@pytest.mark.parametrize(
    "flags", [["--cuts", "some"], ["--cuts", "-1"], ["--prompts", "0"], ["--prompts", "9"]]
)
def test_flags_that_make_no_sense_are_usage_errors(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["verify", "demo-mini", *flags]) == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize("kind", cases(["gemma4", "gpt_oss", "deepseek_v4"], "gemma4".__eq__))
def test_the_library_judges_models_with_experts_in_float64(models: Models, kind: str) -> None:
    source, text = models.source(kind), list(range(1, 30))
    (wide,) = library_logits(source, [text], dtype=torch.float64)
    (narrow,) = library_logits(source, [text])
    assert wide.dtype == torch.float64
    assert 0 < float((wide - narrow).abs().max()) < 2e-5

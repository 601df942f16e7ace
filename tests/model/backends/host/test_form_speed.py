"""The form of most weights of a model, and the speed of linears in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoy.config.kernels import measured_form
from convoy.model.backends.host.form_speed import in_form, main_form
from convoy.model.backends.host.layer_speed import uncached_bytes
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.stored.linear import exact_available
from convoy.plan.speed import Speed
from support.gguf_models import CASES, build_model, write_case
from support.quantised_models import Writer, library_model, write_gguf


def test_the_form_is_that_of_most_weights_and_float32_has_none(tmp_path: Path) -> None:
    assert main_form(ModelSource.resolve("synthetic:agent")) == ""
    assert main_form(ModelSource.resolve("demo")) == "BF16"
    write_gguf(tmp_path / "q8", Writer(library_model("llama3")), "Q8_0")
    assert main_form(ModelSource.resolve(str(tmp_path / "q8"))) == "gguf:Q8_0"
    write_case(tmp_path / "half.gguf", CASES["llama"], build_model(CASES["llama"]), "F16", shards=1)
    assert main_form(ModelSource.resolve(str(tmp_path / "half.gguf"))) == "F16"


@pytest.mark.skipif(not exact_available(), reason="exact mode does not run on this machine")
def test_a_form_changes_the_speed_of_linears_and_not_that_of_keys_and_values() -> None:
    plain = Speed(10e9, 1e12, few_flop_per_s=5e11, cache_bytes_per_s=8e9, layer_s=1e-3)
    found = in_form(plain, "gguf:Q8_0")
    assert (found.cache_bytes_per_s, found.attention_flop_per_s) == (8e9, 1e12)
    assert (found.layer_s, found.row_s, found.step_s) == (plain.layer_s, plain.row_s, plain.step_s)
    rates = (found.read_bytes_per_s, found.flop_per_s, found.few_flop_per_s or 0.0)
    assert all(rate > 0 for rate in rates)
    assert rates != (plain.read_bytes_per_s, plain.flop_per_s, plain.few_flop_per_s)


@pytest.mark.skipif(not exact_available(), reason="exact mode does not run on this machine")
def test_weights_rounded_at_load_have_the_bytes_of_their_form_beside_rounded_rows() -> None:
    plain = Speed(10e9, 1e12, few_flop_per_s=5e11)
    found = in_form(plain, "rounded4", rounds=True)
    assert found.read_bytes_per_s != plain.read_bytes_per_s
    assert measured_form("exact-q4", "BF16") == measured_form("int8-q4", "") == "rounded4"
    assert measured_form("exact-f32", "BF16") == measured_form("int8-stored", "BF16") == "BF16"
    assert measured_form("plain-f32", "BF16") == ""
    on_cuda = {"cuda-bf16": "gguf:Q4_K", "cuda-int8": "rounded8", "cuda-fp8": "float8"}
    assert {kernel: measured_form(kernel, "gguf:Q4_K") for kernel in on_cuda} == on_cuda


def test_a_probe_reads_more_than_the_last_cache_and_has_a_bound() -> None:
    assert 80 << 20 <= uncached_bytes() <= 256 << 20

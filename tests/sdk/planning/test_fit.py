"""The popular shapes have the published numbers of weights, and their plans follow the members' memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.transcript import run_here
from convoy.sdk.planning.fit import SHAPES, shapes

# So that nothing is measured.
TOLD = ["--speed", "10,100"]


def test_every_shape_has_the_weights_that_its_publisher_counts() -> None:
    published = [row["billions"] for row in json.loads(SHAPES.read_bytes())]
    counted = [sum(one.num_bytes // 2 for one in source.tensors.values()) / 1e9 for _, source in shapes()]
    assert counted == pytest.approx(published, rel=0.01)


def test_a_form_fits_where_its_bytes_do_and_the_best_has_most_bits(tmp_path: Path) -> None:
    flags = ["plan", "--fit", "--device", "a=cpu:16GB", *TOLD]
    found = json.loads(run_here([*flags, "--json"], tmp_path).stdout)
    assert found["memory_bytes"] == {"a": 12_800_000_000}
    rows = {row["model"]: row for row in found["rows"]}
    assert [rows[name]["best"] for name in ("Llama 3.2 3B", "Llama 3.1 8B", "Phi-4 14B")] == [
        "bf16",
        "q8",
        "q4",
    ]
    refused = rows["DeepSeek V3 671B"]["forms"][0]
    assert "needs 1.3 TB for layers 0-60 but has 12.8 GB" in refused["refused"]
    assert "machines with 12.8 GB that fit: " in refused["hint"]
    for row in rows.values():
        decodes = [form["decode_tokens_per_s"] for form in row["forms"] if form["fits"]]
        assert decodes == sorted(decodes), "with fewer bits a token reads less"
    lines = run_here(flags, tmp_path).stdout.splitlines()
    assert any(line.startswith("Llama 3.1 8B ") and line.endswith(" q8") for line in lines)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["demo"], "--fit lists popular models, and demo is asked for"),
        (["--quantize", "q4"], "--fit plans every form"),
        (["--layers", "0:3,output"], "--fit plans every form"),
        (["--device", "a=cpu:0GB"], "--device a has '0GB'"),
    ],
)
def test_flags_about_one_model_are_wrong_with_fit(tmp_path: Path, flags: list[str], message: str) -> None:
    done = run_here(["plan", "--fit", *flags, *TOLD], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr

"""The popular shapes have the published numbers of weights, and their plans follow the members' memory."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from cli.transcript import run_here
from convoy.cli.checks.plan_print import print_fits
from convoy.crypto.identity import OperatorKey
from convoy.sdk.planning.fit import SHAPES, FitForm, FitReport, FitRow, shapes

# Small and large, dense and with experts. Every shape would take four seconds for each plan.
FEW = ("Llama 3.2 3B", "Llama 3.1 8B", "Phi-4 14B", "DeepSeek V3 671B")
# So that nothing is measured.
TOLD = ["--speed", "10,100"]


@pytest.fixture
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [shape for shape in shapes() if shape.source.spec.name in FEW]
    assert len(few) == len(FEW)
    monkeypatch.setattr("convoy.sdk.planning.fit.shapes", lambda: iter(few))


def test_every_shape_has_the_weights_that_its_publisher_counts() -> None:
    published = [row["billions"] for row in json.loads(SHAPES.read_bytes())]
    counted = [sum(one.num_bytes // 2 for one in shape.source.tensors.values()) / 1e9 for shape in shapes()]
    assert counted == pytest.approx(published, rel=0.01)


@pytest.mark.usefixtures("few_shapes")
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


def roster_of_two(folder: Path, hosts: tuple[str, str]) -> list[str]:
    """Make a roster of alpha and beta in ``folder``, and return the flags for alpha's convoy.toml."""
    for name, host in zip(("alpha", "beta"), hosts, strict=True):
        port = 7001 if name == "alpha" else 7002
        new = ["identity", "new", name, "--address", f"{host}:{port}"]
        assert run_here(new, folder).returncode == 0
    cards = ["alpha.card.toml", "beta.card.toml"]
    assert run_here(["roster", "new", "home", *cards, "--head", "alpha"], folder).returncode == 0
    key = OperatorKey.load(folder / ".convoy/operator").public_key.hex()
    (folder / "alpha.toml").write_text(
        '[cluster]\nname = "alpha"\nidentity = ".convoy/alpha"\nroster = "roster.toml"\n'
        f'operator_key = "{key}"\n'
    )
    return ["plan", "--fit", "--config", "alpha.toml", *TOLD]


@pytest.mark.usefixtures("few_shapes")
def test_members_of_one_host_share_its_memory_and_their_link_is_short(tmp_path: Path) -> None:
    flags = roster_of_two(tmp_path, ("192.0.2.1", "192.0.2.1"))
    done = run_here([*flags, "--json"], tmp_path)
    assert "alpha and beta share the machine at 192.0.2.1: its memory and its cores count once" in done.stderr
    found = json.loads(done.stdout)
    assert sum(found["memory_bytes"].values()) < psutil.virtual_memory().total
    assert any("a round trip of 0.15 ms" in text for text in found["assumed"])


@pytest.mark.long
def test_the_assumed_round_trip_of_two_machines_is_said(tmp_path: Path) -> None:
    done = run_here([*roster_of_two(tmp_path, ("192.0.2.1", "192.0.2.2")), "--json"], tmp_path)
    assert "share the machine" not in done.stderr
    assert any("a round trip of 0.5 ms" in text for text in json.loads(done.stdout)["assumed"])


def test_a_rate_alone_is_shown_where_it_reads_differently(capsys: pytest.CaptureFixture[str]) -> None:
    forms = [
        FitForm("bf16", fits=True, weight_bytes=1, decode_tokens_per_s=0.81, alone_tokens_per_s=0.84),
        FitForm("q8", fits=True, weight_bytes=1, decode_tokens_per_s=0.81, alone_tokens_per_s=0.86),
    ]
    print_fits(FitReport({"a": 1}, 512, [FitRow("model", "org/name", 1, "bf16", forms)], []))
    assert " 0.8 " in (said := capsys.readouterr().out)
    assert "(0.8 alone)" not in said
    assert "0.8 (0.9 alone)" in said


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

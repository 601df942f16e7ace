"""The benches of what members reach, as a user types them: real members, and every form of the report.

`batch` is a process of its own, as it is for a user. The others run here, where torch is there already; every
peer is a process all the same.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from e2e.bench_verb import QUICK, REPORT, Bench
from e2e.served import convoy_json
from support.synthetic import write_config


@pytest.mark.slow
@pytest.mark.long
def test_batch_reports_one_member_and_two_as_json_table_and_plot(tmp_path: Path) -> None:
    model = f"synthetic:{write_config(tmp_path)}@2"
    table, plot = tmp_path / "rows.csv", tmp_path / "rows.svg"
    sizes = ("--concurrent", "16,1", "--context", "20", "--windows", "1", "--tokens", "2")
    shown = convoy_json("bench", "batch", model, *sizes, *QUICK, "--csv", str(table), "--plot", str(plot))
    assert list(shown) == REPORT
    assert shown["bench"] == "batch"
    assert shown["model"] == model
    assert [(row["members"], row["concurrent"], row["through"]) for row in shown["rows"]] == [
        (1, 1, "engine"),
        (1, 16, "engine"),
        (2, 1, "engine"),
        (2, 16, "engine"),
        (1, 1, "stage"),
    ]
    assert shown["ratios"].keys() == {"batch_16_over_serial", "loop_over_solo", "alone_over_solo"}
    assert shown["machine"]["num_cores"] >= 1
    assert len(list(csv.DictReader(table.read_text().splitlines()))) == 5
    drawn = ElementTree.fromstring(plot.read_text())  # noqa: S314 - our own file
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == 4


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins here")
def test_solo_pinned_is_one_process_with_one_request(bench: Bench, tmp_path: Path) -> None:
    model = f"synthetic:{write_config(tmp_path)}"
    shown = bench("solo", model, "--context", "20", "--windows", "1", "--tokens", "2", "--pin")
    rows = shown["rows"]
    assert [(row["members"], row["concurrent"], row["through"]) for row in rows] == [(1, 1, "stage")]
    assert shown["settings"]["pinned"] is True
    assert shown["ratios"] == {}


@pytest.mark.slow
@pytest.mark.long
def test_loop_tells_the_engine_and_the_hops_apart_from_the_stages(bench: Bench, tmp_path: Path) -> None:
    model = f"synthetic:{write_config(tmp_path)}"
    shown = bench("loop", model, "--context", "20", "--windows", "1", "--tokens", "4", *QUICK)
    decodes, steps = shown["rows"][:3], shown["rows"][3:]
    assert [(row["members"], row["through"]) for row in decodes] == [
        (1, "stage"),
        (1, "engine"),
        (2, "engine"),
    ]
    assert [(row["through"], row["num_hops"]) for row in steps] == [("stage", 0), ("stages", 0), ("ring", 2)]
    ratios = shown["ratios"]
    assert ratios.keys() == {"loop_over_solo", "alone_over_solo", "hop_us", "alone_over_solo_and_hops"}
    ms = {row["through"]: row["p50_ms"] for row in steps}
    assert ratios["hop_us"] == pytest.approx((ms["ring"] - ms["stages"]) / 2 * 1000, abs=0.2)


@pytest.mark.slow
@pytest.mark.long
def test_formats_has_a_rate_of_two_members_for_each_form(bench: Bench, tmp_path: Path) -> None:
    plot = tmp_path / "rows.svg"
    model = f"synthetic:{write_config(tmp_path, hidden_size=64, intermediate_size=64, head_dim=16)}"
    sizes = (
        "--forms",
        "Q8_0,mlx-4",
        "--concurrent",
        "1,2",
        "--steps",
        "1",
        "--rounds",
        "1",
        "--threads",
        "1",
    )
    shown = bench("formats", model, "--members", "2", *sizes, "--plot", str(plot))
    rows = shown["rows"]
    assert [(row["form"], row["through"], row["members"], row["number"]) for row in rows] == [
        (form, "engine", 2, count) for form in ("Q8_0", "mlx-4") for count in (1, 2)
    ]
    assert [row["over"] for row in rows] == ["", "", *["Q8_0 through engine"] * 2]
    assert shown["settings"]["kernel"] == "exact-f32"
    drawn = ElementTree.fromstring(plot.read_text())  # noqa: S314 - our own file
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == 4


def test_comms_has_a_row_for_each_size_and_sealing(bench: Bench, tmp_path: Path) -> None:
    table, plot = tmp_path / "rows.csv", tmp_path / "rows.svg"
    files = ("--csv", str(table), "--plot", str(plot))
    shown = bench("comms", "--what", "hop", "--sizes", "4,1", "--rounds", "5", *files)
    assert [(row["bytes"], row["sealing"]) for row in shown["rows"]] == [
        (size, sealing) for size in (8192, 32768) for sealing in ("none", "outer", "both")
    ]
    assert {"p50_8KiB_both_minus_none_us", "gb_per_s_32KiB_both_over_none"} <= shown["ratios"].keys()
    assert len(list(csv.DictReader(table.read_text().splitlines()))) == 6
    drawn = ElementTree.fromstring(plot.read_text())  # noqa: S314 - our own file
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == 6


@pytest.mark.slow
@pytest.mark.long
def test_prefill_has_a_row_for_each_chunk_window_and_number_of_members(bench: Bench, tmp_path: Path) -> None:
    model = f"synthetic:{write_config(tmp_path)}"
    sizes = ("--prompt-tokens", "100", "--chunks", "64", "--windows", "0", "--rounds", "1")
    shown = bench("prefill", model, *sizes, *QUICK)
    rows = shown["rows"]
    assert [(row["members"], row["chunk"], row["window"]) for row in rows] == [(1, 64, 1), (2, 64, 2)]
    assert shown["ratios"].keys() == {"two_members_over_one_prefill"}


@pytest.mark.slow
@pytest.mark.long
def test_spec_says_the_same_text_with_guesses_and_without_over_a_longer_wire(
    bench: Bench, tmp_path: Path
) -> None:
    plot = tmp_path / "rows.svg"
    sizes = ("--delays", "1", "--tokens", "16", "--rounds", "1", "--speculate", "4", "--threads", "1")
    shown = bench("spec", "demo-mini", *sizes, "--plot", str(plot))
    rows = shown["rows"]
    assert [(row["delay_ms"], row["speculate"]) for row in rows] == [(1, 0), (1, 4)] * 4
    assert all(row["identical"] is True for row in rows)
    assert all(row["round_trip_ms"] >= 2 * row["delay_ms"] for row in rows)
    assert all(row["drafted"] == 0 for row in rows if row["speculate"] == 0)
    assert len(shown["ratios"]) == 4
    drawn = ElementTree.fromstring(plot.read_text())  # noqa: S314 - our own file
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == 6


@pytest.mark.slow
@pytest.mark.long
def test_tp_has_a_row_for_each_mode_and_count_and_says_when_ranks_pay(bench: Bench, tmp_path: Path) -> None:
    flags = ("--concurrent", "1,2", "--context", "16", "--windows", "1", "--tokens", "2", *QUICK)
    report = bench("tp", f"synthetic:{write_config(tmp_path)}", *flags)
    rows = [row for row in report["rows"] if "mode" in row]
    assert [(row["mode"], row["concurrent"]) for row in rows] == [
        (mode, count) for mode in ("single", "pipeline", "tensor") for count in (1, 2)
    ]
    assert all(row["tokens_per_s"] > 0 and row["predicted_tokens_per_s"] > 0 for row in rows)
    one, two = (row["bytes"] for row in report["rows"] if "through" in row)
    assert two == 2 * one
    assert {"tensor_over_single_1", "tensor_over_pipeline_2", "crossover_us"} <= report["ratios"].keys()

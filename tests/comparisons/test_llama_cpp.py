"""llama.cpp beside Convoy, with programs that print what its own would print."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from compare import app
from comparisons.llama_cpp import LlamaRates, find_programs, rpc_servers
from convoy.bench.forms.rates import DECODE, PREFILL, RateOptions
from convoy.bench.report.clock import Deadline
from convoy.cli.main import run
from convoy.errors import ConvoyError
from support.synthetic import write_config

OPTIONS = RateOptions((1, 4), context=30, prompt_tokens=300, steps=8, rounds=1)
BENCH = """
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("loading", file=sys.stderr)
for count in map(int, given["-npl"].split(",")):
    rates = {"speed_pp": float(given["-npp"]), "speed_tg": float(given["-ntg"]) * count}
    print(json.dumps({"pl": count, **rates}))
"""
SERVER = """
import socket, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
listener = socket.create_server((given["-H"], int(given["-p"])))
while True:
    listener.accept()[0].close()
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, text in (("llama-batched-bench", BENCH), ("ggml-rpc-server", SERVER)):
        (folder / name).write_text(f"#!{sys.executable}\n{text}")
        (folder / name).chmod(0o700)
    return folder


def test_rates_are_those_that_the_program_prints(programs: Path, tmp_path: Path) -> None:
    rates = LlamaRates(programs, tmp_path / "model.gguf", 2, OPTIONS, Deadline(60)).measure()
    assert rates == {(PREFILL, 300): 300.0, (DECODE, 1): 8.0, (DECODE, 4): 32.0}


def test_a_program_that_fails_or_is_missing_is_named_with_its_last_line(
    programs: Path, tmp_path: Path
) -> None:
    (programs / "llama-batched-bench").write_text("#!/bin/sh\necho no such model\nexit 3\n")
    with pytest.raises(
        ConvoyError, match="llama-batched-bench ended with 3 and 0 of 1 results: no such model"
    ):
        LlamaRates(programs, tmp_path / "model.gguf", 2, OPTIONS, Deadline(60)).measure()
    with pytest.raises(ConvoyError, match="has no llama-batched-bench"):
        find_programs(tmp_path)


def test_servers_listen_on_their_cores_until_the_block_ends(programs: Path) -> None:
    core = (min(os.sched_getaffinity(0)),)
    with rpc_servers(programs, [core, core], Deadline(60)) as addresses:
        assert len(set(addresses)) == 2
        assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_every_form_has_a_line_and_those_in_gguf_have_llama_cpps_beside(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, hidden_size=64, intermediate_size=64, head_dim=16)
    options = ["--forms", "F32,Q8_0,mlx-4", "--two", "", "--concurrent", "1", "--prompt-tokens", "20"]
    shorter = ["--steps", "1", "--rounds", "1", "--threads", "1", "--json"]
    assert run(["llama", f"synthetic:{config}", "--llama", str(programs), *options, *shorter], app) == 0
    report = json.loads(capsys.readouterr().out)
    sizes = [row for row in report["rows"] if "stored_bytes" in row]
    rates = [row for row in report["rows"] if "what" in row]
    assert [row["form"] for row in sizes] == ["F32", "Q8_0", "mlx-4"]
    assert sizes[0]["stored_bytes"] > 3 * sizes[1]["stored_bytes"] > 4 * sizes[2]["stored_bytes"]
    ways = [(row["form"], row["through"], row["over"]) for row in rates if row["what"] == DECODE]
    assert ways == [
        *(("F32", "llama.cpp", ""), ("F32", "stage", "llama.cpp")),
        *(("Q8_0", "llama.cpp", ""), ("Q8_0", "stage", "llama.cpp"), ("mlx-4", "stage", "")),
    ]
    assert report["ratios"].keys() == {
        f"{form}_over_F32_{what}" for form in ("Q8_0", "mlx-4") for what in ("decode_1", "prefill_20")
    }

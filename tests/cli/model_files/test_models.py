"""Models are downloaded, listed with their fit, and removed by the names of the list."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.transcript import run_here
from convoy.cli.operator.first_machine import make_first_machine
from convoy.cli.operator.home import Home
from convoy.cli.show.progress import CountLines, counting_bar
from convoy.config.settings import load_config
from support.fake_hub import COMMIT, REPO, FakeHub
from support.fake_service import serving
from support.odd_models import make_odd_llama

# So that nothing is measured.
TOLD = ["--speed", "10,100"]


def test_a_model_is_pulled_listed_with_its_fit_and_removed(tmp_path: Path) -> None:
    hub = FakeHub(make_odd_llama(tmp_path / "served"))
    try:
        (tmp_path / "c.toml").write_text(f'[model]\nhub = "{hub.url}"\ncache = "kept"\n')
        pulled = run_here(["pull", REPO, "--config", "c.toml"], tmp_path)
        assert pulled.returncode == 0, pulled.stderr
        assert f"serve it: convoy serve {REPO}" in pulled.stderr
    finally:
        hub.close()
    asked = ["models", "--device", "a=cpu:24GB", "--config", "c.toml", *TOLD]
    found = json.loads(run_here([*asked, "--json"], tmp_path).stdout)
    kept = next(one for one in found["kept"] if one["model"])
    assert kept["model"] == f"{REPO}@{COMMIT}"
    assert kept["fit"]["fits"]
    assert kept["fit"]["decode_tokens_per_s"] > 0
    best = {row["source"]: row["best"] for row in found["choices"]["rows"]}
    assert (best["Qwen/Qwen3-8B"], best["Qwen/Qwen3-14B"], best["Qwen/Qwen3-32B"]) == ("bf16", "q8", "")
    assert run_here(["rm", REPO, "--config", "c.toml"], tmp_path).returncode == 0
    left = json.loads(run_here(["models", "--kept", "--json", "--config", "c.toml"], tmp_path).stdout)
    assert not any(one["model"] for one in left["kept"])


def test_a_download_that_was_ended_is_listed_with_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "kept" / "hub" / f"models--{REPO.replace('/', '--')}" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "odd-Q4_K_M.gguf.part").write_bytes(b"x")
    said = run_here(["models", "--kept", "--cache", "kept"], tmp_path).stdout
    assert "the download is not complete: `convoy pull somebody/odd:odd-Q4_K_M.gguf` goes on" in said


def test_without_members_of_a_head_the_table_is_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as running:
        monkeypatch.setattr("convoy.cli.model_files.models.DEFAULT_URL", running.url)
        done = run_here(["models", "--cache", "kept", *TOLD], tmp_path)
        silent = run_here(["models", "--cache", "kept", *TOLD, "--json"], tmp_path)
        named = run_here(["models", "--url", running.url, "--cache", "kept", *TOLD], tmp_path)
    assert (silent.returncode, silent.stderr) == (0, "")
    assert json.loads(silent.stdout)["served"] is None
    assert named.returncode == 1, "a head that is named must be one"
    assert "is left out" in done.stderr, "the fake's status has no members"
    assert done.stdout.startswith("members: this machine ")
    assert "yes, at about " in done.stdout
    assert "no: q4 takes 133.6 GB" in done.stdout


def test_a_head_that_is_named_and_does_not_answer_is_an_error(tmp_path: Path) -> None:
    done = run_here(["models", "--url", "http://127.0.0.1:1", "--cache", "kept", *TOLD], tmp_path)
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr.startswith("error: no head answers at http://127.0.0.1:1")
    assert "\nhint: " in done.stderr


def test_a_list_in_json_is_silent(tmp_path: Path) -> None:
    asked = ["models", "--device", "a=cpu:24GB", "--cache", "kept", *TOLD]
    assert "a: cpu with 24" in run_here(asked, tmp_path).stderr
    assert run_here([*asked, "--json"], tmp_path).stderr == ""


@pytest.mark.parametrize(
    ("speed", "tried"),
    [
        ("10,100", "Qwen/Qwen3-0.6B"),
        ("0.1,100", "Qwen/Qwen3-0.6B"),
        ("1000,10000", "Qwen/Qwen3-14B --quantize q4"),
    ],
)
def test_the_model_to_try_is_the_largest_that_answers_in_time(tmp_path: Path, speed: str, tried: str) -> None:
    asked = ["models", "--device", "a=cpu:16GB", "--cache", "kept", "--speed", speed]
    assert run_here(asked, tmp_path).stdout.splitlines()[-1] == f"try: convoy serve {tried}"


@pytest.mark.parametrize(("model", "key"), [("demo", "name"), (".", "path")])
def test_a_new_cluster_keeps_the_model_that_it_was_made_for(
    model: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = Home(tmp_path / ".convoy")
    make_first_machine(home, name="alpha", address="127.0.0.1", cluster="home", model=model)
    settings = load_config(home.config)
    assert settings.model_name() == (model if key == "name" else str(tmp_path))


def test_a_list_that_takes_long_names_the_model_at_hand_and_json_stays_clean(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seconds = iter([0.0, 0.5, 1.5, 2.0, 7.0])
    lines = CountLines("planning", now=lambda: next(seconds))
    for number, name in enumerate(["a", "b", "c", "d"]):
        lines.on_progress(number, 4, name)
    assert capsys.readouterr().err.splitlines() == ["planning: 1/4, b", "planning: 3/4, d"]
    with counting_bar("planning", quiet=True) as tell:
        tell(0, 1, "a")
    assert capsys.readouterr().err == ""

"""A cluster of real processes where only the head has the model's files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.weights.test_from_peers import opened
from convoy.cli.main import run
from convoy.crypto.identity import OperatorKey
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.store.digests import Hashing, make_manifest
from convoy.sdk.local_cluster import LocalCluster, LocalOptions
from support.fake_hub import COMMIT, REPO, FakeHub
from support.odd_models import make_odd_llama

WAIT_S = 150.0
POLL_S = 0.1


def url_of(local: LocalCluster) -> str:
    """Return the head's address from the JSON value that it prints once it answers."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        local.check_alive()
        log = local.log_file(local.head).read_text()
        start = log.find("{\n")
        if start >= 0 and log.rstrip().endswith("}"):
            url: str = json.loads(log[start:])["url"]
            return url
        time.sleep(POLL_S)  # a file has no event to wait on
    raise AssertionError(local.log_file(local.head).read_text())


def asked(url: str, **body: Any) -> Any:
    answer = httpx.post(f"{url}/completions", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()


@pytest.mark.slow
@pytest.mark.long
def test_a_cluster_where_only_the_head_has_the_files_starts_and_answers(tmp_path: Path) -> None:
    model = make_odd_llama(tmp_path / "odd")
    cache = tmp_path / "cache"
    texts = []
    for with_files in (True, False):
        with LocalCluster(LocalOptions(2, ["0:2,output", "3:4"], num_threads=1)) as local:
            files = ("--model", str(model)) if with_files else ("--cache", str(cache))
            join = ("join", "--config", str(local.config_file("beta")), "--until-stdin-closes")
            local.start("beta", *join, *files)
            local.start(
                local.head, "serve", str(model), "--config", str(local.config_file(local.head)), "--json"
            )
            answer = asked(url_of(local), model="odd", prompt="abc", max_tokens=12, temperature=0)
            texts.append(answer["choices"][0]["text"])
    assert texts[0] == texts[1] != ""
    assert len(list(cache.glob("models/*/tensors/*"))) > 10


@pytest.mark.slow
@pytest.mark.long
def test_a_member_gets_its_layers_from_another_through_a_head_that_lacks_them_and_no_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """beta has the files, gamma none; the head has the text files and its own layers, and no hub answers."""
    key = OperatorKey.generate()
    key.save(tmp_path / "operator")
    monkeypatch.setattr(OperatorKey, "generate", lambda: key)
    hub = FakeHub(make_odd_llama(tmp_path / "odd"))
    elsewhere = tmp_path / "elsewhere.toml"
    elsewhere.write_text(f'[model]\ncache = "{tmp_path / "elsewhere"}"\nhub = "{hub.url}"\n')
    sign = ["manifest", "sign", f"{REPO}@{COMMIT}", "--operator", str(tmp_path / "operator")]
    assert run([*sign, "--out", str(tmp_path / "signed"), "--config", str(elsewhere), "--json"]) == 0
    hub.close()
    manifest = make_manifest(ModelSource.resolve(str(hub.directory)), Hashing())
    opened(hub.directory, manifest, tmp_path / "alpha")
    with LocalCluster(LocalOptions(3, ["0:1,output", "2:2", "3:4"], num_threads=1)) as local:
        for name in local.names:
            file = local.config_file(name)
            more = f'[model]\ncache = "{tmp_path / name}"\nhub = "{hub.url}"\nsigned = "{tmp_path}/signed"\n'
            file.write_text(file.read_text().replace("[model]\n", more))
            if name != local.head:
                join = ("join", "--config", str(file), "--until-stdin-closes")
                local.start(name, *join, *(["--model", str(hub.directory)] if name == "beta" else []))
        local.start(local.head, "serve", REPO, "--config", str(local.config_file(local.head)), "--json")
        url = url_of(local)
        answer = asked(url, model=REPO, prompt="abc", max_tokens=12, temperature=0)
        status = httpx.get(url.removesuffix("/v1") + "/status", timeout=60).json()
    assert len(answer["choices"][0]["text"]) > 3
    origins = {stage["member"]: stage["weights_from"] for stage in status["stages"]}
    assert origins["gamma"]["beta"] > 50_000
    assert len(list((tmp_path / "gamma").glob("models/*/tensors/*"))) > 10


@pytest.mark.slow
@pytest.mark.long
def test_a_cluster_runs_a_model_of_a_hub_that_was_signed_and_nobody_fetches_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = OperatorKey.generate()
    key.save(tmp_path / "operator")
    monkeypatch.setattr(OperatorKey, "generate", lambda: key)
    hub = FakeHub(make_odd_llama(tmp_path / "odd"))
    with LocalCluster(LocalOptions(2, ["0:2,output", "3:4"], num_threads=1)) as local:
        for name in local.names:
            file = local.config_file(name)
            more = f'[model]\ncache = "{tmp_path / name}"\nhub = "{hub.url}"\nsigned = "{tmp_path}/signed"\n'
            file.write_text(file.read_text().replace("[model]\n", more))
        file = local.config_file(local.head)
        sign = ["manifest", "sign", f"{REPO}@{COMMIT}", "--operator", str(tmp_path / "operator")]
        elsewhere = tmp_path / "elsewhere.toml"
        elsewhere.write_text(f'[model]\ncache = "{tmp_path / "elsewhere"}"\nhub = "{hub.url}"\n')
        assert run([*sign, "--out", str(tmp_path / "signed"), "--config", str(elsewhere), "--json"]) == 0
        hub.served.clear()
        local.start("beta", "join", "--config", str(local.config_file("beta")), "--until-stdin-closes")
        local.start(local.head, "serve", REPO, "--config", str(file), "--json")
        answer = asked(url_of(local), model=REPO, prompt="abc", max_tokens=12, temperature=0)
        assert len(answer["choices"][0]["text"]) > 3
        alone = f"{local.log_file('beta').read_text()}{local.log_file(local.head).read_text()}"
        assert "the head is asked" not in alone
        for name in local.names:
            held = [path.stat().st_size for path in (tmp_path / name).glob("models/*/tensors/*")]
            assert 0 < sum(held) < 0.8 * (hub.directory / "model.safetensors").stat().st_size
            assert not list((tmp_path / name).rglob("*.safetensors"))
    hub.close()

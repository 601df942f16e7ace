"""`convoy upgrade --check` compares the versions that the members told the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli.transcript import run_here
from convoy import __version__
from convoy.sdk.endpoint import Endpoint


@pytest.mark.parametrize(
    ("versions", "code", "said"),
    [
        ({"alpha": __version__, "beta": __version__}, 0, "the members have one version"),
        (
            {"alpha": __version__, "beta": "0.0.9"},
            1,
            "the members have different versions, and a plan mixes them",
        ),
    ],
)
def test_members_with_different_versions_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], code: int, said: str
) -> None:
    status: dict[str, Any] = dict.fromkeys(("running", "waiting", "num_blocks", "free_blocks", "steps"), 0)
    status |= dict.fromkeys(("prompt_tokens", "generated_tokens", "generation"), 0)
    status |= dict.fromkeys(("model", "reason", "route", "kernel"), "")
    status |= {
        "ready": True,
        "ring_s": None,
        "stages": [],
        "versions": versions,
        "absent": [{"name": "gamma"}],
    }
    monkeypatch.setattr(Endpoint, "get", lambda *_, **__: status)
    done = run_here(["upgrade", "--check"], tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, said)
    assert "absent, so unknown: gamma" in done.stderr


def test_convoy_does_not_replace_itself(tmp_path: Path) -> None:
    assert run_here(["upgrade"], tmp_path).returncode == 2

"""Which heads serve HTTP in a front process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from convoy.api.service import Service
from convoy.cli.running.front import server_of, wants_front
from convoy.cluster.status import ClusterStatus
from convoy.config.settings import Config, override

STATUS = ClusterStatus(
    model="demo",
    ready=True,
    reason="",
    route="",
    kernel="exact",
    generation=1,
    stages=[],
    running=0,
    waiting=0,
    num_blocks=0,
    free_blocks=0,
    steps=0,
    prompt_tokens=0,
    generated_tokens=0,
    ring_s=None,
)


def config(device: str, asked: bool | None = None) -> Config:
    settings = Config()
    return override(
        settings,
        model=override(settings.model, device=device),
        serve=override(settings.serve, http_process=asked),
    )


@pytest.mark.parametrize("device", ["auto", "cpu", "mlx", "cuda", "cuda:0+cuda:1"])
def test_a_head_on_cuda_has_a_front_process_unless_told_otherwise(device: str, tmp_path: Path) -> None:
    (tmp_path / "driver").touch()
    assert wants_front(config(device), tmp_path / "driver") == (device not in {"cpu", "mlx"})
    assert wants_front(config(device), tmp_path / "absent") == device.startswith("cuda")
    several = config(device)
    several = override(several, serve=override(several.serve, also=("other=demo",)))
    assert not wants_front(several, tmp_path / "driver")
    for asked in (True, False):
        assert wants_front(config(device, asked), tmp_path / "driver") is asked


def test_a_head_with_a_front_process_offers_no_model_to_load_or_unload() -> None:
    started: list[Service] = []
    # The parts that a head, its cluster and a front process have here.
    cluster: Any = SimpleNamespace(
        head=SimpleNamespace(
            active_plan=SimpleNamespace(plan=SimpleNamespace(model="demo")), own_weights=None
        ),
        source=None,
        tokenizer=SimpleNamespace(describe=lambda: "described"),
        health=lambda: (True, ""),
        level=lambda: "",
        status=lambda **_: STATUS,
    )
    front: Any = SimpleNamespace(run=lambda service, _tokenizer: started.append(service))
    options: Any = None
    run: Any = server_of(front, cluster, options, Config())
    run()
    assert [model.name for model in started[0].models] == ["demo"]
    assert (started[0].status().models, started[0].switch) == ([], None)

"""Which heads serve HTTP in a front process."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoy.cli.running.front import wants_front
from convoy.config.settings import Config, override


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

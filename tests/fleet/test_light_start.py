"""Programs of a fleet that compute nothing start without the libraries that compute."""

from __future__ import annotations

import subprocess
import sys

import pytest

SHOWN = """
import sys
for name in sys.argv[1:]:
    __import__(name)
heavy = ("torch", "transformers", "tokenizers", "safetensors", "alembic", "sqlalchemy.dialects.postgresql")
print([name for name in heavy if name in sys.modules], "numpy" in sys.modules)
"""


@pytest.mark.parametrize(
    ("modules", "numpy"),
    [
        # a coordinator compares its providers as columns of numbers
        (("convoy.cli.main", "convoy.cli.running.coordinator", "convoy.fleet.coordinator.server"), True),
        (("convoy.cli.main", "convoy.cli.proxy", "convoy.fleet.proxy.server"), False),
    ],
)
@pytest.mark.outside
def test_a_coordinator_and_a_proxy_start_without_torch(modules: tuple[str, ...], numpy: bool) -> None:
    command = [sys.executable, "-c", SHOWN, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == f"[] {numpy}"

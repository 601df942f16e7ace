"""Programs of a fleet that compute nothing start in little memory: they import what they need, and no more.

A coordinator that is ready takes less than 80 MB (`bench/results/coordinator-memory-2026-11-23.json`). A size
depends on the machine, so these tests compare names.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SHOWN = """
import json, sys
for name in sys.argv[1:]:
    __import__(name)
mine = [name for name in sys.modules if name.startswith("convoy.")]
outside = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names - {"convoy"}
print(json.dumps([
    sorted(name for name in outside if not name.startswith("_")),
    sorted(name.removeprefix("convoy.") for name in mine if not hasattr(sys.modules[name], "__path__")),
]))
"""
# typer, uvicorn and their own packages, and those that seal and decode.
COMMON = {
    *("annotated_doc", "click", "shellingham", "typer", "typing_extensions"),
    *("anyio", "httptools", "idna", "sniffio", "starlette", "uvicorn"),
    *("cryptography", "cython_runtime", "msgspec"),
}
# httpx brings a command of its own where these two are installed.
HTTPX = {"httpx", "httpcore", "h11", "certifi", "rich", "pygments"}
# No program of a fleet has a use for other modules of these rooms, and of a head's API.
ROOMS = ("api.app", "api.chat", "api.ollama", "cluster", "engine", "evaluate", "model", "plan", "sdk")
USED = {
    "api.chat.resume",
    "cluster.attestation.claims",
    "cluster.status",
    "cluster.metrics.families",
    "engine.stats",
    "model.kernels.release_memory",
    "model.text.conversation",
    "model.text.token_size",
    "sdk.options",
}


@pytest.mark.parametrize(
    ("modules", "outside", "used"),
    [
        # A coordinator imports numpy with its first model, to compare providers as columns of numbers.
        (
            ("convoy.cli.main", "convoy.cli.coordinator", "convoy.fleet.coordinator.server"),
            COMMON | {"sqlalchemy", "greenlet", "tomli_w", "websockets"},
            USED,
        ),
        (
            ("convoy.cli.main", "convoy.cli.proxy", "convoy.fleet.proxy.server"),
            COMMON | HTTPX,
            USED | {"sdk.endpoint"},
        ),
    ],
    ids=["coordinator", "proxy"],
)
@pytest.mark.outside
def test_a_coordinator_and_a_proxy_import_no_more_than_they_need_to_start(
    modules: tuple[str, ...], outside: set[str], used: set[str]
) -> None:
    command = [sys.executable, "-c", SHOWN, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    packages, mine = json.loads(done.stdout)
    assert set(packages) <= outside
    assert {name for name in mine if name.startswith(ROOMS)} <= used

"""Convoy: one language model across several machines, over links that are always sealed.

`serve` starts a model here, `connect` calls a running server, `plan` and `verify` compute without serving.
docs/python.md has examples. Every name is imported on its first use, so `import convoy` is instant.

A room imports itself and the rooms before it in ARCHITECTURE.md's list. Open `engine` first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convoy import errors, testing
    from convoy.cluster.status import ClusterStatus
    from convoy.engine.sessions.session import Session
    from convoy.errors import CapacityError, ConvoyError, InputError, PeerError, Unavailable
    from convoy.evaluate.certificate import Certificate
    from convoy.model.sampling.params import SamplingParams
    from convoy.plan.report import PlanReport
    from convoy.sdk.client import Client, Reply, connect
    from convoy.sdk.endpoint import HttpRefused, ServerBusy
    from convoy.sdk.parity import verify
    from convoy.sdk.planning.planning import plan
    from convoy.sdk.server import Server, serve

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "Certificate",
    "Client",
    "ClusterStatus",
    "ConvoyError",
    "HttpRefused",
    "InputError",
    "PeerError",
    "PlanReport",
    "Reply",
    "SamplingParams",
    "Server",
    "ServerBusy",
    "Session",
    "Unavailable",
    "connect",
    "errors",
    "plan",
    "serve",
    "testing",
    "verify",
]

# Each public name, and the module that has it.
_PLACES = {
    "ClusterStatus": "cluster.status",
    "Session": "engine.sessions.session",
    "Certificate": "evaluate.certificate",
    "SamplingParams": "model.sampling.params",
    "PlanReport": "plan.report",
    "Client": "sdk.client",
    "Reply": "sdk.client",
    "connect": "sdk.client",
    "HttpRefused": "sdk.endpoint",
    "ServerBusy": "sdk.endpoint",
    "verify": "sdk.parity",
    "plan": "sdk.planning.planning",
    "Server": "sdk.server",
    "serve": "sdk.server",
    **dict.fromkeys(("CapacityError", "ConvoyError", "InputError", "PeerError", "Unavailable"), "errors"),
}
_MODULES = frozenset({"errors", "testing"})


if not TYPE_CHECKING:
    # Type checkers see the imports above, and refuse every other name.
    def __getattr__(name: str) -> object:
        """Import a public name on its first use."""
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# `plan` is a function here and a package below. An import of the package binds the name to the package, and
# only the first import does. So it comes now, and then the name is free for the function.
importlib.import_module(f"{__name__}.plan")
del globals()["plan"]

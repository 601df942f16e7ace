"""A verb of `convoy bench` as a test types it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Bench = Callable[..., dict[str, Any]]
REPORT = ["bench", "machine", "model", "settings", "rows", "ratios"]
# no figure is looked at: a thread for each member, and no proof of exact mode where nothing is compared
QUICK = ("--threads", "1", "--kernel", "plain-f32")

"""Limits of links under attack: rates out of the way, unless the attack is on them."""

from __future__ import annotations

from typing import Any

from convoy.crypto.seal import SealLimits
from convoy.transport.admission import AdmissionLimits
from convoy.transport.options import LinkOptions


def attack_options(changed: dict[str, Any]) -> LinkOptions:
    """Return options with the fields in ``changed``; ``admission`` None asks for the product's own rates."""
    values: dict[str, Any] = {
        "handshake_timeout_s": 10.0,
        "max_half_open": 256,
        "max_links_per_member": 256,
        "ping_after_s": 60.0,
        "gone_after_s": 120.0,
        "admission": {
            "address_rate": 1e5,
            "address_burst": 100_000,
            "strangers_rate": 1e5,
            "strangers_burst": 100_000,
            "max_half_open_per_address": 256,
            "max_half_open_per_member": 256,
        },
        **changed,
    }
    admission = values.pop("admission")
    if "key_limits" in values:
        values["key_limits"] = SealLimits(**values["key_limits"])
    return LinkOptions(admission=AdmissionLimits(**(admission or {})), **values)

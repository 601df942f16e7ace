"""``convoy status``: who holds what in a running cluster, and whether tokens pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from convoy.cli.endpoint import DEFAULT_URL, ApiKeyFlag, Endpoint, UrlFlag
from convoy.cli.output import (
    JsonFlag,
    format_bytes,
    format_seconds,
    print_fields,
    print_json,
    print_table,
)
from convoy.errors import NotReady, PeerUnreachable


def status(
    url: UrlFlag = DEFAULT_URL,
    api_key_file: ApiKeyFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a running cluster: stages, links, load. Exit 1 when it is not ready."""
    endpoint = Endpoint.of(url, api_key_file)
    health = _table(endpoint.get("/health", accept=frozenset({200, 503})), endpoint)
    cluster = _table(endpoint.get("/status"), endpoint)
    if as_json:
        print_json({"health": health, **cluster})
    else:
        _print(health, cluster)
    if health.get("status") != "ready":
        raise NotReady(f"the cluster is {health.get('status')}: {health.get('reason', 'no reason given')}")


def _table(value: object, endpoint: Endpoint) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise PeerUnreachable(f"what answers at {endpoint.url} is not Convoy", hint="check --url")
    return value


def _print(health: Mapping[str, Any], cluster: Mapping[str, Any]) -> None:
    print_fields(
        [
            ("model", cluster.get("model")),
            ("health", f"{health.get('status')}: {health.get('reason')}"),
            ("route", cluster.get("route")),
            ("kernel", cluster.get("kernel")),
            ("requests", f"{cluster.get('running')} running, {cluster.get('waiting')} waiting"),
            ("K/V blocks", f"{cluster.get('free_blocks')} of {cluster.get('num_blocks')} free"),
            (
                "tokens",
                f"{cluster.get('prompt_tokens')} of prompts, {cluster.get('generated_tokens')} generated",
            ),
            ("ring", format_seconds(cluster.get("ring_s"))),
        ]
    )
    print()
    print_stages(cluster.get("stages", []))


def print_stages(stages: Sequence[Mapping[str, Any]]) -> None:
    """The table of stages from `StageStatus` values in their JSON form."""
    print_table(
        ["stage", "member", "layers", "owns", "weights", "round trip", "cipher", "sealed out", "sealed in"],
        [
            (
                index,
                stage["member"],
                f"{stage['start']}-{stage['end'] - 1}",
                "+".join(name for name in ("embed", "output") if stage[name]) or None,
                format_bytes(stage["weight_bytes"]),
                format_seconds(stage["round_trip_s"]),
                stage["cipher"],
                format_bytes(stage["sealed_bytes_sent"]) if stage["cipher"] else None,
                format_bytes(stage["sealed_bytes_received"]) if stage["cipher"] else None,
            )
            for index, stage in enumerate(stages)
        ],
    )

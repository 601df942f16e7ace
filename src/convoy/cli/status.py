"""``convoy status``: show the stages of a running cluster, and whether tokens pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import typer

from convoy.cli.running.endpoint import ApiKeyFlag, CaFlag, UrlFlag, client_key
from convoy.cli.show.cluster_status import (
    forecast_lines,
    guesses_text,
    models_text,
    print_cluster,
    recoveries_text,
)
from convoy.cli.show.exit_codes import EXIT_RETRY
from convoy.cli.show.output import JsonFlag, format_seconds, one_line, print_fields, print_json
from convoy.errors import NotReady
from convoy.sdk.client import cluster_status
from convoy.sdk.endpoint import DEFAULT_URL, Endpoint, HttpRefused

if TYPE_CHECKING:
    from convoy.cluster.status import ClusterStatus


_NO_HEAD = (
    "is this a head? --url names one; at a coordinator, `convoy coordinator providers` shows its providers"
)


def status(
    url: UrlFlag = DEFAULT_URL,
    api_key_file: ApiKeyFlag = None,
    ca: CaFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a running cluster: stages, links, load. Exit 75 if it is not ready."""
    endpoint = Endpoint.of(url, client_key(api_key_file), ca)
    try:
        health = endpoint.get("/health", accept=frozenset({200, 503}))
        cluster = cluster_status(endpoint)
    except HttpRefused as error:
        if error.hint is not None:
            raise
        raise type(error)(error.message, hint=_NO_HEAD) from None
    if not isinstance(health, dict):
        raise endpoint.not_ours("its health is no JSON object")
    ready: dict[str, Any] = health
    if as_json:
        print_json({"health": ready, **msgspec.structs.asdict(cluster)})
    else:
        _print(ready, cluster)
    if ready.get("status") != "ready":
        if as_json:
            # The JSON value already gives the reason, and a script expects one value only.
            raise typer.Exit(EXIT_RETRY)
        raise NotReady(f"the cluster is {ready.get('status')}: {ready.get('reason', 'no reason given')}")


def _print(health: dict[str, Any], cluster: ClusterStatus) -> None:
    print_fields(
        [
            ("model", models_text(cluster)),
            ("health", one_line(f"{health.get('status')}: {health.get('reason')}")),
            ("requests", f"{cluster.running} running, {cluster.waiting} waiting"),
            ("K/V blocks", f"{cluster.free_blocks} of {cluster.num_blocks} free"),
            (
                "tokens",
                f"{cluster.prompt_tokens} of prompts, {cluster.session_tokens} of sessions, "
                f"{cluster.generated_tokens} generated",
            ),
            ("guesses", guesses_text(cluster)),
            ("recoveries", recoveries_text(cluster)),
            ("ring", format_seconds(cluster.ring_s)),
        ]
    )
    print()
    print_cluster(cluster)
    for line in forecast_lines(cluster):
        print(line)

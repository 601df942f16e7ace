"""``convoy upgrade --check``: compare the versions of a cluster's members before a plan mixes them."""

from __future__ import annotations

from typing import Annotated

import typer

from convoy import __version__
from convoy.cli.running.endpoint import ApiKeyFlag, CaFlag, UrlFlag, client_key
from convoy.cli.show.exit_codes import EXIT_FAILURE
from convoy.cli.show.output import JsonFlag, print_json, print_note, print_table
from convoy.errors import UsageError
from convoy.sdk.client import cluster_status
from convoy.sdk.endpoint import DEFAULT_URL, Endpoint

_HOW = "pip install --upgrade WHEEL on each machine, then restart its members"


def upgrade(
    check: Annotated[
        bool, typer.Option("--check", help="Compare the members' versions; exit 1 if they differ.")
    ] = False,
    url: UrlFlag = DEFAULT_URL,
    api_key_file: ApiKeyFlag = None,
    ca: CaFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare the versions of a cluster's members."""
    if not check:
        raise UsageError("Convoy does not replace itself", hint=f"--check compares; to upgrade: {_HOW}")
    cluster = cluster_status(Endpoint.of(url, client_key(api_key_file), ca))
    versions = dict(sorted(cluster.versions.items()))
    same = len(set(versions.values())) <= 1
    absent = [one.name for one in cluster.absent]
    if as_json:
        print_json({"same": same, "here": __version__, "members": versions, "absent": absent})
    else:
        print_table(("member", "version"), versions.items())
        if absent:
            print_note(f"absent, so unknown: {', '.join(absent)}")
        if __version__ not in versions.values():
            print_note(f"this command has version {__version__}")
        print(f"the members have {'one version' if same else 'different versions, and a plan mixes them'}")
        if not same:
            print_note(f"hint: {_HOW}")
    if not same:
        raise typer.Exit(EXIT_FAILURE)

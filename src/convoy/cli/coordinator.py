"""``convoy coordinator``: route the requests of many accounts to many providers; and look after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from convoy.cli.config import read_api_key
from convoy.cli.coordinator_run import (
    ADMIN_KEY,
    DEFAULT_ADMIN_PORT,
    DEFAULT_PORT,
    AdminPortFlag,
    AuthorityFlag,
    BehindProxyFlag,
    CertificateFlag,
    ConfigFlag,
    DatabaseFlag,
    DoorFlags,
    HostFlag,
    InstanceFlag,
    PortFlag,
    TlsKeyFlag,
    run_here,
)
from convoy.cli.endpoint import Endpoint
from convoy.cli.fleet_config import load_fleet_config, load_telemetry
from convoy.cli.home import DEFAULT_HOME, Home
from convoy.cli.output import JsonFlag, print_fields, print_json, print_note, print_table
from convoy.cli.proxy import read_keys
from convoy.cli.traces import TracesFlag, tracing
from convoy.errors import ConfigError, UsageError

app = typer.Typer(help="Route requests of accounts to providers, and look after both.", rich_markup_mode=None)
# of its own: a provider on the same machine is another one, with another key
_FOLDER = DEFAULT_HOME / "coordinator"
FolderFlag = Annotated[
    Path, typer.Option("--dir", help="Folder of its keys and, unless --database names another, its database.")
]
AdminUrlFlag = Annotated[str, typer.Option("--admin-url", help="The administrators' door.")]
AdminKeyFlag = Annotated[
    Path | None, typer.Option("--admin-key-file", help="An administrator's key.  [default: in --dir]")
]
_ADMIN_URL = f"http://127.0.0.1:{DEFAULT_ADMIN_PORT}"


@app.callback(invoke_without_command=True)
def coordinator(
    context: typer.Context,
    host: HostFlag = "127.0.0.1",
    port: PortFlag = DEFAULT_PORT,
    admin_port: AdminPortFlag = DEFAULT_ADMIN_PORT,
    config: ConfigFlag = None,
    database: DatabaseFlag = None,
    instance: InstanceFlag = "coordinator",
    authority: AuthorityFlag = None,
    tls_certificate: CertificateFlag = None,
    tls_key: TlsKeyFlag = None,
    behind_tls_proxy: BehindProxyFlag = False,
    traces: TracesFlag = None,
    directory: FolderFlag = _FOLDER,
    as_json: JsonFlag = False,
) -> None:
    """Route requests of accounts to providers until Ctrl-C; the verbs below look after both."""
    if context.invoked_subcommand is not None:
        return
    if (tls_certificate is None) != (tls_key is None):
        raise UsageError("--tls-certificate and --tls-key go together")
    known = tuple(authority or ())
    doors = DoorFlags(host, port, admin_port, tls_certificate, tls_key, behind_tls_proxy, known)
    options = load_fleet_config(config, instance, known)
    with tracing(traces or load_telemetry(config).traces, "convoy-coordinator") as on:
        options = replace(options, traces=on)
        run_here(options, doors, Home(directory), database, as_json=as_json)


def _admin(url: str, key_file: Path | None, directory: Path) -> Endpoint:
    file = key_file or directory / ADMIN_KEY
    if not file.exists():
        raise ConfigError(
            f"there is no administrator's key at {file}", hint="`convoy coordinator` makes one, or --dir"
        )
    return Endpoint(
        *(url.rstrip("/"), read_api_key(file)),
        server="coordinator",
        start="convoy coordinator",
        url_option="--admin-url",
    )


@app.command()
def status(
    url: AdminUrlFlag = _ADMIN_URL,
    key_file: AdminKeyFlag = None,
    directory: FolderFlag = _FOLDER,
    as_json: JsonFlag = False,
) -> None:
    """Show models, queues and connected providers."""
    found = _object(_admin(url, key_file, directory).get("/status"))
    if as_json:
        print_json(found)
        return
    print_fields([("coordinator key", found["coordinator_key"])])
    print()
    _table(["model", "providers", "free_slots", "waiting"], found["models"])
    print()
    rows = [{**one, "running": sum(one["models"].values())} for one in found["providers"]]
    _table(["name", "level", "running", "draining", "software"], rows)
    for one in rows:
        _print_evidence(one)


def _print_evidence(one: dict[str, Any]) -> None:
    members = ", ".join(f"{name} {level}" for name, level in one["members"].items())
    absent = f"; no evidence of {', '.join(one['absent'])}" if one["absent"] else ""
    print_note(f"{one['name']} is {one['level']}: {members}{': ' if members else ''}{one['why']}{absent}")


@app.command()
def providers(
    approve: Annotated[
        tuple[str, str] | None, typer.Option(help="KEY NAME: let a provider in, by what it shows.")
    ] = None,
    revoke: Annotated[str | None, typer.Option(help="NAME: put a provider out.")] = None,
    url: AdminUrlFlag = _ADMIN_URL,
    key_file: AdminKeyFlag = None,
    directory: FolderFlag = _FOLDER,
    as_json: JsonFlag = False,
) -> None:
    """List, approve or revoke providers."""
    admin = _admin(url, key_file, directory)
    said: object
    if approve is not None:
        read_keys("--approve", [approve[0]])
        if approve[1].startswith("-"):
            raise UsageError(f"--approve wants a key and a name, and {approve[1]} is neither")
        said = admin.post("/providers", {"identity": approve[0], "name": approve[1]})
        if not (_object(said)["has_called"] or as_json):
            print_note("no provider with that key has called yet: compare it with what the provider prints")
    elif revoke is not None:
        said = admin.post("/providers/revoke", {"name": revoke})
    else:
        rows = admin.get("/providers")
        if not as_json:
            _table(["name", "identity", "level", "revoked_s"], rows)
            return
        said = rows
    _show(said, as_json=as_json)


@app.command()
def keys(
    add: Annotated[str | None, typer.Option(help="ACCOUNT: make a key; the account too, where new.")] = None,
    credit: Annotated[
        int | None, typer.Option(min=1, help="With --add: millionths of a unit for the account.")
    ] = None,
    metrics: Annotated[bool, typer.Option("--metrics", help="Make a key that reads /metrics alone.")] = False,
    label: Annotated[str, typer.Option(help="Of the key that is made: what it is for.")] = "",
    revoke: Annotated[
        tuple[str, str] | None,
        typer.Option(help="ACCOUNT HINT: those that begin so, as listed; '' for no account."),
    ] = None,
    url: AdminUrlFlag = _ADMIN_URL,
    key_file: AdminKeyFlag = None,
    directory: FolderFlag = _FOLDER,
    as_json: JsonFlag = False,
) -> None:
    """List, make or revoke consumers' API keys; add to balances."""
    admin = _admin(url, key_file, directory)
    if revoke is not None:
        done = _object(admin.post("/keys/revoke", {"account": revoke[0] or None, "hint": revoke[1]}))
        if not done["revoked"]:
            raise UsageError(f"no key of {revoke[0] or 'no account'} that is good begins with {revoke[1]}")
        _show(done, as_json=as_json)
        return
    if add is not None and metrics:
        raise UsageError("--add makes a consumer's key and --metrics one for scraping: ask for one of them")
    if add is not None:
        _open(admin, add, credit)
    if add is None and not metrics:
        rows = admin.get("/keys")
        if as_json:
            print_json(rows)
        else:
            _table(["account", "scope", "label", "hint", "revoked_s"], rows)
        return
    scope = "consumer" if add is not None else "metrics"
    made = _object(admin.post("/keys", {"scope": scope, "account": add, "label": label}))
    _show(made, as_json=as_json)
    if not as_json:
        _explain(admin, add)


def _open(admin: Endpoint, account: str, credit: int | None) -> None:
    """Where it is new, and with more in it where that is asked."""
    if not any(one["name"] == account for one in _objects(admin.get("/accounts"))):
        admin.post("/accounts", {"name": account})
    if credit is not None:
        admin.post("/credits", {"account": account, "amount_micro": credit})


def _explain(admin: Endpoint, account: str | None) -> None:
    """What to know of a key that was made."""
    print_note("the key is shown this once")
    found = [one["balance_micro"] for one in _objects(admin.get("/accounts")) if one["name"] == account]
    if found == [0]:
        print_note(f"{account} has a balance of 0, enough for models without a price: --credit adds to it")


@app.command()
def usage(
    account: Annotated[str | None, typer.Option(help="Of one account alone.")] = None,
    url: AdminUrlFlag = _ADMIN_URL,
    key_file: AdminKeyFlag = None,
    directory: FolderFlag = _FOLDER,
    as_json: JsonFlag = False,
) -> None:
    """Show what was settled and what accounts have left. By account and model."""
    admin = _admin(url, key_file, directory)
    used = _objects(admin.get("/usage"))
    accounts = _objects(admin.get("/accounts"))
    if account is not None:
        used = [one for one in used if one["account"] == account]
        accounts = [one for one in accounts if one["name"] == account]
        if not accounts:
            raise UsageError(f"there is no account {account}")
    if as_json:
        print_json({"usage": used, "accounts": accounts})
        return
    _table(["account", "model", "requests", "prompt_tokens", "completion_tokens", "cost_micro"], used)
    print()
    _table(["name", "balance_micro"], accounts)


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError("the coordinator answers something else than this version's does")
    return value


def _objects(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ConfigError("the coordinator answers something else than this version's does")
    return value


def _table(columns: list[str], rows: object) -> None:
    cells = [[one[name] for name in columns] for one in _objects(rows)]
    print_table([name.removesuffix("_s") for name in columns], cells)


def _show(said: object, *, as_json: bool) -> None:
    if as_json:
        print_json(said)
    else:
        print_fields(_object(said).items())

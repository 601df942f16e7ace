"""``convoy coordinator``: route the requests of many accounts to many providers, and administer both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convoy.cli.flags.traces import TracesFlag, tracing
from convoy.cli.keys import ExpiresFlag, seconds_of
from convoy.cli.operator.home import DEFAULT_HOME, Home
from convoy.cli.running.coordinator import (
    ADMIN_KEY,
    DEFAULT_ADMIN_PORT,
    DEFAULT_PORT,
    AdminPortFlag,
    AuthorityFlag,
    BehindProxyFlag,
    CertificateFlag,
    ConfigFlag,
    DatabaseFileFlag,
    DatabaseFlag,
    HostFlag,
    InstanceFlag,
    ListenFlags,
    PortFlag,
    PublicCertificateFlag,
    TlsKeyFlag,
    admin_url_of,
    database_url,
    run_here,
)
from convoy.cli.running.coordinator_file import load_fleet_config, load_telemetry
from convoy.cli.show.output import JsonFlag, print_fields, print_json, print_note, print_table
from convoy.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from convoy.sdk.endpoint import Endpoint

app = typer.Typer(help="Route requests of accounts to providers; administer both.", rich_markup_mode=None)
# A folder of its own: a provider on the same machine has another identity, with another key.
_FOLDER = DEFAULT_HOME / "coordinator"
FolderFlag = Annotated[
    Path, typer.Option("--dir", help="Folder of its keys, and of its database unless --database names one.")
]
AdminUrlFlag = Annotated[
    str | None,
    typer.Option(
        "--admin-url", help="The URL for administrators.  [default: that of the coordinator in --dir]"
    ),
]
AdminKeyFlag = Annotated[
    Path | None,
    typer.Option("--admin-key-file", help="File with an administrator's key.  [default: in --dir]"),
]
_APPROVE = "convoy coordinator providers --approve"
_VERSION = "use the coordinator's own version of convoy, and check --admin-url"
LimitFlag = Annotated[int | None, typer.Option(min=1, help="A limit of the new key.")]


@app.callback(invoke_without_command=True)
def coordinator(
    context: typer.Context,
    host: HostFlag = "127.0.0.1",
    port: PortFlag = DEFAULT_PORT,
    admin_port: AdminPortFlag = DEFAULT_ADMIN_PORT,
    config: ConfigFlag = None,
    database: DatabaseFlag = None,
    database_file: DatabaseFileFlag = None,
    instance: InstanceFlag = "coordinator",
    authority: AuthorityFlag = None,
    tls_certificate: CertificateFlag = None,
    tls_key: TlsKeyFlag = None,
    behind_tls_proxy: BehindProxyFlag = False,
    public_certificate: PublicCertificateFlag = None,
    traces: TracesFlag = None,
    directory: FolderFlag = _FOLDER,
    as_json: JsonFlag = False,
) -> None:
    """Route requests of accounts to providers until Ctrl-C. The commands below administer both."""
    if context.invoked_subcommand is not None:
        _refuse_early_options(context, context.invoked_subcommand)
        return
    if (tls_certificate is None) != (tls_key is None):
        raise UsageError(
            "--tls-certificate and --tls-key go together",
            hint="give both, or --behind-tls-proxy where a proxy ends TLS",
        )
    database = database_url(database, database_file)
    known = tuple(authority or ())
    listen = ListenFlags(
        *(host, port, admin_port, tls_certificate, tls_key),
        *(behind_tls_proxy, known, public_certificate),
    )
    options = load_fleet_config(config, instance, known)
    with tracing(traces or load_telemetry(config).traces, "convoy-coordinator") as on:
        options = replace(options, traces=on)
        run_here(options, listen, Home(directory), database, as_json=as_json)


def _refuse_early_options(context: typer.Context, command: str) -> None:
    """Raise `UsageError` for an option in front of a command that administers: it would change nothing."""
    for option in context.command.get_params(context):
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"{option.opts[0]} stands in front of {command}, and is for the coordinator itself",
                hint=f"options of the command come behind it: convoy coordinator {command} --help",
            )


def _admin(url: str | None, key_file: Path | None, directory: Path) -> Endpoint:
    # A coordinator that serves calls no HTTP API itself.
    from convoy.cli.running.endpoint import client_key
    from convoy.sdk.endpoint import Endpoint

    file = key_file or directory / ADMIN_KEY
    if not file.exists():
        raise ConfigError(
            f"there is no administrator's key at {file}", hint="`convoy coordinator` makes one, or --dir"
        )
    return Endpoint.of(
        *(url or admin_url_of(directory), client_key(file)),
        server="coordinator",
        start="convoy coordinator",
        url_option="--admin-url",
        key_hint="give an administrator's key with --admin-key-file",
    )


@app.command()
def status(
    url: AdminUrlFlag = None,
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
    rows = [
        {
            **one,
            "running": sum(one["models"].values()),
            "template": max(one["template_tokens"].values(), default=0),
        }
        for one in found["providers"]
    ]
    _table(["name", "level", "running", "draining", "template", "unbilled_tokens", "software"], rows)
    for one in rows:
        _print_evidence(one)
    _print_unapproved(found["unapproved"])


def _print_evidence(one: dict[str, Any]) -> None:
    members = ", ".join(f"{name} {level}" for name, level in one["members"].items())
    absent = f"; no evidence of {', '.join(one['absent'])}" if one["absent"] else ""
    print_note(f"{one['name']} is {one['level']}: {members}{': ' if members else ''}{one['why']}{absent}")


def _print_unapproved(keys: list[str]) -> None:
    """Print the keys of providers that wait, each with the command that approves it."""
    for key in keys:
        print_note("a provider waits for approval: compare its key with the one that it prints, then")
        print_note(f"  {_APPROVE} {key} NAME")


@app.command()
def providers(
    approve: Annotated[
        tuple[str, str] | None, typer.Option(help="KEY NAME: admit the provider that prints KEY.")
    ] = None,
    revoke: Annotated[str | None, typer.Option(help="NAME: revoke a provider.")] = None,
    url: AdminUrlFlag = None,
    key_file: AdminKeyFlag = None,
    directory: FolderFlag = _FOLDER,
    as_json: JsonFlag = False,
) -> None:
    """List, approve or revoke providers. The list has those that wait for approval, with their keys."""
    admin = _admin(url, key_file, directory)
    said: object
    if approve is not None:
        from convoy.cli.proxy import read_keys

        read_keys("--approve", [approve[0]])
        if approve[1].startswith("-"):
            raise UsageError(
                f"--approve expects a key and a name, and {approve[1]} is neither",
                hint="--approve KEY NAME: the provider prints its key",
            )
        said = admin.post("/providers", {"identity": approve[0], "name": approve[1]})
        if not as_json:
            # Whether it has called is a note for a person, and a field for a script.
            said = _object(said)
            if not said.pop("has_called"):
                print_note(
                    "no provider with that key has called yet: compare it with what the provider prints"
                )
    elif revoke is not None:
        said = admin.post("/providers/revoke", {"name": revoke})
    else:
        rows = _objects(admin.get("/providers"))
        if not as_json:
            _table(["name", "state", "identity", "level", "unbilled_tokens", "revoked_s"], rows)
            _print_unapproved([one["identity"] for one in rows if one["state"] == "waiting"])
            return
        said = rows
    _show(said, as_json=as_json)


@app.command()
def keys(
    add: Annotated[
        str | None, typer.Option(help="ACCOUNT: make a key, and the account if it is new.")
    ] = None,
    credit: Annotated[
        int | None, typer.Option(min=1, help="With --add: millionths of a unit for the account.")
    ] = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Make a key that can only read /metrics.")
    ] = False,
    admin: Annotated[bool, typer.Option("--admin", help="Make an administrator's key.")] = False,
    label: Annotated[str, typer.Option(help="The purpose of the new key.")] = "",
    expires: ExpiresFlag = None,
    requests_per_minute: LimitFlag = None,
    tokens_per_minute: LimitFlag = None,
    concurrent_requests: LimitFlag = None,
    spend_limit: Annotated[
        int | None,
        typer.Option(min=1, help="With --add: the key may spend this in all, in millionths of a unit."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the new key to this file (0600) and do not show it.")
    ] = None,
    revoke: Annotated[
        tuple[str, str] | None,
        typer.Option(help="ACCOUNT HINT: revoke the listed keys that begin with HINT; '' for no account."),
    ] = None,
    url: AdminUrlFlag = None,
    key_file: AdminKeyFlag = None,
    directory: FolderFlag = _FOLDER,
    as_json: JsonFlag = False,
) -> None:
    """List, make or revoke API keys; add to balances."""
    endpoint = _admin(url, key_file, directory)
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists already", hint="name a new file with --out")
    scopes = {"consumer": add is not None, "metrics": metrics, "admin": admin}
    chosen = [scope for scope, wanted in scopes.items() if wanted]
    terms = {
        "expires_s": seconds_of(expires),
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
        "spend_limit_micro": spend_limit,
    }
    if revoke is not None:
        _revoke(endpoint, *revoke, as_json=as_json)
    elif not (chosen or credit or out or label or any(terms.values())):
        _list_keys(endpoint, as_json=as_json)
    else:
        _make_key(endpoint, chosen, add, credit, {"label": label, **terms}, out, as_json=as_json)


def _revoke(admin: Endpoint, account: str, hint: str, *, as_json: bool) -> None:
    done = _object(admin.post("/keys/revoke", {"account": account or None, "hint": hint}))
    if not done["revoked"]:
        raise UsageError(
            f"no key of {account or 'no account'} that is good begins with {hint}",
            hint="`convoy coordinator keys` lists the first letters of each key",
        )
    _show(done, as_json=as_json)


def _list_keys(admin: Endpoint, *, as_json: bool) -> None:
    rows = admin.get("/keys")
    if as_json:
        print_json(rows)
    else:
        _table(["account", "scope", "label", "hint", "revoked_s", "expires_s"], rows)


def _make_key(
    admin: Endpoint,
    scopes: list[str],
    account: str | None,
    credit: int | None,
    facts: dict[str, Any],
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    from convoy.crypto.keyfile import write_private

    if not scopes:
        raise UsageError(
            "--credit, --out, --label and limits are for a new key, and none is asked for",
            hint="--add ACCOUNT makes one",
        )
    if len(scopes) > 1:
        raise UsageError(
            "--add makes a consumer's key, --metrics one for scraping and --admin an administrator's: ask "
            "for one of them",
            hint="run this command once for each key",
        )
    if account is not None:
        _open(admin, account, credit)
    given = {name: value for name, value in facts.items() if value is not None}
    made = _object(admin.post("/keys", {"scope": scopes[0], "account": account, **given}))
    if out is not None:
        write_private(out, f"{made.pop('key')}\n".encode())
        made["file"] = str(out)
    _show(made, as_json=as_json)
    if not as_json:
        _explain(admin, account, shown=out is None)


def _open(admin: Endpoint, account: str, credit: int | None) -> None:
    """Make the account if it is new, and add ``credit`` to it if that is given."""
    if not any(one["name"] == account for one in _objects(admin.get("/accounts"))):
        admin.post("/accounts", {"name": account})
    if credit is not None:
        admin.post("/credits", {"account": account, "amount_micro": credit})


def _explain(admin: Endpoint, account: str | None, *, shown: bool) -> None:
    """Print notes about a new key: it is shown once, and its account may have no balance."""
    if shown:
        print_note("the key is shown this once")
    found = [one["balance_micro"] for one in _objects(admin.get("/accounts")) if one["name"] == account]
    for balance in found:
        more = "" if balance else ", enough for models without a price: --credit adds to it"
        print_note(f"{account} has a balance of {balance:,} millionths of a unit{more}")


@app.command()
def usage(
    account: Annotated[str | None, typer.Option(help="Show one account only.")] = None,
    url: AdminUrlFlag = None,
    key_file: AdminKeyFlag = None,
    directory: FolderFlag = _FOLDER,
    as_json: JsonFlag = False,
) -> None:
    """Show each account's settled costs by model, and its balance."""
    admin = _admin(url, key_file, directory)
    used = _objects(admin.get("/usage"))
    accounts = _objects(admin.get("/accounts"))
    if account is not None:
        used = [one for one in used if one["account"] == account]
        accounts = [one for one in accounts if one["name"] == account]
        if not accounts:
            raise UsageError(
                f"there is no account {account}", hint="`convoy coordinator usage` lists the accounts"
            )
    if as_json:
        print_json({"usage": used, "accounts": accounts})
        return
    _table(["account", "model", "requests", "prompt_tokens", "completion_tokens", "cost_micro"], used)
    print()
    _table(["name", "balance_micro"], accounts)


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError("the coordinator answers something else than this version's does", hint=_VERSION)
    return value


def _objects(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ConfigError("the coordinator answers something else than this version's does", hint=_VERSION)
    return value


def _table(columns: list[str], rows: object) -> None:
    cells = [[one[name] for name in columns] for one in _objects(rows)]
    print_table([name.removesuffix("_s") for name in columns], cells)


def _show(said: object, *, as_json: bool) -> None:
    if as_json:
        print_json(said)
    else:
        print_fields(_object(said).items())

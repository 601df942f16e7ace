"""``convoy keys``: make and list files with API keys for ``serve`` and ``run``."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.show.output import JsonFlag, print_fields, print_json, print_note, print_table
from convoy.errors import UsageError

app = typer.Typer(help="Make and list files with API keys.", rich_markup_mode=None)
FileArgument = Annotated[Path, typer.Argument(help="The file that --api-key-file names.")]
ExpiresFlag = Annotated[
    str | None, typer.Option(help="A date, such as 2030-12-31. The key expires as that day begins in UTC.")
]
LimitFlag = Annotated[int | None, typer.Option(min=1, help="With --name: a limit of the key.")]


@app.command()
def new(
    file: FileArgument,
    name: Annotated[
        str | None, typer.Option(help="Make a named key, in a new file or beside those in FILE.")
    ] = None,
    expires: ExpiresFlag = None,
    requests_per_minute: LimitFlag = None,
    tokens_per_minute: LimitFlag = None,
    concurrent_requests: LimitFlag = None,
    total_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="With --name: tokens of prompts and answers that the key may use in all."),
    ] = None,
    hashed: Annotated[
        bool, typer.Option("--hash", help="With --name and --show: keep only the key's SHA-256.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Also print the key.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Make a key. Only you can read its file."""
    from convoy.api.keys.key_file import append_entry, bare_text, entry_text, new_key, write_new
    from convoy.api.keys.key_use import NO_LIMITS, KeyLimits

    limits = KeyLimits(requests_per_minute, tokens_per_minute, concurrent_requests, total_tokens)
    if name is None and (expires is not None or limits != NO_LIMITS or hashed):
        raise UsageError("a bare key has no limits and no expiry", hint="--name NAME makes a named key")
    # The file would keep a hash only, and the key would be lost.
    if hashed and not show:
        raise UsageError(
            "--hash needs --show: the file does not hold the key itself",
            hint="add --show, and keep the key that it prints",
        )
    key = new_key()
    if name is None:
        write_new(file, bare_text(key))
    else:
        entry = entry_text(name, key, _date(expires), limits, hashed=hashed)
        if file.exists():
            append_entry(file, entry)
        else:
            write_new(file, entry)
    _say(file, name, key if show else None, as_json=as_json)


def _say(file: Path, name: str | None, key: str | None, *, as_json: bool) -> None:
    made = {"file": str(file), "name": name, "key": key}
    made = {what: value for what, value in made.items() if value is not None}
    if as_json:
        print_json(made)
        return
    print_fields(made.items())
    print_note(
        f"convoy serve MODEL --api-key-file {file}; a running server that has it reads it within a second"
    )


@app.command("list")
def list_keys(file: FileArgument, as_json: JsonFlag = False) -> None:
    """List a file's keys by name, with limits and expiry."""
    from convoy.api.keys.key_file import LIMIT_NAMES, parse_keys, read_key_file

    rows = []
    for key in parse_keys(read_key_file(file), file):
        limits = {name: getattr(key.limits, name) for name in LIMIT_NAMES}
        rows.append({"name": key.name, "expires": _shown(key.expires_s), "metrics": key.metrics, **limits})
    if as_json:
        print_json(rows)
    else:
        print_table(list(rows[0]), [list(row.values()) for row in rows])


def _date(text: str | None) -> str | None:
    """Return ``text`` as an ISO date. Raises `UsageError` for text that is no date, or no future date."""
    if text is None:
        return None
    try:
        found = datetime.date.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"--expires is {text[:40]!r}, expected a date", hint="--expires 2030-12-31"
        ) from None
    today = datetime.datetime.now(datetime.UTC).date()
    if found <= today:
        raise UsageError(
            f"--expires is {found}, and the key would never work: today is {today} in UTC",
            hint="give --expires a future date",
        )
    return found.isoformat()


def seconds_of(text: str | None) -> int | None:
    """Return the start of a date in UTC, in seconds since the epoch. Raises `UsageError` for a wrong date."""
    date = _date(text)
    if date is None:
        return None
    return int(datetime.datetime.fromisoformat(f"{date}T00:00:00+00:00").timestamp())


def _shown(expires_s: float | None) -> str | None:
    if expires_s is None:
        return None
    return datetime.datetime.fromtimestamp(expires_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

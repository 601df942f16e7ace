"""``convoy audit``: show the log of a key's acts, and check that no entry was changed or cut off."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.show.output import JsonFlag, one_line, print_fields, print_json, print_note, print_table
from convoy.errors import UsageError

if TYPE_CHECKING:
    from convoy.crypto.identity import OperatorKey
    from convoy.trust.audit import AuditLog
    from convoy.trust.roster.roster import SignedRoster

_MAX_NAMES = 64
_MAX_PATH_CHARS = 512

app = typer.Typer(help="Show or verify the log of a key's acts.", rich_markup_mode=None)
LogArgument = Annotated[
    Path, typer.Argument(help="An audit.jsonl, or the folder of the key, such as .convoy/operator.")
]


def operator_log(directory: Path, key: OperatorKey) -> AuditLog:
    """Return the log of the operator key in ``directory``."""
    from convoy.trust.audit import FILE, AuditLog

    return AuditLog(directory / FILE, key, "operator")


def roster_subject(signed: SignedRoster, file: Path) -> dict[str, str | int | list[str]]:
    """Return the facts about a roster for an audit entry: its identity, and its first members by name."""
    members = [member.name for member in signed.roster.members]
    return {
        "cluster": signed.roster.cluster_id,
        "epoch": signed.roster.epoch,
        "digest": signed.digest.hex(),
        "file": str(file)[:_MAX_PATH_CHARS],
        "num_members": len(members),
        "members": members[:_MAX_NAMES],
    }


@app.command()
def show(log: LogArgument, as_json: JsonFlag = False) -> None:
    """Show the entries of a log. `verify` checks them."""
    from convoy.trust.audit import read_entries

    entries = list(read_entries(_file(log)))
    torn = entries.pop() if entries and isinstance(entries[-1], int) else 0
    found = [entry for entry in entries if not isinstance(entry, int)]
    if as_json:
        print_json([{**entry.fields, "hash": entry.hash} for entry in found])
    else:
        names = ("sequence", "time", "actor", "from", "action")
        rows = [
            [one_line(str(entry.fields[name])) for name in names]
            + [one_line(json.dumps(entry.fields["subject"], ensure_ascii=False))]
            for entry in found
        ]
        print_table([*names, "subject"], rows)
    if torn:
        _tell_torn(int(str(torn)))


@app.command()
def verify(
    log: LogArgument,
    expect: Annotated[
        str | None,
        typer.Option(help="Hash that an earlier `verify` printed, to detect a cut-off end.  [default: none]"),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="Public key that must have signed, in hex.  [default: the first entry's]"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check a log: signatures and order, and its end with --expect."""
    from convoy.trust.audit import verify_log

    for name, value in (("--expect", expect), ("--key", key)):
        if value is not None and not re.fullmatch(r"[0-9a-f]{64}", value):
            raise UsageError(f"{name} {value[:80]!r} is no hash or key, expected 64 hexadecimal digits")
    found = verify_log(_file(log), expected=expect, key=key)
    facts = {
        "entries": found.num_entries,
        "key": found.key,
        "head": found.head,
        "torn_bytes": found.num_torn_bytes,
        "entries_after_expected": found.num_after,
    }
    if as_json:
        print_json(facts)
        return
    print_fields((name, value) for name, value in facts.items() if value is not None)
    if found.num_torn_bytes:
        _tell_torn(found.num_torn_bytes)
    if found.num_after is None:
        print_note(
            "every entry holds. Whether entries were cut off at the end cannot be told without --expect: "
            "note the head somewhere else, and give it to the next `convoy audit verify`"
        )
    else:
        print_note(
            f"every entry holds, and the expected one is there with {found.num_after} behind it. Whether "
            f"more were cut off behind these cannot be told: note the new head"
        )


def _file(log: Path) -> Path:
    from convoy.trust.audit import FILE

    return log / FILE if log.is_dir() else log


def _tell_torn(num_bytes: int) -> None:
    print_note(
        f"the last line is torn after {num_bytes} bytes: its process ended while it wrote, before it acted. "
        f"The next entry takes its place, and says so"
    )

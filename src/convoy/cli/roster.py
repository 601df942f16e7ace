"""``convoy roster``: the signed list of members, made by the operator and checked by anyone."""

from __future__ import annotations

import datetime
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.config import decode_public_key, load_config
from convoy.cli.files import read_bytes, read_text, replace_file
from convoy.cli.output import JsonFlag, print_fields, print_json, print_table
from convoy.errors import RosterError, UsageError

if TYPE_CHECKING:
    from convoy.crypto.identity import OperatorKey
    from convoy.trust.roster import SignedRoster

app = typer.Typer(help="Sign, show or verify the list of members.", rich_markup_mode=None)
OPERATOR_DIRECTORY = Path(".convoy/operator")
_MAX_FILE_BYTES = 2 << 20


@app.command()
def new(
    cluster: Annotated[str, typer.Argument(help="The cluster's name.")],
    cards: Annotated[list[Path], typer.Argument(help="A card of each member, from `convoy identity new`.")],
    head: Annotated[list[str], typer.Option(help="A member that may be head; may be given again.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long the roster is valid.")] = 30,
    epoch: Annotated[
        int | None, typer.Option(min=1, help="Its version.  [default: one more than that in --out]")
    ] = None,
    operator: Annotated[
        Path, typer.Option(help="Directory of the operator's key; made if there is none.")
    ] = OPERATOR_DIRECTORY,
    out: Annotated[Path, typer.Option(help="Where the roster goes.")] = Path("roster.toml"),
    as_json: JsonFlag = False,
) -> None:
    """Sign a roster of the members on the cards. Every member gets the same file."""
    from convoy.trust.card import MAX_CARD_BYTES, read_card
    from convoy.trust.roster import make_roster, open_roster, sign_roster

    members = [read_card(read_text(card, max_bytes=MAX_CARD_BYTES), head=False) for card in cards]
    names = [member.name for member in members]
    for name in head:
        if name not in names:
            raise UsageError(f"--head {name} is on none of the cards, which name {', '.join(names)}")
    members = [
        read_card(read_text(card, max_bytes=MAX_CARD_BYTES), head=name in head)
        for card, name in zip(cards, names, strict=True)
    ]
    key = _operator_key(operator)
    roster = make_roster(
        cluster,
        members,
        epoch=epoch or _next_epoch(out, key, cluster),
        lifetime=datetime.timedelta(days=days),
    )
    data = sign_roster(roster, key)
    replace_file(out, data)
    _print_roster(out, open_roster(data, operator_key=key.public_key), key.public_key, as_json=as_json)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A roster file.")],
    as_json: JsonFlag = False,
) -> None:
    """Show what a roster says and whose key it names; `verify` checks that the key is your operator's."""
    from convoy.trust.roster import open_roster

    data = read_bytes(file, max_bytes=_MAX_FILE_BYTES)
    key, valid_at = _claims(data, file)
    _print_roster(file, open_roster(data, operator_key=key, now=valid_at), key, as_json=as_json)


@app.command()
def verify(
    file: Annotated[
        Path | None, typer.Argument(help="A roster file.  [default: the one in --config]")
    ] = None,
    operator_key: Annotated[
        str | None, typer.Option(help="The operator's public key, as `roster new` printed it.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A convoy.toml that names roster and key.")] = None,
    cluster: Annotated[str | None, typer.Option(help="The cluster it must be for.")] = None,
    member: Annotated[str | None, typer.Option(help="A member that it must list.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check a roster as a member does: signature, time, cluster and member. Exit 1 if it does not hold."""
    from convoy.trust.roster import open_roster

    settings = load_config(config)
    if config is None and (file is None or operator_key is None):
        raise UsageError(
            "the roster and the operator's key are both needed",
            hint="give FILE and --operator-key, or --config",
        )
    path = file or settings.require_roster()
    key = (
        settings.require_operator_key()
        if operator_key is None
        else decode_public_key(operator_key, "--operator-key")
    )
    data = read_bytes(path, max_bytes=_MAX_FILE_BYTES)
    signed = open_roster(data, operator_key=key, cluster_id=cluster)
    wanted = member or settings.cluster.name
    if wanted is not None:
        signed.roster.member(wanted)
    _print_roster(path, signed, key, as_json=as_json)


def _operator_key(directory: Path) -> OperatorKey:
    from convoy.crypto.identity import OPERATOR_KEY, OperatorKey

    if (directory / OPERATOR_KEY).exists():
        return OperatorKey.load(directory)
    key = OperatorKey.generate()
    key.save(directory)
    return key


def _next_epoch(out: Path, key: OperatorKey, cluster: str) -> int:
    """One more than the roster that is about to be replaced; members refuse to go back."""
    from convoy.trust.roster import open_roster

    if not out.exists():
        return 1
    data = read_bytes(out, max_bytes=_MAX_FILE_BYTES)
    _, valid_at = _claims(data, out)
    old = open_roster(data, operator_key=key.public_key, cluster_id=cluster, now=valid_at)
    return old.roster.epoch + 1


def _claims(data: bytes, file: Path) -> tuple[bytes, datetime.datetime]:
    """The operator key that a roster claims and a time at which it is valid; nothing is verified by that."""
    try:
        table = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError):
        raise RosterError(f"{file} is not TOML, so it is no roster") from None
    signature, valid_at = table.get("signature"), table.get("not_before")
    if not isinstance(signature, dict) or not isinstance(signature.get("operator"), str):
        raise RosterError(f"{file} is unsigned", hint="sign a roster with `convoy roster new`")
    if not isinstance(valid_at, datetime.datetime) or valid_at.tzinfo is None:
        raise RosterError(f"{file} has no time not_before, so it is no roster")
    return decode_public_key(signature["operator"], f"{file}: the operator's key"), valid_at


def _print_roster(file: Path, signed: SignedRoster, key: bytes, *, as_json: bool) -> None:
    from convoy.trust.roster import format_address

    roster = signed.roster
    now = datetime.datetime.now(datetime.UTC)
    facts: dict[str, object] = {
        "file": file,
        "cluster": roster.cluster_id,
        "epoch": roster.epoch,
        "not_before": f"{roster.not_before:%Y-%m-%d %H:%M:%S} UTC",
        "expires": f"{roster.expires:%Y-%m-%d %H:%M:%S} UTC{' (expired)' if now >= roster.expires else ''}",
        "operator_key": key.hex(),
        "digest": signed.digest.hex(),
    }
    members = [
        {
            "member": member.name,
            "head": member.head,
            "address": format_address(member.address),
            "identity_key": member.identity_key.hex(),
        }
        for member in roster.members
    ]
    if as_json:
        facts["expires"] = f"{roster.expires:%Y-%m-%d %H:%M:%S} UTC"
        print_json({**facts, "expired": now >= roster.expires, "members": members})
        return
    print_fields(facts.items())
    print()
    rows = [(m["member"], "yes" if m["head"] else "no", m["address"], m["identity_key"]) for m in members]
    print_table(["member", "head", "address", "identity key"], rows)

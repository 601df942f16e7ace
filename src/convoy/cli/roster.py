"""``convoy roster``: the signed list of members, made by the operator and checked by anyone."""

from __future__ import annotations

import datetime
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.audit import operator_log, roster_subject
from convoy.cli.operator.home import config_file, roster_file
from convoy.cli.operator.passphrase import NewPassphraseFlag, Passphrase, PassphraseFlag
from convoy.cli.operator.roster_change import OPERATOR_DIRECTORY, RosterChange, open_change, require_signer
from convoy.cli.show.output import JsonFlag, print_fields, print_json, print_table
from convoy.config.files import WHENCE_ROSTER, read_bytes, read_text, replace_file
from convoy.config.settings import decode_public_key, load_config
from convoy.errors import RosterError, UsageError

if TYPE_CHECKING:
    from convoy.crypto.identity import OperatorKey
    from convoy.transport.member import Member
    from convoy.trust.roster.roster import SignedRoster

_REMEDY = "give the card of that member too, or name another head"
_REMEDY_2 = "`convoy roster new` writes a roster"

app = typer.Typer(help="Sign, change, show or verify the list of members.", rich_markup_mode=None)
_CARD = "`convoy identity new NAME` writes NAME.card.toml, on the machine that is to be a member"
_CLOCKS_DIFFER = datetime.timedelta(minutes=10)

DaysFlag = Annotated[int, typer.Option(min=1, max=3650, help="How long the roster is valid from now on.")]
OperatorFlag = Annotated[
    Path, typer.Option(help="Directory of the operator's key; `new` makes it if there is none.")
]
SignerFlag = Annotated[Path, typer.Option(help="Directory of the operator's key.")]
RosterFlag = Annotated[
    Path | None,
    typer.Option(help="The roster to replace.  [default: roster.toml, or else .convoy/roster.toml]"),
]


@app.command()
def new(
    cluster: Annotated[str, typer.Argument(help="The cluster's name.")],
    cards: Annotated[
        list[Path],
        typer.Argument(metavar="CARD", help="A card of each member, from `convoy identity new`."),
    ],
    head: Annotated[list[str], typer.Option(help="A member that may be head; repeatable.")],
    days: DaysFlag = 30,
    epoch: Annotated[
        int | None, typer.Option(min=1, help="The roster's version.  [default: one more than in --out]")
    ] = None,
    operator: OperatorFlag = OPERATOR_DIRECTORY,
    out: Annotated[Path, typer.Option(help="Where the roster goes.")] = Path("roster.toml"),
    passphrase_file: PassphraseFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Sign a roster of the members on the cards. Every member gets the same file."""
    from convoy.trust.roster.addresses import check_own_addresses
    from convoy.trust.roster.card import MAX_CARD_BYTES, read_card
    from convoy.trust.roster.roster import make_roster, open_roster, sign_roster

    members = [read_card(read_text(card, max_bytes=MAX_CARD_BYTES, hint=_CARD), head=False) for card in cards]
    names = [member.name for member in members]
    for name in head:
        if name not in names:
            raise UsageError(
                f"--head {name} is on none of the cards, which name {', '.join(names)}", hint=_REMEDY
            )
    key = Passphrase(passphrase_file).load_or_make(operator)
    old = _replaced(out, key, cluster)
    roster = make_roster(
        cluster,
        [replace(member, head=member.name in head) for member in members],
        epoch=epoch or (old.roster.epoch + 1 if old is not None else 1),
        not_before=datetime.datetime.now(datetime.UTC) - _CLOCKS_DIFFER,
        lifetime=datetime.timedelta(days=days) + _CLOCKS_DIFFER,
    )
    check_own_addresses(roster.members)
    data = sign_roster(roster, key, old.handovers if old is not None else ())
    signed = open_roster(data, operator_key=key.public_key)
    with operator_log(operator, key).doing("sign roster", roster_subject(signed, out)):
        replace_file(out, data)
    _print_roster(out, signed, key.public_key, as_json=as_json)


@app.command()
def add(
    cards: Annotated[list[Path], typer.Argument(metavar="CARD", help="A card of each new member.")],
    head: Annotated[list[str] | None, typer.Option(help="A new member that may be head.")] = None,
    days: DaysFlag = 30,
    operator: SignerFlag = OPERATOR_DIRECTORY,
    roster: RosterFlag = None,
    passphrase_file: PassphraseFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Sign the roster again, one epoch later, with further members."""
    from convoy.trust.roster.addresses import check_own_addresses
    from convoy.trust.roster.card import MAX_CARD_BYTES, read_card

    heads = set(head or ())
    new = [read_card(read_text(card, max_bytes=MAX_CARD_BYTES, hint=_CARD), head=False) for card in cards]
    for name in sorted(heads - {member.name for member in new}):
        raise UsageError(f"--head {name} is on none of the cards", hint=_REMEDY)
    change = open_change(roster_file(roster), operator, days, passphrase_file)
    listed = {member.name for member in change.old.roster.members}
    for member in new:
        if member.name in listed:
            remove = _command("remove", member.name, operator, roster)
            raise RosterError(
                f"{member.name} is listed already, and its keys are never overwritten",
                hint=f"if its machine is new: `{remove}`, then add it",
            )
    added = tuple(replace(member, head=member.name in heads) for member in new)
    members = (*change.old.roster.members, *added)
    check_own_addresses(members)
    _print_change(change, members, as_json=as_json)


@app.command()
def remove(
    names: Annotated[list[str], typer.Argument(help="The members to remove.")],
    days: DaysFlag = 30,
    operator: SignerFlag = OPERATOR_DIRECTORY,
    roster: RosterFlag = None,
    passphrase_file: PassphraseFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Sign the roster again without some members, one epoch later. They are out wherever the new roster
    arrives.
    """
    change = open_change(roster_file(roster), operator, days, passphrase_file)
    for name in names:
        change.old.roster.member(name)
    left = tuple(member for member in change.old.roster.members if member.name not in names)
    if not left:
        raise RosterError(
            "no member would be left in the roster",
            hint="keep one member, or begin another cluster with `convoy roster new`",
        )
    _print_change(change, left, as_json=as_json)


@app.command()
def sign(
    days: DaysFlag = 30,
    operator: SignerFlag = OPERATOR_DIRECTORY,
    new_operator: Annotated[
        Path | None, typer.Option(help="Directory of the key that signs from now on; made if there is none.")
    ] = None,
    roster: RosterFlag = None,
    passphrase_file: PassphraseFlag = None,
    new_passphrase_file: NewPassphraseFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Sign the same members again, for a new expiry or operator key. The roster is one epoch later."""
    from convoy.trust.roster.addresses import check_own_addresses

    change = open_change(roster_file(roster), operator, days, passphrase_file)
    check_own_addresses(change.old.roster.members)
    if new_operator is not None:
        new_key = Passphrase(new_passphrase_file, "--new-passphrase-file")
        change = change.hand_over(new_key.load_or_make(new_operator), new_operator)
    _print_change(change, change.old.roster.members, as_json=as_json)


def _print_change(change: RosterChange, members: tuple[Member, ...], *, as_json: bool) -> None:
    signed = change.write(members)
    _print_roster(change.file, signed, signed.operator, as_json=as_json)


@app.command()
def show(
    file: Annotated[
        Path | None,
        typer.Argument(help="A roster file.  [default: roster.toml, or else .convoy/roster.toml]"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a roster and the operator key that it names. `verify` checks that the key is your operator's."""
    from convoy.trust.roster.roster import MAX_ROSTER_BYTES, open_roster

    file = roster_file(file)
    data = read_bytes(file, max_bytes=MAX_ROSTER_BYTES, hint=WHENCE_ROSTER)
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
    config: Annotated[
        Path | None,
        typer.Option(help="A convoy.toml that names roster and key.  [default: .convoy/convoy.toml]"),
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="The cluster that the roster must be for.")] = None,
    member: Annotated[str | None, typer.Option(help="A member that the roster must list.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check a roster as a member does. Exit 78 if signature, time, cluster or member do not hold."""
    from convoy.trust.roster.roster import MAX_ROSTER_BYTES, open_roster

    lacking = file is None or operator_key is None
    config = config_file(config) if lacking else config
    settings = load_config(config)
    if config is None and lacking:
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
    data = read_bytes(path, max_bytes=MAX_ROSTER_BYTES, hint=WHENCE_ROSTER)
    signed = open_roster(data, operator_key=key, cluster_id=cluster)
    wanted = member or settings.cluster.name
    if wanted is not None:
        signed.roster.member(wanted)
    _print_roster(path, signed, key, as_json=as_json)


def _command(verb: str, name: str, operator: Path, roster: Path | None) -> str:
    """Return a command line that works on the same files as this command."""
    words = ["convoy", "roster", verb, name]
    words += [] if roster is None else ["--roster", str(roster)]
    words += [] if operator == OPERATOR_DIRECTORY else ["--operator", str(operator)]
    return shlex.join(words)


def _replaced(out: Path, key: OperatorKey, cluster: str) -> SignedRoster | None:
    """Return the roster that ``out`` holds, or None. The new epoch must follow it: members refuse an older
    one.
    """
    from convoy.trust.roster.roster import MAX_ROSTER_BYTES, open_roster

    if not out.exists():
        return None
    data = read_bytes(out, max_bytes=MAX_ROSTER_BYTES)
    _, valid_at = _claims(data, out)
    old = open_roster(data, operator_key=key.public_key, cluster_id=cluster, now=valid_at)
    require_signer(old, key)
    return old


def _claims(data: bytes, file: Path) -> tuple[bytes, datetime.datetime]:
    """Return the operator key that a roster names, and a time at which it is valid. This verifies nothing."""
    try:
        table = tomllib.loads(data.decode("utf-8"))
    # tomllib also raises ValueError for a number of 4,301 digits.
    except (ValueError, RecursionError):
        raise RosterError(f"{file} is not TOML, so it is no roster", hint=_REMEDY_2) from None
    signature, valid_at = table.get("signature"), table.get("not_before")
    if not isinstance(signature, dict) or not isinstance(signature.get("operator"), str):
        raise RosterError(f"{file} is unsigned", hint="sign a roster with `convoy roster new`")
    if not isinstance(valid_at, datetime.datetime) or valid_at.tzinfo is None:
        raise RosterError(f"{file} has no time not_before, so it is no roster", hint=_REMEDY_2)
    return decode_public_key(signature["operator"], f"{file}: the operator's key"), valid_at


def _print_roster(file: Path, signed: SignedRoster, key: bytes, *, as_json: bool) -> None:
    from convoy.trust.roster.roster import format_address

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

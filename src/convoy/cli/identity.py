"""``convoy identity``: make and show a member's keys, and the card that its operator puts into the roster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.audit import operator_log
from convoy.cli.operator.certify import certify
from convoy.cli.operator.passphrase import NewPassphraseFlag, Passphrase, PassphraseFlag
from convoy.cli.operator.roster_change import OPERATOR_DIRECTORY, load_operator
from convoy.cli.show.output import JsonFlag, print_fields, print_json, print_note
from convoy.config.files import replace_file
from convoy.config.table import DEFAULT_PEER_PORT
from convoy.errors import ConfigError, UsageError

app = typer.Typer(help="Make or show keys and cards; an operator key's passphrase.", rich_markup_mode=None)
app.command()(certify)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="The member's name, unique in its cluster.")],
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where the keys go.  [default: .convoy/NAME]")
    ] = None,
    address: Annotated[
        str, typer.Option(help="host:port where other members reach this one.")
    ] = f"127.0.0.1:{DEFAULT_PEER_PORT}",
    card: Annotated[Path | None, typer.Option(help="Where the card goes.  [default: NAME.card.toml]")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a member's keys, and a card for the operator. The keys stay here; the card has the public half."""
    from convoy.crypto.identity import Identity
    from convoy.trust.roster.card import member_of, write_card
    from convoy.trust.roster.text import parse_address

    identity = Identity.generate()
    member = member_of(name, identity, parse_address(address))
    card = card or Path(f"{name}.card.toml")
    # Check before the keys are written, so that a failure leaves nothing behind.
    if not card.parent.is_dir():
        raise ConfigError(
            f"there is no directory {card.parent} for the card",
            hint="make the directory, or name another file with --card",
        )
    directory = directory or Path(".convoy") / name
    identity.save(directory)
    replace_file(card, write_card(member).encode())
    facts = {
        "member": name,
        "address": address,
        "directory": directory,
        "card": card,
        "identity_key": identity.public_key.hex(),
    }
    if as_json:
        print_json(facts)
        return
    print_fields(facts.items())
    print(f"The keys in {directory} are secret and stay here; the card goes to the operator.")


@app.command()
def passphrase(
    directory: Annotated[Path, typer.Argument(help="Directory of the operator's key.")] = OPERATOR_DIRECTORY,
    passphrase_file: PassphraseFlag = None,
    new_passphrase_file: NewPassphraseFlag = None,
    remove: Annotated[bool, typer.Option("--remove", help="Leave the key without a passphrase.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Set, change or remove the passphrase of an operator key. The key itself stays the same."""
    if remove and new_passphrase_file is not None:
        raise UsageError("--remove and --new-passphrase-file are given together", hint="give one of them")
    key = load_operator(directory, passphrase_file)
    new = None
    if not remove:
        new = Passphrase(new_passphrase_file, "--new-passphrase-file").choose(directory, may_be_empty=False)
        if new is None:
            raise UsageError(
                "there is no new passphrase, and no terminal to ask for one",
                hint="--new-passphrase-file FILE sets one, --remove leaves none",
            )
    action = "remove passphrase" if new is None else "set passphrase"
    with operator_log(directory, key).doing(action, {}):
        key.replace(directory, new)
    facts = {"directory": directory, "operator_key": key.public_key.hex(), "passphrase": new is not None}
    if as_json:
        print_json(facts)
        return
    print_fields([*list(facts.items())[:2], ("passphrase", "none" if new is None else "set")])
    if new is not None:
        print_note("the disk, and copies and backups, may still hold the key as it was before")


@app.command()
def show(
    directory: Annotated[Path, typer.Argument(help="The directory with the keys, such as .convoy/identity.")],
    as_json: JsonFlag = False,
) -> None:
    """Check the keys in a directory, and show their public half."""
    from convoy.crypto.certificate import certificate_fingerprint
    from convoy.crypto.identity import Identity

    identity = Identity.load(directory)
    facts = {
        "directory": directory,
        "identity_key": identity.public_key.hex(),
        "certificate_sha256": certificate_fingerprint(identity.tls_certificate_der).hex(),
    }
    if as_json:
        print_json(facts)
    else:
        print_fields(facts.items())

"""Set up the first machine of a cluster: operator key, identity, a roster of one member, convoy.toml."""

from __future__ import annotations

import datetime
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.cli.audit import operator_log, roster_subject
from convoy.cli.operator.home import DEFAULT_HOME, NAME_HINT, Home, host_name, local_addresses, parse_place
from convoy.cli.show.output import print_note
from convoy.config.files import read_bytes, replace_file
from convoy.config.table import DEFAULT_PEER_PORT
from convoy.errors import ConfigError

if TYPE_CHECKING:
    from convoy.transport.member import Member, Roster


def make_first_machine(
    home: Home,
    *,
    name: str | None,
    address: str | None,
    cluster: str | None,
    passphrase_file: Path | None = None,
    model: str | None = None,
) -> None:
    """Make a convoy.toml in ``home``, which keeps ``model``, and the files that it names.

    After an interruption, continue next time. Raises `IdentityError`, `RosterError` or `ConfigError`.
    """
    from convoy.trust.roster.card import member_of
    from convoy.trust.roster.check import check_name
    from convoy.trust.roster.roster import MAX_ROSTER_BYTES, make_roster, open_roster, sign_roster

    if name is not None:
        # A wrong name is refused before a key is made.
        check_name(name, hint=NAME_HINT)
    _refuse_second_cluster(home)
    if not home.roster.exists():
        _announce(home)
    host, _ = parse_place(address or local_addresses()[0], None)
    operator, identity = home.open_operator(passphrase_file), home.open_identity()
    member = member_of(name or host_name(), identity, (host, DEFAULT_PEER_PORT), head=True)
    # An earlier run was interrupted after it wrote the roster.
    if home.roster.exists():
        data = read_bytes(home.roster, max_bytes=MAX_ROSTER_BYTES)
        roster = open_roster(data, operator_key=operator.public_key).roster
        member = _own_line(roster, member, home)
    else:
        roster = make_roster(cluster or f"home-{secrets.token_hex(4)}", [member], not_before=_a_while_ago())
        data = sign_roster(roster, operator)
        signed = open_roster(data, operator_key=operator.public_key)
        with operator_log(home.operator, operator).doing("sign roster", roster_subject(signed, home.roster)):
            replace_file(home.roster, data)
    home.write_config(
        member.name, operator.public_key, listen_host="::" if ":" in host else None, model=model
    )
    print_note(
        f"made cluster {roster.cluster_id} with {member.name} as its head: "
        f"keys, roster and convoy.toml are in {home.directory.absolute()}"
    )


def _announce(home: Home) -> None:
    """Say that a cluster is about to be made. On a terminal a question for a passphrase follows."""
    print_note(f"no cluster in {home.directory.absolute()}: making a new one, with this machine as its head")
    print_note("(for a cluster that exists: run this where its .convoy is, or name that folder with --dir)")


def _refuse_second_cluster(home: Home) -> None:
    """Raise `ConfigError` if this folder holds a cluster that was set up by hand, and no other was named."""
    found = next((file for file in (Path("convoy.toml"), Path("roster.toml")) if file.exists()), None)
    if found is not None and home.directory == DEFAULT_HOME:
        raise ConfigError(
            f"{found} in this folder is of a cluster already, and {home.config} would begin another one",
            hint="--config FILE names the convoy.toml of its first machine; --dir DIR begins another cluster",
        )


def _own_line(roster: Roster, member: Member, home: Home) -> Member:
    for listed in roster.members:
        if listed.identity_key == member.identity_key:
            return listed
    raise ConfigError(
        f"{home.roster} does not list the identity in {home.identity}",
        hint="name the member's own file with --config, or choose another folder with --dir",
    )


def _a_while_ago() -> datetime.datetime:
    from convoy.trust.roster.newcomer import SLACK

    return datetime.datetime.now(datetime.UTC) - SLACK

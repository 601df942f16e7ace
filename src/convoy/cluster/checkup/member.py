"""Examine one member's own files: keys, roster, clock, and whether the roster's entry for it is true."""

from __future__ import annotations

import datetime
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from convoy.cluster.checkup.finding import Finding, fail, ok, warn
from convoy.crypto.identity import (
    IDENTITY_KEY,
    OPERATOR_KEY,
    TLS_CERTIFICATE,
    TLS_KEY,
    Identity,
)
from convoy.errors import ConfigError, RosterError
from convoy.transport.member import Roster
from convoy.trust.evidence.policy import Policy

_SOON = datetime.timedelta(days=7)
_AHEAD = datetime.timedelta(minutes=2)


def check_keys(directory: Path) -> Iterator[Finding]:
    """Check the folder of a member's keys: it exists, belongs to this user, and is closed to all others."""
    if not directory.is_dir():
        yield fail(f"there is no directory {directory}", f"convoy identity new NAME --dir {directory}")
        return
    found = list(_check_owner(directory, 0o700))
    for name in (IDENTITY_KEY, TLS_KEY, TLS_CERTIFICATE):
        found += _check_owner(directory / name, 0o600)
    yield from found
    if (directory / OPERATOR_KEY).exists():
        yield warn(
            f"the operator's key lies beside a member's keys in {directory}",
            "move it to a machine that is no member: its holder can sign any machine into the cluster",
        )
    if not found:
        identity = Identity.load(directory)
        yield ok(f"keys in {directory} are private; identity {identity.public_key.hex()[:16]}...")


def _check_owner(path: Path, wanted: int) -> Iterator[Finding]:
    try:
        status = path.stat()
    except OSError as error:
        what = (error.strerror or "unreadable").lower()
        yield fail(f"cannot read {path}: {what}", "restore it, or make new keys: `convoy identity new NAME`")
        return
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        yield fail(
            f"{path} has mode {mode:04o}, expected {wanted:04o}: others could read the key",
            f"chmod {wanted:o} {path}",
        )
    if status.st_uid != os.getuid():
        yield fail(
            f"{path} belongs to user {status.st_uid}, and this is user {os.getuid()}",
            f"chown {os.getuid()} {path}, or run Convoy as that user",
        )


def check_clock(roster: Roster, files: Sequence[Path], now: datetime.datetime) -> Iterator[Finding]:
    """Compare this machine's clock with the roster's start and the times of files that were written here."""
    found = []
    if now < roster.not_before:
        found.append(
            fail(
                f"the clock says {_text(now)}, and the roster begins at {_text(roster.not_before)}",
                "set the clock: `timedatectl set-ntp true`, or check the clock of the signing machine",
            )
        )
    for path in files:
        try:
            written = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
        except (OSError, OverflowError, ValueError):
            # Other checks name a missing file.
            continue
        if written > now + _AHEAD:
            found.append(
                warn(
                    f"{path} was written at {_text(written)}, and the clock says {_text(now)}",
                    "set the clock: `timedatectl set-ntp true`",
                )
            )
    yield from found or [ok(f"the clock says {_text(now)}, which agrees with the roster and with the files")]


def check_roster(roster: Roster, now: datetime.datetime, file_epoch: int) -> Iterator[Finding]:
    """Check how long the newest roster that this member knows is valid. Its signature was verified before.

    ``file_epoch`` is the file's epoch. It is lower if a newer roster was accepted before.
    """
    shown = f"the roster of {roster.cluster_id}, epoch {roster.epoch}, lists {len(roster.members)} members"
    yield ok(f"{shown}, and the operator's signature holds")
    if file_epoch < roster.epoch:
        yield ok(
            f"epoch {roster.epoch} came over a link and counts; the file, with epoch {file_epoch}, may stay "
            f"as it is"
        )
    left = roster.expires - now
    renew = "the operator runs `convoy roster sign`, and gives the file to one running member"
    if left <= datetime.timedelta(0):
        yield fail(f"the roster expired at {_text(roster.expires)}, {_days(-left)} ago", renew)
    elif left < _SOON:
        yield warn(f"the roster expires at {_text(roster.expires)}, in {_days(left)}", renew)
    else:
        yield ok(f"the roster is valid for {_days(left)} more")


def check_listed(roster: Roster, name: str, identity: Identity) -> Iterator[Finding]:
    """Check that the roster lists this member with these very keys."""
    again = "give its card to the operator, who signs a new roster: `convoy roster add`"
    try:
        listed = roster.member(name)
    except RosterError as error:
        yield fail(error.message, f"{again}; or mend [cluster] name")
        return
    found = []
    if listed.identity_key != identity.public_key:
        found.append(
            fail(
                f"the roster lists identity {listed.identity_key.hex()[:16]}... for {name}, and this machine "
                f"has {identity.public_key.hex()[:16]}...",
                again,
            )
        )
    if listed.certificate_der != identity.tls_certificate_der:
        found.append(
            fail(f"the roster lists another TLS certificate for {name} than this machine has", again)
        )
    part = "may be the head" if listed.head else "is a peer"
    yield from found or [ok(f"the roster lists {name} with the keys of this machine; it {part}")]


def check_policy(policy: Policy, roster: Roster | None) -> Iterator[Finding]:
    """Describe a policy file that could be read, and check the members that it names."""
    rules = len(policy.placement)
    yield ok(f"the policy's minimum is {policy.minimum.text}, and it has {rules} placement rules")
    if roster is None:
        return
    try:
        policy.check_members([member.name for member in roster.members])
    except ConfigError as error:
        yield fail(error.message, error.hint)


def check_granted(layers: Mapping[str, str] | None, roster: Roster) -> Iterator[Finding]:
    """Check the members that [plan] layers names."""
    for name in layers or {}:
        if name not in {member.name for member in roster.members}:
            yield fail(
                f"[plan] layers gives layers to {name}, which is not in the roster", "mend [plan] layers"
            )


def _text(at: datetime.datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _days(span: datetime.timedelta) -> str:
    hours = span.total_seconds() / 3600
    return f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.0f} hours"

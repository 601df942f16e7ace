"""The members of a roster as values, and this process as one of them.

`trust.roster` makes, signs and verifies rosters. Links need only these values, so they stand here, one
floor up.
"""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass, field

from convoy.crypto.certificate import certificate_fingerprint
from convoy.crypto.handshake import Party
from convoy.crypto.identity import Identity
from convoy.crypto.keys import prefixed
from convoy.errors import RosterError

_DIGEST_LABEL = b"convoy roster v1"


@dataclass(frozen=True, slots=True)
class Member:
    """Hold one line of the roster. ``address`` is (host, port). ``head`` members may schedule and serve.

    ``attestation_key`` is the DER SubjectPublicKeyInfo of its TPM's attestation key, or empty if none was
    enrolled.
    """

    name: str
    identity_key: bytes
    certificate_der: bytes = field(repr=False)
    address: tuple[str, int]
    head: bool = False
    attestation_key: bytes = field(default=b"", repr=False)

    @property
    def party(self) -> Party:
        """Return the member in the form that the handshake uses."""
        return Party(self.name, self.identity_key, certificate_fingerprint(self.certificate_der))


@dataclass(frozen=True, slots=True)
class Roster:
    """List the members of a cluster for one epoch.

    Times are UTC in whole seconds. The roster is valid in [not_before, expires).
    """

    cluster_id: str
    epoch: int
    not_before: datetime.datetime
    expires: datetime.datetime
    members: tuple[Member, ...]

    def member(self, name: str) -> Member:
        """Return the member with this name. Raises `RosterError` if there is none."""
        for member in self.members:
            if member.name == name:
                return member
        names = ", ".join(member.name for member in self.members)
        raise RosterError(
            f"{name} is not in the roster of {self.cluster_id}, which lists {names}",
            hint="name one of these, or add the member with `convoy invite` or `convoy roster add`",
        )

    def member_with_certificate(self, certificate_der: bytes) -> Member | None:
        """Return the member with exactly this certificate, or None."""
        return next((m for m in self.members if m.certificate_der == certificate_der), None)

    @property
    def digest(self) -> bytes:
        """Return the SHA-256 over every field, each behind its length. Equal digests mean equal rosters."""
        parts = [
            _DIGEST_LABEL,
            self.cluster_id.encode(),
            self.epoch.to_bytes(8, "big"),
            int(self.not_before.timestamp()).to_bytes(8, "big"),
            int(self.expires.timestamp()).to_bytes(8, "big"),
        ]
        for member in self.members:
            host, port = member.address
            parts += [
                member.name.encode(),
                member.identity_key,
                member.certificate_der,
                host.encode(),
                port.to_bytes(2, "big"),
                bytes([member.head]),
                member.attestation_key,
            ]
        return hashlib.sha256(prefixed(*parts)).digest()

    def require_valid(self, now: datetime.datetime) -> None:
        """Raise `RosterError` before ``not_before`` and from ``expires`` on."""
        clock = f"and it is {now:%Y-%m-%d %H:%M:%S}"
        if now < self.not_before:
            start = f"{self.not_before:%Y-%m-%d %H:%M:%S} UTC"
            raise RosterError(
                f"the roster of {self.cluster_id} is not valid before {start}, {clock}",
                hint="check this machine's clock",
            )
        if now >= self.expires:
            end = f"{self.expires:%Y-%m-%d %H:%M:%S} UTC"
            raise RosterError(
                f"the roster of {self.cluster_id} expired at {end}, {clock}",
                hint="sign a new one with a higher epoch: `convoy roster new`",
            )


@dataclass(frozen=True, slots=True)
class LocalMember:
    """Describe this process: its name and keys, and the roster that lists it.

    Raises `RosterError` if the roster does not list this name with these keys.
    """

    name: str
    identity: Identity = field(repr=False)
    roster: Roster = field(repr=False)

    def __post_init__(self) -> None:
        listed = self.roster.member(self.name)
        if listed.identity_key != self.identity.public_key:
            raise RosterError(
                f"the roster lists another identity key for {self.name} than this machine has",
                hint=self._whose_keys(),
            )
        if listed.certificate_der != self.identity.tls_certificate_der:
            raise RosterError(
                f"the roster lists another certificate for {self.name} than this machine has",
                hint=self._whose_keys(),
            )

    def _whose_keys(self) -> str:
        """Return a hint for keys that do not belong to the name."""
        mine = (one.name for one in self.roster.members if one.identity_key == self.identity.public_key)
        other = next((name for name in mine if name != self.name), None)
        if other is not None:
            return (
                f"the keys are {other}'s: mend [cluster] name or identity in convoy.toml, as name and keys "
                f"belong together"
            )
        return (
            f"is [cluster] identity the folder of {self.name}'s keys? if they are new: `convoy roster remove "
            f"{self.name}` and `convoy roster add` with its new card, or another invitation"
        )

    @property
    def member(self) -> Member:
        """Return this process's own line of the roster."""
        return self.roster.member(self.name)

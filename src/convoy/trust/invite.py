"""Encode the token of an invitation: one word that a person pastes, with all that a newcomer must know.

``convoy1`` and base32 in lower case: addresses, cluster id, the operator's public key, the fingerprint of the
listener's certificate, expiry and the secret, with a checksum at the end. Layout: docs/protocol.md,
"Enrolment".
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import ipaddress
import re
from dataclasses import dataclass, field

from convoy.crypto.enrolment import LABEL, SECRET_BYTES, invitation_id
from convoy.crypto.keys import prefixed
from convoy.errors import InviteError

_COPY = "copy the whole line of `convoy invite`, or make a new one"

PREFIX = "convoy1"
MAX_ADDRESSES = 8
MAX_TOKEN_CHARS = 4096
MAX_LIFETIME_S = 3600
MAX_SKEW_S = 120

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# A wrong host leads nowhere, because the fingerprint decides.
_HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,253}")
_CHECKSUM_BYTES = 4
_KEY_BYTES = 32
_COPY = "copy the whole line that `convoy invite` printed; it is one word that begins with convoy1"


@dataclass(frozen=True, slots=True)
class Token:
    """Hold an invitation.

    ``expires`` is in Unix seconds; ``addresses`` are (host, port), tried in their order.
    """

    cluster_id: str
    operator_key: bytes
    fingerprint: bytes
    addresses: tuple[tuple[str, int], ...]
    expires: int
    lifetime_s: int
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.cluster_id):
            raise InviteError("the invitation makes no sense: its cluster has no possible name", hint=_COPY)
        if not all(_HOST.fullmatch(host) and 0 < port < 65536 for host, port in self.addresses):
            raise InviteError("the invitation makes no sense: it has an impossible address", hint=_COPY)
        lengths = (len(self.operator_key), len(self.fingerprint), len(self.secret))
        if lengths != (_KEY_BYTES, _KEY_BYTES, SECRET_BYTES):
            raise InviteError(
                "the invitation makes no sense: a key has another length than its kind", hint=_COPY
            )
        if not 1 <= len(self.addresses) <= MAX_ADDRESSES:
            raise InviteError(
                f"the invitation names {len(self.addresses)} addresses, expected 1 to {MAX_ADDRESSES}",
                hint=_COPY,
            )
        if not 0 < self.lifetime_s <= MAX_LIFETIME_S or not self.lifetime_s <= self.expires < 2**37:
            raise InviteError("the invitation makes no sense: its time is outside the calendar", hint=_COPY)

    @property
    def invitation(self) -> bytes:
        """Return the SHA-256 over everything but the secret. Both ends mix it into their transcript."""
        # Both ends can compute it without telling the secret.
        return hashlib.sha256(prefixed(LABEL, b"invitation", self._head, self._tail)).digest()

    @property
    def id(self) -> str:
        """Return the invitation's name in files and logs, without its secret."""
        return invitation_id(self.secret, self.invitation)

    def encode(self) -> str:
        """Return the word to paste."""
        body = self._head + self.secret + self._tail
        text = base64.b32encode(body + token_checksum(body)).decode().rstrip("=").lower()
        return PREFIX + text

    def require_usable(self, now: datetime.datetime) -> None:
        """Raise `InviteError` once the invitation has expired, or before it can have been made.

        Both errors name both times.
        """
        seconds = now.timestamp()
        clock = f"and it is {_shown(seconds)} here"
        if seconds >= self.expires:
            raise InviteError(
                f"the invitation expired at {_shown(self.expires)}, {clock}",
                hint="make a new one with `convoy invite`, or check the clocks of both machines",
            )
        made = self.expires - self.lifetime_s
        if seconds < made - MAX_SKEW_S:
            raise InviteError(
                f"the invitation was made at {_shown(made)}, {clock}: the clocks of the machines differ",
                hint="set the clock of this machine or of the inviting one",
            )

    @property
    def _head(self) -> bytes:
        times = self.expires.to_bytes(8, "big") + self.lifetime_s.to_bytes(2, "big")
        return times + self.operator_key + self.fingerprint

    @property
    def _tail(self) -> bytes:
        places = b"".join(_encode_address(address) for address in self.addresses)
        return _short(self.cluster_id) + bytes([len(self.addresses)]) + places


def decode_token(text: str) -> Token:
    """Return the token in a text; white space within it (a line that was wrapped) does no harm.

    Raises `InviteError`.
    """
    # The text is cut before it is split, so that a huge paste costs nothing.
    word = "".join(text[: MAX_TOKEN_CHARS + 1].split()).lower()
    if len(word) > MAX_TOKEN_CHARS:
        raise InviteError(f"the invitation is longer than {MAX_TOKEN_CHARS} characters", hint=_COPY)
    if not word.startswith(PREFIX):
        raise InviteError(f"this is no invitation: it does not begin with {PREFIX}", hint=_COPY)
    digits = word.removeprefix(PREFIX)
    try:
        data = base64.b32decode(digits.upper().encode() + b"=" * (-len(digits) % 8))
    except (binascii.Error, UnicodeEncodeError):
        data = b""
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    # The checksum catches a bad paste. It proves nothing: the secret and the keys do that.
    if not body or checksum != token_checksum(body):
        raise InviteError("the invitation is damaged: a part is missing or was changed", hint=_COPY)
    token = _read(_Reader(body))
    # Every token has one spelling, so that no second text means the same invitation.
    if token.encode() != word:
        raise InviteError("the invitation is damaged: it is not written as convoy writes it", hint=_COPY)
    return token


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._data):
            raise InviteError("the invitation is damaged: it ends too early", hint=_COPY)
        part, self._at = self._data[self._at : end], end
        return part

    def number(self, num_bytes: int) -> int:
        return int.from_bytes(self.take(num_bytes), "big")

    def text(self) -> str:
        try:
            return self.take(self.number(1)).decode()
        except UnicodeDecodeError:
            raise InviteError("the invitation is damaged: a name in it is not UTF-8", hint=_COPY) from None

    def end(self) -> None:
        if self._at != len(self._data):
            raise InviteError("the invitation is damaged: something follows its end", hint=_COPY)


def _read(reader: _Reader) -> Token:
    expires, lifetime_s = reader.number(8), reader.number(2)
    operator_key, fingerprint = reader.take(_KEY_BYTES), reader.take(_KEY_BYTES)
    secret = reader.take(SECRET_BYTES)
    cluster_id = reader.text()
    addresses = tuple(_read_address(reader) for _ in range(reader.number(1)))
    reader.end()
    return Token(cluster_id, operator_key, fingerprint, addresses, expires, lifetime_s, secret)


def _read_address(reader: _Reader) -> tuple[str, int]:
    kind = reader.number(1)
    if kind == 4:
        host = str(ipaddress.IPv4Address(reader.take(4)))
    elif kind == 6:
        host = str(ipaddress.IPv6Address(reader.take(16)))
    elif kind == 0:
        host = reader.text()
    else:
        raise InviteError(f"the invitation has an address of the unknown kind {kind}", hint=_COPY)
    return host, reader.number(2)


def _encode_address(address: tuple[str, int]) -> bytes:
    host, port = address
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return b"\0" + _short(host) + port.to_bytes(2, "big")
    # A scope names an interface of this machine only, so the address stays text.
    if isinstance(ip, ipaddress.IPv6Address) and ip.scope_id is not None:
        return b"\0" + _short(host) + port.to_bytes(2, "big")
    return bytes([ip.version]) + ip.packed + port.to_bytes(2, "big")


def _short(text: str) -> bytes:
    data = text.encode()
    return bytes([len(data)]) + data


def token_checksum(body: bytes) -> bytes:
    """Return the bytes at the end of a token that show a bad paste."""
    return hashlib.sha256(prefixed(LABEL, b"checksum", body)).digest()[:_CHECKSUM_BYTES]


def _shown(seconds: float) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"

"""The folder of a member that was set up by an invitation: keys, roster and convoy.toml in one place."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tomli_w
import typer

from convoy.cli.operator.passphrase import Passphrase
from convoy.cli.show.files import replace_file
from convoy.config.settings import DEFAULT_PEER_PORT, Config, load_config
from convoy.errors import ConfigError, RosterError, UsageError

if TYPE_CHECKING:
    from convoy.crypto.identity import Identity, OperatorKey

DEFAULT_HOME = Path(".convoy")
DirectoryFlag = Annotated[
    Path, typer.Option("--dir", help="Folder of this machine's keys, roster and convoy.toml.")
]


@dataclass(frozen=True, slots=True)
class Home:
    """Paths below one folder. What is there already is used, and nothing secret is ever overwritten."""

    directory: Path

    @property
    def config(self) -> Path:
        return self.directory / "convoy.toml"

    @property
    def roster(self) -> Path:
        return self.directory / "roster.toml"

    @property
    def identity(self) -> Path:
        return self.directory / "identity"

    @property
    def operator(self) -> Path:
        return self.directory / "operator"

    def settings(self) -> Config | None:
        """The convoy.toml that is here, or None."""
        return load_config(self.config) if self.config.exists() else None

    def open_identity(self) -> Identity:
        """The identity that is here, or a new one. Raises `IdentityError`."""
        from convoy.crypto.identity import IDENTITY_KEY, Identity

        if (self.identity / IDENTITY_KEY).exists():
            return Identity.load(self.identity)
        self._make()
        identity = Identity.generate()
        identity.save(self.identity)
        return identity

    def open_operator(self, passphrase_file: Path | None = None) -> OperatorKey:
        """The operator key that is here, or a new one. Raises `IdentityError`."""
        self._make()
        return Passphrase(passphrase_file).load_or_make(self.operator)

    def write_config(
        self,
        name: str,
        operator_key: bytes,
        *,
        listen_host: str | None,
        listen_port: int | None = None,
        standby: bool = False,
    ) -> None:
        """A convoy.toml with what nothing can do without, and what the next start is to know of this one."""
        cluster: dict[str, object] = {
            "name": name,
            "identity": self.identity.name,
            "roster": self.roster.name,
            "operator_key": operator_key.hex(),
        }
        tables = {"cluster": cluster | ({"standby": True} if standby else {})}
        listen: dict[str, object] = {"host": listen_host, "port": listen_port}
        listen = {key: value for key, value in listen.items() if value is not None}
        if listen:
            tables["listen"] = listen
        text = "# docs/configuration.md has every other key.\n" + tomli_w.dumps(tables)
        replace_file(self.config, text.encode())

    def _make(self) -> None:
        try:
            # parents as well: mkdir's own would be open to others
            self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            reason = (error.strerror or "unwritable").lower()
            raise ConfigError(f"cannot make the folder {self.directory}: {reason}") from None


def config_file(named: Path | None, directory: Path = DEFAULT_HOME) -> Path | None:
    """The convoy.toml of a verb, by the one rule for all of them: the one that was named, or else the one in
    the home folder, where an invitation leaves it. None where there is neither.
    """
    home = Home(directory).config
    return home if named is None and os.path.exists(home) else named  # unlike Path's, this never raises


def roster_file(named: Path | None) -> Path:
    """The roster of an operator's verb: the one that was named, or else roster.toml here, or else the one in
    the home folder, where an invitation leaves it. What is returned need not be there.
    """
    here, home = Path("roster.toml"), Home(DEFAULT_HOME).roster
    return named or next((file for file in (here, home) if os.path.exists(file)), here)


def host_name() -> str:
    """This machine's name as a member's: its first label, other characters as dashes."""
    label = socket.gethostname().partition(".")[0]
    name = re.sub(r"[^A-Za-z0-9_-]", "-", label).strip("-_")[:63]
    return name or "member"


def local_addresses() -> list[str]:
    """The addresses of this machine's interfaces that others may reach; loopback if there is no other.

    First the one that most of the world is reached from, then IPv4 before IPv6.
    """
    import psutil

    found: dict[int, list[str]] = {4: [], 6: []}
    loopback = ["127.0.0.1"]
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if name in states and not states[name].isup:
            continue
        for entry in addresses:
            version = {socket.AF_INET: 4, socket.AF_INET6: 6}.get(entry.family)
            host = entry.address
            # A link-local address means nothing without the name that its interface has here.
            if version is not None and not host.startswith(("127.", "fe80:")) and host != "::1":
                found[version].append(host)
    first = _outward_address()
    return sorted(found[4] + found[6], key=lambda host: host != first) or loopback


def _outward_address() -> str | None:
    """The local address of the default route. Nothing is sent: UDP only chooses a route here."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("198.51.100.1", 9))  # RFC 5737: nobody's address
        except OSError:
            return None
        host: str = sock.getsockname()[0]
        return host


def parse_place(text: str, port: int | None) -> tuple[str, int | None]:
    """``HOST`` or ``HOST:PORT`` (IPv6 alone, or in brackets with a port). Raises `UsageError`."""
    from convoy.trust.roster.roster import parse_address

    host, given = text, port
    if text.startswith("[") or text.count(":") == 1:
        try:
            host, given = parse_address(text if not text.endswith("]") else f"{text}:{DEFAULT_PEER_PORT}")
        except RosterError as error:
            raise UsageError(f"--address: {error.message}") from None
        given = port if text.endswith("]") else given
    return host, given

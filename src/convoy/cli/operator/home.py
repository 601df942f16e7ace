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
from convoy.config.files import replace_file
from convoy.config.settings import Config, load_config
from convoy.config.table import DEFAULT_PEER_PORT, row
from convoy.errors import ConfigError, RosterError, UsageError

if TYPE_CHECKING:
    from convoy.crypto.identity import Identity, OperatorKey

DEFAULT_HOME = Path(".convoy")
DirectoryFlag = Annotated[
    Path, typer.Option("--dir", help="Folder of this machine's keys, roster and convoy.toml.")
]


@dataclass(frozen=True, slots=True)
class Home:
    """Hold the paths below one folder. Existing files are used, and secret ones are never overwritten."""

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
        """Return the settings of the folder's convoy.toml, or None."""
        return load_config(self.config) if self.config.exists() else None

    def find_identity(self) -> Identity | None:
        """Return the folder's identity, or None if it has none. Raises `IdentityError`."""
        from convoy.crypto.identity import IDENTITY_KEY, Identity

        return Identity.load(self.identity) if (self.identity / IDENTITY_KEY).exists() else None

    def open_identity(self) -> Identity:
        """Return the folder's identity, or a new one. Raises `IdentityError`."""
        from convoy.crypto.identity import Identity

        found = self.find_identity()
        if found is not None:
            return found
        self._make()
        identity = Identity.generate()
        identity.save(self.identity)
        return identity

    def open_operator(self, passphrase_file: Path | None = None) -> OperatorKey:
        """Return the folder's operator key, or a new one. Raises `IdentityError`."""
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
        model: str | None = None,
    ) -> None:
        """Write a convoy.toml with the required keys, and with the choices that the next start needs."""
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
        if model is not None:
            here = Path(model)
            tables["model"] = {"path": str(here.absolute())} if here.exists() else {"name": model}
        replace_file(self.config, _with_comments(tables).encode())

    def _make(self) -> None:
        try:
            # Make the parents with the private mode too: mkdir's own parents would be open to others.
            self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            reason = (error.strerror or "unwritable").lower()
            raise ConfigError(
                f"cannot make the folder {self.directory}: {reason}",
                hint="name another folder with --dir, or check the mode of its parent",
            ) from None


def _with_comments(tables: dict[str, dict[str, object]]) -> str:
    """Return the tables as TOML, with the meaning of each key above it."""
    lines = ["# docs/configuration.md has every other key."]
    for table, keys in tables.items():
        lines.append(f"[{table}]")
        for key, value in keys.items():
            lines += [f"# {row(table, key).setting.text}", tomli_w.dumps({key: value}).rstrip()]
        lines.append("")
    return "\n".join(lines)


def config_file(named: Path | None, directory: Path = DEFAULT_HOME) -> Path | None:
    """Return the convoy.toml of a verb: the named one, or the one in the home folder, or None.

    An invitation leaves its file in the home folder. All verbs share this rule.
    """
    home = Home(directory).config
    # Unlike `Path.exists`, `os.path.exists` never raises.
    return home if named is None and os.path.exists(home) else named


def roster_file(named: Path | None) -> Path:
    """Return the roster of an operator's verb, which may be missing.

    It is the named one, or roster.toml here, or the one that an invitation left in the home folder.
    """
    here, home = Path("roster.toml"), Home(DEFAULT_HOME).roster
    return named or next((file for file in (here, home) if os.path.exists(file)), here)


NAME_HINT = "choose another name with --name"


def host_name() -> str:
    """Return this machine's name for a member: its first label, with dashes for other characters."""
    label = socket.gethostname().partition(".")[0]
    name = re.sub(r"[^A-Za-z0-9_-]", "-", label).strip("-_")[:63]
    return name or "member"


def local_addresses() -> list[str]:
    """Return the addresses of this machine that others may reach; loopback if there is no other.

    The address of the default route comes first, then IPv4 before IPv6.
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
    """Return the local address of the default route, or None. UDP only chooses a route here and sends
    nothing.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            # RFC 5737 reserves this address for documentation.
            sock.connect(("198.51.100.1", 9))
        except OSError:
            return None
        host: str = sock.getsockname()[0]
        return host


def parse_place(text: str, port: int | None) -> tuple[str, int | None]:
    """Return host and port of ``HOST`` or ``HOST:PORT``. IPv6 stands alone, or in brackets with a port.

    The port is ``port`` if the text has none. Raises `UsageError`.
    """
    from convoy.trust.roster.text import parse_address

    host, given = text, port
    if text.startswith("[") or text.count(":") == 1:
        try:
            host, given = parse_address(text if not text.endswith("]") else f"{text}:{DEFAULT_PEER_PORT}")
        except RosterError as error:
            raise UsageError(
                f"--address: {error.message}", hint="--address HOST or --address HOST:PORT"
            ) from None
        given = port if text.endswith("]") else given
    return host, given

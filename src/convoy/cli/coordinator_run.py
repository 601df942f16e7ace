"""The running of ``convoy coordinator``: its flags, its folder, and what it says once it listens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from convoy.cli.home import Home
from convoy.cli.output import print_draining, print_ended, print_fields, print_json_line
from convoy.cli.start import settle_memory
from convoy.errors import ConfigError

if TYPE_CHECKING:
    from convoy.fleet.books.store import Store
    from convoy.fleet.coordinator.options import CoordinatorOptions
    from convoy.fleet.coordinator.server import Doors

DEFAULT_PORT, DEFAULT_ADMIN_PORT = 8780, 8781
ADMIN_KEY = "admin.key"
_DATABASE = "fleet.db"

HostFlag = Annotated[str, typer.Option(help="Address for consumers and providers.")]
PortFlag = Annotated[int, typer.Option(min=0, max=65535, help="0 lets the system choose.")]
AdminPortFlag = Annotated[int, typer.Option(min=0, max=65535, help="On loopback alone.")]
ConfigFlag = Annotated[Path | None, typer.Option(help="coordinator.toml: models, prices, the queue.")]
DatabaseFlag = Annotated[
    str | None, typer.Option(help="sqlite:///FILE or postgresql://...  [default: a file in --dir]")
]
InstanceFlag = Annotated[str, typer.Option(help="Its name, where several share a database.")]
AuthorityFlag = Annotated[
    list[str] | None, typer.Option(help="host:port by which providers dial it, if another than it sees.")
]
CertificateFlag = Annotated[Path | None, typer.Option(help="PEM, for a listener off loopback.")]
TlsKeyFlag = Annotated[Path | None, typer.Option(help="PEM.")]
BehindProxyFlag = Annotated[
    bool, typer.Option("--behind-tls-proxy", help="A proxy on this machine ends TLS.")
]


@dataclass(frozen=True, slots=True)
class DoorFlags:
    """Where it is to listen."""

    host: str
    port: int
    admin_port: int
    tls_certificate: Path | None
    tls_key: Path | None
    behind_tls_proxy: bool
    authorities: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """Under which providers may dial it. Raises `ConfigError` where nothing says so, `IdentityError`."""
        from convoy.crypto.certificate import certificate_names
        from convoy.fleet.coordinator.authority import LOOPBACK_NAMES
        from convoy.serve.options import is_loopback

        if self.behind_tls_proxy:
            if not self.authorities:
                raise ConfigError(
                    "behind a proxy that ends TLS nothing says by which name providers dial",
                    hint="--authority HOST:443",
                )
            return ()
        pem = b"" if self.tls_certificate is None else _bytes_of(self.tls_certificate)
        mine = LOOPBACK_NAMES if is_loopback(self.host) else ()
        return (*mine, *(certificate_names(pem) if pem else ()))

    def doors(self) -> Doors:
        """Raises `ConfigError` for a door that would be open in clear text."""
        from convoy.fleet.coordinator.server import Doors
        from convoy.serve.options import ServeOptions

        tls = None if self.tls_certificate is None else (str(self.tls_certificate), str(self.tls_key))
        names = tuple(filter(None, (urlsplit(f"//{one}").hostname for one in self.authorities)))
        public = ServeOptions(host=self.host, port=self.port, allow_unauthenticated=True, allowed_hosts=names)
        admin = ServeOptions(port=self.admin_port, allow_unauthenticated=True)
        made = Doors(public, admin, tls, self.behind_tls_proxy)
        made.check()
        return made


def run_here(
    options: CoordinatorOptions, flags: DoorFlags, home: Home, database: str | None, *, as_json: bool
) -> None:
    """Serve until a signal, with keys and, unless another is named, a database in ``home``."""
    from convoy.fleet.books.store import Store
    from convoy.fleet.coordinator.server import run_coordinator

    doors = flags.doors()
    options = replace(options, names=flags.names())
    identity = home.open_identity()
    store = Store(database or f"sqlite:///{home.directory / _DATABASE}")
    try:
        key_file = _admin_key(home, store)

        def ready(url: str, admin_url: str, released: int) -> None:
            settle_memory()
            facts = {
                "url": url,
                "admin_url": admin_url,
                "admin_key_file": key_file,
                "coordinator_key": identity.public_key.hex(),
                "released": released,
            }
            if as_json:
                print_json_line({"event": "ready", **facts})
            else:
                print_fields(facts.items())

        def drain(num_answers: int, drain_s: float) -> None:
            if not as_json:
                print_draining(num_answers, drain_s)

        cut_off = run_coordinator(options, doors, store, identity.public_key, on_ready=ready, on_drain=drain)
    finally:
        store.close()
    if not as_json:
        print_ended(cut_off)


def _admin_key(home: Home, store: Store) -> Path:
    """The file with an administrator's key for this machine's own commands; made at the first start
    of a database."""
    from convoy.crypto.keyfile import write_private
    from convoy.fleet.books.directory import Directory
    from convoy.fleet.books.keys import Scope

    file, directory = home.directory / ADMIN_KEY, Directory(store)
    known = directory.keys()
    if not any(key.scope is Scope.ADMIN and key.revoked_s is None for key in known):
        # a file that is there is of another database
        file.unlink(missing_ok=True)
    if not file.exists():
        write_private(file, (directory.make_key(Scope.ADMIN, None, "first") + "\n").encode())
    return file


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error

"""Run ``convoy coordinator``: its flags, its folder, and its output once it listens."""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from convoy.cli.operator.home import Home
from convoy.cli.running.process import announced
from convoy.cli.running.start import settle_memory
from convoy.cli.show.output import (
    counted,
    one_line,
    print_draining,
    print_ended,
    print_fields,
    print_json_line,
    print_note,
)
from convoy.cli.show.ready import page_line
from convoy.config.files import replace_file, token_folder
from convoy.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from convoy.fleet.books.store import Store
    from convoy.fleet.coordinator.options import CoordinatorOptions
    from convoy.fleet.coordinator.server import ListenOptions
    from convoy.trust.audit import AuditLog

_REMEDY = "check the path, and that you may read the file"

DEFAULT_PORT, DEFAULT_ADMIN_PORT = 8780, 8781
ADMIN_KEY = "admin.key"
BODY_KEY = "idempotency.key"
_BODY_KEY_BYTES = 32
# The file that holds the URL of this folder's administrators' listener.
ADMIN_URL = "admin.url"
_DATABASE = "fleet.db"
# The label of the key that is made with a new database.
_FIRST = "first"
_MAX_URL_CHARS = 4096
_MAX_NAME_CHARS = 64
_MAX_PRICES, _MAX_MODEL_CHARS = 64, 128

HostFlag = Annotated[str, typer.Option(help="Address for consumers and providers.")]
PortFlag = Annotated[
    int, typer.Option(min=0, max=65535, help="Port for consumers and providers; 0 lets the system choose.")
]
AdminPortFlag = Annotated[
    int, typer.Option(min=0, max=65535, help="Port for administrators, only on loopback.")
]
ConfigFlag = Annotated[Path | None, typer.Option(help="coordinator.toml: models, prices, the queue.")]
DatabaseFlag = Annotated[
    str | None, typer.Option(help="sqlite:///FILE or postgresql://...  [default: a file in --dir]")
]
DatabaseFileFlag = Annotated[
    Path | None,
    typer.Option(help="File with the database's URL and password on its first line, for --database."),
]
InstanceFlag = Annotated[str, typer.Option(help="This coordinator's name, if several share a database.")]
AuthorityFlag = Annotated[
    list[str] | None,
    typer.Option(help="host:port that providers dial, if it is not the address here; repeatable."),
]
CertificateFlag = Annotated[Path | None, typer.Option(help="PEM certificate, for a listener off loopback.")]
TlsKeyFlag = Annotated[Path | None, typer.Option(help="PEM key of the certificate.")]
BehindProxyFlag = Annotated[
    bool, typer.Option("--behind-tls-proxy", help="A proxy on this machine ends TLS.")
]
PublicCertificateFlag = Annotated[
    Path | None,
    typer.Option(help="PEM certificate of the TLS proxy in front: pinned providers compare it."),
]


@dataclass(frozen=True, slots=True)
class ListenFlags:
    """Hold the flags of the two listeners, for consumers and providers and for administrators."""

    host: str
    port: int
    admin_port: int
    tls_certificate: Path | None
    tls_key: Path | None
    behind_tls_proxy: bool
    authorities: tuple[str, ...] = ()
    public_certificate: Path | None = None

    def names(self) -> tuple[str, ...]:
        """Return the names by which providers may dial. Raises `ConfigError` if no flag gives one,
        `IdentityError`.
        """
        from convoy.config.clear_text import is_loopback
        from convoy.fleet.coordinator.authority import LOOPBACK_NAMES

        if self.behind_tls_proxy:
            if not self.authorities:
                raise ConfigError(
                    "behind a proxy that ends TLS, the coordinator needs the name that providers dial",
                    hint="--authority HOST:443",
                )
            return ()
        mine = LOOPBACK_NAMES if is_loopback(self.host) else ()
        return (*mine, *self._certificate_names())

    def _certificate_names(self) -> tuple[str, ...]:
        from convoy.crypto.certificate import certificate_names

        return () if self.tls_certificate is None else certificate_names(_bytes_of(self.tls_certificate))

    def page_line(self, url: str) -> str:
        """Return the line on the page of a coordinator at ``url``, under a name that its certificate has."""
        parts, names = urlsplit(url), [one for one in self._certificate_names() if "*" not in one]
        if names and parts.hostname not in names:
            host = f"[{names[0]}]" if ":" in names[0] else names[0]
            url = f"{parts.scheme}://{host}:{parts.port}"
        return page_line(url, certificate=self.tls_certificate)

    def listen_options(self) -> ListenOptions:
        """Return the two listeners. Raises `ConfigError` for one that would be open in clear text."""
        from convoy.api.listen.options import PageOptions, ServeOptions
        from convoy.fleet.coordinator.server import ListenOptions

        tls = None if self.tls_certificate is None else (str(self.tls_certificate), str(self.tls_key))
        names = tuple(filter(None, (urlsplit(f"//{one}").hostname for one in self.authorities)))
        hosts = (*names, *self._certificate_names())
        page = PageOptions(tokens=token_folder(), behind_tls_proxy=self.behind_tls_proxy)
        public = ServeOptions(
            *(self.host, self.port), allow_unauthenticated=True, allowed_hosts=hosts, tls=tls, page=page
        )
        admin = ServeOptions(port=self.admin_port, allow_unauthenticated=True)
        made = ListenOptions(public, admin, self.behind_tls_proxy, self.public_certificate)
        made.check()
        return made


def run_here(
    options: CoordinatorOptions, flags: ListenFlags, home: Home, database: str | None, *, as_json: bool
) -> None:
    """Serve until a signal, with keys in ``home``, and the database there unless another is named."""
    from convoy.fleet.books.store import Store
    from convoy.fleet.coordinator.server import run_coordinator
    from convoy.trust.audit import FILE, AuditLog

    listen = flags.listen_options()
    identity = home.open_identity()
    audit = AuditLog(home.identity / FILE, identity, "coordinator")
    options = replace(options, names=flags.names(), body_key=_body_key(home), audit=audit)
    name = one_line(options.instance[:_MAX_NAME_CHARS])
    with (
        announced("coordinator", name, home.directory) as here,
        closing(Store(database or f"sqlite:///{home.directory / _DATABASE}")) as store,
    ):
        key_file = ensure_admin_key(home, store, audit)
        audit.append("set prices", _prices(options))

        def ready(url: str, admin_url: str, released: int) -> None:
            settle_memory()
            replace_file(home.directory / ADMIN_URL, f"{admin_url}\n".encode())
            facts = {
                "url": url,
                "admin_url": admin_url,
                "admin_key_file": str(key_file),
                "coordinator_key": identity.public_key.hex(),
            }
            if as_json:
                print_json_line({"event": "ready", **facts, "released": released})
            else:
                _print_ready(facts, "" if listen.public.in_clear else flags.page_line(url), released)
            here.ready(f"routes requests at {url}/v1", url)

        def drain(num_answers: int, drain_s: float) -> None:
            if not as_json:
                print_draining(num_answers, drain_s)

        cut_off = run_coordinator(options, listen, store, identity, on_ready=ready, on_drain=drain)
    if not as_json:
        print_ended(cut_off)


def _print_ready(facts: dict[str, str], page: str, released: int) -> None:
    """Print a coordinator's addresses and keys. ``released`` requests of the last run got money back."""
    print_fields(facts.items())
    if page:
        print_note(page)
    if released:
        print_note(f"gave back the reserved money of {counted(released, 'request')} of the last run")


def database_url(url: str | None, file: Path | None) -> str | None:
    """Return the given URL, or the file's. Raises `UsageError` and `ConfigError`."""
    if file is None:
        return url
    if url is not None:
        raise UsageError("--database and --database-file both name the database: give one of them")
    from convoy.api.keys.key_file import check_private

    try:
        with file.open(encoding="utf-8") as lines:
            status = os.fstat(lines.fileno())
            found = lines.readline(_MAX_URL_CHARS).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the database file {file}: {reason}", hint=_REMEDY) from None
    check_private(status, file, "the database file")
    if not found:
        raise ConfigError(
            f"the database file {file} is empty, expected a URL on its first line",
            hint="its first line is a URL like postgresql://user:password@host/name",
        )
    return found


def admin_url_of(directory: Path) -> str:
    """Return the administrators' URL of a folder's coordinator: from its file, or with the default port."""
    try:
        said = (directory / ADMIN_URL).read_text(encoding="utf-8")[:_MAX_URL_CHARS].strip()
    except (OSError, UnicodeDecodeError):
        said = ""
    return said or f"http://127.0.0.1:{DEFAULT_ADMIN_PORT}"


def _body_key(home: Home) -> bytes:
    """Return the folder's secret for bodies with an Idempotency-Key. The first start makes it."""
    from convoy.crypto.keyfile import read_private, write_private

    file = home.directory / BODY_KEY
    if not file.exists():
        write_private(file, secrets.token_bytes(_BODY_KEY_BYTES))
    key = read_private(file)
    if len(key) != _BODY_KEY_BYTES:
        raise ConfigError(
            f"{file} has {len(key)} bytes, expected {_BODY_KEY_BYTES}",
            hint="remove it: a new one is made, and Idempotency-Keys in use may be refused for a day",
        )
    return key


def ensure_admin_key(home: Home, store: Store, audit: AuditLog) -> Path:
    """Return the file with an administrator's key for commands on this machine.

    The first start of a database makes it.
    """
    from convoy.api.keys.key_file import new_key
    from convoy.crypto.keyfile import write_private
    from convoy.fleet.books.directory import Directory
    from convoy.fleet.books.keys import Scope, subject_of_key

    file, directory = home.directory / ADMIN_KEY, Directory(store)
    known = directory.keys()
    if not any(key.scope is Scope.ADMIN and key.revoked_s is None for key in known):
        # An existing file belongs to another database.
        file.unlink(missing_ok=True)
    if not file.exists():
        key = new_key()
        audit.append("make API key", subject_of_key(key, Scope.ADMIN, None, _FIRST))
        write_private(file, (directory.make_key(Scope.ADMIN, None, _FIRST, key=key) + "\n").encode())
    return file


def _prices(options: CoordinatorOptions) -> dict[str, str | list[str]]:
    """Return the prices for an audit entry at a start: a digest of all, and the first of them."""
    lines = [
        f"{model[:_MAX_MODEL_CHARS]}: {one.price.prompt_micro} {one.price.completion_micro}"
        for model, one in sorted(options.models.items())
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return {"instance": options.instance[:_MAX_NAME_CHARS], "digest": digest, "prices": lines[:_MAX_PRICES]}


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", hint=_REMEDY) from error

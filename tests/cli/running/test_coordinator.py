"""What `convoy coordinator` makes of its flags before it listens."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from convoy.api.page.rights import PageRights
from convoy.cli.operator.home import Home
from convoy.cli.running.coordinator import (
    ADMIN_KEY,
    ADMIN_URL,
    BODY_KEY,
    ListenFlags,
    admin_url_of,
    database_url,
    ensure_admin_key,
    run_here,
)
from convoy.cli.running.coordinator_file import load_fleet_config
from convoy.crypto.certificate import certificate_names
from convoy.crypto.identity import Identity
from convoy.errors import ConfigError, IdentityError, UsageError
from convoy.fleet.books.directory import Directory
from convoy.fleet.books.keys import Scope
from convoy.fleet.books.price import Price
from convoy.fleet.books.store import Store
from convoy.fleet.consumer_request import ModelOptions
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.trust.audit import AuditLog, Entry, read_entries, verify_log
from support.tls_files import make_tls_files


def flags(**changes: object) -> ListenFlags:
    made: dict[str, object] = {"host": "127.0.0.1", "port": 0, "admin_port": 0, "tls_certificate": None}
    return ListenFlags(**{**made, "tls_key": None, "behind_tls_proxy": False, **changes})  # type: ignore[arg-type]


def test_a_key_with_a_passphrase_is_refused_before_anything_listens(tmp_path: Path) -> None:
    certificate, key = map(Path, make_tls_files(tmp_path))
    opened = load_pem_private_key(key.read_bytes(), None)
    sealed = opened.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    key.write_bytes(sealed)
    with pytest.raises(ConfigError, match=r"tls\.key are no certificate and its key") as caught:
        flags(tls_certificate=certificate, tls_key=key).listen_options()
    assert "no passphrase" in str(caught.value.hint)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Make a certificate for a name and an address; its key is in the same file."""
    key, now = Ed25519PrivateKey.generate(), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    names = [x509.DNSName("coordinator.example"), x509.IPAddress(ipaddress.ip_address("192.0.2.1"))]
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(1))
    built = builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(key, None)
    file = tmp_path / "tls.pem"
    file.touch(mode=0o600)
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file.write_bytes(built.public_bytes(Encoding.PEM) + secret)
    return file


def test_providers_may_dial_the_names_of_the_certificate(certificate: Path) -> None:
    assert flags(host="0.0.0.0", tls_certificate=certificate).names() == (  # noqa: S104 - what is listened on
        "coordinator.example",
        "192.0.2.1",
    )
    assert "localhost" in flags().names()
    assert "localhost" in flags(tls_certificate=certificate).names()


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.pem"):
        flags(tls_certificate=tmp_path / "nothing.pem").names()
    with pytest.raises(IdentityError):
        certificate_names(b"rubbish")


def test_behind_a_proxy_the_name_must_be_said_and_is_a_host_that_is_answered() -> None:
    with pytest.raises(ConfigError, match="the coordinator needs the name that providers dial"):
        flags(behind_tls_proxy=True).names()
    said = flags(behind_tls_proxy=True, authorities=("coordinator.example:443",))
    assert said.names() == ()
    assert said.listen_options().public.allowed_hosts == ("coordinator.example",)


def test_off_loopback_the_names_of_the_certificate_are_hosts_that_are_answered(certificate: Path) -> None:
    listens = flags(host="0.0.0.0", tls_certificate=certificate, tls_key=certificate)  # noqa: S104 - not bound
    assert listens.listen_options().public.allowed_hosts == ("coordinator.example", "192.0.2.1")


@pytest.mark.parametrize(
    ("behind", "with_tls", "has_page"), [(True, False, False), (False, True, True), (True, True, True)]
)
def test_off_loopback_a_coordinator_has_a_page_where_it_has_tls_itself(
    certificate: Path, *, behind: bool, with_tls: bool, has_page: bool
) -> None:
    files = {"tls_certificate": certificate, "tls_key": certificate} if with_tls else {}
    away = flags(host="192.0.2.1", behind_tls_proxy=behind, authorities=("c.example:443",), **files)
    public = away.listen_options().public
    assert (not public.in_clear) == (PageRights(public).why_not is None) == has_page


def test_the_line_on_the_page_names_the_certificate_and_a_host_that_it_has(certificate: Path) -> None:
    away = flags(host="0.0.0.0", tls_certificate=certificate, tls_key=certificate)  # noqa: S104 - not bound
    command = f"convoy open --url https://coordinator.example:8780 --ca {certificate}"
    assert away.page_line("https://127.0.0.1:8780") == (
        f"page: https://coordinator.example:8780/ (`{command}` on this machine signs in to operate)"
    )
    assert "--url https://192.0.2.1:8780 " in away.page_line("https://192.0.2.1:8780")
    assert "page: http://127.0.0.1:8780/ " in flags().page_line("http://127.0.0.1:8780")


def test_a_new_database_gets_an_administrators_key_though_a_file_is_there(tmp_path: Path) -> None:
    home = Home(tmp_path)
    audit = AuditLog(tmp_path / "identity" / "audit.jsonl", Identity.generate(), "coordinator")
    (tmp_path / ADMIN_KEY).write_text("convoy-of-another-database\n")
    store = Store(f"sqlite:///{tmp_path / 'fleet.db'}")
    try:
        key = ensure_admin_key(home, store, audit).read_text().strip()
        assert Directory(store).look_up(key, Scope.ADMIN) is None
        assert ensure_admin_key(home, store, audit).read_text().strip() == key, "and keeps it"
        assert verify_log(audit.path).num_entries == 1
    finally:
        store.close()


def test_a_start_writes_its_prices_down_and_keeps_a_private_secret_for_bodies(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = flags(port=taken.getsockname()[1])

        def start(prompt_micro: int) -> None:
            """Do all that a start does before it listens."""
            models = {"adder": ModelOptions(Price(prompt_micro, 5))}
            with pytest.raises(ConfigError, match="is taken"):
                run_here(CoordinatorOptions(models=models), listen, home, None, as_json=True)

        start(3)
        secret = tmp_path / BODY_KEY
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        kept = secret.read_bytes()
        assert len(kept) == 32
        start(4)
        assert secret.read_bytes() == kept
    found = [entry for entry in read_entries(home.identity / "audit.jsonl") if isinstance(entry, Entry)]
    assert [one.fields["action"] for one in found] == ["make API key", "set prices", "set prices"]
    first, second = (dict(one.fields["subject"]) for one in found[1:])
    assert (first["prices"], second["prices"]) == (["adder: 3 5"], ["adder: 4 5"])
    assert first["digest"] != second["digest"]
    secret.write_bytes(kept[:31])
    with pytest.raises(ConfigError, match=r"idempotency\.key has 31 bytes, expected 32") as caught:
        run_here(CoordinatorOptions(), flags(), home, None, as_json=True)
    assert "remove it" in str(caught.value.hint)


def test_a_key_of_a_file_that_is_misspelt_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    file = tmp_path / "coordinator.toml"
    for text, near in (("[evidnce]", "evidence"), ('[[model]]\nname = "a"\npromt_micro = 1', "prompt_micro")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"coordinator\.toml: .*unknown field") as raised:
            load_fleet_config(file, "one", ())
        assert raised.value.hint == f"did you mean {near}?"


def test_a_database_url_may_stand_in_a_file_that_others_cannot_read(tmp_path: Path) -> None:
    file = tmp_path / "database.url"
    with pytest.raises(ConfigError, match="cannot read"):
        database_url(None, file)
    file.write_text("postgresql://u:secret@h/d\nmore\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644, expected 0600") as raised:
        database_url(None, file)
    assert "secret" not in str(raised.value)
    file.chmod(0o600)
    assert database_url(None, file) == "postgresql://u:secret@h/d"
    with pytest.raises(UsageError, match="--database-file"):
        database_url("sqlite:///x", file)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        database_url(None, file)
    assert database_url("sqlite:///x", None) == "sqlite:///x"


def test_administrators_commands_find_the_port_of_their_folder(tmp_path: Path) -> None:
    assert admin_url_of(tmp_path) == "http://127.0.0.1:8781"
    (tmp_path / ADMIN_URL).write_text("http://127.0.0.1:9999\n")
    assert admin_url_of(tmp_path) == "http://127.0.0.1:9999"

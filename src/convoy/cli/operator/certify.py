"""``convoy identity certify``: certify a provider, for proxies that pin the operator's key."""

from __future__ import annotations

import base64
import binascii
import time
from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.audit import operator_log
from convoy.cli.operator.home import DEFAULT_HOME, DirectoryFlag, Home
from convoy.cli.operator.passphrase import PassphraseFlag
from convoy.cli.show.output import JsonFlag, print_fields, print_json
from convoy.config.files import replace_file
from convoy.errors import ConfigError, UsageError

_DAY_S = 24 * 3600


def certify(
    key: Annotated[str, typer.Argument(help="The provider's identity key, as `convoy provide` shows it.")],
    name: Annotated[str, typer.Argument(help="The provider's name in the certificate.")],
    file: Annotated[Path, typer.Option(help="Where the certificate goes.")] = Path("provider.certificate"),
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days until the certificate expires.")] = 365,
    directory: DirectoryFlag = DEFAULT_HOME,
    passphrase_file: PassphraseFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Certify a provider for proxies that trust the operator's key."""
    from convoy.wire.fleet.certified import certify as sign

    try:
        identity = bytes.fromhex(key)
    except ValueError:
        raise UsageError(
            f"{key[:80]!r} is no key, expected 64 hexadecimal digits",
            hint="`convoy provide` prints the provider's key",
        ) from None
    operator = Home(directory).open_operator(passphrase_file)
    expires_s = int(time.time()) + days * _DAY_S
    log = operator_log(Home(directory).operator, operator)
    with log.doing("certify provider", {"name": name[:256], "identity": key.lower()[:64], "days": days}):
        replace_file(file, base64.b64encode(sign(operator, identity, name, expires_s)) + b"\n")
    facts = {"certificate": file, "provider": name, "operator_key": operator.public_key.hex(), "days": days}
    if as_json:
        print_json(facts)
    else:
        print_fields(facts.items())


def read_certificate_file(file: Path, identity: bytes | None) -> bytes:
    """Return the certificate in a file for the provider with key ``identity``; None if it has no key yet.

    Raises `ConfigError` for a file that is no certificate, has expired, or belongs to another provider.
    """
    from convoy.wire.fleet.certified import MAX_CERTIFICATE_BYTES, read_certificate

    try:
        with file.open("rb") as opened:
            data = base64.b64decode(opened.read(2 * MAX_CERTIFICATE_BYTES), validate=False)
    except (OSError, binascii.Error):
        raise ConfigError(f"{file} is no certificate", hint="convoy identity certify makes one") from None
    found = read_certificate(data, time.time())
    if found.identity != identity:
        here = "this one has no key yet" if identity is None else f"this one has {identity.hex()}"
        raise ConfigError(
            f"{file} is the certificate of another provider, with key {found.identity.hex()}; {here}",
            hint="`convoy identity certify` makes one for a key, and --dir names the folder of another key",
        )
    return data

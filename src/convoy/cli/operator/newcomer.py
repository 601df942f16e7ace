"""``convoy join TOKEN``: enrol before the peer starts. This fetches a roster and writes a convoy.toml."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.cli.operator.home import DEFAULT_HOME, NAME_HINT, Home, host_name, parse_place
from convoy.cli.show.output import print_note
from convoy.config.files import replace_file
from convoy.config.settings import load_config
from convoy.config.table import DEFAULT_PEER_PORT
from convoy.errors import ConfigError

if TYPE_CHECKING:
    from convoy.cluster.enrolment.newcomer import Enrolled
    from convoy.crypto.identity import Identity
    from convoy.trust.invite import Token

Tell = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class NewcomerFiles:
    """Hold the flags of a newcomer; None is a flag's default.

    ``address`` is HOST or HOST:PORT, where others reach this machine. The machine listens on ``port``, which
    differs where a port is forwarded.
    """

    home: Home
    name: str | None
    address: str | None
    port: int | None
    standby: bool | None = None

    def join(self, token_text: str, tell: Tell) -> Path:
        """Use the invitation, write roster and convoy.toml, and return the path of the latter.

        ``tell`` gets (kind, text) to show. Raises the errors of `join_by_token`; then only the identity is
        written.
        """
        from convoy.transport.listen.enrolment_tls import listen_everywhere
        from convoy.trust.invite import decode_token
        from convoy.trust.roster.check import check_name

        token = decode_token(_read_token(token_text))
        name = self._name_here(token)
        if name is not None:
            # A wrong name is refused before a key is made and the invitation is used up.
            check_name(name, hint=NAME_HINT)
        host, given = parse_place(self.address, self.port) if self.address else (None, self.port)
        port = DEFAULT_PEER_PORT if given is None else given
        # Report a port in use before the invitation is used up.
        listen_host = "::" if host is not None and ":" in host else None
        # 0.0.0.0 is the default of [listen] too.
        listen_everywhere(listen_host or "0.0.0.0", self.port or port).close()  # noqa: S104
        identity = self.home.open_identity()
        enrolled = _enrol(token, identity, (name, host, port), tell)
        # The roster comes first: a convoy.toml must not name a missing file.
        replace_file(self.home.roster, enrolled.signed.raw)
        if not self.home.config.exists():
            self.home.write_config(
                enrolled.member.name,
                token.operator_key,
                listen_host="::" if ":" in enrolled.member.address[0] else None,
                listen_port=None if self.port in {None, port} else self.port,
                standby=bool(self.standby),
            )
        roster = enrolled.signed.roster
        tell(
            "joined",
            f"{enrolled.member.name} is in {roster.cluster_id}, roster epoch {roster.epoch}; "
            f"the next time: {self._next_time(port)}",
        )
        return self.home.config

    def _next_time(self, port: int) -> str:
        """Return the command that starts this member again, with the flags that the convoy.toml does not
        hold.
        """
        settings = load_config(self.home.config)
        here = self.home.directory == DEFAULT_HOME
        command = "convoy join" if here else f"convoy join --dir {self.home.directory}"
        if self.standby is not None and self.standby != settings.cluster.standby:
            command += " --standby" if self.standby else " --no-standby"
        listens = port if settings.listen.port is None else settings.listen.port
        return command if self.port in {None, listens} else f"{command} --port {self.port}"

    def _name_here(self, token: Token) -> str | None:
        """Return the requested name, or the one in the folder's convoy.toml. Raises `ConfigError`."""
        settings = self.home.settings()
        if settings is None:
            return self.name
        if settings.require_operator_key() != token.operator_key:
            raise ConfigError(
                f"{self.home.config} is of a cluster with another operator than the invitation",
                hint="choose another folder with --dir",
            )
        if settings.require_identity() != self.home.identity or settings.require_roster() != self.home.roster:
            raise ConfigError(
                f"{self.home.config} keeps its identity or roster elsewhere",
                hint="choose another folder with --dir",
            )
        if self.name not in {None, settings.require_name()}:
            raise ConfigError(
                f"this machine is {settings.require_name()} in {self.home.config}, not {self.name}",
                hint="leave --name out, or choose another folder with --dir",
            )
        return settings.require_name()


def _enrol(
    token: Token, identity: Identity, asked: tuple[str | None, str | None, int], tell: Tell
) -> Enrolled:
    from convoy.cluster.enrolment.newcomer import EnrolmentRequest, NameTaken, join_by_token

    name, host, port = asked

    def on_code(digits: str) -> None:
        tell("code", f"{digits} - the inviting machine must show the same; its operator is asked")

    first = EnrolmentRequest(name or host_name(), host, port)
    try:
        return join_by_token(token, identity, first, on_code)
    except NameTaken:
        if name is not None:
            raise
    # The host's name was a default, so another name is fine. Machines often share a host name.
    other = f"{first.name[:58]}-{identity.public_key[:2].hex()}"
    return join_by_token(token, identity, EnrolmentRequest(other, host, port), on_code)


def _read_token(text: str) -> str:
    if text != "-":
        return text
    from convoy.trust.invite import MAX_TOKEN_CHARS

    if sys.stdin.isatty():
        print_note("paste the invitation, then Enter:")
    return sys.stdin.readline(MAX_TOKEN_CHARS + 2)

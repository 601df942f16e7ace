"""``convoy invite``: add one machine to the cluster. It is a process of its own: it holds the operator key.

The process listens for minutes, shows a token and asks the operator to compare two codes. Then it signs the
next roster and ends.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from convoy.cli.audit import roster_subject
from convoy.cli.operator.files import OperatorFiles
from convoy.cli.operator.first_machine import make_first_machine
from convoy.cli.operator.home import DEFAULT_HOME, DirectoryFlag, Home, local_addresses, parse_place
from convoy.cli.operator.passphrase import PassphraseFlag
from convoy.cli.running.process import announced
from convoy.cli.show.output import one_line, print_json_line, print_note
from convoy.config.files import invitation_folder, replace_file
from convoy.errors import AuditError, ConfigError, InviteError, LinkBroken

if TYPE_CHECKING:
    import socket

    from convoy.api.page.invitations import InvitationQuestion, OpenQuestion
    from convoy.cluster.enrolment.inviter import Newcomer
    from convoy.transport.member import Member, Roster
    from convoy.trust.consumption import Consumption
    from convoy.trust.invite import Token

DEFAULT_ENROLMENT_PORT = 7778
_ANSWERS = {"y": True, "yes": True, "n": False, "no": False, "": False}
_MAX_LINE_BYTES = 4096
# How often the answer of a page is looked for.
_LOOK_S = 0.25
AutoApproveFlag = Annotated[
    bool,
    typer.Option("--auto-approve", help="Approve the first machine that presents the token, without asking."),
]
InviteAddressFlag = Annotated[
    list[str] | None,
    typer.Option("--address", help="HOST or HOST:PORT that leads here.  [default: every interface's]"),
]


def invite(
    config: Annotated[
        Path | None,
        typer.Option(help="The operator's convoy.toml.  [default: that in --dir, made if missing]"),
    ] = None,
    directory: DirectoryFlag = DEFAULT_HOME,
    operator: Annotated[
        Path | None, typer.Option(help="Directory of the operator's key.  [default: operator in --dir]")
    ] = None,
    address: InviteAddressFlag = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help=f"Port to listen on; 0: any.  [default: {DEFAULT_ENROLMENT_PORT}, or any]"
        ),
    ] = None,
    minutes: Annotated[int, typer.Option(min=1, max=60, help="Minutes until the token expires.")] = 10,
    auto_approve: AutoApproveFlag = False,
    name: Annotated[
        str | None, typer.Option(help="The first machine's name, for a new cluster.  [default: the host's]")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="The cluster's name, for a new cluster.")] = None,
    model: Annotated[
        str | None, typer.Option(help="For a new cluster: the model that `serve` takes without a name.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the token to this file (0600) and do not show it.")
    ] = None,
    passphrase_file: PassphraseFlag = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON value for each event, on one line.")
    ] = False,
    ends_with: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Let one more machine in: show a token for its `join`.

    In a folder without a cluster, make one first, with this machine as its head.
    """
    if ends_with is not None:
        threading.Thread(target=_end_with, args=(ends_with,), daemon=True).start()
    home = Home(directory)
    if config is None and not home.config.exists():
        first = address[0] if address else None
        make_first_machine(
            home, name=name, address=first, cluster=cluster, passphrase_file=passphrase_file, model=model
        )
    files = OperatorFiles.open(config or home.config, operator or home.operator, passphrase_file)
    screen = _Screen(as_json, auto_approve, out, within_serve=ends_with is not None)
    verb = "invite" if ends_with is None else "serve --invite"
    own_name = files.settings.cluster.name or "-"
    with files.in_use(), announced(verb, own_name, files.roster_file.parent) as here:
        here.say("waits for a machine with its invitation")
        _invite(files, screen, address, port, minutes, here.say)


def _invite(
    files: OperatorFiles,
    screen: _Screen,
    address: list[str] | None,
    port: int | None,
    minutes: int,
    say: Callable[[str], None],
) -> None:
    token, newcomer = _meet(files, screen, address, port, minutes)
    say(f"waits for an answer: is {newcomer.code} the code of {newcomer.card.name}?")
    consumption = files.consumption(token)
    who = {"id": token.id, "name": newcomer.card.name, "identity": newcomer.card.identity_key.hex()}
    # From here on the token is used up, whatever the operator answers.
    files.audit.append("use invitation", who, actor="newcomer", origin=newcomer.host)
    name = one_line(newcomer.card.name)
    with screen.ending(f"{name} was not let in, and the invitation is used up"):
        answer = _ask(files, screen, newcomer, token)
    who["answered"] = answer.where
    if not answer.approves:
        from convoy.trust.consumption import DECLINED
        from convoy.wire.messages.enrolment import Refusal

        files.audit.append("decline newcomer", who)
        newcomer.refuse(Refusal.DECLINED)
        consumption.end(DECLINED)
        raise InviteError(
            f"{newcomer.card.name} was not let in, and the invitation is used up",
            hint="make a new one with `convoy invite`",
        )
    roster, member = _let_in(files, newcomer, consumption, answer)
    screen.enrolled(roster, member, files.roster_file)


@dataclass(frozen=True, slots=True)
class _Decision:
    """Hold whether the newcomer comes in, and where the operator said so."""

    approves: bool
    where: Literal["terminal", "page", "--auto-approve"]


def _ask(files: OperatorFiles, screen: _Screen, newcomer: Newcomer, token: Token) -> _Decision:
    """Return the operator's answer, from this terminal or from the page of the same user's head."""
    screen.asked(newcomer)
    if screen.auto_approve:
        return _Decision(True, "--auto-approve")
    from convoy.transport.listen.enrolment_listener import EnrolmentLimits

    wait_s = EnrolmentLimits().decision_timeout_s
    typed = _Typed(time.monotonic() + wait_s)
    asked = f"does {one_line(newcomer.card.name)}'s screen show the same code? [y/N] "
    if screen.within_serve:
        print_note("answer here")
        return _decision(asked, typed)
    from convoy.api.page.invitations import asked_on_page

    question = _page_question(newcomer, token, wait_s)
    with contextlib.ExitStack() as page:
        try:
            key = files.settings.require_operator_key().hex()
            typed.page = page.enter_context(asked_on_page(invitation_folder(), key, question))
            print_note("answer here, or on the page of this machine's head (`convoy open`)")
        except ConfigError as error:
            print_note(f"only this terminal can answer: {error.message}")
        return _decision(asked, typed)


def _page_question(newcomer: Newcomer, token: Token, wait_s: float) -> InvitationQuestion:
    from convoy.api.page.invitations import InvitationQuestion
    from convoy.trust.roster.roster import format_address

    card = newcomer.card
    return InvitationQuestion(
        id=token.id,
        name=card.name,
        address=format_address(card.address),
        called_from=newcomer.host,
        fingerprint=card.identity_key.hex(),
        code=newcomer.code,
        expires_unix_s=time.time() + wait_s,
    )


def _meet(
    files: OperatorFiles, screen: _Screen, address: list[str] | None, port: int | None, minutes: int
) -> tuple[Token, Newcomer]:
    """Return the token and the first newcomer that proves it. Then close the listener.

    The token's secret is never written, so it ends with this process.
    """
    from convoy.cluster.enrolment.inviter import Enrolment
    from convoy.crypto.certificate import certificate_fingerprint
    from convoy.crypto.enrolment import SECRET_BYTES, OneTimeCertificate
    from convoy.trust.invite import MAX_ADDRESSES, Token

    sock = _listen(port)
    bound = sock.getsockname()[1]
    places = [parse_place(text, bound) for text in (address or local_addresses()[:MAX_ADDRESSES])]
    certificate = OneTimeCertificate.generate()
    token = Token(
        files.roster().cluster_id,
        files.key.public_key,
        certificate_fingerprint(certificate.certificate_der),
        tuple((host, given or bound) for host, given in places),
        expires=int(time.time()) + 60 * minutes,
        lifetime_s=60 * minutes,
        secret=os.urandom(SECRET_BYTES),
    )
    enrolment = Enrolment(sock, certificate, token, consumption=files.consumption(token), judge=files.judge)
    lost = "no machine was let in, and the token is no longer valid: make a new one with `convoy invite`"
    try:
        with _open_in_log(files, token, screen.auto_approve), screen.ending(lost):
            screen.invited(token, bound)
            return token, enrolment.wait()
    finally:
        enrolment.close()


@contextlib.contextmanager
def _open_in_log(files: OperatorFiles, token: Token, auto_approve: bool) -> Iterator[None]:
    """Log that an invitation is made, and that it is withdrawn if the block ends with an error."""
    facts = {"id": token.id, "minutes": token.lifetime_s // 60, "auto_approve": auto_approve}
    files.audit.append("make invitation", facts)
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(AuditError):
            files.audit.append("withdraw invitation", {"id": token.id, "why": type(error).__name__})
        raise


def _end_with(pipe: int) -> None:
    """End this process like SIGTERM once the process that started it has ended, in whatever way.

    An open listener and the operator key must not outlive the command that they belong to.
    """
    with contextlib.suppress(OSError):
        # The read returns when the parent ends, because that closes the other end of the pipe.
        os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _listen(port: int | None) -> socket.socket:
    """Listen on the requested port; without one on 7778, or on any port if 7778 is taken.

    A fixed port lets a firewall be opened beforehand.
    """
    from convoy.transport.listen.enrolment_tls import listen_everywhere

    if port is not None:
        return listen_everywhere(None, port, serving_flag="--invite-port")
    try:
        return listen_everywhere(None, DEFAULT_ENROLMENT_PORT)
    except ConfigError:
        sock = listen_everywhere(None, 0)
        print_note(f"note: port {DEFAULT_ENROLMENT_PORT} is taken: open {sock.getsockname()[1]} instead")
        return sock


def _let_in(
    files: OperatorFiles, newcomer: Newcomer, consumption: Consumption, answer: _Decision
) -> tuple[Roster, Member]:
    """Sign the next roster, write it, and hand it over; return it with the new member.

    The order matters: the newcomer never has a roster that is not on disk. A newcomer that hung up while the
    operator decided is not signed in.
    """
    from convoy.trust.consumption import ENROLLED, GONE
    from convoy.trust.roster.newcomer import roster_with
    from convoy.trust.roster.roster import sign_roster, verify_roster

    try:
        newcomer.require_there()
    except InviteError:
        consumption.end(GONE)
        raise
    with files.signing():
        # Read the roster under the lock: another invitation may have signed one meanwhile.
        before = files.newest()
        roster = roster_with(before.roster, newcomer.card, datetime.datetime.now(datetime.UTC))
        signed = sign_roster(roster, files.key, before.handovers)
        subject = roster_subject(verify_roster(signed, operator_key=files.key.public_key), files.roster_file)
        facts = {"invitation": consumption.invitation_id, "answered": answer.where}
        with files.audit.doing("sign roster", {**subject, **facts}):
            replace_file(files.roster_file, signed)
    member = next(m for m in roster.members if m.identity_key == newcomer.card.identity_key)
    try:
        newcomer.accept(signed)
    except LinkBroken as error:
        raise InviteError(
            f"{member.name} is in the roster, but went away before it got it",
            hint="invite it again: with its identity it keeps its place",
        ) from error
    finally:
        consumption.end(f"{ENROLLED} in epoch {roster.epoch}")
    return roster, member


@dataclass(frozen=True, slots=True)
class _Screen:
    """Show the invitation to the operator, and read the answer."""

    as_json: bool
    auto_approve: bool
    out: Path | None
    # The head that would have a page starts after this process.
    within_serve: bool = False

    def invited(self, token: Token, port: int) -> None:
        """Show the token and the addresses. ``port`` is the port of this machine, to which a forwarded
        address leads.
        """
        from convoy.crypto.keyfile import write_private
        from convoy.trust.roster.roster import format_address

        text = token.encode()
        until = f"{datetime.datetime.fromtimestamp(token.expires, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
        if self.out is not None:
            write_private(self.out, f"{text}\n".encode())
        if self.auto_approve:
            print_note(
                "--auto-approve: the first machine that presents this token gets in, without a question"
            )
        places = [format_address(address) for address in token.addresses]
        if self.as_json:
            shown = {"token": text} if self.out is None else {"out": self.out}
            facts = {"addresses": places, "port": port, "expires": until}
            print_json_line({"event": "invited", **shown, **facts})
            return
        print_note(f"on the other machine, until {until}, run `convoy join -` and paste this line:\n")
        if self.out is None:
            print(text, flush=True)
        else:
            print_note(f"(the line in {self.out})")
        forwarded = [place for place, (_, at) in zip(places, token.addresses, strict=True) if at != port]
        where = f"at {', '.join(places)}"
        # Nothing on this machine may listen at a forwarded address.
        if forwarded:
            where = f"on port {port}, for calls to {', '.join(places)}"
        print_note(f"\nwaiting {where}")
        if forwarded:
            print_note(f"{', '.join(forwarded)} must lead to port {port} of this machine")

    @contextlib.contextmanager
    def ending(self, what: str) -> Iterator[None]:
        """Print ``what``, the state of the invitation, if Ctrl-C or SIGTERM ends the block."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.as_json:
                # The line end comes first: a question, or the terminal's ^C, may stand on the line.
                print_note(f"\nended: {what}")
            raise

    def asked(self, newcomer: Newcomer) -> None:
        """Show the machine that wants to come in, and its code."""
        from convoy.trust.roster.roster import format_address

        card = newcomer.card
        where = format_address(card.address)
        if self.as_json:
            print_json_line(
                {
                    "event": "confirm",
                    "name": card.name,
                    "address": where,
                    "from": newcomer.host,
                    "identity_key": card.identity_key.hex(),
                    "code": newcomer.code,
                }
            )
        else:
            print_note(f"{one_line(card.name)} at {where} asks to be let in (it called from {newcomer.host})")
            print_note(f"code: {newcomer.code}")

    def enrolled(self, roster: Roster, member: Member, file: Path) -> None:
        if self.as_json:
            print_json_line({"event": "enrolled", "name": member.name, "epoch": roster.epoch, "roster": file})
        else:
            print_note(f"{member.name} is in: roster epoch {roster.epoch} in {file}")


def _decision(question: str, typed: _Typed) -> _Decision:
    """Return the answer to ``question``. A timeout means no, and so does the end of the input without a page.

    Ask again after an answer other than those of ``_ANSWERS``.
    """
    if sys.stdin.isatty():
        # Text that was typed before the question does not answer it.
        termios.tcflush(sys.stdin, termios.TCIFLUSH)
    while True:
        print(question, end="", file=sys.stderr, flush=True)
        said = typed.line()
        if isinstance(said, bool):
            print_note(f"\nthe page said {'yes' if said else 'no'}")
            return _Decision(said, "page")
        if (word := said.strip().lower()) in _ANSWERS:
            return _Decision(_ANSWERS[word], "terminal")
        print_note("that is neither y nor n")


class _Typed:
    """Read lines of standard input until a deadline (monotonic), or until ``page`` has an answer.

    It reads the descriptor itself: `select` cannot see the bytes that `sys.stdin` has read ahead.
    """

    def __init__(self, deadline_s: float) -> None:
        self.page: OpenQuestion | None = None
        self._deadline_s = deadline_s
        self._ahead = b""

    def line(self) -> str | bool:
        """Return the next line, or the page's answer; an empty line once the time or the input is over.

        Without a terminal, the page may still answer after the input's end.
        """
        source = sys.stdin.fileno()
        inputs = [source]
        while b"\n" not in self._ahead:
            if self.page is not None and (answer := self.page.answer()) is not None:
                return answer
            left_s = max(0.0, self._deadline_s - time.monotonic())
            if not select.select(inputs, [], [], min(left_s, _LOOK_S))[0]:
                if left_s > 0:
                    continue
                return ""
            data = os.read(source, _MAX_LINE_BYTES)
            if not data and not self._ahead and self.page is not None and not os.isatty(source):
                print_note("\nthe input is over: only the page can answer now (`convoy open`)")
                inputs = []
                continue
            if not data:
                # The input is over, and its last line may lack a line end.
                last, self._ahead = self._ahead, b""
                return last.decode(errors="replace")
            # Bound the memory for input without a line end.
            self._ahead = (self._ahead + data)[-2 * _MAX_LINE_BYTES :]
        line, _, self._ahead = self._ahead.partition(b"\n")
        return line.decode(errors="replace")

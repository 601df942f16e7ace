"""`convoy invite` and `convoy join TOKEN` as processes: what a person sees, and what a crash leaves."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.transcript import run_here
from convoy.api.page.invitations import InvitationList
from convoy.cli.invite import DEFAULT_ENROLMENT_PORT
from convoy.config.settings import load_config
from convoy.transport.ports import free_port
from convoy.trust.audit import Entry, read_entries, verify_log
from convoy.trust.invite import decode_token
from support.cases import cases
from support.invitations import Joining
from survival.losing import wait_for

SOURCE = str(Path(__file__).resolve().parents[2] / "src")
EVERYWHERE = ("0.0.0.0", 0)  # noqa: S104 - where members listen
ENVIRONMENT = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}


@contextmanager
def process(
    folder: Path, *arguments: str, environment: dict[str, str] = ENVIRONMENT
) -> Iterator[subprocess.Popen[str]]:
    folder.mkdir(exist_ok=True)
    command = subprocess.Popen(
        [sys.executable, "-m", "convoy", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield command
    finally:
        command.kill()
        command.communicate()


def event(command: subprocess.Popen[str], name: str) -> dict[str, Any]:
    assert command.stdout is not None
    value: dict[str, Any] = {"kind": "starting"}  # which says that it may take a moment, and nothing else
    while value.get("kind") == "starting":
        line = command.stdout.readline()
        assert line, command.communicate()
        value = json.loads(line)
    assert value.get("event", value.get("kind")) == name, value
    return value


@contextmanager
def inviting(
    folder: Path, *flags: str, environment: dict[str, str] = ENVIRONMENT
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the process of an open invitation at 127.0.0.1, and its token."""
    arguments = ("invite", "--json", "--address", "127.0.0.1", "--name", "alpha", *flags)
    with process(folder, *arguments, environment=environment) as command:
        yield command, event(command, "invited")["token"]


@contextmanager
def joining(folder: Path, token: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    arguments = ("join", "-", "--json", "--port", str(free_port()), "--name", "beta", *flags)
    with process(folder, *arguments) as command:
        assert command.stdin is not None
        command.stdin.write(f"{token}\n")
        command.stdin.flush()
        yield command


def answer(command: subprocess.Popen[str], text: str) -> None:
    assert command.stdin is not None
    command.stdin.write(text)
    command.stdin.flush()


def epoch(folder: Path) -> int:
    done = run_here(["roster", "show", ".convoy/roster.toml", "--json"], folder)
    number: int = json.loads(done.stdout)["epoch"]
    return number


def records(folder: Path) -> list[str]:
    return sorted(file.suffix for file in (folder / ".convoy/operator/invites").glob("[0-9a-f]*"))


def actions(folder: Path) -> list[str]:
    """Return the actions in the operator's log, of which every entry holds."""
    log = folder / ".convoy/operator/audit.jsonl"
    verify_log(log)
    return [entry.fields["action"] for entry in read_entries(log) if isinstance(entry, Entry)]


def test_yes_lets_the_newcomer_in_and_a_typo_is_asked_again(tmp_path: Path) -> None:
    alpha, beta = tmp_path / "alpha", tmp_path / "beta"
    with inviting(alpha) as (operator, token), joining(beta, token) as newcomer:
        asked = event(operator, "confirm")
        assert asked["name"] == "beta"
        assert event(newcomer, "code")["text"].startswith(asked["code"])
        # All at once, as from a pipe. The last line is not over yet.
        answer(operator, "yy\nyesterday\nyes")
        answer(operator, "\n")
        assert event(operator, "enrolled")["epoch"] == 2
        _, said = operator.communicate(timeout=120)
        assert operator.returncode == 0
        assert said.count("the same code? [y/N] ") == 3
        assert said.count("that is neither y nor n\n") == 2
        event(newcomer, "joined")
        assert event(newcomer, "listening")["text"].startswith("beta listens on")
    rosters = [(folder / ".convoy/roster.toml").read_bytes() for folder in (alpha, beta)]
    assert rosters[0] == rosters[1]
    assert records(alpha) == [".ended", ".used"]
    assert actions(alpha) == [
        "make operator key",
        "sign roster",
        "make invitation",
        "use invitation",
        "sign roster",
    ]
    secrets = [file for file in tmp_path.rglob("*") if file.is_file() and file.suffix in {".key", ".used"}]
    assert {stat.S_IMODE(file.stat().st_mode) for file in secrets} == {0o600}
    spoken = decode_token(token).secret
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert token not in file.read_text(), file
            assert spoken.hex() not in file.read_text(), file


def end_of_input(command: subprocess.Popen[str]) -> None:
    assert command.stdin is not None
    command.stdin.close()
    command.stdin = None


def noted_until(command: subprocess.Popen[str], words: str) -> str:
    """Return what the process notes up to ``words``."""
    assert command.stderr is not None
    noted = ""
    while words not in noted:
        line = command.stderr.readline()
        assert line, noted
        noted += line
    return noted


@pytest.mark.parametrize("approves", cases([True, False], bool))
def test_the_page_of_the_head_answers_in_place_of_the_terminal(tmp_path: Path, approves: bool) -> None:
    is_without_terminal = approves
    environment = {**ENVIRONMENT, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    arguments = ("invite", "--json", "--address", "127.0.0.1", "--name", "alpha")
    with process(tmp_path / "alpha", *arguments, environment=environment) as operator:
        newcomer = Joining(decode_token(event(operator, "invited")["token"]), port=7779)
        asked = event(operator, "confirm")
        head = load_config(tmp_path / "alpha/.convoy/convoy.toml").require_operator_key().hex()
        questions = InvitationList(tmp_path / "cache/convoy/invitations", head)
        if is_without_terminal:
            end_of_input(operator)
            noted_until(operator, "the input is over: only the page can answer now")
        wait_for(questions.pending)
        [question] = questions.pending()
        assert (question.name, question.code) == (asked["name"], asked["code"])
        assert question.fingerprint == asked["identity_key"]
        [record] = (tmp_path / "cache/convoy/running").glob("*/process.json")
        listed = json.loads(record.read_bytes())
        # `convoy ps` lists it.
        assert (listed["verb"], listed["name"]) == ("invite", "alpha")
        assert listed["state"] == f"waits for an answer: is {question.code} the code of {question.name}?"
        questions.answer(question.id, question.code, approves=approves)
        operator.wait(30)
        said, noted = operator.communicate(timeout=120)
    assert f"the page said {'yes' if approves else 'no'}\n" in noted
    assert ('"event": "enrolled"' in said) is approves
    assert (newcomer.end().enrolled is not None) is approves
    *_, last = read_entries(tmp_path / "alpha/.convoy/operator/audit.jsonl")
    assert isinstance(last, Entry)
    assert last.fields["subject"]["answered"] == "page"
    assert questions.pending() == []


@pytest.mark.parametrize("said", cases(["n\n", "\n", "NO\n"], "\n".__eq__))
def test_a_no_lets_nobody_in(tmp_path: Path, said: str) -> None:
    alpha = tmp_path / "alpha"
    with inviting(alpha) as (operator, token), joining(tmp_path / "beta", token) as newcomer:
        event(operator, "confirm")
        answer(operator, said)
        _, errors = operator.communicate(timeout=120)
        assert operator.returncode == 1
        assert "error: beta was not let in, and the invitation is used up" in errors
        _, errors = newcomer.communicate(timeout=120)
        assert newcomer.returncode == 1
        assert "error: the operator said no\nhint: " in errors
    assert epoch(alpha) == 1
    assert actions(alpha)[2:] == ["make invitation", "use invitation", "decline newcomer"]
    assert not (tmp_path / "beta/.convoy/roster.toml").exists()
    assert not (tmp_path / "beta/.convoy/convoy.toml").exists()


def test_who_interrupts_an_invitation_reads_that_its_line_counts_no_more(tmp_path: Path) -> None:
    port = ("--port", str(free_port()))
    with process(tmp_path / "alpha", "invite", "--address", "127.0.0.1", *port, "--out", "token") as operator:
        assert operator.stderr is not None
        for line in operator.stderr:
            if line.startswith("waiting at"):
                break
        operator.send_signal(signal.SIGINT)
        _, errors = operator.communicate(timeout=120)
        assert operator.returncode == 130
    assert actions(tmp_path / "alpha")[2:] == ["make invitation", "withdraw invitation"]
    assert errors.strip() == (
        "ended: no machine was let in, and the token is no longer valid: make a new one with `convoy invite`"
    )
    token = (tmp_path / "alpha" / "token").read_text()
    with inviting(tmp_path / "alpha", *port):  # as true with another listener at the same place
        late = run_here(["join", "-", "--port", str(free_port())], tmp_path, text=token)
    assert "another certificate than the invitation names" in late.stderr


def test_who_interrupts_the_question_reads_that_the_invitation_is_used_up(tmp_path: Path) -> None:
    arguments = ("invite", "--address", "127.0.0.1", "--name", "alpha")
    with process(tmp_path / "alpha", *arguments) as operator:
        assert operator.stdout is not None
        token = operator.stdout.readline()
        with joining(tmp_path / "beta", token.strip()) as newcomer:
            event(newcomer, "code")
            assert operator.stderr is not None
            for line in operator.stderr:
                if line.startswith("code: "):
                    break
            operator.send_signal(signal.SIGINT)
            _, errors = operator.communicate(timeout=120)
            _, said = newcomer.communicate(timeout=120)
    assert errors.splitlines()[-1] == "ended: beta was not let in, and the invitation is used up"
    assert "error: the invitation is used up, and the inviting machine went away" in said


def test_the_end_of_input_after_a_typo_is_a_no_where_no_page_can_be_asked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    alone = {**ENVIRONMENT, "XDG_CACHE_HOME": str(tmp_path / "file")}
    with (
        inviting(tmp_path / "alpha", environment=alone) as (operator, token),
        joining(tmp_path / "beta", token),
    ):
        event(operator, "confirm")
        _, errors = operator.communicate("maybe\n", timeout=120)
        assert operator.returncode == 1
        assert "error: beta was not let in, and the invitation is used up" in errors


def joined(tmp_path: Path, *flags: str) -> str:
    """Return the output for an admitted newcomer with these flags."""
    with (
        inviting(tmp_path / "alpha", "--auto-approve") as (_, token),
        joining(tmp_path / "beta", token, *flags) as newcomer,
    ):
        event(newcomer, "code")
        said: str = event(newcomer, "joined")["text"]
        event(newcomer, "listening")
        if "--standby" in flags:
            event(newcomer, "standby")
    return said


@pytest.mark.long
def test_a_standby_is_one_the_next_time_too(tmp_path: Path) -> None:
    said = joined(tmp_path, "--standby")
    assert said.endswith("the next time: convoy join")
    assert load_config(tmp_path / "beta/.convoy/convoy.toml").cluster.standby
    with process(tmp_path / "beta", "join", "--json") as again:
        event(again, "listening")
        event(again, "standby")
    with process(tmp_path / "beta", "join", "--json", "--no-standby", "--until-stdin-closes") as again:
        said, _ = again.communicate(timeout=120)
    assert [json.loads(line)["kind"] for line in said.splitlines()][-2:] == ["listening", "ended"]


@pytest.mark.long
def test_a_standby_whose_file_is_of_before_is_told_the_flag(tmp_path: Path) -> None:
    joined(tmp_path)
    said = joined(tmp_path, "--standby")
    assert said.endswith("the next time: convoy join --standby")


@pytest.mark.long
def test_behind_a_forwarded_port_roster_and_file_have_one_each_and_the_member_cannot_invite(
    tmp_path: Path,
) -> None:
    outside, inside = str(free_port()), str(free_port())
    said = joined(tmp_path, "--address", f"127.0.0.1:{outside}", "--port", inside)
    assert said.endswith("the next time: convoy join")
    assert load_config(tmp_path / "beta/.convoy/convoy.toml").listen.port == int(inside)
    shown = json.loads(run_here(["roster", "show", "--json"], tmp_path / "beta").stdout)
    assert shown["members"][1]["address"] == f"127.0.0.1:{outside}"
    invited = run_here(["invite"], tmp_path / "beta")
    assert invited.returncode == 78
    assert "operator.key" in invited.stderr


@pytest.mark.long
def test_after_an_invitation_the_verbs_find_the_files_by_themselves(tmp_path: Path) -> None:
    joined(tmp_path)
    alpha = tmp_path / "alpha"
    for verb in (["roster", "verify"], ["roster", "show"], ["roster", "sign"], ["attest", "show"]):
        done = run_here([*verb, "--json"], alpha)
        assert done.returncode == 0, done.stderr
    plan = run_here(["plan", "demo-mini", "--speed", "10,100", "--json"], alpha)
    assert [stage["member"] for stage in json.loads(plan.stdout)["stages"]] == ["alpha", "beta"]
    other = run_here(["plan", "demo-mini", "--members", "3", "--speed", "10,100", "--json"], alpha)
    assert [stage["member"] for stage in json.loads(other.stdout)["stages"]] == ["alpha", "beta", "gamma"]
    head = run_here(["session", "demo-mini", "--prompt", "x"], tmp_path / "beta")  # a peer, which may not
    said = head.stderr.splitlines()
    assert said[0] == "as the head of .convoy/convoy.toml; --members 1 is this machine alone"
    assert "error: beta may not be the head; the roster allows alpha" in said
    examined = json.loads(run_here(["doctor", "--json"], alpha).stdout)
    assert "keys" in {finding["check"] for finding in examined["findings"]}
    removed = run_here(["roster", "remove", "beta", "--json"], alpha)
    assert json.loads(removed.stdout)["file"] == ".convoy/roster.toml"


@pytest.mark.long
def test_a_crash_between_the_use_and_the_roster_leaves_an_honest_state(tmp_path: Path) -> None:
    alpha, beta = tmp_path / "alpha", tmp_path / "beta"
    port = ("--port", str(free_port()))  # the same for both, so that the old token meets the new listener
    with inviting(alpha, *port) as (operator, token), joining(beta, token) as newcomer:
        event(operator, "confirm")
        event(newcomer, "code")
        operator.send_signal(signal.SIGKILL)
        operator.wait(30)
        _, errors = newcomer.communicate(timeout=120)
        assert newcomer.returncode == 1
        assert "error: the invitation is used up, and the inviting machine went away" in errors
    assert epoch(alpha) == 1
    assert records(alpha) == [".used"]
    with inviting(alpha, *port) as (again, other):
        assert decode_token(other).secret != decode_token(token).secret
        with joining(beta, token) as late:
            _, errors = late.communicate(timeout=120)
            assert "error: the inviting machine was not found: 127.0.0.1:" in errors
            assert "another certificate than the invitation names" in errors
            assert records(alpha) == [".ended", ".used"]
        with joining(beta, other) as newcomer:
            event(again, "confirm")
            answer(again, "y\n")
            event(again, "enrolled")
            _, noted = again.communicate(timeout=120)
            event(newcomer, "code")
            event(newcomer, "joined")
    assert "note: an earlier invitation was used up by beta from 127.0.0.1" in noted
    assert records(alpha) == [".ended", ".ended", ".used", ".used"]
    assert epoch(alpha) == 2


def test_a_taken_name_or_address_leaves_the_invitation_good_for_another(tmp_path: Path) -> None:
    with inviting(tmp_path / "alpha", "--auto-approve") as (operator, token):
        flags = ["join", "-", "--port", str(free_port())]
        done = run_here([*flags, "--name", "alpha"], tmp_path, text=f"{token}\n")
        assert done.returncode == 1
        assert "error: the cluster has a member alpha already" in done.stderr
        assert "hint: run this command again with --name OTHER" in done.stderr
        flags += ["--name", "beta", "--address", "127.0.0.1:7777"]
        done = run_here(flags, tmp_path, text=f"{token}\n")
        assert done.returncode == 1
        assert "error: another member of the cluster has the address 127.0.0.1:7777\n" in done.stderr
        assert "hint: run this command again with --port PORT" in done.stderr
        with joining(tmp_path / "beta", token) as newcomer:
            event(operator, "confirm")
            assert event(operator, "enrolled")["name"] == "beta"
            event(newcomer, "code")
            event(newcomer, "joined")
        _, errors = operator.communicate(timeout=120)
        assert "beta was turned away: it asks for 127.0.0.1:7777, alpha's address" in errors


@pytest.mark.long
def test_a_member_that_comes_back_is_kept_at_its_new_address(tmp_path: Path) -> None:
    alpha, beta = tmp_path / "alpha", tmp_path / "beta"
    for expected in (2, 3):
        with inviting(alpha, "--auto-approve") as (operator, token), joining(beta, token) as newcomer:
            event(operator, "confirm")
            assert event(operator, "enrolled")["epoch"] == expected
            event(newcomer, "code")
            event(newcomer, "joined")
            event(newcomer, "listening")
    shown = run_here(["roster", "show", ".convoy/roster.toml", "--json"], alpha)
    assert [member["member"] for member in json.loads(shown.stdout)["members"]] == ["alpha", "beta"]


def test_a_token_file_is_private_and_the_token_is_not_shown(tmp_path: Path) -> None:
    arguments = ("invite", "--json", "--address", "127.0.0.1", "--out", "token")
    with process(tmp_path / "alpha", *arguments) as operator:
        shown = event(operator, "invited")
        file = tmp_path / "alpha" / "token"
        assert "token" not in shown
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert decode_token(file.read_text()).addresses[0][0] == "127.0.0.1"


def test_a_forwarded_address_is_told_apart_from_the_port_that_it_must_lead_to(tmp_path: Path) -> None:
    port = str(free_port())
    with process(tmp_path / "alpha", "invite", "--address", "192.0.2.7:9000", "--port", port) as operator:
        assert operator.stderr is not None
        said = list(itertools.takewhile(lambda line: "must lead" not in line, operator.stderr))
    assert said[-1] == f"waiting on port {port}, for calls to 192.0.2.7:9000\n"


def test_an_invitation_of_another_cluster_does_not_overwrite_this_one(tmp_path: Path) -> None:
    with inviting(tmp_path / "alpha", "--auto-approve") as (_, token):
        with inviting(tmp_path / "beta"):
            pass
        done = run_here(["join", "-", "--port", str(free_port())], tmp_path / "beta", text=f"{token}\n")
    assert done.returncode == 78
    assert "is of a cluster with another operator than the invitation" in done.stderr
    assert "hint: choose another folder with --dir" in done.stderr


def test_a_port_in_use_is_said_before_the_invitation_is_used(tmp_path: Path) -> None:
    with (
        inviting(tmp_path / "alpha") as (_, token),
        socket.create_server(EVERYWHERE) as taken,
    ):
        port = str(taken.getsockname()[1])
        done = run_here(["join", "-", "--port", port], tmp_path, text=f"{token}\n")
        assert f"error: port {port} on 0.0.0.0 is taken" in done.stderr
        assert records(tmp_path / "alpha") == []


def test_the_port_in_place_of_a_taken_one_is_named(tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        # Another program may have the port already.
        with contextlib.suppress(OSError):
            held.enter_context(socket.create_server((EVERYWHERE[0], DEFAULT_ENROLMENT_PORT)))
        operator = held.enter_context(process(tmp_path / "alpha", "invite", "--address", "127.0.0.1"))
        assert operator.stderr is not None
        said = list(itertools.takewhile(lambda line: "waiting at" not in line, operator.stderr))
        taken = re.compile(rf"note: port {DEFAULT_ENROLMENT_PORT} is taken: open (\d+) instead\n")
        [port] = [found[1] for line in said if (found := taken.fullmatch(line))]
        assert operator.stdout is not None
        assert decode_token(operator.stdout.readline().strip()).addresses == (("127.0.0.1", int(port)),)


@pytest.mark.long
def test_two_invitations_at_once_are_two_epochs_and_no_crash(tmp_path: Path) -> None:
    alpha = tmp_path / "alpha"
    with inviting(alpha) as (first, token), joining(tmp_path / "beta", token) as beta:
        event(first, "confirm")
        with (
            inviting(alpha) as (second, other),
            joining(tmp_path / "gamma", other, "--name", "gamma") as gamma,
        ):
            event(second, "confirm")
            for operator in (first, second):
                answer(operator, "y\n")
            assert {event(operator, "enrolled")["epoch"] for operator in (first, second)} == {2, 3}
            for newcomer in (beta, gamma):
                event(newcomer, "code")
                event(newcomer, "joined")
            _, said = second.communicate(timeout=120)
            assert "an earlier invitation" not in said
    assert epoch(alpha) == 3


def test_the_invitation_of_a_killed_serve_names_no_page_and_ends_with_it(tmp_path: Path) -> None:
    arguments = ["serve", "demo-mini", "--invite", "--name", "alpha", "--address", "127.0.0.1", "--json"]
    port = str(free_port())
    with process(tmp_path / "alpha", *arguments, "--invite-port", port) as serve:
        invited = event(serve, "invited")
        assert invited["addresses"] == [f"127.0.0.1:{port}"]
        newcomer = Joining(decode_token(invited["token"]), port=7779)
        event(serve, "confirm")
        assert "page" not in noted_until(serve, "answer here"), "no head runs yet"
        serve.kill()
        serve.communicate(timeout=60)  # to the end of what the invitation's process could still write
        assert newcomer.end().enrolled is None


@pytest.mark.parametrize("name", ["convoy.toml", "roster.toml"])
def test_no_second_cluster_is_begun_beside_one_that_was_set_up_by_hand(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("", encoding="utf-8")
    done = run_here(["invite"], tmp_path)
    assert done.returncode == 78
    assert done.stderr.startswith(f"error: {name} in this folder is of a cluster already")
    assert "--config FILE" in done.stderr
    assert not (tmp_path / ".convoy").exists()

"""What an examination finds, with real files and sockets: each wrong thing by name, and what mends it."""

from __future__ import annotations

import datetime
import os
import queue
import re
import socket
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from convoy.cluster.checkup import machine as machine_check
from convoy.cluster.checkup import member as member_check
from convoy.cluster.checkup import network as network_check
from convoy.cluster.checkup.finding import Check, Finding, at_once, examine
from convoy.cluster.own_speed import own_speed
from convoy.crypto.cipher import Cipher
from convoy.crypto.identity import OPERATOR_KEY, TLS_KEY, Identity
from convoy.errors import ConfigError, PeerUnreachable
from convoy.plan.memory.memory import format_bytes
from convoy.plan.speed import Speed
from convoy.transport.link.link import Link
from convoy.transport.listen.listener import Listener
from convoy.transport.member import LocalMember, Member
from convoy.transport.network import TcpNetwork
from convoy.transport.ports import free_port
from convoy.trust.evidence.policy import parse_policy
from support.members import make_local_members, membership_of, with_roster


def levels(found: Iterable[Finding]) -> list[str]:
    return [finding.level for finding in found]


def only(found: Iterable[Finding], level: str) -> Finding:
    """Return the one finding of that level."""
    (finding,) = [finding for finding in found if finding.level == level]
    return finding


# the examination itself


def test_a_check_that_fails_itself_is_a_finding_and_not_the_end() -> None:
    def wrong() -> Iterator[Finding]:
        yield from ()
        raise ConfigError("a key is missing", hint="add it")

    def bug() -> Iterator[Finding]:
        yield from ()
        raise ZeroDivisionError

    assert examine(Check("x", wrong)) == [Finding("fail", "a key is missing", "add it")]
    (found,) = examine(Check("x", bug))
    assert found.what == "this check failed itself: ZeroDivisionError"


def test_looks_with_a_deadline_go_on_beside_one_that_hangs() -> None:
    never: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()
    late = Finding("fail", "too late", "wait")
    quick = [Finding("ok", "quick")]
    found = at_once(0.2, [(lambda: never.get(timeout=5), late), (lambda: quick, late)])
    assert found == [late, *quick]


# the machine


def test_this_machine_has_what_the_project_asks_for() -> None:
    assert set(levels(machine_check.check_python())) == {"ok"}
    assert levels(machine_check.check_packages()) == ["ok"]


def test_a_machine_that_cannot_compile_is_warned_where_exact_mode_unpacks_for_that_reason() -> None:
    finding = machine_check.compiled_finding
    assert finding("AVX2, prebuilt", "", [], is_exact=True).what == (
        "decodes run on code for AVX2, prebuilt, in the written order of sums"
    )
    assert finding("", "this machine has no x86-64 Linux", ["x86-64 Linux"], is_exact=False).level == "ok"
    found = finding("", "no C compiler was found", [], is_exact=True)
    assert found.level == "warn"
    assert found.what.endswith(
        "no C compiler was found; exact mode unpacks the matrices of a file to float32"
    )
    assert found.mend == "install a C compiler (cc, gcc or clang), or mend that reason"
    found = finding("", "this machine has no avx2", ["avx2"], is_exact=True)
    assert found.mend is not None
    assert "fewer layers" in found.mend


@pytest.mark.parametrize(("busy", "found"), [(0.1, ["ok"]), (0.9, ["ok", "warn"])])
def test_figures_that_were_measured_on_a_busy_machine_are_a_warning(busy: float, found: list[str]) -> None:
    speed = Speed(2.1e9, 5e9, layer_s=1e-4)
    measure = partial(own_speed, measure=lambda *_: speed, busy=lambda: busy)
    shown = list(machine_check.check_speed("exact-f32", 1, "cpu", measure=measure))
    assert levels(shown) == found
    assert "cpu reads 2.1 GB/s" in shown[0].what
    if busy == 0.9:
        assert shown[1].what == "programs use 90% of this machine's cores: figures may be too low"
        assert shown[1].mend == "measure again when the machine is idle: `convoy doctor`"


@pytest.mark.parametrize("version", [(3, 10, 9), (3, 14, 0)])
def test_another_python_is_named_with_what_is_expected(version: tuple[int, ...]) -> None:
    found = only(machine_check.check_python(version), "fail")
    assert "expected 3.11 or later and below 3.14" in found.what


@pytest.mark.parametrize(
    ("package", "version", "expected"),
    [
        ("torch", "2.10.9", "torch is 2.10.9, expected 2.11 or later"),
        ("transformers", "6.0.0", "transformers is 6.0.0, expected 5.17 or later, below 6"),
        ("cryptography", None, "cryptography is not installed"),
    ],
)
def test_a_wrong_package_is_named(package: str, version: str | None, expected: str) -> None:
    right = {"cryptography": "50.0.2", "msgspec": "0.22.0", "torch": "2.13.0+cpu", "transformers": "5.23.0"}
    assert levels(machine_check.check_packages(right)) == ["ok"]
    found = only(machine_check.check_packages({**right, package: version}), "fail")
    assert found == Finding("fail", expected, "make setup")


def test_the_versions_asked_for_are_those_of_the_project_file() -> None:
    root = Path(__file__).resolve().parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = {re.split("[<>=]", line)[0]: line for line in project["dependencies"]}
    for name, (least, below) in machine_check.REQUIRED.items():
        limits = ">=" + ".".join(map(str, least)) + ("" if below is None else f",<{below[0]}")
        assert wanted[name] == name + limits
    oldest, first_after = (".".join(map(str, bound)) for bound in machine_check.PYTHON)
    assert project["requires-python"] == f">={oldest},<{first_after}"


def test_ciphers_are_measured() -> None:
    found = list(machine_check.check_ciphers(0.01))
    assert [finding.what.split(" seals ")[0] for finding in found[:2]] == [one.title for one in Cipher]
    assert machine_check.seal_speed(Cipher.CHACHA20_POLY1305, 0.01) > 1e6


def test_more_memory_granted_than_there_is_says_what_to_write() -> None:
    found = only(machine_check.check_memory(10**18), "fail")
    assert f"grants {format_bytes(10**18)}" in found.what
    assert found.mend is not None
    assert re.match(r"set memory_gb = \d+\.\d or less under \[model\]", found.mend)


def test_disk_is_looked_at_where_the_keys_are(tmp_path: Path) -> None:
    (found,) = machine_check.check_disk(tmp_path)
    assert str(tmp_path) in found.what


def test_an_optional_part_is_wrong_only_where_it_is_asked_for() -> None:
    assert levels(machine_check.check_tpm(None)) == ["ok"]
    assert levels(machine_check.check_tpm("device:/dev/there-is-none")) == ["fail"]
    assert levels(machine_check.check_discovery(wanted=False)) == ["ok"]


# keys, roster, clock


@pytest.fixture
def members(tmp_path: Path) -> tuple[LocalMember, ...]:
    return make_local_members(["alpha", "beta", "gamma"], tmp_path)


def test_private_keys_are_right(members: tuple[LocalMember, ...], tmp_path: Path) -> None:
    (found,) = member_check.check_keys(tmp_path / "alpha")
    assert found.level == "ok"
    assert members[0].identity.public_key.hex()[:16] in found.what


def test_a_key_that_others_can_read_is_named_with_the_command(
    members: tuple[LocalMember, ...], tmp_path: Path
) -> None:
    key = tmp_path / "alpha" / TLS_KEY
    key.chmod(0o644)
    found = only(member_check.check_keys(tmp_path / "alpha"), "fail")
    assert found == Finding(
        "fail", f"{key} has mode 0644, expected 0600: others could read the key", f"chmod 600 {key}"
    )


def test_every_wrong_mode_is_told_at_once(members: tuple[LocalMember, ...], tmp_path: Path) -> None:
    folder = tmp_path / "alpha"
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o640)
    found = list(member_check.check_keys(folder))
    assert levels(found) == ["fail"] * 4
    assert found[0].mend == f"chmod 700 {folder}"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_key_of_another_user_is_named(members: tuple[LocalMember, ...], tmp_path: Path) -> None:
    key = tmp_path / "alpha" / TLS_KEY
    os.chown(key, 12345, -1)
    assert "belongs to user 12345" in only(member_check.check_keys(tmp_path / "alpha"), "fail").what


def test_missing_keys_are_told(members: tuple[LocalMember, ...], tmp_path: Path) -> None:
    (tmp_path / "alpha" / TLS_KEY).unlink()
    assert "no such file" in only(member_check.check_keys(tmp_path / "alpha"), "fail").what
    missing = only(member_check.check_keys(tmp_path / "zeta"), "fail")
    assert missing.mend == f"convoy identity new NAME --dir {tmp_path / 'zeta'}"


def test_a_key_and_a_certificate_that_do_not_belong_together_are_told(
    members: tuple[LocalMember, ...], tmp_path: Path
) -> None:
    (tmp_path / "alpha" / TLS_KEY).write_bytes((tmp_path / "beta" / TLS_KEY).read_bytes())
    (found,) = examine(Check("keys", lambda: member_check.check_keys(tmp_path / "alpha")))
    assert found.level == "fail"
    assert "is not the certificate of" in found.what


def test_an_operator_key_beside_a_members_keys_is_warned_of(
    members: tuple[LocalMember, ...], tmp_path: Path
) -> None:
    (tmp_path / "alpha" / OPERATOR_KEY).write_bytes(b"")
    assert "operator's key" in only(member_check.check_keys(tmp_path / "alpha"), "warn").what


def test_a_roster_is_judged_by_the_days_that_are_left(members: tuple[LocalMember, ...]) -> None:
    roster = members[0].roster
    assert levels(member_check.check_roster(roster, roster.not_before, 1)) == ["ok", "ok"]
    soon = only(member_check.check_roster(roster, roster.expires - datetime.timedelta(hours=30), 1), "warn")
    assert soon.what.endswith("in 30 hours")
    late = only(member_check.check_roster(roster, roster.expires + datetime.timedelta(days=3), 1), "fail")
    assert late.what.endswith("3 days ago")
    assert "convoy roster sign" in str(late.mend)


def test_a_file_that_lags_behind_what_was_accepted_is_told(members: tuple[LocalMember, ...]) -> None:
    newest = replace(members[0].roster, epoch=7)
    found = list(member_check.check_roster(newest, newest.not_before, 5))
    assert {one.level for one in found} == {"ok"}, "it mends itself, so there is nothing to look at"
    assert found[1].what == "epoch 7 came over a link and counts; the file, with epoch 5, may stay as it is"


def test_a_clock_before_the_roster_or_the_files_is_told(
    members: tuple[LocalMember, ...], tmp_path: Path
) -> None:
    roster = members[0].roster
    files = [tmp_path / "alpha" / TLS_KEY, tmp_path / "not there"]
    now = roster.not_before + datetime.timedelta(seconds=1)
    assert levels(member_check.check_clock(roster, files, now)) == ["ok"]
    found = list(member_check.check_clock(roster, files, now - datetime.timedelta(hours=2)))
    assert levels(found) == ["fail", "warn"]
    assert all("timedatectl" in str(finding.mend) for finding in found)


def test_a_roster_that_lists_other_keys_or_nobody_is_told(members: tuple[LocalMember, ...]) -> None:
    roster, other = members[0].roster, Identity.generate()
    assert levels(member_check.check_listed(roster, "alpha", members[0].identity)) == ["ok"]
    found = list(member_check.check_listed(roster, "alpha", other))
    assert levels(found) == ["fail", "fail"]
    assert other.public_key.hex()[:16] in found[0].what
    (nobody,) = member_check.check_listed(roster, "zeta", other)
    assert "zeta is not in the roster" in nobody.what
    assert "convoy roster add" in str(nobody.mend)


def test_names_that_are_not_in_the_roster_are_told(members: tuple[LocalMember, ...]) -> None:
    roster = members[0].roster
    rule = b'[[placement]]\nkeep = ["output"]\nmembers = ["alpha", "zeta"]\n'
    told = only(member_check.check_policy(parse_policy(rule), roster), "fail")
    assert "[[placement]] rule 1 names zeta" in told.what
    offer = b'[[offer]]\nmax_memory_gb = 8\nmembers = ["betta"]\n'
    assert "betta" in only(member_check.check_policy(parse_policy(offer), roster), "fail").what
    assert levels(member_check.check_granted({"alpha": "0:3"}, roster)) == []
    assert "eta" in only(member_check.check_granted({"eta": "0:3"}, roster), "fail").what


# addresses and ports


def moved(member: Member, host: str, port: int = 7777) -> Member:
    return replace(member, address=(host, port))


def test_an_address_is_resolved_and_mine_must_be_of_this_machine(members: tuple[LocalMember, ...]) -> None:
    me = members[0].member
    assert levels(network_check.check_address(me, mine=True)) == ["ok"]
    far = moved(me, "192.0.2.1")  # RFC 5737: no host has it
    assert only(network_check.check_address(far, mine=True), "warn").what.endswith(
        "no address of this machine"
    )
    assert levels(network_check.check_address(far, mine=False)) == ["ok"]
    nowhere = moved(me, "no-such-host.invalid")
    assert "has no address" in only(network_check.check_address(nowhere, mine=False), "fail").what


def test_a_loopback_address_beside_others_is_warned_of(members: tuple[LocalMember, ...]) -> None:
    roster = members[0].roster
    assert levels(network_check.check_loopback(roster, "alpha")) == ["ok"]
    mixed = replace(roster, members=(moved(roster.members[0], "192.0.2.1"), *roster.members[1:]))
    assert (
        "beta, gamma can be reached from one machine"
        in only(network_check.check_loopback(mixed, "alpha"), "warn").what
    )


@contextmanager
def listening(member: LocalMember) -> Iterator[tuple[int, queue.SimpleQueue[Link]]]:
    links: queue.SimpleQueue[Link] = queue.SimpleQueue()
    listener = Listener(("127.0.0.1", 0), membership_of(member), links.put)
    try:
        yield listener.address[1], links
    finally:
        listener.close()


def at_port(member: LocalMember, name: str, port: int) -> LocalMember:
    """Return the member under a roster in which ``name`` is at another port."""
    listed = [moved(m, "127.0.0.1", port) if m.name == name else m for m in member.roster.members]
    return with_roster(member, replace(member.roster, members=tuple(listed)))


def test_a_free_port_is_right_and_another_than_the_rosters_is_warned_of(
    members: tuple[LocalMember, ...],
) -> None:
    me = at_port(members[0], "alpha", free_port())
    assert levels(network_check.check_listen(me, "127.0.0.1", None)) == ["ok"]
    assert levels(network_check.check_listen(me, "127.0.0.1", free_port())) == ["warn", "ok"]


def test_an_address_of_another_machine_cannot_be_listened_on(members: tuple[LocalMember, ...]) -> None:
    found = only(network_check.check_listen(members[0], "192.0.2.1", None), "fail")
    assert found.mend == "set [listen] host to an address of this machine"


def test_a_port_taken_by_this_very_member_is_right(members: tuple[LocalMember, ...]) -> None:
    with listening(members[0]) as (port, _):
        me = at_port(members[0], "alpha", port)
        found = only(network_check.check_listen(me, "127.0.0.1", None), "ok")
    assert found.what == f"alpha runs and listens on 127.0.0.1:{port}"


def test_a_port_taken_by_somebody_else_is_told(members: tuple[LocalMember, ...]) -> None:
    with listening(members[1]) as (port, _):
        found = only(
            network_check.check_listen(at_port(members[0], "alpha", port), "127.0.0.1", None), "fail"
        )
        assert found.what.endswith("is taken by beta, another member")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        sock.settimeout(0.01)
        found = only(
            network_check.check_listen(at_port(members[0], "alpha", port), "127.0.0.1", None), "fail"
        )
    assert found.what == f"127.0.0.1:{port} is taken by another program"
    assert f"sport = :{port}" in str(found.mend)


def test_the_http_port_may_be_taken_by_a_head_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        assert levels(network_check.check_http("127.0.0.1", port, lambda: True)) == ["ok"]
        assert levels(network_check.check_http("127.0.0.1", port, lambda: False)) == ["fail"]
    assert levels(network_check.check_http("127.0.0.1", port, lambda: False)) == ["ok"]


# peers


def look_at(me: LocalMember, name: str, port: int) -> list[Finding]:
    """Look at a member at a given port: the roster, equal at both ends, has another address."""
    network, membership = TcpNetwork(), membership_of(me)
    member = moved(me.roster.member(name), "127.0.0.1", port)
    return list(network_check.check_peer(member, lambda peer: network.dial(membership, peer, 5.0)))


def test_a_peer_that_answers_has_proved_its_identity_and_its_link_is_closed(
    members: tuple[LocalMember, ...],
) -> None:
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    arrived: queue.SimpleQueue[object] = queue.SimpleQueue()

    def greet(link: Link) -> None:
        link.start(lambda _, item: arrived.put(item), lambda _, error: ended.put(error.message), frozenset())

    listener = Listener(("127.0.0.1", 0), membership_of(members[1]), greet)
    try:
        found = only(look_at(members[0], "beta", listener.address[1]), "ok")
        assert re.search(r"proved its identity; \d+\.\d\d ms there and back under ", found.what)
        assert ended.get(timeout=60) == "alpha closed the link: an examination is over"
        assert arrived.empty()
    finally:
        listener.close()


def test_another_identity_at_a_peers_address_is_told(members: tuple[LocalMember, ...]) -> None:
    with listening(members[2]) as (port, _):
        found = only(look_at(members[0], "beta", port), "fail")
    assert "did not prove to be beta" in found.what
    assert "shows the certificate of another member" in found.what


def test_a_stranger_at_a_peers_address_is_told(members: tuple[LocalMember, ...], tmp_path: Path) -> None:
    stranger = make_local_members(["alpha", "beta", "gamma"], tmp_path / "others")[1]
    with listening(stranger) as (port, _):
        found = only(look_at(members[0], "beta", port), "fail")
    assert "did not prove to be beta" in found.what


def test_a_peer_that_is_not_there_is_told_with_the_command(members: tuple[LocalMember, ...]) -> None:
    port = free_port()
    found = only(look_at(members[0], "beta", port), "fail")
    assert "connection refused" in found.what
    assert f"`convoy join` in that member's folder, and open port {port}" in str(found.mend)


def test_a_head_that_does_not_listen_is_no_failure(members: tuple[LocalMember, ...]) -> None:
    found = only(look_at(members[1], "alpha", free_port()), "ok")
    assert found.what.startswith("alpha does not listen now, as heads do not")


def test_a_link_that_breaks_after_its_handshake_is_told(members: tuple[LocalMember, ...]) -> None:
    listener = Listener(("127.0.0.1", 0), membership_of(members[1]), lambda link: link.close("busy"))
    try:
        found = only(look_at(members[0], "beta", listener.address[1]), "fail")
    finally:
        listener.close()
    assert "proved its identity, and then: " in found.what


def test_a_newer_roster_that_a_peer_brought_is_told() -> None:
    assert levels(network_check.check_epochs(3, 3)) == []
    assert "has roster epoch 5" in only(network_check.check_epochs(3, 5), "ok").what


def test_a_name_that_cannot_be_dialled_never_raises(members: tuple[LocalMember, ...]) -> None:
    def refuse(_member: Member) -> Link:
        raise PeerUnreachable("beta could not be reached: nobody")

    assert levels(network_check.check_peer(members[0].roster.member("beta"), refuse)) == ["fail"]

"""Real `convoy` processes under a policy that demands hardware, over TPMs in software: `make test-tpm`."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import tomli_w

from convoy.crypto.identity import Identity, OperatorKey
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.transport.ports import free_ports
from convoy.trust.evidence.provider import ProviderRules
from e2e.served import CONVOY, ENVIRONMENT, convoy, convoy_json
from support.fleet import FleetUnderTest
from tpm.soft_tpm import SoftTpm, TestAuthority

_WAIT_S = 90.0


@dataclass(frozen=True, slots=True)
class Site:
    """Hold two machines: alpha is the head and has a policy, beta is a peer with an enrolled TPM."""

    folder: Path
    tpm: SoftTpm

    def file(self, name: str) -> Path:
        return self.folder / name

    def write_policy(
        self, minimum: str = "hardware", interval_s: float = 0.5, register: str | None = None
    ) -> None:
        policy: dict[str, object] = {
            "minimum": minimum,
            "interval_s": interval_s,
            "deadline_s": 10.0,
            "software": {"package": "same", "torch": "same", "model": "same"},
            "tpm": {"authorities": ["ca.pem"]},
        }
        if register is not None:
            policy["pcr"] = [{"index": 16, "values": [register], "members": ["beta"]}]
        self.file("policy.toml").write_text(tomli_w.dumps({"attestation": policy}))

    def write_config(self, name: str, port: int, operator_key: str, *, tcti: str | None = None) -> None:
        cluster: dict[str, object] = {
            "name": name,
            "identity": name,
            "roster": "roster.toml",
            "operator_key": operator_key,
        }
        if name == "alpha":
            cluster["policy"] = "policy.toml"
        if tcti is not None:
            cluster["tpm"] = tcti
        tables = {
            "cluster": cluster,
            "listen": {"host": "127.0.0.1", "port": port},
            "model": {"num_threads": 1, "memory_gb": 1.0},
            "plan": {"wait_s": 60.0},
        }
        self.file(f"{name}.toml").write_text(tomli_w.dumps(tables))

    def attest(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return convoy("attest", verb, *arguments)


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "ca")


@pytest.fixture
def site(tmp_path: Path, authority: TestAuthority) -> Iterator[Site]:
    """Write keys, roster and configuration; nothing is enrolled yet."""
    with SoftTpm(authority) as tpm:
        site = Site(tmp_path, tpm)
        ports = dict(zip(("alpha", "beta"), free_ports(2), strict=True))
        for name, port in ports.items():
            card, address = site.file(f"{name}.card"), f"127.0.0.1:{port}"
            convoy_json(
                "identity",
                "new",
                name,
                "--dir",
                str(site.file(name)),
                "--address",
                address,
                "--card",
                str(card),
            )
        cards = [str(site.file(f"{name}.card")) for name in ports]
        where = ["--operator", str(site.file("operator")), "--out", str(site.file("roster.toml"))]
        made = convoy_json("roster", "new", "tpm-test", *cards, "--head", "alpha", *where)
        site.file("ca.pem").write_bytes(authority.certificates.read_bytes())
        site.write_policy()
        for name, port in ports.items():
            tcti = tpm.tcti if name == "beta" else None
            site.write_config(name, port, str(made["operator_key"]), tcti=tcti)
        yield site


def enrol(site: Site, *, algorithm: str = "ecc") -> None:
    """Enrol in the four steps, as the two people would type them."""
    beta = ("--config", str(site.file("beta.toml")))
    operator = ("--operator", str(site.file("operator")), "--roster", str(site.file("roster.toml")))
    request, challenge, answer = (
        str(site.file(f"beta.{step}")) for step in ("request", "challenge", "answer")
    )
    policy = ("--policy", str(site.file("policy.toml")))
    for verb, *arguments in (
        ("new", *beta, "--algorithm", algorithm, "--out", request),
        ("challenge", request, *policy, *operator, "--out", challenge),
        ("answer", challenge, *beta, "--out", answer),
        ("accept", answer, *operator),
    ):
        done = site.attest(verb, *arguments)
        assert done.returncode == 0, (verb, done.stderr)


@contextmanager
def running(site: Site, *flags: str, serve: bool = True) -> Iterator[str]:
    """Run `convoy join` on beta and `convoy serve` on alpha, with these flags; yield the URL."""
    with ExitStack() as stack:
        _start(stack, site, "beta", "join", "--config", str(site.file("beta.toml")))
        arguments = (
            "serve",
            "demo-mini",
            "--config",
            str(site.file("alpha.toml")),
            "--port",
            "0",
            "--json",
            *flags,
        )
        head = _start(stack, site, "alpha", *arguments) if serve else None
        assert head is not None
        yield _url(site.file("alpha.log"), head)


def _start(stack: ExitStack, site: Site, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    with site.file(f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [*CONVOY, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=ENVIRONMENT,
        )
    stack.callback(process.wait, 60)
    stack.callback(process.terminate)
    return process


def _url(log: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        text = log.read_text()
        at = text.find("{\n")
        if at >= 0 and text.rstrip().endswith("}"):
            return str(json.loads(text[at:])["url"]).removesuffix("/v1")
        assert process.poll() is None, text
        time.sleep(0.1)  # a file has no event to wait on
    raise AssertionError(log.read_text())


def _levels(url: str) -> dict[str, str]:
    status = httpx.get(f"{url}/status", timeout=60).json()
    return {one["member"]: one["level"] for one in status["verdicts"]}


def _wait_until_out(url: str, name: str) -> None:
    """Wait until no stage is held by the member: the others go on without it."""
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        status = httpx.get(f"{url}/status", timeout=60).json()
        if name not in {stage["member"] for stage in status["stages"]}:
            return
        time.sleep(0.1)  # a process far away has no event to wait on
    raise AssertionError("the member stayed")


@pytest.mark.parametrize("algorithm", ["ecc", "rsa"])
def test_an_enrolled_machine_is_hardware_and_the_cluster_comes_up(site: Site, algorithm: str) -> None:
    enrol(site, algorithm=algorithm)
    shown = convoy_json(
        "attest", "show", "--config", str(site.file("beta.toml")), "--policy", str(site.file("policy.toml"))
    )
    assert shown["level"] == "hardware", shown
    assert {"clock_ms", "resets", "firmware", "pcr_7"} <= shown["hardware"].keys()
    with running(site) as url:
        assert _levels(url) == {"alpha": "self_signed", "beta": "hardware"}
        status = httpx.get(f"{url}/status", timeout=60).json()
        assert {stage["member"]: stage["level"] for stage in status["stages"]} == _levels(url)
        assert httpx.get(f"{url}/health", timeout=60).json()["level"] == "self_signed"
        assert "hardware" in convoy("status", "--url", url).stdout
    roster = convoy_json("roster", "show", str(site.file("roster.toml")))
    assert roster["epoch"] == 2


def test_a_member_whose_registers_change_falls_out_at_the_next_check(site: Site) -> None:
    enrol(site)
    site.write_policy(register=site.tpm.register(16))
    with running(site) as url:
        assert _levels(url)["beta"] == "hardware"
        site.tpm.extend(16)
        _wait_until_out(url, "beta")


def test_a_member_on_another_machine_gets_no_stage(site: Site, authority: TestAuthority) -> None:
    enrol(site)
    with SoftTpm(authority) as other:
        config = site.file("beta.toml")
        config.write_text(config.read_text().replace(site.tpm.tcti, other.tcti))
        with running(site) as url:
            status = httpx.get(f"{url}/status", timeout=60).json()
    assert [stage["member"] for stage in status["stages"]] == ["alpha"]
    [beta] = [one for one in status["verdicts"] if one["member"] == "beta"]
    assert beta["excluded"]
    assert beta["level"] == "self_signed"
    assert "another key than the enrolled" in beta["reasons"][0]
    assert "beta has level self_signed" in site.file("beta.log").read_text()


def test_a_member_that_was_not_enrolled_gets_no_stage_and_a_plan_that_needs_it_says_why(site: Site) -> None:
    config = site.file("alpha.toml")
    layers = '{ alpha = "0:0,output", beta = "1:1" }'
    config.write_text(config.read_text().replace("[plan]\n", f"[plan]\nlayers = {layers}\n"))
    with ExitStack() as stack:
        _start(stack, site, "beta", "join", "--config", str(site.file("beta.toml")))
        done = convoy("serve", "demo-mini", "--config", str(config), "--port", "0")
    assert done.returncode == 1
    assert "beta has level self_signed, and the policy's minimum is hardware" in done.stderr
    assert "no attestation key of beta is enrolled" in done.stderr


def test_an_endorsement_certificate_of_another_authority_is_refused(site: Site, tmp_path: Path) -> None:
    with SoftTpm(TestAuthority(tmp_path / "other")):
        site.file("ca.pem").write_bytes((tmp_path / "other" / "issuercert.pem").read_bytes())
    request = str(site.file("beta.request"))
    assert site.attest("new", "--config", str(site.file("beta.toml")), "--out", request).returncode == 0
    where = ("--operator", str(site.file("operator")), "--roster", str(site.file("roster.toml")))
    done = site.attest("challenge", request, "--policy", str(site.file("policy.toml")), *where)
    assert done.returncode == 1
    assert "does not lead to an authority of the policy" in done.stderr


def test_another_tpm_cannot_answer_a_challenge(site: Site, authority: TestAuthority) -> None:
    beta = ("--config", str(site.file("beta.toml")))
    operator = ("--operator", str(site.file("operator")), "--roster", str(site.file("roster.toml")))
    request, challenge = str(site.file("beta.request")), str(site.file("beta.challenge"))
    assert site.attest("new", *beta, "--out", request).returncode == 0
    policy = ("--policy", str(site.file("policy.toml")))
    assert site.attest("challenge", request, *policy, *operator, "--out", challenge).returncode == 0
    kept = site.file("operator") / "attest-beta.toml"
    assert os.stat(kept).st_mode & 0o077 == 0
    with SoftTpm(authority) as other:
        config = site.file("beta.toml")
        config.write_text(config.read_text().replace(site.tpm.tcti, other.tcti))
        done = site.attest("answer", challenge, *beta)
    assert done.returncode == 1
    assert "tpm2_activatecredential failed" in done.stderr


def test_an_enrolled_member_of_a_provider_is_hardware_to_a_coordinator_that_trusts_its_operator(
    site: Site,
) -> None:
    enrol(site)
    operator = OperatorKey.load(site.file("operator")).public_key
    rules = ProviderRules(operators=frozenset({operator}))
    fleet = FleetUnderTest(site.folder, CoordinatorOptions(instance="test", trust=rules))
    try:
        identity = Identity.load(site.file("alpha")).public_key
        fleet.directory.approve(identity, "site")
        with running(site, "--provide", fleet.url.replace("http", "ws", 1)):
            deadline = time.monotonic() + _WAIT_S
            found: list[dict[str, object]] = []
            while not found and time.monotonic() < deadline:
                time.sleep(0.1)  # another process measures first, and then dials
                with fleet.admin() as admin:
                    found = admin.get("/status").json()["providers"]
            (provider,) = found
            assert provider["members"] == {"alpha": "self_signed", "beta": "hardware"}, provider
            assert provider["level"] == "self_signed"
            assert "alpha" in str(provider["why"])
    finally:
        fleet.close()

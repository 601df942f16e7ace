"""The files of deploy/: manifests without rights, flags that exist, and metrics that are served."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml  # type: ignore[import-untyped]

from convoy.cli.main import app
from convoy.config.settings import load_config
from convoy.sdk.local_cluster import LocalCluster, LocalOptions
from convoy.sdk.options import load_member

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SETS = ("head", "peers")
# As docs/kubernetes.md names it. It has no schemas of kustomize and of the Prometheus operator.
KUBERNETES_VERSION = "1.37"
METRIC = re.compile(r"\b(?:convoy_|vllm:)[a-z_]+")


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / f"{name}.yaml").read_text("utf-8")))


def stateful_set(name: str) -> dict[str, Any]:
    (found,) = (one for one in objects(name) if one["kind"] == "StatefulSet")
    return dict(found["spec"])


def test_the_base_names_every_manifest() -> None:
    (base,) = objects("kustomization")
    files = {file.name for file in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(base["resources"]) == files


def check_schema(manifest: dict[str, Any]) -> None:
    """Raise ValidationError for a field that Kubernetes does not know, or with a value that it refuses."""
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="requirements-dev.lock is not installed anew: `make setup`"
    )
    kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("name", ["head", "namespace", "peers"])
def test_every_manifest_passes_the_schemas_of_kubernetes(name: str) -> None:
    for manifest in objects(name):
        check_schema(manifest)


def test_a_manifest_with_a_wrong_field_does_not_pass() -> None:
    (manifest,) = (one for one in objects("head") if one["kind"] == "StatefulSet")
    manifest["spec"]["replica"] = 2
    with pytest.raises(Exception, match="replica"):
        check_schema(manifest)


@pytest.mark.parametrize("name", SETS)
def test_members_run_without_rights_and_with_keys_in_memory_alone(name: str) -> None:
    pod = stateful_set(name)["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["keys"]["emptyDir"]["medium"] == "Memory"
    claims = {claim["metadata"]["name"] for claim in stateful_set(name)["volumeClaimTemplates"]}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} <= volumes.keys() | claims
    # Grace is longer than the drain of running answers.
    assert pod["terminationGracePeriodSeconds"] > 50


@pytest.mark.parametrize("name", SETS)
def test_the_flags_of_a_container_are_those_of_the_command_line(name: str) -> None:
    (container,) = stateful_set(name)["template"]["spec"]["containers"]
    log, verb, *arguments = container["args"]
    assert log == "--log-format=json"
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    command.make_context(verb, arguments)


@pytest.mark.parametrize("name", SETS)
def test_probes_and_monitors_name_ports_of_the_container(name: str) -> None:
    (container,) = stateful_set(name)["template"]["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    probes = [container[kind] for kind in container if kind.endswith("Probe")]
    assert {
        next(one[how]["port"] for how in ("httpGet", "tcpSocket") if how in one) for one in probes
    } <= ports
    (monitor,) = (one for one in objects("monitoring") if one["metadata"]["name"] == f"convoy-{name}")
    assert {end["port"] for end in monitor["spec"]["podMetricsEndpoints"]} <= ports


def served_metrics() -> set[str]:
    """Return the names in the table of metrics, which other tests compare with a scrape."""
    return set(METRIC.findall((DEPLOY.parent / "docs/metrics.md").read_text("utf-8")))


@pytest.mark.parametrize("file", ["convoy.json", "alerts.yaml"])
def test_dashboard_and_alerts_ask_for_metrics_that_are_served(file: str) -> None:
    text = (DEPLOY / "grafana" / file).read_text("utf-8")
    asked = {name.removesuffix("_bucket") for name in METRIC.findall(text)}
    assert len(asked) > 5
    assert asked <= served_metrics()
    # Both parse: JSON is YAML.
    assert yaml.safe_load(text)


def test_the_keys_of_a_secret_become_files_that_convoy_takes(tmp_path: Path) -> None:
    secret, cluster, keys = tmp_path / "secret", tmp_path / "cluster", tmp_path / "keys"
    for folder in (secret, cluster, keys):
        folder.mkdir()
    with LocalCluster(LocalOptions(num_members=2)) as local:
        config = local.config("beta")
        for file in ("identity.key", "tls.key", "tls.crt"):
            shutil.copy(config.require_identity() / file, secret / f"beta.{file}")
            (secret / f"beta.{file}").chmod(0o644)
        shutil.copy(config.require_roster(), cluster / "roster.toml")
        (cluster / "operator-key.txt").write_text(f"{config.require_operator_key().hex()}\n")
    script = (KUBERNETES / "copy-keys.sh").read_text("utf-8")
    for folder in (secret, cluster, keys):
        script = script.replace(f"/{folder.name}/", f"{folder}/")
    subprocess.run(["/bin/sh", "-s", "beta"], input=script, text=True, check=True)
    assert load_member(load_config(keys / "convoy.toml")).name == "beta"
    assert (keys / "identity/identity.key").stat().st_mode & 0o777 == 0o600

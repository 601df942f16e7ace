"""``[evidence]`` of coordinator.toml and proxy.toml: read as it stands, and refused where it is mistyped."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoy.cli.proxy import read_proxy_file
from convoy.cli.running.coordinator_file import load_fleet_config
from convoy.cli.running.trust_rules import rules_of
from convoy.errors import ConfigError
from convoy.trust.evidence.level import Level

KEY, OTHER = "ab" * 32, "cd" * 32


def written(folder: Path, text: str) -> Path:
    file = folder / "some.toml"
    file.write_text(text)
    return file


def test_rules_are_read_with_the_policy_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('[attestation]\nminimum = "hardware"\n')
    text = f'policy = "policy.toml"\noperators = ["{KEY}"]\nrevoked = ["{OTHER}"]\nevery_member = true\n'
    file = written(tmp_path, f'[evidence]\nmin_level = "self_signed"\n{text}')
    rules = load_fleet_config(file, "test", ()).trust
    assert rules.minimum is Level.HARDWARE, "the higher of both"
    assert rules.operators == {bytes.fromhex(KEY)}
    assert rules.revoked == {bytes.fromhex(OTHER)}
    assert rules.every_member
    same = rules_of(read_proxy_file(file).evidence, file, frozenset({bytes.fromhex(OTHER)}))
    assert same.operators == {bytes.fromhex(KEY), bytes.fromhex(OTHER)}


def test_without_a_table_nothing_is_demanded() -> None:
    rules = load_fleet_config(None, "test", ()).trust
    assert (rules.minimum, rules.revoked, rules.every_member) == (Level.NONE, frozenset(), False)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('min_level = "high"', "min_level"),
        ('revoked = ["abc"]', "neither hex nor base64"),
        ('revokd = ["x"]', "revokd"),
        ('policy = "placement.toml"', r"\[\[placement\]\] rules"),
        ('policy = "offer.toml"', r"\[\[offer\]\] rules"),
        ('policy = "missing.toml"', "missing.toml"),
    ],
)
def test_what_is_mistyped_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "offer.toml").write_text("[[offer]]\nmax_memory_gb = 8\n")
    (tmp_path / "placement.toml").write_text('[[placement]]\nkeep = ["output"]\nmembers = ["alpha"]\n')
    with pytest.raises(ConfigError, match=why):
        load_fleet_config(written(tmp_path, f"[evidence]\n{text}\n"), "test", ())

"""Read policy files: the demands are those that were written, and unknown ones are refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.errors import ConfigError
from convoy.trust.evidence.level import Level
from convoy.trust.evidence.policy import MAX_POLICY_BYTES, PcrRule, Policy, SoftwareRule, parse_policy

WHOLE = """
[attestation]
minimum = "hardware"
interval_s = 60
deadline_s = 2.5

[attestation.software]
package = "same"
torch = ["2.13.0", "2.13.0+cpu"]

[attestation.tpm]
authorities = ["a.pem", "b.pem"]
require_pcrs = true

[[attestation.pcr]]
index = 7
values = ["{digest}"]
members = ["beta"]

[[attestation.pcr]]
index = 4
values = ["{digest}", "{digest}"]

[[placement]]
keep = ["embedding", "first:2", "last:3"]
on = "hardware"

[[placement]]
keep = ["output"]
members = ["alpha", "beta"]
""".replace("{digest}", "ab" * 32)


def test_a_whole_file() -> None:
    policy = parse_policy(WHOLE.encode())
    assert policy.minimum is Level.HARDWARE
    assert (policy.interval_s, policy.deadline_s) == (60.0, 2.5)
    assert policy.software == (SoftwareRule("package", ()), SoftwareRule("torch", ("2.13.0", "2.13.0+cpu")))
    assert policy.authorities == ("a.pem", "b.pem")
    assert policy.require_pcrs
    digest = b"\xab" * 32
    assert policy.pcrs_of("beta") == (PcrRule(7, (digest,), ("beta",)), PcrRule(4, (digest, digest)))
    assert policy.pcrs_of("gamma") == (PcrRule(4, (digest, digest)),)
    first, second = policy.placement
    assert (first.embedding, first.output, first.first_layers, first.last_layers) == (True, False, 2, 3)
    assert (first.level, first.members) == (Level.HARDWARE, ())
    assert (second.level, second.members) == (None, ("alpha", "beta"))


def test_of_an_offer_no_more_counts_than_the_least_of_its_rules_allows() -> None:
    text = """
[[offer]]
max_memory_gb = 24
[[offer]]
max_memory_gb = 8.5
members = ["beta", "alpha"]
"""
    policy = parse_policy(text.encode())
    huge = 10**15
    assert policy.capped("gamma", huge, head=False) == 24 * 10**9
    assert policy.capped("beta", huge, head=False) == 8_500_000_000
    assert policy.capped("beta", 10**9, head=False) == 10**9
    assert policy.capped("delta", huge, head=True) == huge, "a rule without members is for peers"
    assert policy.capped("alpha", huge, head=True) == 8_500_000_000
    assert Policy().capped("beta", huge, head=False) == huge


def test_an_empty_file_demands_nothing() -> None:
    assert parse_policy(b"") == Policy()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[atestation]", "atestation is unknown"),
        ("[attestation]\nminimun = 'hardware'", "minimun is unknown"),
        ("[attestation]\nminimum = 'high'", "no level 'high'"),
        ("[attestation]\nminimum = 2", "is a int, expected str"),
        ("[attestation]\ninterval_s = 0", "expected 0.5 to 86400 seconds"),
        ("[attestation]\ninterval_s = nan", "expected 0.5 to 86400 seconds"),
        ("[attestation]\ndeadline_s = true", "is a bool, expected float"),
        ("[attestation.software]\ntourch = 'same'", "tourch is unknown"),
        ("[attestation.software]\ntorch = '2.13'", 'expected "same" or a list'),
        ("[attestation.software]\ntorch = []", "allows nothing"),
        ("[attestation.tpm]\nauthority = 'a.pem'", "authority is unknown"),
        ("[[attestation.pcr]]\nindex = 24\nvalues = []", "not 0 to 23"),
        ("[[attestation.pcr]]\nindex = 7\nvalues = []", "not a list of SHA-256 digests"),
        ("[[attestation.pcr]]\nindex = 7\nvalues = ['AB']", "not a list of SHA-256 digests"),
        ("[[attestation.pcr]]\nindex = 7\nvalues = ['" + "a" * 64 + "']\nmembers = []", "names no member"),
        ("[[attestation.pcr]]\nindex = 7\nvalues = ['" + "a" * 64 + "']\nbank = 'sha1'", "bank is unknown"),
        ("[[placement]]\nkeep = ['embedding']\non = 'self_signed'", "keeps nothing where it belongs"),
        ("[[placement]]\nkeep = ['embedding']\non = 'none'", "keeps nothing where it belongs"),
        ("[[placement]]\nkeep = ['embedding']", "one of `on` and `members`"),
        ("[[placement]]\nkeep = ['embedding']\non = 'hardware'\nmembers = ['a']", "and not both"),
        ("[[placement]]\nkeep = ['first:0']\non = 'hardware'", "'first:0' is unknown"),
        ("[[placement]]\nkeep = []\non = 'hardware'", "keeps nothing"),
        ("[[offer]]\nmembers = ['a']", "offer 1: max_memory_gb is 0, expected more than 0 and at most 17592"),
        ("[[offer]]\nmax_memory_gb = -1", "max_memory_gb is -1"),
        ("[[offer]]\nmax_memory_gb = nan", "max_memory_gb is nan"),
        ("[[offer]]\nmax_memory_gb = 1e9", "max_memory_gb is 1e+09"),
        ("[[offer]]\nmax_memory_gb = '8'", "is a str, expected float"),
        ("[[offer]]\nmax_memory_gb = 8\nmembers = []", "names no member"),
        ("[[offer]]\nmax_memory_gb = 8\nkeep = 1", "keep is unknown"),
        ("placement = 3", "is a int, expected list"),
        ("attestation = 3", "attestation is no table"),
        ("x = [", "is not TOML"),
        ("\xff", "is unknown"),
    ],
)
def test_what_is_not_understood_is_refused_and_named(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match="policy") as refused:
        parse_policy(text.encode() if text != "\xff" else b"'\xc3\xbf' = 1")
    assert reason in refused.value.message


def test_a_file_that_is_too_long_is_refused_unread() -> None:
    with pytest.raises(ConfigError, match="the limit is"):
        parse_policy(b"#" * (MAX_POLICY_BYTES + 1))


@given(st.binary(max_size=300))
def test_garbage_is_a_policy_or_an_error(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        parse_policy(data)


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ("[[offer]]\nmax_memory_gb = 8\nmembers = ['alpha', 'betta']", "[[offer]] rule 1"),
        ("[[placement]]\nkeep = ['output']\nmembers = ['betta']", "[[placement]] rule 1"),
        (
            f"[[attestation.pcr]]\nindex = 7\nvalues = ['{'0' * 64}']\nmembers = ['betta']",
            "[[attestation.pcr]] rule 1",
        ),
    ],
)
def test_a_rule_for_an_unknown_member_is_refused_with_its_number(rule: str, named: str) -> None:
    policy = parse_policy(rule.encode())
    with pytest.raises(ConfigError) as caught:
        policy.check_members(["alpha", "beta"])
    assert caught.value.message == f"the policy's {named} names betta, which is no member"
    assert "the members are alpha, beta" in str(caught.value.hint)
    policy.check_members(["alpha", "betta"])
    Policy().check_members([])

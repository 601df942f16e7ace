"""Keys of accounts and administrators with an expiry and limits, as the database keeps them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convoy.api.keys.key_use import KeyLimits
from convoy.api.refusals import NoBalance, WrongKey
from convoy.errors import ConfigError
from convoy.fleet.books.directory import Directory
from convoy.fleet.books.keys import KeyTerms, Scope
from convoy.fleet.books.ledger import Bill, Hold, Ledger
from convoy.fleet.books.store import Store

TERMS = KeyTerms(2_000_000, 60, 1000, 2, 500)
BILL = Bill("beta", 10, 20, 100)


def spent(directory: Directory) -> list[int]:
    facts = directory.keys()
    return [one.spent_micro for one in facts]


@pytest.fixture
def directory(store: Store) -> Directory:
    Ledger(store, "one").open_account("ann")
    return Directory(store, now=lambda: 1_000_000.0)


def test_limits_and_expiry_come_back_as_they_were_given(directory: Directory) -> None:
    key = directory.make_key(Scope.CONSUMER, "ann", "laptop", TERMS)
    grant = directory.grant(key, Scope.CONSUMER)
    assert (grant.account, grant.terms, grant.spends) == ("ann", TERMS, grant.key_hash)
    assert grant.terms.limits == KeyLimits(60, 1000, 2)
    (facts,) = directory.keys()
    assert (facts.label, facts.terms, facts.spent_micro) == ("laptop", TERMS, 0)
    other = directory.grant(directory.make_key(Scope.CONSUMER, "ann"), Scope.CONSUMER)
    assert (other.terms, other.spends) == (KeyTerms(), None)


@pytest.mark.parametrize("scope", [Scope.CONSUMER, Scope.ADMIN, Scope.METRICS])
def test_a_key_of_any_scope_ends_when_it_expires(store: Store, scope: Scope) -> None:
    now_s = [1_000_000.0]
    directory = Directory(store, now=lambda: now_s[0])
    Ledger(store, "one").open_account("ann")
    account = "ann" if scope is Scope.CONSUMER else None
    key = directory.make_key(scope, account, "", KeyTerms(expires_s=1_000_100))
    now_s[0] += 99
    directory.grant(key, scope)
    now_s[0] += 1
    with pytest.raises(WrongKey, match="has expired"):
        directory.grant(key, scope)


@pytest.mark.parametrize(
    ("scope", "terms", "said"),
    [
        (Scope.CONSUMER, KeyTerms(expires_s=999_999), "expired already"),
        (Scope.CONSUMER, KeyTerms(requests_per_minute=0), "requests_per_minute is 0"),
        (Scope.ADMIN, KeyTerms(spend_limit_micro=5), "leave spend_limit_micro out"),
        (Scope.METRICS, KeyTerms(tokens_per_minute=5), "leave tokens_per_minute out"),
    ],
)
def test_terms_that_make_no_sense_are_refused(
    directory: Directory, scope: Scope, terms: KeyTerms, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        directory.make_key(scope, "ann" if scope is Scope.CONSUMER else None, "", terms)


def test_a_spend_limit_counts_what_is_held_and_what_was_settled(store: Store, directory: Directory) -> None:
    ledger = Ledger(store, "one")
    ledger.credit("ann", 10_000)
    key = directory.make_key(Scope.CONSUMER, "ann", "", KeyTerms(spend_limit_micro=500))
    spends = directory.grant(key, Scope.CONSUMER).spends
    hold = Hold("r1", "ann", "demo", 300, b"h" * 32, spends=spends)
    ledger.reserve(hold)
    with pytest.raises(NoBalance, match="may cost 300, and 200 of 500 are left to this API key"):
        ledger.reserve(replace(hold, request_id="r2"))
    assert ledger.settle("r1", BILL) == 100
    ledger.reserve(replace(hold, request_id="r3"))
    ledger.release("r3")
    ledger.reserve(replace(hold, request_id="r4", amount_micro=400))
    assert spent(directory) == [500]
    assert Ledger(store, "one").recover() == 1
    assert spent(directory) == [100]
    assert ledger.balance("ann") == 9_900
    assert ledger.check() == []


def test_a_request_without_balance_spends_nothing_of_its_key(store: Store, directory: Directory) -> None:
    ledger = Ledger(store, "one")
    key = directory.make_key(Scope.CONSUMER, "ann", "", KeyTerms(spend_limit_micro=500))
    hold = Hold("r1", "ann", "demo", 300, b"h" * 32, spends=directory.grant(key, Scope.CONSUMER).spends)
    with pytest.raises(NoBalance, match="ann has 0"):
        ledger.reserve(hold)
    assert spent(directory) == [0]

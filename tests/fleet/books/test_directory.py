from __future__ import annotations

import pytest
from sqlalchemy import UniqueConstraint, inspect, select

from convoy.errors import ConfigError
from convoy.fleet.books.directory import Directory
from convoy.fleet.books.keys import Scope, hint_of
from convoy.fleet.books.ledger import Ledger
from convoy.fleet.books.store import Store
from convoy.fleet.books.tables import API_KEYS, METADATA
from convoy.serve.refusals import Forbidden, Unauthenticated

ANN, BOB = bytes(31) + b"a", bytes(31) + b"b"


@pytest.fixture
def directory(store: Store) -> Directory:
    Ledger(store, "here").open_account("ann")
    return Directory(store)


def test_a_key_lets_its_account_in_and_is_stored_nowhere(directory: Directory, store: Store) -> None:
    key = directory.make_key(Scope.CONSUMER, "ann", "laptop")
    assert len(key) >= 43  # 256 bits
    assert directory.look_up(key, Scope.CONSUMER) == "ann"
    with store.read() as db:
        (row,) = db.execute(select(API_KEYS)).all()
    assert key not in repr(row)
    assert key[12:] not in repr(row)


def test_a_key_is_for_one_scope(directory: Directory) -> None:
    consumer = directory.make_key(Scope.CONSUMER, "ann")
    admin = directory.make_key(Scope.ADMIN, None)
    assert directory.look_up(admin, Scope.ADMIN) is None
    with pytest.raises(Forbidden, match="scope consumer"):
        directory.look_up(consumer, Scope.ADMIN)
    with pytest.raises(Forbidden, match="scope admin"):
        directory.look_up(admin, Scope.CONSUMER)


def test_a_revoked_or_unknown_key_lets_nobody_in(directory: Directory) -> None:
    key = directory.make_key(Scope.CONSUMER, "ann")
    other = directory.make_key(Scope.CONSUMER, "ann")
    assert directory.revoke_key("ann", hint_of(key)) == 1
    assert directory.revoke_key("ann", hint_of(key)) == 0
    with pytest.raises(Unauthenticated, match="revoked"):
        directory.look_up(key, Scope.CONSUMER)
    assert directory.look_up(other, Scope.CONSUMER) == "ann"
    for wrong in ("", "convoy-", key + "x", key[:-1], "x" * 100_000):
        with pytest.raises(Unauthenticated, match="not known"):
            directory.look_up(wrong, Scope.CONSUMER)


def test_keys_are_listed_by_their_first_characters(directory: Directory) -> None:
    key = directory.make_key(Scope.CONSUMER, "ann", "laptop")
    (facts,) = directory.keys()
    assert (facts.account, facts.label, facts.hint) == ("ann", "laptop", hint_of(key))
    for bad in ({"scope": Scope.CONSUMER, "account": None}, {"scope": Scope.ADMIN, "account": "ann"}):
        with pytest.raises(ConfigError):
            directory.make_key(**bad)
    with pytest.raises(ConfigError, match="no account"):
        directory.make_key(Scope.CONSUMER, "nobody")


def test_a_provider_is_known_from_its_approval_to_its_revocation(directory: Directory) -> None:
    assert directory.provider_name(ANN) is None
    directory.approve(ANN, "ann's box")
    assert directory.provider_name(ANN) == "ann's box"
    with pytest.raises(ConfigError, match="already"):
        directory.approve(BOB, "ann's box")
    assert directory.revoke_provider("ann's box")
    assert not directory.revoke_provider("ann's box")
    assert directory.provider_name(ANN) is None
    directory.approve(ANN, "box again")
    assert [one.name for one in directory.providers()] == ["box again"]
    assert directory.revoke_provider("box again")
    directory.approve(BOB, "box again")  # the name is free, and the key that had it is not let in by that
    assert (directory.provider_name(ANN), directory.provider_name(BOB)) == (None, "box again")
    with pytest.raises(ConfigError):
        directory.approve(b"short", "box")


def test_the_migrations_make_the_tables_that_the_code_uses(store: Store) -> None:
    with store.read() as db:
        found = inspect(db)
        for table in METADATA.sorted_tables:
            columns = {column["name"]: column["nullable"] for column in found.get_columns(table.name)}
            assert columns == {column.name: column.nullable for column in table.columns}
            unique = {tuple(one["column_names"]) for one in found.get_unique_constraints(table.name)}
            assert unique == {
                tuple(column.name for column in one.columns)
                for one in table.constraints
                if isinstance(one, UniqueConstraint)
            }


def test_a_database_opens_again_as_it_was(database_url: str) -> None:
    first = Store(database_url)
    Ledger(first, "here").open_account("ann")
    first.close()
    again = Store(database_url)
    assert Ledger(again, "here").balance("ann") == 0
    again.close()


@pytest.mark.parametrize(
    "url", ["", "nonsense", "mysql://u:secret@h/d", "sqlite:////nowhere/at/all/fleet.db", "postgresql:///?"]
)
def test_a_database_that_cannot_be_used_is_said_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Store(url)
    assert "secret" not in str(caught.value)

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, inspect, select, text
from sqlalchemy.engine import make_url

from convoy.api.refusals import Forbidden, Unauthenticated
from convoy.errors import ConfigError
from convoy.fleet.books.directory import Directory
from convoy.fleet.books.keys import Scope, hint_of
from convoy.fleet.books.ledger import Ledger
from convoy.fleet.books.store import Store, migrate, newest_version
from convoy.fleet.books.tables import API_KEYS, METADATA

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


def shape_of(db: Connection) -> dict[str, object]:
    """Return columns, constraints and indexes of each table."""
    found = inspect(db)
    return {
        table: (
            [(one["name"], repr(one["type"]), one["nullable"]) for one in found.get_columns(table)],
            sorted(str(one["column_names"]) for one in found.get_unique_constraints(table)),
            sorted(str(one["sqltext"]) for one in found.get_check_constraints(table)),
            sorted((one["name"] or "", str(one["column_names"])) for one in found.get_indexes(table)),
            found.get_pk_constraint(table)["constrained_columns"],
            sorted(str(one["constrained_columns"]) for one in found.get_foreign_keys(table)),
        )
        for table in found.get_table_names()
    }


def test_the_migrations_make_the_tables_that_a_new_database_has(store: Store) -> None:
    with store.write() as db:
        new = shape_of(db)
        assert set(new) == {*METADATA.tables, "alembic_version"}
        version = db.scalar(text("SELECT version_num FROM alembic_version"))
        METADATA.drop_all(db)
        db.execute(text("DROP TABLE alembic_version"))
        migrate(db)
        assert shape_of(db) == new
        assert db.scalar(text("SELECT version_num FROM alembic_version")) == version == newest_version()


def test_a_database_opens_again_as_it_was(database_url: str) -> None:
    first = Store(database_url)
    Ledger(first, "here").open_account("ann")
    first.close()
    again = Store(database_url)
    assert Ledger(again, "here").balance("ann") == 0
    again.close()


def change(database_url: str, *statements: str) -> dict[str, object]:
    """Run the statements on a new database with an account, and return its shape then."""
    store = Store(database_url)
    Ledger(store, "here").open_account("ann")
    with store.write() as db:
        for statement in statements:
            db.execute(text(statement))
        shape = shape_of(db)
    store.close()
    return shape


def unchanged(database_url: str) -> tuple[dict[str, object], str | None, str | None]:
    """Return the shape, the version and the one account, without opening it as a `Store`."""
    url = make_url(database_url)
    driver = "sqlite" if url.drivername == "sqlite" else "postgresql+psycopg"
    engine = create_engine(url.set(drivername=driver))
    with engine.connect() as db:
        version = db.scalar(text("SELECT version_num FROM alembic_version"))
        found = shape_of(db), version, db.scalar(text("SELECT name FROM accounts"))
    engine.dispose()
    return found


AS_BEFORE = (
    "ALTER TABLE charges RENAME COLUMN body_mac TO body_hash",
    "ALTER TABLE charges RENAME COLUMN delivered TO retry_is_free",
    "DROP INDEX charges_by_key",
)
_OF_0002 = ("expires_s", "requests_per_minute", "tokens_per_minute", "concurrent_requests")
BEFORE_0002 = (
    *(f"ALTER TABLE api_keys DROP COLUMN {name}" for name in (*_OF_0002, "spend_limit_micro", "spent_micro")),
    "ALTER TABLE charges DROP COLUMN key_hash",
)
STAMPED_0001 = (*BEFORE_0002, "UPDATE alembic_version SET version_num = '0001'")


@pytest.mark.parametrize(
    ("statements", "version"), [(AS_BEFORE + STAMPED_0001, "0001"), (AS_BEFORE, newest_version())]
)
def test_a_database_that_no_migration_leads_from_is_refused_and_stays_as_it_is(
    database_url: str, statements: tuple[str, ...], version: str
) -> None:
    shape = change(database_url, *statements)
    with pytest.raises(
        ConfigError, match=r"an earlier version .* charges lacks body_mac, delivered"
    ) as caught:
        Store(database_url)
    assert "new" in (caught.value.hint or "")
    assert "accounts, keys" in (caught.value.hint or "")
    assert unchanged(database_url) == (shape, version, "ann")


def test_a_database_of_the_first_version_is_brought_up_to_date(database_url: str) -> None:
    change(database_url, *STAMPED_0001)
    again = Store(database_url)
    assert Ledger(again, "here").balance("ann") == 0
    with again.read() as db:
        assert db.scalar(text("SELECT version_num FROM alembic_version")) == newest_version()
    again.close()


@pytest.mark.parametrize(
    "statement", ["UPDATE alembic_version SET version_num = '9999'", "DELETE FROM alembic_version"]
)
def test_a_database_of_a_version_that_is_not_known_is_refused(database_url: str, statement: str) -> None:
    change(database_url, statement)
    with pytest.raises(ConfigError, match=f"has version (9999|none), expected at most {newest_version()}"):
        Store(database_url)


def test_a_database_without_one_of_the_tables_is_refused(database_url: str) -> None:
    change(database_url, "DROP TABLE providers")
    with pytest.raises(ConfigError, match="its table providers lacks identity"):
        Store(database_url)


@pytest.mark.parametrize("text_of", ['revision = "0002"\n', "", 'down_revision = "0003"\n'])
def test_a_migration_whose_revision_is_not_its_file_names_is_an_error(tmp_path: Path, text_of: str) -> None:
    (tmp_path / "versions").mkdir()
    file = tmp_path / "versions" / "v0003_next.py"
    file.write_text('revision = "0003"\ndown_revision = "0002"\n')
    assert newest_version(tmp_path) == "0003"
    file.write_text(text_of)
    with pytest.raises(ConfigError, match=r"v0003_next\.py"):
        newest_version(tmp_path)


@pytest.mark.parametrize(
    "url", ["", "nonsense", "mysql://u:secret@h/d", "sqlite:////nowhere/at/all/fleet.db", "postgresql:///?"]
)
def test_a_database_that_cannot_be_used_is_said_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Store(url)
    assert "secret" not in str(caught.value)


def test_a_database_file_is_its_owners_alone_and_so_is_its_log(tmp_path: Path) -> None:
    file = tmp_path / "fleet.db"
    file.touch(0o644)  # as an earlier start may have left it
    store = Store(f"sqlite:///{file}")
    Ledger(store, "here").open_account("ann")
    modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir()}
    store.close()
    assert modes == dict.fromkeys(("fleet.db", "fleet.db-wal", "fleet.db-shm"), 0o600)

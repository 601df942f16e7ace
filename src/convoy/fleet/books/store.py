"""Open the coordinator's database: SQLite with no set-up, or PostgreSQL by a URL."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    func,
    inspect,
    select,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, OperationalError

from convoy.errors import ConfigError
from convoy.fleet.books.tables import METADATA

# The hint about an account that is not there.
NO_ACCOUNT = "`convoy coordinator usage` lists the accounts"
# Marks a connection that is about to write.
_WRITES = "convoy_writes"
# How long a writer waits for another process's.
_BUSY_S = 10
_MIGRATIONS = resources.files("convoy.fleet.books") / "migrations"
_NEW_DATABASE = (
    "name a new one with --database, or move the file away; its accounts, keys, ledger and approvals of "
    "providers are not taken over"
)
# Alembic defines this table.
_VERSION = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
_SCHEMES = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}


class Store:
    """Hold a database with the tables of `tables`. Threads may share it."""

    def __init__(self, url: str) -> None:
        """Open the database and bring its tables up to date.

        Raises `ConfigError` for an invalid URL, for a database that cannot be reached, and for one of a
        version that cannot be brought up to date. No message shows a password of the URL.
        """
        self._engine = _open(url)
        _make_private(self._engine)
        self._writing = threading.Lock()
        self._log_file = _log_file(self._engine)
        self._claims = ExitStack()
        self.is_postgres = self._engine.dialect.name == "postgresql"
        shown = self._engine.url.render_as_string(hide_password=True)
        try:
            self._make_tables(shown)
        except ConfigError:
            self._engine.dispose()
            raise
        except OperationalError as error:
            self._engine.dispose()
            raise ConfigError(
                f"the database {shown} cannot be used: {type(error.orig).__name__}",
                hint="see that it is there, that its folder may be written to, and its user and password",
            ) from None

    @contextmanager
    def write(self, *, survives_power: bool = True) -> Iterator[Connection]:
        """Yield a transaction: all of it is written, or none of it if something is raised.

        Once it is over it outlives this process, and, unless ``survives_power`` is False, a loss of power.
        """
        # SQLite has one writer at a time, and a writer that finds it busy looks again only after a pause.
        with (
            nullcontext() if self.is_postgres else self._writing,
            self._engine.connect().execution_options(**{_WRITES: True}) as connection,
            connection.begin(),
        ):
            yield connection
        if survives_power:
            # The lock is free by now, so that the next writer need not wait for the disk.
            self.sync()

    def sync(self) -> None:
        """Make the writes so far outlive a loss of power. PostgreSQL sees to that by itself."""
        if self._log_file is not None:
            _sync(self._log_file)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Yield a connection for reading only."""
        with self._engine.connect() as connection:
            yield connection

    def claim(self, instance: str) -> None:
        """Be the only coordinator of that name on this database, until `close` or the end of this process.

        Raises `ConfigError` if another one runs: its held amounts would look like those of a dead one.
        """
        digest = hashlib.sha256(b"convoy coordinator " + instance.encode()).digest()
        file = self._engine.url.database
        if self.is_postgres:
            claimed = self._claim_session(int.from_bytes(digest[:8], signed=True))
        else:
            claimed = not file or self._claim_file(f"{file}-{digest[:8].hex()}.lock")
        if not claimed:
            raise ConfigError(
                f"another coordinator runs as {instance!r} on this database",
                hint="--instance gives this one a name of its own",
            )

    def _claim_session(self, number: int) -> bool:
        session = self._claims.enter_context(self._engine.connect())
        session.execution_options(isolation_level="AUTOCOMMIT")
        return bool(session.scalar(select(func.pg_try_advisory_lock(number))))

    def _claim_file(self, name: str) -> bool:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._claims.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Close every connection."""
        self._claims.close()
        self._engine.dispose()

    def _make_tables(self, shown: str) -> None:
        """Make the tables of a new database, or bring those of an older version up to date.

        Raises `ConfigError`, which names the database as ``shown``, and then has changed nothing.
        """
        newest = newest_version()
        with self.write() as connection:
            names = set(inspect(connection).get_table_names())
            if not names:
                METADATA.create_all(connection)
                _VERSION.metadata.create_all(connection)
                connection.execute(_VERSION.insert().values(version_num=newest))
                return
            has_version = _VERSION.name in names
            version = connection.scalar(select(_VERSION.c.version_num)) if has_version else None
            is_ours = not names.isdisjoint(METADATA.tables)
            if version not in _versions() and (version is not None or is_ours):
                raise ConfigError(
                    f"the database {shown} has version {version or 'none'}, expected at most {newest}",
                    hint=f"a later Convoy may open it; here, {_NEW_DATABASE}",
                )
            if version != newest:
                migrate(connection)
            _check_columns(connection, shown)


def _check_columns(connection: Connection, shown: str) -> None:
    """Raise `ConfigError` if a column is missing: the first version of the tables once was another one."""
    found = inspect(connection)
    names = found.get_table_names()
    for table in METADATA.sorted_tables:
        there = {one["name"] for one in found.get_columns(table.name)} if table.name in names else set()
        missing = [column.name for column in table.columns if column.name not in there]
        if missing:
            raise ConfigError(
                f"the database {shown} is of an earlier version of Convoy, and nothing brings it up to date: "
                f"its table {table.name} lacks {', '.join(missing)}",
                hint=_NEW_DATABASE,
            )


def newest_version(migrations: Traversable = _MIGRATIONS) -> str:
    """Return the newest version of the tables that ``migrations`` lead to.

    Raises `ConfigError` as `_versions`.
    """
    return max(_versions(migrations))


def _versions(migrations: Traversable = _MIGRATIONS) -> set[str]:
    """Return every version of the tables, by the names of the files that lead there.

    Raises `ConfigError` for a file with a revision that differs from its name: a new database would be marked
    with a version that the migrations do not know.
    """
    found = set()
    for file in (migrations / "versions").iterdir():
        named = re.match(r"v(\d{4})_", file.name)
        if named is None:
            continue
        # Read rather than imported: a module of a version imports the whole library of migrations.
        said = re.search(r'^revision = "(.*)"$', file.read_text(encoding="utf-8"), re.MULTILINE)
        if said is None or said[1] != named[1]:
            raise ConfigError(
                f"the migration {file.name} has revision {said[1] if said else 'none'}, expected {named[1]}"
            )
        found.add(named[1])
    return found


def migrate(connection: Connection) -> None:
    """Run the versions that are missing.

    Alembic takes 0.4 s and 10 MB, so call this only if there are some.
    """
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _open(url: str) -> Engine:
    try:
        parsed = make_url(url)
        driver = _SCHEMES[parsed.drivername.split("+")[0]]
        engine = create_engine(parsed.set(drivername=driver), pool_pre_ping=driver != "sqlite")
    except (ArgumentError, KeyError):
        raise ConfigError(
            "the database URL is of no known kind",
            hint="sqlite:///path/to/file.db, or postgresql://user:password@host/database",
        ) from None
    except (NoSuchModuleError, ModuleNotFoundError):
        raise ConfigError(
            "PostgreSQL needs psycopg, which is not installed", hint="pip install 'WHEEL[postgres]'"
        ) from None
    if driver == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin)
    return engine


def _make_private(engine: Engine) -> None:
    """Create SQLite's file for its owner alone, or make it so; SQLite gives its log the same mode.

    Raises `ConfigError` for a file that stays readable by others. Another file that cannot be opened gets
    SQLite's own error later.
    """
    name = engine.url.database
    if engine.dialect.name != "sqlite" or not name or name == ":memory:" or name.startswith("file:"):
        return
    try:
        os.close(os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError:
        return
    for file in (Path(name), Path(f"{name}-wal"), Path(f"{name}-shm")):
        try:
            mode = stat.S_IMODE(file.stat().st_mode)
            if mode & 0o077:
                file.chmod(mode & 0o700)
        except FileNotFoundError:
            continue
        except OSError:
            raise ConfigError(
                f"the database {file} has mode {mode:04o}, expected 0600: others could read it",
                hint=f"chmod 600 {file}, as its owner",
            ) from None


def _set_up_sqlite(connection: Any, _record: object) -> None:
    # `_begin` starts the transactions instead.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # `Store.write` syncs the changes that must outlive a loss of power.
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_S * 1000}")
    cursor.close()


def _begin(connection: Connection) -> None:
    if _WRITES not in connection.get_execution_options():
        # A reader waits for no writer.
        connection.exec_driver_sql("BEGIN")
        return
    # A transaction that reads first and then writes could fail for another's write in between.
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _log_file(engine: Engine) -> Path | None:
    """Return SQLite's log of committed changes, or None.

    SQLite itself syncs the changes that it moves from there.
    """
    name = engine.url.database
    return Path(f"{name}-wal") if engine.dialect.name == "sqlite" and name else None


def _sync(file: Path) -> None:
    try:
        number = os.open(file, os.O_RDWR)
    except FileNotFoundError:
        # The last connection that closed it has moved its content and removed it.
        return
    try:
        os.fsync(number)
    finally:
        os.close(number)

"""Where the coordinator keeps what must outlive it: SQLite with no set-up, or PostgreSQL by a URL."""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import resources
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event, func, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, OperationalError

from convoy.errors import ConfigError

_WRITES = "convoy_writes"  # of a connection that is about to
_BUSY_S = 10  # that a writer waits for another process's
_SCHEMES = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}


class Store:
    """A database whose tables are as `tables` says. Threads may share it."""

    def __init__(self, url: str) -> None:
        """Opens it and brings its tables up to date.

        Raises `ConfigError` for a URL that is none, or a database that cannot be reached; a password in the
        URL is in no message.
        """
        self._engine = _open(url)
        self._writing = threading.Lock()
        self._log_file = _log_file(self._engine)
        self._claims = ExitStack()
        self.is_postgres = self._engine.dialect.name == "postgresql"
        try:
            self._migrate()
        except OperationalError as error:
            self._engine.dispose()
            shown = self._engine.url.render_as_string(hide_password=True)
            raise ConfigError(
                f"the database {shown} cannot be used: {type(error.orig).__name__}",
                hint="see that it is there, that its folder may be written to, and its user and password",
            ) from None

    @contextmanager
    def write(self, *, survives_power: bool = True) -> Iterator[Connection]:
        """A transaction: all of it, or where something is raised none of it.

        Once it is over it outlives this process, and, unless ``survives_power`` is False, a loss of power.
        """
        # SQLite has one writer at a time, and who finds it busy looks again only after a pause
        with (
            nullcontext() if self.is_postgres else self._writing,
            self._engine.connect().execution_options(**{_WRITES: True}) as connection,
            connection.begin(),
        ):
            yield connection
        if survives_power:
            self.sync()  # after the next writer has its turn, which need not wait for the disk

    def sync(self) -> None:
        """What was written outlives a loss of power from here on. PostgreSQL sees to that by itself."""
        if self._log_file is not None:
            _sync(self._log_file)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """For looking only."""
        with self._engine.connect() as connection:
            yield connection

    def claim(self, instance: str) -> None:
        """Be the one coordinator of that name on this database, until `close` or the end of this process.

        Raises `ConfigError` where another one runs: what that holds would look like a dead one's.
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
        """Every connection."""
        self._claims.close()
        self._engine.dispose()

    def _migrate(self) -> None:
        config = Config()
        config.set_main_option("script_location", str(resources.files("convoy.fleet.books") / "migrations"))
        with self.write() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


def _open(url: str) -> Engine:
    try:
        parsed = make_url(url)
        driver = _SCHEMES[parsed.drivername.split("+")[0]]
        engine = create_engine(parsed.set(drivername=driver), pool_pre_ping=driver != "sqlite")
    except (ArgumentError, KeyError):
        raise ConfigError(
            "the database URL is none that is known",
            hint="sqlite:///path/to/file.db, or postgresql://user:password@host/database",
        ) from None
    except (NoSuchModuleError, ModuleNotFoundError):
        raise ConfigError(
            "PostgreSQL needs psycopg, which is not installed", hint="pip install 'convoy-llm[postgres]'"
        ) from None
    if driver == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin)
    return engine


def _set_up_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # SQLAlchemy says when a transaction begins, see below
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")  # `Store.write` syncs what has to outlive a loss of power
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_S * 1000}")
    cursor.close()


def _begin(connection: Connection) -> None:
    if _WRITES not in connection.get_execution_options():
        connection.exec_driver_sql("BEGIN")  # who only reads waits for nobody
        return
    # A transaction that reads first and then writes could fail for another's write in between.
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _log_file(engine: Engine) -> Path | None:
    """Where SQLite writes what was committed; what it has moved from there on it has synced itself."""
    name = engine.url.database
    return Path(f"{name}-wal") if engine.dialect.name == "sqlite" and name else None


def _sync(file: Path) -> None:
    try:
        number = os.open(file, os.O_RDWR)
    except FileNotFoundError:  # moved and removed, by the last one to close it
        return
    try:
        os.fsync(number)
    finally:
        os.close(number)

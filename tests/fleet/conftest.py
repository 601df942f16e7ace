"""A database of its own for each test: SQLite, and PostgreSQL where `make test-postgres` names one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from convoy.fleet.books.store import Store


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/fleet.db"
        return
    server = request.config.getoption("--postgres")
    if not server:
        pytest.skip("no PostgreSQL is named: `make test-postgres` starts one")
    url = make_url(server).set(drivername="postgresql+psycopg")
    name = "convoy_" + "".join(char if char.isalnum() else "_" for char in request.node.name.lower())[:50]
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as db:
        db.execute(text(f'DROP DATABASE IF EXISTS "{name}"'))
        db.execute(text(f'CREATE DATABASE "{name}"'))
    yield url.set(database=name).render_as_string(hide_password=False)
    with engine.connect() as db:
        db.execute(text(f'DROP DATABASE "{name}" WITH (FORCE)'))
    engine.dispose()


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    made = Store(database_url)
    yield made
    made.close()

"""Run the versions over the connection that `books.store.Store` gives: Alembic's entry point."""

from __future__ import annotations

from alembic import context

from convoy.fleet.books.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"], target_metadata=METADATA, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()

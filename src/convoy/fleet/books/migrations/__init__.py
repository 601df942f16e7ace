"""The versions of the coordinator's database, as Alembic runs them.

`env` is Alembic's entry point, and `versions` has one module for each change of the tables. The newest
version equals `books.tables`. Open `versions` first.
"""

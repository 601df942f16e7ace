"""Keep the coordinator's database: accounts, prices, API keys, approved providers and charges.

`store` opens SQLite or PostgreSQL, `tables` defines the tables, and `migrations` brings older databases up
to date. `ledger` keeps balances and charges, `clerk` writes it for an event loop, and `directory` looks up
keys and providers. `price` computes a request's cost in whole numbers. Open `ledger` first.
"""

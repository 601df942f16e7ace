"""Keep the coordinator's database: accounts, prices, API keys, approved providers and charges."""

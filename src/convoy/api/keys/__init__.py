"""Check API keys, and apply each key's limits.

`keys` finds the caller of a request and reads the key file again when it changes. `key_file` is the form
of that file. `key_use` counts requests and tokens of a key against its limits. `failed_keys` slows
addresses that send wrong keys, and `repeats` refuses a request that failed too often. Open `keys` first.
"""

"""Read `convoy.toml` strictly into frozen values.

One file configures a member: its roster, address, limits, model and servers. Keys that are not known, and
values of another type, are refused with the name of the key. The settings' module has the tables and their
defaults; another reads a TOML file with a closed set of keys. Open the settings first.
"""

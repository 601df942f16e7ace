"""Read `convoy.toml` strictly into frozen values.

One file configures a member: its roster, address, limits, model and servers. Keys that are not known, and
values of another type, are refused with the name of the key. `table` has every setting with its default,
`kernels` every kernel with its form, and `toml_file` reads a file with a closed set of keys. `settings` reads
a file, `type_resolution` is for every room that reads values as a type, and `files` and `temporary_folder`
for every room that reads or writes files. `clear_text` has the rule for addresses without TLS.
`mlx_launch` reads what MLX's launcher left in the environment. Open `table` first.
"""

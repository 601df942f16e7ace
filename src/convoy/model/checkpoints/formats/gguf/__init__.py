"""Read GGUF, llama.cpp's files with settings, tokeniser and weights, as the library's model.

`header` reads one file and `split` the files of a split model. `settings` returns the library's config.json,
and `names` the library's names and the layout. `rows` unpacks. A family's row in
`plan.spec.families` has its own names and changes. Open `names` first.
"""

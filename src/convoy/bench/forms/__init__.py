"""Measure a model's memory and speed in each form in which files hold weights.

`files` writes one model in each form, `blocks` with ggml's types and `codes` in the layouts of other
programs. `rates` measures them in turn. Open `files` first.
"""

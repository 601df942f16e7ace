"""The verbs about a model's files: which there are, and how they come, go, and are signed and rounded.

`models` lists those that this machine keeps and good choices, with their fit. `pull` downloads one, and `rm`
removes some. `manifest` hashes and signs a model, and `quantize` writes a checkpoint with fewer bits. No verb
here runs a model. Open the module of the verb.
"""

"""The verbs about a model's files: ``convoy manifest``, ``convoy cache`` and ``convoy quantize``.

`manifest` hashes and signs a model, `cache` shows the files that this machine keeps, and `quantize` writes a
checkpoint with fewer bits. No verb here runs a model. Open the module of the verb.
"""

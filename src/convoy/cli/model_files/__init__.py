"""The verbs about a model's files: ``convoy manifest`` and ``convoy cache``.

`manifest` hashes and signs a model, and `cache` shows the files that this machine keeps. No verb here runs a
model. Open the module of the verb.
"""

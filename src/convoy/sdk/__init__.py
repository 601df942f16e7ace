"""The Python API behind `import convoy`, and the parts of it that the commands share.

`server` starts a model and `client` calls one; `planning` and `parity` compute plans and certificates.
`local_cluster` runs members as processes of this machine, `head` and `models` prepare a serving head,
`endpoint` speaks HTTP, and `speeds` and `names` complete a plan. Nothing here prints.
"""

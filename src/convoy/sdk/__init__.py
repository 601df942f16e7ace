"""The Python API behind `import convoy`, and the parts of it that the commands share.

`server` starts a model and `client` calls one; `planning` and `parity` compute plans and certificates.
`local_cluster` runs members as processes of this machine, `names` names them, `head` and `models` prepare a
serving head from `options`, and `endpoint` speaks HTTP. Nothing here prints.
"""

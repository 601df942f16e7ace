"""A request: its parameters, the checks before it is admitted, and the choices that it generates.

`GenerationRequest` holds token ids and parameters. Admission checks whether it can ever run here, `Choice`
follows one of its sequences to the end of its text, and `Restrictions` lists the tokens that the sampler
may choose. Open `request` first, then the module of `Choice`.
"""

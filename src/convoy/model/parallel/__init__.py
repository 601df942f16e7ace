"""Split layers over the ranks of a stage.

Experts are divided as whole experts, and embeddings and vocabulary by rows. `Ranks` connects a stage's
modules to the collective that turns partial sums into whole ones. Collectives themselves are in
`engine.ranks.sums`. Open the module of `Ranks` first.
"""

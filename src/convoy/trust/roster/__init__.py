"""Sign and check the list of members: text, checks, acceptance, and the change of operators.

`roster` makes and signs the list, `text` is its TOML form, and `check` and `addresses` refuse facts that
cannot be. `authority` judges a roster at one member, and `accepted` keeps the newest on disk. `operator`
hands a cluster to another key; `card` and `newcomer` add a member. Open `roster` first.
"""

"""The parts of `convoy doctor`, `convoy plan` and `convoy verify` that measure, examine or print at length.

The subject of `convoy doctor` is a member's files, read one after another. The printer of `convoy plan`
shows stages, blocks and rules, beside the inputs of its predicted rates. The last part is the search of
`convoy verify --leak`. Open the verb's own module in `cli` first; it names its part here.
"""

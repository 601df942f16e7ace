"""Check a split model against the unsplit one: parity certificates, question sets and the leak search.

`verify` makes a certificate: it runs `prompts` through every cut of `cuts`, in the ways of `runs`, and
`compare` compares the logits with the whole model and with the library. `certificate` holds the result.
`questions` and `score` ask for answers that are right or wrong, and `leak` measures what activations
reveal. Open `verify` first.
"""

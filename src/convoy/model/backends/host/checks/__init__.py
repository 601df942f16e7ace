"""Self-checks at start: prove on this machine that a row's bits do not depend on its batch.

`selfcheck` runs the proof for each kernel and refuses exact mode where it fails. Others compare compiled
attention and whole compiled layers with torch, bit for bit, try a stage's own layers when they are loaded,
and digest the machine's arithmetic. Open `selfcheck` first.
"""

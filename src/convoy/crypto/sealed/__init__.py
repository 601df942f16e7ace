"""Seal requests and answers of blind mode (HPKE), and files in chunks.

`request` seals a request to one provider's key, `answer` seals the answer in ordered chunks of which the
last is marked, and `padding` hides lengths behind a few sizes. `chunks` seals a file that is written and
read in pieces. Open `request` first.
"""

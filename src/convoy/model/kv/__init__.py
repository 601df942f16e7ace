"""Block tables and pools of a stage, and the description of a batch over them.

`pools` accounts for blocks in tables of integers, and `pool` holds the K and V of each layer. `packed`
describes a batch: it tells attention which queries meet which keys. Recurrent layers keep a state for each
sequence in slots. `KvStore`'s implementation for a host is in `backends.host`. Open `pools` first.
"""

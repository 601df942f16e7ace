"""Block tables and pools of a stage, and the description of a batch over them.

Tables hold integers only and account for blocks; pools hold the K and V of each layer. A packed batch
tells attention which queries meet which keys. Recurrent layers keep a state for each sequence in slots.
`KvStore`'s implementation for a host is in `backends.host`. Open the accounting of pools first.
"""

"""Distribute weights: heads and peers serve tensors to each other, and verify them.

`PeerWeights` is the source of a peer's part of a model: own files, a hub, its head, or another peer.
`HeadWeightServer` and `PeerWeightServer` answer requests, `PartClient` sends them, and `HeadWeights`
serves a head without the whole model. All compare digests with the manifest. Open the module of
`PeerWeights` first.
"""

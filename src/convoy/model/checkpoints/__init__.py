"""Read checkpoints: headers, manifests, and the tensors that a stage owns.

`formats` unpacks quantised files, `hub` downloads them, and `store` keeps parts that arrive over the network.
"""

"""Read checkpoints: headers, manifests, and the tensors that a stage owns.

`formats` unpacks quantised files, `hub` downloads them, and `store` keeps parts that arrive over the network.
`source` resolves a name, a directory or a file; the checkpoint maps its tensors on demand; the manifest has
the digest of each. Slices cut a tensor for one rank. Open `source` first.
"""

"""Read a model's dimensions from its config.json, without opening a weight.

`model` has the facts that a plan needs, `family` the differences between families as data, `heads` and
`cache` the K/V of each layer and its cache groups, and `tensors` and `weights` the names and sizes of a
layer's tensors. `config` checks every value that it reads. `registry` finds the row of a family in
`families`, `quantization` gives the form of stored weights, and `sharding` one rank's part of a stage. Open
`model` first, then `family`.
"""

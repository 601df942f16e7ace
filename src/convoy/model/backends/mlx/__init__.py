"""Stages on MLX: Apple's GPU through Metal, or any processor where mlx has a CPU build.

Open `stage` first: it implements `Stage`. `weights` reads a stage's tensors, and keeps MLX's codes as stored.
`matrices` multiplies by them, and computes MLPs and experts. `layer` computes a decoder layer, `attention`
its attention over the rows of a step, `rotation` the angles. `kv` holds keys and values. `arrays` converts
between torch and MLX, and runs everything on the one thread that owns a stage. `model.mlx_device` answers for
this machine: versions, memory, speed.
"""

"""Stages on MLX: Apple's GPU through Metal, or any processor where mlx has a CPU build.

Open `stage` first: it implements `Stage`. `supported` tells which models run. `weights` reads a stage's
tensors, and keeps MLX's codes as stored; `assemble` makes layers of them. `layers` computes a decoder layer.
`kv` holds keys, values and states. `arrays` converts between torch and MLX, and runs everything on the one
thread that owns a stage. `model.mlx_device` answers for this machine: versions, memory, speed.
"""

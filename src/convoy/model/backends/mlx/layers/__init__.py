"""The layers of a stage on MLX.

Open `layer` first: a decoder layer, and attention with keys and values for each head. `attention` attends
over the rows of a step, `latent` over DeepSeek's latents, and `delta` runs Qwen3.5's recurrence. `matrices`
multiplies by plain matrices and codes, and has the MLP. `experts` chooses experts, `rotation` has angles.
"""

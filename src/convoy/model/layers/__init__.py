"""Layers in exact form, put in place of the library's.

Attention of fixed shape, norms and MLPs, experts, rotary positions, the gated
delta net of Qwen3.5, the latent attention of DeepSeek V3, and the streams of DeepSeek V4. `compressed`
holds the attention of the latter. Open `exact` first: it replaces the parts of a decoder layer.
"""

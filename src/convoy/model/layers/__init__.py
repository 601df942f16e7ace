"""Layers in exact form: attention, norms, experts, rotary positions, recurrent and latent attention."""

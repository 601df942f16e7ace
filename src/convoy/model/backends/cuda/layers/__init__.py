"""Run the layers of single families on a device.

- `latent`: attention over one latent a token (DeepSeek V3);
- `delta`: the recurrence of a gated delta net (Qwen3.5);
- `experts`: products of tokens with the experts that they chose.

Open `experts` first: it is registered with the library as our attention is.
"""

"""Test exact tables of rotations: powers, sines and cosines are computed in float64 and rounded once."""

from __future__ import annotations

import numpy as np
import torch

from convoy.model.layers.rope import RopeUse, Rotations
from support.tiny_models import build_model


def test_an_exact_table_rounds_each_number_once() -> None:
    rotary = build_model("odd").model.rotary_emb
    positions, use = torch.arange(300), RopeUse()
    found = Rotations(rotary, 512, is_exact=True).look_up([use], positions, 299)[use]
    width = rotary.inv_freq.numel()
    powers = 10_000.0 ** (np.arange(0, 2 * width, 2, dtype=np.float32) / np.float32(2 * width)).astype(float)
    frequencies = np.float32(1.0) / powers.astype(np.float32)
    angles = (np.arange(300, dtype=np.float32)[:, None] * frequencies).astype(float)
    for table, function in zip(found, (np.cos, np.sin), strict=True):
        expected = function(angles).astype(np.float32)
        assert np.array_equal(table[0, :, :width].numpy(), expected)


def test_a_table_of_the_library_keeps_its_own_bits() -> None:
    rotary = build_model("odd").model.rotary_emb
    positions, use = torch.arange(64), RopeUse()
    found = Rotations(rotary, 64).look_up([use], positions, 63)[use]
    assert all(map(torch.equal, found, rotary(torch.empty(0), positions[None])))

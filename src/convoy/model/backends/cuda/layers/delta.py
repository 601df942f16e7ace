"""Run the gated delta net of Qwen3.5 on a device: the recurrence of `model.layers.delta`, token by token.

A slot holds a sequence's state and the inputs that the next tokens' convolution still covers, float32. One
program keeps some columns of one head's state in registers and takes the row's tokens in order, as the
fused recurrent kernels of flash-linear-attention do (https://github.com/fla-org/flash-linear-attention).
A row that begins a sequence begins with a state of zeros, whatever its slot holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import triton.language as tl
from torch import nn

from convoy.model.backends.cuda.kernels.attention import Launch
from convoy.model.backends.cuda.kernels.language import kernel, next_power
from convoy.model.kv.delta_batch import DeltaShape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from convoy.model.layers.delta import GatedDeltaNet

# Channels of a program of the convolution, and columns of a state in one of the recurrence.
_CHANNELS = 64
_COLUMNS = 8


class DeviceStatePool:
    """Hold the slots of one layer: [slots, taps - 1, mixed_width] and [slots, heads, key_dim, value_dim]."""

    def __init__(self, shape: DeltaShape, num_slots: int, device: torch.device) -> None:
        self.shape = shape
        self.past = torch.zeros(num_slots, shape.num_taps - 1, shape.mixed_width, device=device)
        self.states = torch.zeros(num_slots, shape.num_heads, shape.key_dim, shape.value_dim, device=device)

    def copy(self, source: int, target: int) -> None:
        """Copy all that one slot holds to another."""
        for numbers in (self.past, self.states):
            numbers[target].copy_(numbers[source])


@dataclass(frozen=True)
class SlotRows:
    """Hold the rows of a step: ``tables``, ``rows`` and ``launches`` as in `kernels.attention.attend`.

    A row's table has one block, its slot. ``group`` is that of the launches' shape.
    """

    tables: torch.Tensor
    rows: torch.Tensor
    launches: tuple[Launch, ...]
    group: int


class StateStep(Protocol):
    """Describe the inputs of one layer in a step."""

    @property
    def states(self) -> DeviceStatePool:
        """Return the layer's slots."""

    @property
    def slot_rows(self) -> SlotRows:
        """Return the rows of the step."""


class DeviceDeltaNet(nn.Module):
    """Compute the layer with the linears and numbers of the host's module."""

    def __init__(self, net: GatedDeltaNet) -> None:
        super().__init__()
        self.layer_idx = net.layer_idx
        self.inputs, self.gate, self.out = net.inputs, net.gate, net.out
        self.taps, self.dt_bias, self.A_log, self.norm = net.taps, net.dt_bias, net.A_log, net.norm
        self._eps = net.eps

    def forward(
        self, hidden_states: torch.Tensor, batch: Mapping[int, StateStep], **_: object
    ) -> torch.Tensor:
        """Map [1, T, hidden] to the same shape."""
        x, step = hidden_states[0], batch[self.layer_idx]
        pool, rows = step.states, step.slot_rows
        widths = [pool.shape.mixed_width, 2 * pool.shape.num_heads]
        mixed, gates = torch.split(self.inputs(x), widths, dim=-1)
        mixed = convolve(mixed, self.taps, pool, rows)
        found = run_states(mixed, gates, self.A_log, self.dt_bias, pool, rows)
        found = nn.functional.rms_norm(found, found.shape[-1:], self.norm.float(), self._eps)
        gate = nn.functional.silu(self.gate(x).float()).view_as(found)
        out: torch.Tensor = self.out((found * gate).to(x.dtype).view(len(x), -1))
        return out[None]


def convolve(mixed: torch.Tensor, taps: torch.Tensor, pool: DeviceStatePool, rows: SlotRows) -> torch.Tensor:
    """Return [T, mixed_width], float32: each row behind its past, convolved by channel, and silu of that.

    ``taps`` is float32 [taps, mixed_width]. The past of each sequence's next row is stored.
    """
    width, num_taps = pool.shape.mixed_width, pool.shape.num_taps
    out = torch.empty(len(mixed), width, dtype=torch.float32, device=mixed.device)
    parts = -(-width // _CHANNELS)
    same = {"TAPS": num_taps, "WIDTH": width, "CHANNELS": _CHANNELS}
    for launch in rows.launches:
        tokens = launch.block_rows // rows.group
        convolve_kernel[len(launch.tiles), parts](
            *(out, mixed, taps, pool.past, rows.tables, rows.rows, launch.tiles, mixed.stride(0)),
            TOKENS=tokens,
            TOKENS_PAD=next_power(tokens),
            **same,
        )
    # In a launch of its own, because the tiles of a row read the past that this replaces.
    keep_past_kernel[len(rows.rows), parts](
        *(pool.past, mixed, rows.tables, rows.rows, mixed.stride(0)),
        PAST_PAD=next_power(num_taps - 1),
        **same,
    )
    return out


def run_states(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    pool: DeviceStatePool,
    rows: SlotRows,
) -> torch.Tensor:
    """Return [T, heads, value_dim], float32: what the states give to each token's query.

    ``mixed`` float32 [T, mixed_width] has queries, keys and values. ``gates`` [T, 2 * heads] has each head's
    share and decay before their activations. The states are extended by all tokens.
    """
    shape = pool.shape
    out = torch.empty(len(mixed), shape.num_heads, shape.value_dim, dtype=torch.float32, device=mixed.device)
    recur_kernel[len(rows.rows), shape.num_heads, -(-shape.value_dim // _COLUMNS)](
        *(out, mixed, gates, a_log, dt_bias, pool.states, rows.tables, rows.rows, gates.stride(0)),
        scale=shape.key_dim**-0.5,
        HEADS=shape.num_heads,
        KEY_HEADS=shape.num_key_heads,
        KEY=shape.key_dim,
        KEY_PAD=next_power(shape.key_dim),
        VALUE=shape.value_dim,
        WIDTH=shape.mixed_width,
        COLUMNS=_COLUMNS,
        num_warps=1,
    )
    return out


# fmt: off


@kernel
def convolve_kernel(out: tl.tensor, mixed: tl.tensor, taps: tl.tensor, past: tl.tensor, tables: tl.tensor,
                    rows: tl.tensor, tiles: tl.tensor, stride: tl.tensor, TOKENS: tl.constexpr,
                    TOKENS_PAD: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr,
                    CHANNELS: tl.constexpr) -> None:
    """Convolve some channels of the tokens of one tile. Grid (tiles, WIDTH / CHANNELS)."""
    tile = tl.program_id(0)
    row = rows + tl.load(tiles + 2 * tile) * 5
    first = tl.load(tiles + 2 * tile + 1)
    num_tokens = tl.load(row + 1)
    if first < num_tokens:
        offset, begins = tl.load(row).to(tl.int64), tl.load(row + 2) == 0
        slot = tl.load(tables + tl.load(row + 3)).to(tl.int64)
        lane = tl.arange(0, TOKENS_PAD)
        token = first + lane
        used = (lane < TOKENS) & (token < num_tokens)
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        known = channel < WIDTH
        total = tl.zeros([TOKENS_PAD, CHANNELS], dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            source = token + (tap - TAPS + 1)
            here = used & (source >= 0)
            x = tl.load(mixed + (offset + source)[:, None] * stride + channel[None, :],
                        mask=here[:, None] & known[None, :], other=0.0).to(tl.float32)
            before = used & (source < 0) & (begins == 0)
            x += tl.load(past + (slot * (TAPS - 1) + source + TAPS - 1)[:, None] * WIDTH + channel[None, :],
                         mask=before[:, None] & known[None, :], other=0.0)
            total += x * tl.load(taps + tap * WIDTH + channel, mask=known, other=0.0)[None, :]
        total = total * tl.sigmoid(total)
        tl.store(out + (offset + token)[:, None] * WIDTH + channel[None, :], total,
                 mask=used[:, None] & known[None, :])


@kernel
def keep_past_kernel(past: tl.tensor, mixed: tl.tensor, tables: tl.tensor, rows: tl.tensor,
                     stride: tl.tensor, PAST_PAD: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr,
                     CHANNELS: tl.constexpr) -> None:
    """Store the last inputs of one row, for some channels. Grid (rows, WIDTH / CHANNELS)."""
    row = rows + tl.program_id(0) * 5
    num_tokens = tl.load(row + 1)
    if num_tokens > 0:
        offset, begins = tl.load(row).to(tl.int64), tl.load(row + 2) == 0
        slot = tl.load(tables + tl.load(row + 3)).to(tl.int64)
        lane = tl.arange(0, PAST_PAD)
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        known = (lane < TAPS - 1)[:, None] & (channel < WIDTH)[None, :]
        source = num_tokens + lane - (TAPS - 1)
        x = tl.load(mixed + (offset + source)[:, None] * stride + channel[None, :],
                    mask=known & (source >= 0)[:, None], other=0.0).to(tl.float32)
        own = past + slot * (TAPS - 1) * WIDTH + channel[None, :]
        # Read before anything is stored: a row of few tokens keeps a part of the old past.
        x += tl.load(own + (source + TAPS - 1)[:, None] * WIDTH,
                     mask=known & ((source < 0) & (begins == 0))[:, None], other=0.0)
        tl.debug_barrier()
        tl.store(own + lane[:, None] * WIDTH, x, mask=known)


@kernel
def recur_kernel(out: tl.tensor, mixed: tl.tensor, gates: tl.tensor, a_log: tl.tensor, dt_bias: tl.tensor,
                 states: tl.tensor, tables: tl.tensor, rows: tl.tensor, stride: tl.tensor, scale: tl.tensor,
                 HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, KEY_PAD: tl.constexpr,
                 VALUE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    """Run the tokens of one row over some columns of one head's state. Grid (rows, heads, columns)."""
    row = rows + tl.program_id(0) * 5
    head = tl.program_id(1)
    num_tokens = tl.load(row + 1)
    if num_tokens > 0:
        offset = tl.load(row).to(tl.int64)
        slot = tl.load(tables + tl.load(row + 3)).to(tl.int64)
        lane = tl.arange(0, KEY_PAD)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        of_key, of_value = lane < KEY, column < VALUE
        both = of_key[:, None] & of_value[None, :]
        place = states + ((slot * HEADS + head) * KEY + lane)[:, None] * VALUE + column[None, :]
        state = tl.load(place, mask=both & (tl.load(row + 2) > 0), other=0.0)
        key_head = head // (HEADS // KEY_HEADS)
        growth = tl.exp(tl.load(a_log + head).to(tl.float32))
        shift = tl.load(dt_bias + head).to(tl.float32)
        for token in range(num_tokens):
            own = mixed + (offset + token) * WIDTH
            query = tl.load(own + key_head * KEY + lane, mask=of_key, other=0.0)
            key = tl.load(own + (KEY_HEADS + key_head) * KEY + lane, mask=of_key, other=0.0)
            value = tl.load(own + 2 * KEY_HEADS * KEY + head * VALUE + column, mask=of_value, other=0.0)
            gate = gates + (offset + token) * stride + head
            share = tl.sigmoid(tl.load(gate).to(tl.float32))
            step = tl.load(gate + HEADS).to(tl.float32) + shift
            # softplus, which is its argument itself where that is large
            step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
            # The library's value of the added constant.
            query = query * (scale * tl.rsqrt(tl.sum(query * query, 0) + 1e-6))
            key = key * tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
            state = state * tl.exp(-growth * step)
            change = (value - tl.sum(state * key[:, None], 0)) * share
            state = state + key[:, None] * change[None, :]
            found = tl.sum(state * query[:, None], 0)
            at = out + ((offset + token) * HEADS + head) * VALUE + column
            tl.store(at, found, mask=of_value)
        tl.store(place, state, mask=both)

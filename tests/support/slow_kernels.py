"""Compute the CUDA kernels' results in plain torch, slowly: the reference that tests compare them with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from convoy.model.backends.cuda.kernels.attention import LOG2_E, DeviceHeadShape, Pool


def attend_slowly(
    query: torch.Tensor,
    pool: Pool,
    shape: DeviceHeadShape,
    rows: Sequence[tuple[int, int, Sequence[int]]],
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention [T, num_heads * value_dim] in float32.

    ``rows`` are (position of the first token, number of tokens, blocks). Their tokens follow each other in
    ``query`` [T, num_heads * head_dim]. A table with fewer blocks than the row needs is a ring. ``sinks``
    is as in `attend`.
    """
    found, done = [], 0
    for start, num_tokens, blocks in rows:
        end = start + num_tokens
        part = query[done : done + num_tokens].float()
        part = part.view(num_tokens, shape.num_heads, shape.head_dim).transpose(0, 1)
        keys = _gather(pool.keys, blocks, end, shape)
        values = _gather(pool.values, blocks, end, shape)
        scores = part @ keys.transpose(1, 2) * shape.scale
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        positions = torch.arange(start, end, device=query.device)[:, None]
        key = torch.arange(end, device=query.device)
        hidden = key > positions
        if shape.window is not None:
            hidden |= key <= positions - shape.window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            # A sink takes part in the softmax but has no value, so its value here is zero.
            sink = (sinks.float() / LOG2_E)[:, None, None].expand(-1, num_tokens, 1)
            scores = torch.cat((scores, sink), dim=-1)
            values = torch.cat((values, torch.zeros_like(values[:, :1])), dim=1)
        out = torch.softmax(scores, dim=-1) @ values
        found.append(out.transpose(0, 1).reshape(num_tokens, -1))
        done += num_tokens
    return torch.cat(found)


def _gather(blocks: torch.Tensor, table: Sequence[int], end: int, shape: DeviceHeadShape) -> torch.Tensor:
    """Return the first ``end`` positions of a pool as float32 [num_heads, end, dim]."""
    index = [table[i // shape.block_size % len(table)] for i in range(end)]
    offsets = torch.arange(end, device=blocks.device) % shape.block_size
    per_head = blocks[torch.tensor(index, device=blocks.device), :, offsets].float()
    return per_head.transpose(0, 1).repeat_interleave(shape.group, dim=0)


def rotate_slowly(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [T, heads, head_dim] rotated, in float32. ``cos`` and ``sin`` are [T, head_dim / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def norm_slowly(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()

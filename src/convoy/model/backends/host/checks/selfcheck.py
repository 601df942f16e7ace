"""Prove on this machine, at start-up, that a row's bits do not depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from convoy.config.kernels import (
    AUTO,
    EXACT,
    EXACT_KERNELS,
    HOST_KERNELS,
    INT8_KERNELS,
    PLAIN,
    host_kernels_text,
)
from convoy.errors import ModelError, SelfCheckError, UsageError
from convoy.model.kernels.activation import exp_, tanh_
from convoy.model.kernels.linear import LEAST_ROWS, PackedLinear, pad_rows
from convoy.model.kernels.registry import require_int8
from convoy.model.kernels.stored.linear import exact_available, float_linear
from convoy.model.kv.packed import KEY_BLOCK, SAFE_ROWS, HeadShape, describe_group
from convoy.model.kv.pool import make_pool
from convoy.model.kv.pools import BlockTable
from convoy.model.layers.attention import LayerBatch, attend
from convoy.plan.spec.cache import CacheGroup
from convoy.wire.messages.control import Row

# (in, out): wide, narrow, odd and tiny. A stage also checks its own shapes when it is loaded.
_SHAPES = ((40, 105), (44, 40), (256, 704), (704, 256), (256, 2048))
# Fewer rows are padded, see `linear.padded_count`.
_ROW_COUNTS = (LEAST_ROWS, LEAST_ROWS + 1, 17, 64)
# Enough for every size of tile.
_CHECK_TOKENS = 281
_FEWEST_ROWS = 4
# Rows on which a stage's layers are checked.
CHECK_ROWS = 70


def check_options(kernel: str, block_size: int) -> None:
    """Raise ModelError for an unknown kernel, and for a block size that does not divide a key block."""
    if kernel not in HOST_KERNELS:
        *most, last = HOST_KERNELS
        raise ModelError(f"kernel {kernel!r} is not known, expected {', '.join(most)} or {last}")
    if block_size < 1 or KEY_BLOCK % block_size:
        raise ModelError(f"block size {block_size} does not divide {KEY_BLOCK}")


def check_exact(num_threads: int | None = None) -> None:
    """Raise SelfCheckError naming the difference, unless exact mode holds on 1 and ``num_threads`` threads.

    Takes about a third of a second. It covers a sample of shapes. `check_linears` covers those of a stage.
    """
    if not exact_available():
        raise SelfCheckError("this build of torch has no packed oneDNN linears")
    threads = sorted({1, num_threads or torch.get_num_threads()})
    linears = [float_linear(_numbers(rows, width), _numbers(rows)) for width, rows in _SHAPES]
    linears += [
        float_linear(_numbers(105, 40), None, activation) for activation in ("silu", "gelu", "gelu_new")
    ]
    with torch.inference_mode(), _threads_restored():
        for linear in linears:
            check_linear(linear, threads)
        _check_elementwise(threads)
        for heads in ((4, 2, 8), (4, 1, 64), (3, 3, 20)):
            _check_attention(_shape(*heads), threads)


def check_linears(parts: Iterable[nn.Module]) -> None:
    """Check one packed linear of each shape and class in ``parts``, on 1 and the current number of threads.

    Where one does not hold with compiled code, none of them uses compiled code.
    """
    linears = [m for part in parts for m in part.modules() if isinstance(m, PackedLinear)]
    threads = sorted({1, torch.get_num_threads()})
    with torch.inference_mode(), _threads_restored():
        shapes = {(type(m), m.in_features, m.out_features, m.activation): m for m in linears}.values()
        try:
            for linear in shapes:
                check_linear(linear, threads)
        except SelfCheckError:
            if not any(linear.takes_lone_rows for linear in linears):
                raise
            # Compiled code is no condition of exact mode: without it, torch's operators may still hold.
            for linear in linears:
                linear.leave_native()
            for linear in shapes:
                check_linear(linear, threads)


def check_heads(groups: Iterable[CacheGroup]) -> None:
    """Check attention with the heads of these cache groups, on 1 and the current number of threads."""
    threads = sorted({1, torch.get_num_threads()})
    known = list(groups)
    shapes = {_head_shape(group) for group in known if group.attends}
    # Compressed groups have second keys, by which a query chooses its entries; their width is checked too.
    dims = {group.index_dim for group in known} - {0}
    with torch.inference_mode(), _threads_restored():
        for shape in shapes | {_shape(2, 1, dim) for dim in dims}:
            _check_attention(shape, threads)


def check_rows(
    run: Callable[[torch.Tensor, torch.Tensor, list[int]], torch.Tensor], hidden_size: int, vocab_size: int
) -> None:
    """Check the layers of a stage as a whole, on 1 and the current number of threads.

    ``run`` takes hidden states [n, hidden_size], token ids [n] and the chunks in which to run them, and
    returns hidden states. This check is for layers that have parts besides linears and heads, such as
    routers.
    """
    threads = sorted({1, torch.get_num_threads()})
    hidden, tokens = _numbers(CHECK_ROWS, hidden_size), torch.arange(CHECK_ROWS) * 7 % vocab_size
    expected: torch.Tensor | None = None
    with torch.inference_mode(), _threads_restored():
        for count in threads:
            torch.set_num_threads(count)
            for chunks in ([CHECK_ROWS], [1, 2, 17, 5, CHECK_ROWS - 25]):
                found = run(hidden, tokens, chunks)
                expected = found if expected is None else expected
                _same(f"running the layers in chunks on {count} threads", expected, found)


def least_tile_rows(head_dim: int) -> int:
    """Return the fewest rows (4, 8 or 16) of attention's matmuls that have the bits of more rows here.

    A decode has few rows for each K/V head, and padding them to 16 would be most of its work.
    """
    queries, keys, values = (_numbers(6, rows, head_dim) for rows in (2 * SAFE_ROWS, KEY_BLOCK, KEY_BLOCK))
    least = SAFE_ROWS
    with torch.inference_mode(), _threads_restored():
        for count in sorted({1, torch.get_num_threads()}, reverse=True):
            torch.set_num_threads(count)
            while least > _FEWEST_ROWS and _rows_agree(queries, keys, values, least // 2):
                least //= 2
        return least


def choose_kernel(requested: str, num_threads: int | None = None) -> str:
    """Return the kernel to run. "auto" gives exact mode where it holds, else the plain kernel.

    `why_not_exact` tells why exact mode does not hold. Raises SelfCheckError if exact mode or 8-bit products
    were requested by name and do not hold here, UsageError for an unknown name.
    """
    if requested not in {AUTO, *HOST_KERNELS}:
        raise UsageError(f"kernel {requested!r} is not known, expected {host_kernels_text()}")
    if requested in {*EXACT_KERNELS, *INT8_KERNELS}:
        check_exact(num_threads)
    if requested in INT8_KERNELS:
        require_int8()
    if requested == AUTO:
        return PLAIN if why_not_exact(num_threads) else EXACT
    return requested


def why_not_exact(num_threads: int | None = None) -> str:
    """Return why exact mode is refused on this machine, or "" if it holds."""
    try:
        check_exact(num_threads)
    except SelfCheckError as error:
        return error.message
    return ""


def available_kernels(requested: str, num_threads: int | None = None) -> list[str]:
    """Return the kernels that this machine can run under the setting ``requested``, best first.

    Rounded weights and rows come last: they are used where the head requests them by name. Raises as
    `choose_kernel` does.
    """
    kernel = choose_kernel(requested, num_threads)
    if requested != AUTO or kernel != EXACT:
        return [kernel]
    rounded = [name for name in EXACT_KERNELS if name != EXACT]
    return [EXACT, PLAIN, *rounded, *INT8_KERNELS]


@contextmanager
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _numbers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(20)
    return torch.randn(*shape, generator=generator)


def _same(what: str, expected: torch.Tensor, found: torch.Tensor) -> None:
    if not torch.equal(expected, found):
        raise SelfCheckError(
            f"exact mode does not hold here: {what} changes a row's bits",
            hint='set kernel = "plain-f32"; split runs then agree to rounding, not to the bit',
        )


def check_linear(linear: PackedLinear, threads: list[int]) -> None:
    """Check that a row's bits depend neither on the rows beside it nor on the number of threads.

    Raises SelfCheckError.
    """
    x = _numbers(70, linear.in_features)
    expected: torch.Tensor | None = None
    for count in threads:
        torch.set_num_threads(count)
        whole = linear(x)
        expected = whole if expected is None else expected
        name = f"a linear of {linear.in_features} to {linear.out_features} on {count} threads"
        _same(name, expected, whole)
        for rows in _ROW_COUNTS:
            # Varying offsets, so that a row's place in the batch is covered as well as the number of rows.
            start = 1 + rows % 5
            _same(f"{name} with {rows} rows", expected[start : start + rows], linear(x[start : start + rows]))
        _same(f"{name} with a lone row", expected[7:8], linear(pad_rows(x[7:8]))[:1])
        if linear.activation is None:
            few = slice(3, 3 + LEAST_ROWS)
            product = linear.times(x[few], expected[few] - 1)
            _same(f"{name} times a factor", linear.times(x, expected - 1)[few], product)


def _check_elementwise(threads: list[int]) -> None:
    kernels: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "exp": lambda t: exp_(t.clone()),
        "tanh": lambda t: tanh_(t.clone()),
        "rsqrt": lambda t: torch.rsqrt(t * t + 1e-6),
        "an RMS norm": lambda t: nn.functional.rms_norm(t, (1031,), t.new_ones(1031), 1e-6),
        "sum": lambda t: t.sum(-1, keepdim=True).expand_as(t),
    }
    x = _numbers(67, 1031)
    for name, kernel in kernels.items():
        torch.set_num_threads(1)
        expected = kernel(x)
        for count in threads:
            torch.set_num_threads(count)
            for rows in (67, 33, 5, 2):
                _same(f"{name} on {count} threads", expected[3 : 3 + rows], kernel(x[3 : 3 + rows].clone()))


def _rows_agree(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: int) -> bool:
    """Return whether batched matmuls of ``rows`` rows have the bits of those of twice `SAFE_ROWS`."""
    shares = torch.bmm(queries, keys.transpose(1, 2))
    outs = torch.bmm(shares, values)
    for num in (1, 2, len(queries)):
        for start in range(0, queries.shape[1] - rows + 1, rows // 2):
            part = slice(start, start + rows)
            few = torch.bmm(queries[:num, part].contiguous(), keys[:num].transpose(1, 2))
            if not torch.equal(few, shares[:num, part]):
                return False
            if not torch.equal(torch.bmm(shares[:num, part].contiguous(), values[:num]), outs[:num, part]):
                return False
    return True


def _head_shape(group: CacheGroup) -> HeadShape:
    # Two groups of heads show as much as many.
    few = min(group.num_kv_heads, 2)
    shape = _shape(group.num_heads // group.num_kv_heads * few, few, group.head_dim)
    least = max(shape.least_rows, least_tile_rows(group.value_dim))
    return replace(
        shape,
        value_dim=group.value_dim,
        latent=group.is_latent,
        least_rows=least,
        kv_dtype=group.host_dtype,
    )


def _shape(num_heads: int, num_kv_heads: int, head_dim: int) -> HeadShape:
    num_blocks = -(-_CHECK_TOKENS // 16)
    return HeadShape(num_heads, num_kv_heads, head_dim, 16, num_blocks, least_rows=least_tile_rows(head_dim))


def _check_attention(shape: HeadShape, threads: list[int]) -> None:
    length = _CHECK_TOKENS
    inputs = [_numbers(length, shape.num_heads, shape.head_dim), _numbers(length, *shape.kv_rows)]
    torch.set_num_threads(1)
    expected = _attend_in_chunks(shape, inputs, [length])
    for count in threads:
        torch.set_num_threads(count)
        for chunks in ([length], [1, 6, 60, 1, 64, 19, 130], [length - 5, 1, 3, 1]):
            found = _attend_in_chunks(shape, inputs, chunks)
            _same(f"attention in chunks on {count} threads", expected, found)


def _attend_in_chunks(shape: HeadShape, inputs: list[torch.Tensor], chunks: list[int]) -> torch.Tensor:
    blocks = list(range(shape.num_blocks))
    pool = make_pool(shape)
    table = BlockTable([blocks[::-1]])
    outs = []
    start = 0
    for num_tokens in chunks:
        group = describe_group([(Row(0, start, num_tokens, 0), table)], 0, shape)
        query, kv = (tensor[start : start + num_tokens] for tensor in inputs)
        outs.append(attend(query, kv, LayerBatch(group, pool)))
        start += num_tokens
    return torch.cat(outs)

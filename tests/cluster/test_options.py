"""What follows from the kernels of a plan, and kernels that a device has in place of a host's."""

from __future__ import annotations

import pytest

from convoy.cluster.offer import agree_dtype, agree_kernels, can_take_part, without_mlx
from convoy.cluster.options import HeadOptions
from convoy.config.kernels import CUDA_INT4, CUDA_INT8, CUDA_KERNEL, MLX_BF16, MLX_F32, MLX_KERNELS, form_of
from convoy.errors import Incompatible, UsageError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.device import kernel_on
from convoy.wire.messages.control import Hello


def hello(*kernels: str) -> Hello:
    return Hello("test", ["float32", "bfloat16"], list(kernels), 1 << 30, 1, "test", False)


def test_a_prompt_is_cut_into_long_chunks_only_where_every_stage_is_on_a_device() -> None:
    options = HeadOptions()
    devices, mixed = (
        options.for_kernels([CUDA_KERNEL, CUDA_INT8]),
        options.for_kernels(["exact-f32", CUDA_KERNEL]),
    )
    assert (devices.chunk_tokens, devices.step_tokens) == (2048, 2048)
    assert (mixed.chunk_tokens, mixed.step_tokens) == (256, 512)
    # a window's ring has room for the longest row
    rows = [one.demand(block_size=16, max_context=4096).max_row_tokens for one in (devices, mixed, options)]
    assert rows == [2048, 256, 256]
    assert HeadOptions(prefill_chunk=64).for_kernels([CUDA_KERNEL]).chunk_tokens == 64


def test_more_sequences_run_at_once_on_cuda_where_their_kv_has_room() -> None:
    spec = ModelSource.resolve("demo-mini").spec

    def at_once(options: HeadOptions, kernel: str, num_blocks: int) -> int:
        rooms = [num_blocks] * len(spec.cache_groups)
        options = options.for_kernels([kernel])
        return options.limits(spec, num_stages=1, num_blocks=rooms, block_size=16).max_batch

    rooms = (64, 6_400, 1_000_000)
    assert [at_once(HeadOptions(), CUDA_KERNEL, room) for room in rooms] == [32, 100, 256]
    for elsewhere in ("exact-f32", *MLX_KERNELS):
        assert [at_once(HeadOptions(), elsewhere, room) for room in rooms] == [32, 32, 32]
    assert [at_once(HeadOptions(max_batch=200), CUDA_KERNEL, room) for room in rooms] == [200, 200, 200]
    wanted = [
        HeadOptions().for_kernels([kernel]).demand(block_size=16, max_context=1024).most
        for kernel in (CUDA_KERNEL, "exact-f32")
    ]
    assert wanted == [256 * 64, 32 * 64]


def test_what_is_asked_of_hosts_is_on_a_device_what_it_has_in_its_place() -> None:
    asked = ("auto", "exact-q8", "exact-q4")
    assert [kernel_on("cuda:0", name) for name in asked] == [CUDA_KERNEL, CUDA_INT8, CUDA_INT4]
    for name in ("exact-f32", "plain-f32", "int8-q8"):
        with pytest.raises(UsageError, match="does not run on cuda"):
            kernel_on("cuda:0", name)


def test_members_on_devices_run_each_its_own_kernel_beside_hosts() -> None:
    hellos = {"alpha": hello("int8-q8"), "beta": hello(CUDA_INT8), "gamma": hello(CUDA_KERNEL)}
    kernels = agree_kernels(hellos, "alpha")
    assert kernels == {"alpha": "int8-q8", "beta": CUDA_INT8, "gamma": CUDA_KERNEL}
    auto = hello(CUDA_KERNEL, CUDA_INT8, CUDA_INT4)
    assert agree_kernels({"alpha": hello("int8-q8"), "beta": auto}, "alpha")["beta"] == CUDA_INT8
    assert agree_kernels({"alpha": hello("exact-q4"), "beta": auto}, "alpha")["beta"] == CUDA_INT4
    assert agree_kernels({"alpha": hello(CUDA_INT4), "beta": auto}, "alpha")["beta"] == CUDA_INT4
    assert agree_kernels({"alpha": hello("plain-f32"), "beta": auto}, "alpha")["beta"] == CUDA_KERNEL
    assert agree_dtype(hellos, "alpha", kernels.values()) == "bfloat16"
    assert can_take_part(hellos["alpha"], {CUDA_INT8})
    assert not can_take_part(hellos["gamma"], {"exact-f32"})


def test_a_mac_on_auto_computes_on_its_host_where_mlx_does_not_do() -> None:
    mac, given = hello(MLX_BF16, MLX_F32, "exact-f32", "plain-f32"), hello(MLX_BF16, MLX_F32)
    assert agree_kernels({"alpha": hello("exact-f32", "plain-f32"), "beta": mac}, "alpha")["beta"] == MLX_BF16
    assert without_mlx(mac).kernels == ["exact-f32", "plain-f32"]
    assert without_mlx(given) is given
    # The head insists on exact mode, or its texts began under it.
    both = {"alpha": "exact-f32", "beta": "exact-f32"}
    assert agree_kernels({"alpha": hello("exact-f32"), "beta": mac}, "alpha") == both
    assert (
        agree_kernels({"alpha": hello("exact-f32", "plain-f32"), "beta": mac}, "alpha", both.values()) == both
    )
    with pytest.raises(Incompatible, match="beta can run mlx-bf16, mlx-f32"):
        agree_kernels({"alpha": hello("exact-f32"), "beta": given}, "alpha")


def test_rounded_weights_of_a_device_are_counted_with_their_scales() -> None:
    assert form_of(CUDA_INT8).linear_bytes(30, 128) == 30 * (128 + 4 * 2)
    assert form_of(CUDA_INT4).linear_bytes(30, 128) == 30 * (64 + 2 * 4)
    # A size that is no multiple of a group, and lm_head.
    assert (
        form_of(CUDA_INT4).linear_bytes(30, 100)
        == form_of(CUDA_INT4).linear_bytes(30, 100, head=True)
        == 3240
    )

"""A server that Python starts: its refusals, and that its processes end with it."""

from __future__ import annotations

import gc
import signal
import socket
from collections.abc import Iterator

import psutil
import pytest

import convoy
from convoy.errors import ConfigError, UsageError


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children() if "convoy" in child.cmdline()]


def test_a_server_needs_a_model() -> None:
    with pytest.raises(UsageError, match="no model is named"):
        convoy.serve()


def test_a_config_goes_with_no_option_of_local_members() -> None:
    with pytest.raises(UsageError, match="config came with options of local members"):
        convoy.serve("demo-mini", members=2, config="convoy.toml")


def test_a_computation_that_goes_with_no_kernel_is_refused_before_a_process_starts() -> None:
    for kernel, compute in (("plain-f32", "int8"), ("auto", "fast")):
        with pytest.raises(UsageError, match=f"compute is '?{compute}"):
            convoy.serve("demo-mini", kernel=kernel, compute=compute)
    with pytest.raises(UsageError, match="config came with options of local members"):
        convoy.serve("demo-mini", compute="int8", config="convoy.toml")
    assert children() == []


@pytest.mark.long
def test_8_bit_products_answer_over_two_members() -> None:
    with convoy.serve("demo-mini", members=2, kernel="exact-q8", compute="int8", device="cpu") as server:
        assert server.chat("What is 2+3?", max_tokens=8).text == "5"


def test_a_config_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read absent\.toml"):
        convoy.serve("demo-mini", config="absent.toml")


def test_spans_that_leave_a_layer_out_are_refused_before_a_process_starts() -> None:
    with pytest.raises(convoy.errors.SpanError):
        convoy.serve("demo-mini", members=2, layers=["0:0,output", "2:3"], device="cpu")
    assert children() == []


def test_a_start_that_fails_leaves_no_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken"):
            convoy.serve("demo-mini", members=2, device="cpu", port=port)
    assert children() == []


def test_after_the_end_the_collector_sees_all_objects_again() -> None:
    # A large import freezes all objects. Objects that are frozen at exit are reported as leaks.
    gc.freeze()
    with pytest.raises(convoy.errors.SpanError):
        convoy.serve("demo-mini", members=2, layers=["0:0,output", "2:3"], device="cpu")
    assert gc.get_freeze_count() == 0


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, also if this process was started with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.long
@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_program_ends_the_members() -> None:
    urls = []

    def program() -> None:
        with convoy.serve("demo-mini", members=2, device="cpu", num_threads=1) as server:
            urls.append(server.url)
            assert len(children()) == 1
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        program()
    assert children() == []
    assert gc.get_freeze_count() == 0
    with pytest.raises(convoy.errors.PeerUnreachable):
        convoy.connect(urls[0]).models()

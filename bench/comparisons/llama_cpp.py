"""Measure llama.cpp on the same file, with the programs that comparisons/llama_cpp.sh builds.

bench/METHODOLOGY.md explains the figures and their limits.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from convoy.bench.forms.rates import DECODE, PREFILL, RateOptions, Rates
from convoy.bench.report.clock import Deadline
from convoy.errors import ConvoyError
from convoy.sdk.local_cluster import Cores, pin_process
from convoy.transport.ports import free_ports

BATCHED_BENCH, RPC_SERVER = "llama-batched-bench", "ggml-rpc-server"
# llama.cpp gives each sequence a multiple of this.
_CONTEXT_STEP = 256
_POLL_S = 0.05
# One line of `--output-format jsonl`: a flat object with the rate of decodes.
_RESULT = re.compile(r"\{[^{}]*\"speed_tg\"[^{}]*\}")


def find_programs(folder: Path) -> Path:
    """Return the folder itself. Raises ConvoyError if a program is not there."""
    for name in (BATCHED_BENCH, RPC_SERVER):
        if not (folder / name).is_file():
            raise ConvoyError(
                f"{folder} has no {name}", hint="build both with bench/comparisons/llama_cpp.sh"
            )
    return folder


class LlamaRates:
    """Run llama-batched-bench on one file.

    ``servers`` are addresses of RPC servers that share the layers. The program may use ``cores``, or those
    of this thread.
    """

    def __init__(
        self,
        programs: Path,
        model: Path,
        num_threads: int,
        options: RateOptions,
        deadline: Deadline,
        *,
        servers: Sequence[str] = (),
        cores: Cores | None = None,
    ) -> None:
        self._command = [
            *(str(programs / BATCHED_BENCH), "-m", str(model), "-ub", "512", "--output-format", "jsonl"),
            *("-t", str(num_threads), "-tb", str(num_threads)),
            *(("--rpc", ",".join(servers), "-ngl", "99") if servers else ()),
        ]
        self._options, self._deadline, self._cores = options, deadline, cores

    def measure(self) -> Rates:
        """Measure the prompt, then decodes of each count. Raises ConvoyError if the program fails."""
        options = self._options
        found: dict[tuple[str, int], float] = {}
        if options.prompt_tokens:
            (line,) = self._run(options.prompt_tokens, 1, (1,))
            found[PREFILL, options.prompt_tokens] = float(line["speed_pp"])
        for line in self._run(options.context, options.steps, options.concurrent):
            found[DECODE, int(line["pl"])] = float(line["speed_tg"])
        return found

    def _run(self, prompt: int, tokens: int, counts: Sequence[int]) -> list[dict[str, float]]:
        each = -(-(prompt + tokens) // _CONTEXT_STEP) * _CONTEXT_STEP
        sizes = ("-c", str(each * max(counts)), "-npp", str(prompt), "-ntg", str(tokens))
        command = [*self._command, *sizes, "-npl", ",".join(map(str, counts))]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            # Apart: a warning may end up in the middle of a line of results.
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=_environment(),
        ) as process:
            if self._cores is not None:
                pin_process(process.pid, self._cores)
            try:
                text, told = process.communicate(timeout=self._deadline.left_s())
            except BaseException as error:
                process.kill()
                if isinstance(error, subprocess.TimeoutExpired):
                    # Raises, as the time is over.
                    self._deadline.left_s()
                raise
        # A message may stand before a result on its line.
        found = [json.loads(result) for result in _RESULT.findall(text)]
        if process.returncode or len(found) != len(counts):
            last = ((told or text).splitlines() or ["no output"])[-1]
            counted = f"{len(found)} of {len(counts)} results"
            raise ConvoyError(f"{BATCHED_BENCH} ended with {process.returncode} and {counted}: {last}")
        return found


@contextmanager
def rpc_servers(programs: Path, cores: Sequence[Cores], deadline: Deadline) -> Iterator[list[str]]:
    """Yield the addresses of an RPC server of one thread on each of ``cores``. They end with the block.

    Raises ConvoyError at the deadline.
    """
    running: list[subprocess.Popen[bytes]] = []
    ports = free_ports(len(cores))
    try:
        for port, own in zip(ports, cores, strict=True):
            command = [str(programs / RPC_SERVER), "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
            # Silent: the server prints a line for each connection.
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            pin_process(running[-1].pid, own)
        for port in ports:
            _wait(port, deadline)
        yield [f"127.0.0.1:{port}" for port in ports]
    finally:
        for process in running:
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    """Return this process's environment without the spins that `convoy` sets for its own threads."""
    return {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}


def _wait(port: int, deadline: Deadline) -> None:
    """Return when a program listens. Raises ConvoyError at the deadline."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=deadline.left_s()).close()
        except OSError:
            time.sleep(_POLL_S)
        else:
            return

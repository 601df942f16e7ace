"""Measure a server's steady rates on a CUDA device: ``python -m comparisons.cuda.server FILE``.

The server runs in a process of its own, and so do clients, each with some of the streams, so that no client's
interpreter limits the rate. Every stream asks ``/v1/completions`` with a random prompt of token ids. Each
``--flags`` is a way to serve; a round starts a server for each of them, one after another. The file is
written anew after every part.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

MODEL = os.environ.get("CONVOY_BENCH_MODEL", "synthetic:llama-3-8b")
CONTEXT, ANSWER = 512, 256
STREAMS = (1, 16, 64, 256)
SETTINGS: dict[str, dict[str, float]] = {"greedy": {"temperature": 0.0}, "t1": {"temperature": 1.0}}
ARRIVING = 2048
_VOCAB = 100_000
_STREAMS_OF_A_CLIENT = 32
_START_S = 300.0


async def _stream(port: int, body: dict[str, Any]) -> list[float]:
    """Send one request, and return when it was sent and when each of its events came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    times = [time.monotonic()]
    began = False
    while chunk := await reader.read(1 << 16):
        if not began and b" 200 " not in chunk[:32]:
            raise RuntimeError(chunk[:500].decode(errors="replace"))
        began = True
        times += [time.monotonic()] * chunk.count(b'"text":')
    writer.close()
    return times


async def _client(port: int, bodies: Sequence[dict[str, Any]]) -> list[list[float]]:
    return list(await asyncio.gather(*(_stream(port, body) for body in bodies)))


def _as_client() -> None:
    """Run the client's process: a line with the port and the bodies comes, and a line with the times goes."""
    port, bodies, *every_s = json.loads(sys.stdin.readline())
    if every_s:
        asyncio.run(_arrive(port, every_s[0], bodies[0]))
    sys.stdout.write(json.dumps(asyncio.run(_client(port, bodies))) + "\n")


async def _arrive(port: int, every_s: float, body: dict[str, Any]) -> None:
    """Send a request every ``every_s`` seconds until the process ends, and print a line for each answer."""

    async def ask() -> None:
        times = await _stream(port, body)
        sys.stdout.write(f"{times[-1] - times[0]:.4f}\n")
        sys.stdout.flush()

    async with asyncio.TaskGroup() as tasks:
        for number in itertools.count():
            # The first id is another one, so that no prefix is found.
            body = {**body, "prompt": [number, *body["prompt"][1:]]}
            tasks.create_task(ask())
            await asyncio.sleep(every_s)


@contextmanager
def _arriving(port: int, every_s: float, seed: int, vocab: int) -> Iterator[list[float]]:
    """Let prompts of `ARRIVING` tokens arrive. The list gets the seconds of each answer in the end."""
    if not every_s:
        yield []
        return
    drawn = random.Random(-seed)  # noqa: S311 - not a secret
    prompt = [drawn.randrange(vocab) for _ in range(ARRIVING)]
    body = {"prompt": prompt, "max_tokens": 1, "stream": True, "temperature": 0.0}
    command = [sys.executable, "-m", "comparisons.cuda.server", "--client"]
    answers: list[float] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(json.dumps([port, [body], every_s]) + "\n")
        client.stdin.close()
        try:
            yield answers
        finally:
            client.terminate()
            answers += map(float, client.stdout)


def measure(
    port: int,
    streams: int,
    setting: str,
    seed: int,
    answer: int,
    *,
    context: int = CONTEXT,
    vocab: int = _VOCAB,
    every_s: float = 0.0,
) -> dict[str, object]:
    """Return the rate of ``streams`` at once while all of them run, and the times between their tokens.

    Prompts have ``context`` random tokens below ``vocab``. With ``every_s``, a prompt of `ARRIVING` tokens
    comes that often meanwhile.
    """
    drawn = random.Random(seed)  # noqa: S311 - not a secret
    bodies = [
        {
            "prompt": [drawn.randrange(vocab) for _ in range(context)],
            "max_tokens": answer,
            "stream": True,
            "ignore_eos": True,
            "seed": number,
            **SETTINGS[setting],
        }
        for number in range(streams)
    ]
    with _arriving(port, every_s, seed, vocab) as arrived:
        times = _ask(port, bodies)
    first = sorted(one[1] - one[0] for one in times)
    begin, end = max(one[1] for one in times), min(one[-1] for one in times)
    num_tokens = sum(begin < at <= end for one in times for at in one)
    gaps = sorted(b - a for one in times for a, b in pairwise(one[1:]) if begin < b <= end)
    return {
        "streams": streams,
        "setting": setting,
        "arrivals_every_s": every_s,
        "arrivals": len(arrived),
        "tokens_per_s": round(num_tokens / (end - begin), 1),
        "window_s": round(end - begin, 2),
        "p50_ms": round(1000 * statistics.median(gaps), 2),
        "p99_ms": round(1000 * gaps[int(0.99 * len(gaps))], 2),
        "first_p50_ms": round(1000 * statistics.median(first), 1),
        "first_p99_ms": round(1000 * first[int(0.99 * len(first))], 1),
        "events_per_stream": round(statistics.mean(map(len, times)) - 1, 2),
    }


def _ask(port: int, bodies: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Send all requests at once from several processes, and return the times of each one's events."""
    command = [sys.executable, "-m", "comparisons.cuda.server", "--client"]
    groups = [bodies[at : at + _STREAMS_OF_A_CLIENT] for at in range(0, len(bodies), _STREAMS_OF_A_CLIENT)]
    clients = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in groups
    ]
    for client, group in zip(clients, groups, strict=True):
        assert client.stdin is not None
        client.stdin.write(json.dumps([port, group]) + "\n")
        client.stdin.close()
    times: list[list[float]] = []
    for client in clients:
        assert client.stdout is not None
        times += json.loads(client.stdout.readline())
        client.wait()
    return times


@contextmanager
def serving(port: int, flags: Sequence[str], log: Path) -> Iterator[None]:
    """Run a server, and wait until it answers."""
    command = [sys.executable, "-m", "convoy", "run", MODEL, "--members", "1", "--port", str(port), *flags]
    with tempfile.TemporaryDirectory() as home, log.open("ab") as out:
        environment = {**os.environ, "CONVOY_HOME": home}
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            end_s = time.monotonic() + _START_S
            while not _answers(port):
                if server.poll() is not None or time.monotonic() > end_s:
                    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
                time.sleep(0.5)
            yield
        finally:
            server.terminate()
            server.wait(30)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--client", action="store_true")
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)))
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--answer", type=int, default=ANSWER)
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a prompt")
    parser.add_argument("--vocab", type=int, default=_VOCAB, help="token ids of prompts are below this")
    parser.add_argument(
        "--arrivals", type=float, default=0.0, help=f"seconds between {ARRIVING}-token prompts"
    )
    parser.add_argument("--port", type=int, default=8771)
    parser.add_argument("--flags", action="append", help="flags of `convoy run`, in one word; repeatable")
    chosen = parser.parse_args()
    if chosen.client:
        _as_client()
        return
    assert chosen.file is not None
    ways: list[str] = chosen.flags or [""]
    rows: list[dict[str, object]] = []
    for number in range(chosen.rounds):
        # Each round begins with another way, so that a machine that slows down meets all of them.
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            flags = shlex.split(way)
            with serving(chosen.port, flags, chosen.file.with_suffix(".log")):
                for row in _measure_all(chosen, number):
                    rows.append({**row, "round": number, "flags": flags})
                    sys.stdout.write(f"{rows[-1]}\n")
                    sys.stdout.flush()
                    chosen.file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _measure_all(chosen: argparse.Namespace, number: int) -> Iterator[dict[str, object]]:
    """Yield a row for each size and setting, once their kernels and graphs are made."""
    prompts = {"context": chosen.context, "vocab": chosen.vocab}
    sizes = [int(size) for size in chosen.streams.split(",")]
    for size in sizes:
        measure(chosen.port, size, "t1", 1000 + size, chosen.answer, **prompts)
    for size, setting in itertools.product(sizes, chosen.settings.split(",")):
        seed = 10 * size + number
        yield measure(chosen.port, size, setting, seed, chosen.answer, **prompts)
        if chosen.arrivals:
            seed += 5
            yield measure(chosen.port, size, setting, seed, chosen.answer, **prompts, every_s=chosen.arrivals)


if __name__ == "__main__":
    main()

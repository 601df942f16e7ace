"""Measure the processor time of an idle head with open pages: ``python bench/page_streams.py``.

Start `convoy run` of the bundled small model over real processes, open streams of the status as pages do, and
count the processor time of the head and of the processes that it started for HTTP, without its members.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import httpx
import psutil
import typer

_PAGE = re.compile(r"page: (http://\S+?)/ ")
# In this time a head measures its own speed once, for the forecast, and caches fill.
_SETTLE_S = 15.0


def measure(
    pages: Annotated[int, typer.Option(min=1, help="Pages open at once.")] = 10,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each measurement.")] = 30.0,
    members: Annotated[int, typer.Option(min=1, help="Members of the cluster.")] = 3,
) -> None:
    """Print one JSON value: per cent of a core, without pages and with them, and the events of each page."""
    command = ["run", "demo-mini", "--members", str(members), "--port", "0"]
    with _started(command) as (head, url):
        time.sleep(_SETTLE_S)
        without, _ = _share(head, seconds, {})
        with _reading(url, pages) as events:
            time.sleep(_SETTLE_S)
            alone, each = _share(head, seconds, events)
    names = {"pages": pages, "members": members, "seconds": seconds}
    shares = {"percent_without_pages": round(without, 3), "percent_with_pages": round(alone, 3)}
    typer.echo(json.dumps({**names, **shares, "events_of_a_page_per_s": round(each, 2)}))


@contextmanager
def _started(command: list[str]) -> Iterator[tuple[psutil.Process, str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "convoy", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = next(found for line in process.stdout if (found := _PAGE.search(line)))
        yield psutil.Process(process.pid), found[1]
    finally:
        process.terminate()
        process.communicate()


def _share(head: psutil.Process, seconds: float, events: dict[int, int]) -> tuple[float, float]:
    """Return the per cent of a core that the head took, and the events of a page per second."""
    began_s, cpu_s, num_events = time.monotonic(), _processor_s(head), sum(events.values())
    time.sleep(seconds)
    took_s = time.monotonic() - began_s
    each = (sum(events.values()) - num_events) / max(1, len(events)) / took_s
    return 100 * (_processor_s(head) - cpu_s) / took_s, each


def _processor_s(head: psutil.Process) -> float:
    ours = [head, *(one for one in head.children(recursive=True) if "join" not in one.cmdline())]
    return sum(one.cpu_times().user + one.cpu_times().system for one in ours)


@contextmanager
def _reading(url: str, pages: int) -> Iterator[dict[int, int]]:
    """Read the status on this many connections while the block runs. Yield the events of each."""
    events = dict.fromkeys(range(pages), 0)
    ended = threading.Event()

    def read(number: int) -> None:
        accept = {"accept": "text/event-stream"}
        with httpx.stream("GET", f"{url}/status", headers=accept, timeout=60) as answer:
            for line in answer.iter_lines():
                events[number] += line.startswith("data: ")
                if ended.is_set():
                    return

    threads = [threading.Thread(target=read, args=(number,)) for number in events]
    for thread in threads:
        thread.start()
    try:
        yield events
    finally:
        ended.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    typer.run(measure)

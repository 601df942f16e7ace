"""Render chat templates in separate, reused processes, with bounded time, memory and output."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from convoy.errors import RequestError, Unavailable
from convoy.model.text.template_process import DONE, FAILED, LENGTH, NO_MEMORY, REFUSED, TOO_LONG

_PROGRAM = "convoy.model.text.template_process"
_MAX_PROCESSES = 4
_MAX_IDLE = 2
_START_S = 60.0
_LOOK_S = 0.05
_MAX_READ = 1 << 16


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limit the resources of one rendering.

    ``seconds`` count the process's own processor time, so that no honest template fails on a busy machine.
    ``starved_factor`` times as many may pass on the clock.
    """

    seconds: float = 2.0
    starved_factor: float = 10.0
    max_output_bytes: int = 4 * 1024 * 1024
    max_memory_bytes: int = 512 * 1024 * 1024


class TemplateRenderer:
    """Manage a template and the processes that render it. Thread-safe; processes start when first needed."""

    def __init__(
        self, template: str, variables: Mapping[str, str], limits: RenderLimits | None = None
    ) -> None:
        self.limits = limits or RenderLimits()
        opening = {
            "template": template,
            "variables": dict(variables),
            "seconds": self.limits.seconds,
            "max_output_bytes": self.limits.max_output_bytes,
            "max_memory_bytes": self.limits.max_memory_bytes,
        }
        self._opening = _frame(opening)
        self._places = threading.BoundedSemaphore(_MAX_PROCESSES)
        self._idle: list[_Process] = []
        self._finalizer = weakref.finalize(self, _end_all, self._idle)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text of ``variables``, such as ``messages``, as JSON values.

        Raises RequestError if the template refuses them, fails or exceeds a limit, and Unavailable if no
        process can be started.
        """
        frame = _frame(dict(variables))
        with self._places:
            process = self._take()
            spent = True
            try:
                status, text = process.ask(frame, self._is_late(process))
                spent = status not in {DONE, REFUSED, FAILED}
            finally:
                if spent or len(self._idle) >= _MAX_IDLE:
                    process.end()
                else:
                    self._idle.append(process)
        if status == DONE:
            return text
        raise _refusal(status, text, self.limits)

    @property
    def idle_pids(self) -> tuple[int, ...]:
        """Return the ids of the processes that wait for a rendering."""
        return tuple(process.pid for process in tuple(self._idle))

    def close(self) -> None:
        """End the processes; a later rendering starts new ones."""
        _end_all(self._idle)

    def _take(self) -> _Process:
        with contextlib.suppress(IndexError):
            while True:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.end()
        return _Process.started(self._opening, self.limits)

    def _is_late(self, process: _Process) -> Callable[[], bool]:
        """Return a function that tells whether the rendering that begins now has used up its time."""
        began_s, cpu_s, limits = time.monotonic(), process.cpu_s(), self.limits

        def is_late() -> bool:
            waited_s = time.monotonic() - began_s
            if waited_s < limits.seconds:
                return False
            starved = waited_s < limits.seconds * limits.starved_factor
            return not starved or process.cpu_s() - cpu_s >= limits.seconds

        return is_late


class _Process:
    """Hold one process and its two pipes."""

    def __init__(self, process: subprocess.Popen[bytes], max_answer_bytes: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._to, self._from = process.stdin.fileno(), process.stdout.fileno()
        self._max_answer_bytes = max_answer_bytes
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self._process.pid

    @classmethod
    def started(cls, opening: bytes, limits: RenderLimits) -> _Process:
        """Return a process that is ready to render. Raises Unavailable."""
        try:
            process = subprocess.Popen(
                # -P: a file in the working directory is no module of ours.
                [sys.executable, "-P", "-m", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # A traceback may hold a prompt.
                stderr=subprocess.DEVNULL,
                # Ctrl-C is for the parent.
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise _unavailable(f"cannot be started: {error.strerror or error}") from error
        made = cls(process, limits.max_output_bytes + 1)
        deadline_s = time.monotonic() + _START_S
        try:
            made.ask(opening, lambda: time.monotonic() > deadline_s)
        except RequestError:
            made.end()
            raise _unavailable("did not start") from None
        except BaseException:
            made.end()
            raise
        return made

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def cpu_s(self) -> float:
        """Return the processor time that it has used; infinity once it has ended."""
        try:
            used = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return float("inf")
        return float(used.user + used.system)

    def ask(self, frame: bytes, is_late: Callable[[], bool]) -> tuple[int, str]:
        """Return the status and the text of the answer.

        Raises RequestError; the process cannot be used again then.
        """
        unsent, answer = memoryview(frame), bytearray()
        with selectors.DefaultSelector() as ready:
            ready.register(self._from, selectors.EVENT_READ)
            ready.register(self._to, selectors.EVENT_WRITE)
            while (size := self._size(answer)) is None or len(answer) < size:
                if is_late():
                    raise RequestError(
                        "the model's chat template did not end in time on these messages",
                        param="messages",
                        code="chat_template_limit",
                        hint="shorten the messages, or look for a fault in the template",
                    )
                for key, _ in ready.select(_LOOK_S):
                    if key.fd == self._from:
                        answer += self._receive()
                    else:
                        unsent = unsent[self._send(unsent) :]
                        if not unsent:
                            ready.unregister(self._to)
        if unsent or len(answer) > size:
            raise _ended()
        return answer[LENGTH.size], answer[LENGTH.size + 1 :].decode("utf-8", "surrogatepass")

    def end(self) -> None:
        """Kill the process. May be called twice."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _size(self, answer: bytearray) -> int | None:
        """Return the size in bytes of the whole answer, once its length has been received."""
        if len(answer) < LENGTH.size:
            return None
        size: int = LENGTH.unpack_from(answer)[0]
        if not 1 <= size <= self._max_answer_bytes:
            raise _ended()
        return LENGTH.size + size

    def _receive(self) -> bytes:
        data = os.read(self._from, _MAX_READ)
        if not data:
            raise _ended()
        return data

    def _send(self, data: memoryview) -> int:
        try:
            return os.write(self._to, data)
        except BrokenPipeError:
            raise _ended() from None


def _frame(value: object) -> bytes:
    data = json.dumps(value, ensure_ascii=False, check_circular=False).encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(data)) + data


def _refusal(status: int, text: str, limits: RenderLimits) -> RequestError:
    if status == REFUSED:
        return RequestError(f"the model's chat template refused: {text}", param="messages")
    if status == TOO_LONG:
        reason = f"writes more than {limits.max_output_bytes} bytes"
    elif status == NO_MEMORY:
        reason = f"needs more than {limits.max_memory_bytes >> 20} MiB of memory"
    else:
        return RequestError(f"the model's chat template fails on these messages: {text}", param="messages")
    return RequestError(f"the model's chat template {reason}", param="messages", code="chat_template_limit")


def _ended() -> RequestError:
    return RequestError(
        "the process that renders the model's chat template ended on these messages",
        param="messages",
        code="chat_template_limit",
    )


def _unavailable(reason: str) -> Unavailable:
    text = f"the process that renders chat templates {reason}"
    return Unavailable(text, public="chat templates cannot be rendered now")


def _end_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().end()

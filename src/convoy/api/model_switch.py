"""Let requests for several models wait for each other, because one model is loaded at a time.

A request for the loaded model runs at once, unless requests for another one wait. Those wait until the
running requests have ended. Then their model is loaded, and all requests for it that wait begin together.
So no model waits for ever, and each change serves as many requests as it can.

An unload holds no request up: it happens once none runs, or is refused after the time to wait.

Every method runs on the event loop's thread. Loads and unloads run on another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import anyio.to_thread

from convoy.api.refusals import ModelNotLoaded
from convoy.config.table import SERVE
from convoy.errors import ConvoyError, StageLost

_log = logging.getLogger(__name__)


OnChange = Callable[[str | None, str], None]


class Loader(Protocol):
    """Declare the part of `convoy.cluster.model_loader.ModelLoader` that the switch needs."""

    loaded: str | None

    def check_fit(self, name: str, /) -> None:
        """Raise `CapacityError` if the members cannot hold a model."""

    def load(self, name: str, /) -> None:
        """Unload the present model and load this one. Raises `ConvoyError`."""

    def unload(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SwitchOptions:
    """Hold the limits of waiting requests, and when an idle model is unloaded.

    ``keep_alive_s`` None keeps it. Requests say how long their model stays only if the operator chose to
    unload models: with ``keep_alive_s``, or with ``knows_several`` models. ``later`` calls a function after
    some seconds, as `loop.call_later` does; None takes that of the running loop. ``on_change`` is told of
    each change: the loaded model, or None, and a line for the operator.
    """

    max_waiting: int = SERVE.max_waiting
    wait_s: float = SERVE.model_wait_s
    keep_alive_s: float | None = SERVE.keep_alive_s
    knows_several: bool = False
    later: Callable[[float, Callable[[], None]], Any] | None = None
    on_change: OnChange = lambda _loaded, _line: None


class _Waiter:
    """Hold a request that waits until a model is loaded, or with ``unloads`` until it is not."""

    def __init__(self, name: str, *, unloads: bool) -> None:
        self.name = name
        self.unloads = unloads
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def wanted(self) -> str | None:
        """Return the model to load, or None to load none."""
        return None if self.unloads else self.name

    def fail(self, error: ConvoyError) -> None:
        """End the wait with ``error``."""
        if not self.future.done():
            self.future.set_exception(error)

    def admit(self) -> bool:
        """End the wait. Return False if it has ended otherwise."""
        if self.future.done():
            return False
        self.future.set_result(None)
        return True


class ModelSwitch:
    """Admit requests to the loaded model, and change it when the waiting ones want another."""

    def __init__(self, loader: Loader, options: SwitchOptions | None = None) -> None:
        self._loader = loader
        self._options = options or SwitchOptions()
        self._keep_s = self._options.keep_alive_s
        self._num_running = 0
        self._waiting: list[_Waiter] = []
        self._changing: asyncio.Task[None] | None = None
        # The models that the running change unloads and loads.
        self._concerned: frozenset[str | None] = frozenset()
        # Counts uses of the model, so that a timer of an earlier idle time does nothing.
        self._use = 0
        # Monotonic time of the last request's end.
        self._idle_from_s = time.monotonic()

    @property
    def loaded(self) -> str | None:
        """Return the name of the loaded model."""
        return self._loader.loaded

    @property
    def takes_wishes(self) -> bool:
        """Return whether requests say how long their model stays."""
        return self._options.keep_alive_s is not None or self._options.knows_several

    @property
    def expires_in_s(self) -> float | None:
        """Return the seconds until the loaded model is unloaded if no request comes; None for never."""
        if self._keep_s is None or self._keep_s < 0:
            return None
        idle_s = 0.0 if self._num_running else time.monotonic() - self._idle_from_s
        return max(0.0, self._keep_s - idle_s)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that wait for their model."""
        return len(self._waiting)

    def begin(self) -> None:
        """Count the time without a request from now on."""
        self._advance()

    def fail(self, error: ConvoyError) -> None:
        """End all waiting requests with ``error``. A change that runs goes on."""
        for waiter in self._waiting:
            waiter.fail(error)

    @asynccontextmanager
    async def hold(
        self, name: str, keep_alive_s: float | None = None, *, may_shorten: bool = False
    ) -> AsyncIterator[None]:
        """Keep a model loaded inside the block, and load it first if needed.

        ``keep_alive_s`` replaces the setting for the time after this request, if `SwitchOptions` let it. A
        shorter time needs ``may_shorten``. Raises `CapacityError` for a model that does not fit, and
        `ModelNotLoaded` for one request too many or after the time to wait. Raises the error of a load that
        failed.
        """
        queued = any(not one.unloads for one in self._waiting)
        if queued or self._changing is not None or self._loader.loaded != name:
            await self._wait(_Waiter(name, unloads=False))
        else:
            self._num_running += 1
        self._use += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._idle_from_s = time.monotonic()
            self._keep_s = self._kept_s(keep_alive_s, may_shorten=may_shorten)
            self._advance()

    async def load(self, name: str) -> None:
        """Load a model and leave it loaded. Raises as `hold` does."""
        async with self.hold(name):
            pass

    async def unload(self, name: str) -> None:
        """Unload a model once no request for it runs. Raises as `hold` does.

        A load of it that runs ends first. Nothing happens if it is not loaded then.
        """
        if self._loader.loaded == name or name in self._concerned:
            await self._wait(_Waiter(name, unloads=True))

    def _kept_s(self, asked_s: float | None, *, may_shorten: bool) -> float | None:
        """Return how long the model stays after a request that asked for that time."""
        own_s = self._options.keep_alive_s
        if asked_s is None or not self.takes_wishes:
            return own_s
        is_shorter = asked_s >= 0 and (own_s is None or asked_s < own_s)
        return own_s if is_shorter and not may_shorten else asked_s

    async def _wait(self, waiter: _Waiter) -> None:
        if len(self._waiting) >= self._options.max_waiting:
            raise self._refusal(f"{len(self._waiting)} requests wait for their model already")
        name = waiter.wanted
        self._waiting.append(waiter)
        try:
            if name is not None and name != self._loader.loaded:
                # Say at once what does not fit, while the present model runs on.
                await anyio.to_thread.run_sync(self._loader.check_fit, name)
            self._advance()
            async with asyncio.timeout(self._options.wait_s):
                await waiter.future
        except BaseException as error:
            admitted = waiter.future.done() and not waiter.future.cancelled()
            if admitted and waiter.future.exception() is None and name is not None:
                # It was admitted in the moment in which its client left.
                self._num_running -= 1
            if isinstance(error, TimeoutError):
                waited = (
                    f"{name or 'the end of all requests'} was not there within {self._options.wait_s:g} s"
                )
                raise self._refusal(waited) from None
            raise
        finally:
            waiter.future.cancel()
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            self._advance()

    def _refusal(self, why: str) -> ModelNotLoaded:
        loaded = self._loader.loaded or "no model"
        return ModelNotLoaded(f"{why}; {loaded} is loaded now", retry_after_s=min(30.0, self._options.wait_s))

    def _advance(self) -> None:
        """Do what can be done now: admit requests, change the model, or wait until it was idle for long."""
        if self._changing is not None:
            return
        loaded = self._loader.loaded
        self._waiting = [one for one in self._waiting if not one.future.done()]
        for waiter in [one for one in self._waiting if one.unloads and one.name != loaded]:
            # Another model took its place, or it is unloaded already.
            self._waiting.remove(waiter)
            waiter.admit()
        first = next((one for one in self._waiting if not one.unloads), None)
        if first is not None and first.name == loaded:
            for waiter in [one for one in self._waiting if one.wanted == loaded]:
                self._waiting.remove(waiter)
                self._num_running += waiter.admit()
        if self._num_running:
            return
        if self._waiting:
            self._change(self._waiting[0].wanted)
        elif loaded is not None and self._keep_s is not None and self._keep_s >= 0:
            later = self._options.later or asyncio.get_running_loop().call_later
            self._use += 1
            use = self._use
            later(self._keep_s, lambda: self._expire(use))

    def _expire(self, use: int) -> None:
        """Unload the model if nothing used it since."""
        if use == self._use and not (self._num_running or self._waiting or self._changing):
            self._change(None)

    def _change(self, name: str | None) -> None:
        self._use += 1
        self._concerned = frozenset({self._loader.loaded, name})
        self._changing = asyncio.create_task(self._run_change(name))

    async def _run_change(self, name: str | None) -> None:
        error: ConvoyError | None = None
        before, began_s = self._loader.loaded, time.monotonic()
        line = f"{name} could not be loaded; the next request tries again"
        try:
            if name is not None:
                _log.info("loading model=%s in place of=%s", name, before)
                await anyio.to_thread.run_sync(self._loader.load, name, abandon_on_cancel=True)
                old = f" in place of {before}" if before else ""
                line = f"{name} is loaded{old} after {time.monotonic() - began_s:.1f} s"
            elif before is not None:
                _log.info("unloading model=%s", before)
                await anyio.to_thread.run_sync(self._loader.unload, abandon_on_cancel=True)
                line = f"{before} is unloaded; the next request loads its model"
        except ConvoyError as failed:
            _log.warning("%s could not be loaded: %s", name, failed.message)
            error = failed
        except Exception:  # noqa: BLE001 - logged whole, and those that wait must hear of it
            _log.exception("%s could not be loaded", name)
            text = f"{name} could not be loaded"
            error = StageLost(text, public=text)
        finally:
            self._changing, self._concerned = None, frozenset()
        if error is not None:
            for waiter in [one for one in self._waiting if one.wanted == name]:
                self._waiting.remove(waiter)
                waiter.fail(error)
        self._advance()
        try:
            self._options.on_change(self._loader.loaded, line)
        except OSError:
            # The terminal may be gone, or a disk full.
            _log.exception("a change of models could not be told")

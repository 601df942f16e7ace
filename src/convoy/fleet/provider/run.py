"""Run a provider from measuring its engine to its last answer, on the main thread or beside a head."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from convoy.api.ending import on_signals
from convoy.crypto.identity import Identity
from convoy.errors import ConvoyError, UsageError
from convoy.fleet.capacity import Capacity
from convoy.fleet.provider.first_look import check_coordinator
from convoy.fleet.provider.provide import ProvideOptions, Provider
from convoy.fleet.provider.upstream import Upstream

_log = logging.getLogger(__name__)

Say = Callable[[str, str], None]
MakeOptions = Callable[[dict[str, Capacity]], ProvideOptions]


async def run_provider(
    identity: Identity,
    upstream: Upstream,
    options: MakeOptions,
    *,
    models: Sequence[str] | None,
    slots: int,
    say: Say,
    started: Callable[[Provider], None] | None = None,
) -> None:
    """Measure the engine's rates, register, and serve until drained.

    ``started`` gets the provider. Without it, SIGTERM and SIGINT drain, and the second one ends the process
    within `ending.END_S`. Raises `ConfigError` if another server of Convoy is in the place, `ProviderError`
    if the engine does not answer, `UsageError` for a model that it does not have, and the errors of
    `Provider.run`.
    """
    try:
        await check_coordinator(options({}), partial(say, "look"))
        offers = await _measure(upstream, models, slots, say)
        provider = Provider(identity, upstream, options(offers))
        if started is None:
            on_signals(partial(_ask, asyncio.get_running_loop(), provider))
        else:
            started(provider)
        await provider.run()
    finally:
        await upstream.close()


def provide_until_drained(
    identity: Identity,
    upstream: Upstream,
    options: MakeOptions,
    *,
    models: Sequence[str] | None,
    slots: int,
    say: Say,
) -> None:
    """Call `run_provider` on the main thread: SIGTERM and SIGINT drain it."""
    asyncio.run(run_provider(identity, upstream, options, models=models, slots=slots, say=say))


class ProviderBeside:
    """Run a provider on a thread of its own, for a head in the same process."""

    def __init__(
        self,
        upstream: Upstream,
        identity: Identity,
        options: MakeOptions,
        *,
        slots: int,
        say: Say,
    ) -> None:
        """Start the thread. ``upstream`` is the head, which answers already."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._provider: Provider | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self._say = say

        def run() -> None:
            try:
                asyncio.run(
                    run_provider(
                        *(identity, upstream, options),
                        models=None,
                        slots=slots,
                        say=say,
                        started=self._started,
                    )
                )
            except ConvoyError as error:
                say("refused", error.message)
            except Exception as error:  # noqa: BLE001 - the head goes on
                # Only the class is logged, because the error's text may hold a prompt.
                _log.error("the provider ended with %s", type(error).__name__)

        self._thread = threading.Thread(target=run, name="provider", daemon=True)
        self._thread.start()

    def _started(self, provider: Provider) -> None:
        with self._lock:
            self._provider, self._loop = provider, asyncio.get_running_loop()
            if self._stopped:
                provider.drain()

    def drain(self, wait_s: float) -> None:
        """Take no new requests, end the running ones, and leave; wait at most ``wait_s``."""
        with self._lock:
            self._stopped = True
            if self._provider is not None and self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._provider.drain)
        self._thread.join(wait_s)


def _ask(loop: asyncio.AbstractEventLoop, provider: Provider) -> None:
    # A closed loop means that the provider has ended.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(provider.drain)


async def _measure(
    upstream: Upstream, models: Sequence[str] | None, slots: int, say: Say
) -> dict[str, Capacity]:
    there = await upstream.models()
    missing = [name for name in models or () if name not in there]
    if missing or not there:
        raise UsageError(
            f"the engine has no model {missing[0]!r}" if missing else "the engine has no models",
            hint=f"it has {', '.join(sorted(there))}" if there else None,
        )
    offers = {}
    for name in models or sorted(there):
        say("measuring", f"measuring {name}: a few requests of the engine")
        offers[name] = found = await upstream.measure(name, there[name], slots)
        say(
            "measured",
            f"{name}: {found.decode_rate:.1f} tokens/s alone, {found.batch_rate:.1f} with {slots} together, "
            f"prompts at {found.prefill_rate:.0f}",
        )
    return offers

"""Turn a body on the wire into a prompt in tokens, within bounds of memory, threads and time.

A long body waits for a place before it is read. So the sender waits, and this machine's memory is spared.
Long bodies are tokenised one at a time, on a thread of their own, and never delay short ones.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from convoy.api.listen.options import ServeOptions
from convoy.errors import QueueFull
from convoy.model.kernels.release_memory import release_freed
from convoy.model.text.token_size import most_message_bytes, most_text_bytes

if TYPE_CHECKING:
    from convoy.api.service import ServedModel

T = TypeVar("T")

_LONG_BYTES = 256 * 1024
_MAX_LONG_BODIES = 8
# The places of one key, so that no key takes all of them.
_MAX_LONG_BODIES_EACH = 4
_MAX_SHORT_THREADS = 4
# One character of text is written as six bytes of JSON at most, and a token id with its comma as twelve.
_ESCAPED = 6
_WRITTEN_ID = 12
_OTHER_FIELDS_BYTES = 64 * 1024


def most_body_bytes(models: Iterable[ServedModel], options: ServeOptions, *, chat: bool) -> int:
    """Return the most bytes of a body: enough for a context of any model, within the options' limit."""
    most = 0
    for model in models:
        context, longest = model.max_context, model.tokenizer.longest_token_bytes
        if chat:
            most = max(most, _ESCAPED * most_message_bytes(context, longest))
        else:
            one = max(_ESCAPED * most_text_bytes(context, longest), _WRITTEN_ID * context)
            most = max(most, options.max_prompts * one)
    return min(options.max_body_bytes, most + _OTHER_FIELDS_BYTES)


class Threads:
    """Run at most ``count`` calls at a time, each on a thread of its own that never delays the process's end.

    A call counts until its thread has ended, even if the caller is cancelled: clients that come and go cannot
    pile up threads.
    """

    def __init__(self, count: int, after: Callable[[], object] = lambda: None) -> None:
        """Allow ``count`` calls at a time. ``after`` runs on the thread after each call, before the next may
        begin.
        """
        self._free = asyncio.Semaphore(count)
        self._after = after

    async def run(self, call: Callable[..., T], *args: Any, ended: Callable[[], None] = lambda: None) -> T:
        """Return the result of ``call``. ``ended`` is called on the loop once its thread is done."""
        try:
            await self._free.acquire()
        except BaseException:
            ended()
            raise
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def release() -> None:
            self._free.release()
            ended()

        def work(call: Callable[..., T], *args: Any) -> None:
            # A closed loop means that the server has ended, and nothing waits for this call.
            with suppress(RuntimeError):
                try:
                    result = call(*args)
                except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                    # An error keeps the frames of the call, and they what was decoded. Callers refer to the
                    # error in circles, so hundreds of MiB would stay until the collector comes.
                    clear_frames(error.__traceback__)
                    loop.call_soon_threadsafe(_fail, answer, error)
                else:
                    loop.call_soon_threadsafe(_finish, answer, result)
                    del result
                del call, args
                self._after()
                loop.call_soon_threadsafe(release)

        try:
            threading.Thread(target=work, args=(call, *args), name="intake", daemon=True).start()
        except BaseException:
            release()
            raise
        # The frame of this call stays with an error too.
        del call, args
        return await answer


class Upload:
    """Hold one request's body. `leave` frees its place once nothing uses it any more."""

    def __init__(self, places: Sequence[asyncio.Semaphore], wait_s: float) -> None:
        """Prepare a body that needs one place of each semaphore in ``places``, the caller's own first."""
        self._places = places
        self._wait_s = wait_s
        self._data = b""
        self._has_place = False
        self._num_users = 1
        self._left = False

    @property
    def is_long(self) -> bool:
        return self._has_place

    def needs_place(self, num_bytes: int) -> bool:
        """Return whether a body of ``num_bytes`` must wait for a place."""
        return num_bytes > _LONG_BYTES and not self._has_place

    async def reserve(self, num_bytes: int) -> None:
        """Wait for a place if a body of ``num_bytes`` needs one. Raises `QueueFull` after ``wait_s``."""
        if not self.needs_place(num_bytes):
            return
        try:
            async with asyncio.timeout(self._wait_s), AsyncExitStack() as taken:
                for places in self._places:
                    await taken.enter_async_context(places)
                taken.pop_all()
                # No await may come between: a cancelled wait frees the places, and a finished one holds them.
                self._has_place = True
        except TimeoutError:
            raise QueueFull("too many long prompts wait to be read", hint="try again later") from None

    def keep(self, data: bytes) -> None:
        self._data = data

    def take(self) -> bytes:
        """Return the body, and hold it no longer."""
        data, self._data = self._data, b""
        return data

    def use(self) -> Callable[[], None]:
        """Keep the place until the returned function is called."""
        self._num_users += 1
        return self._drop

    def leave(self) -> None:
        """Free the body and the request's hold on the place. It may be called twice."""
        if not self._left:
            self._left = True
            self._data = b""
            self._drop()

    def _drop(self) -> None:
        self._num_users -= 1
        if not self._num_users and self._has_place:
            self._has_place = False
            for places in self._places:
                places.release()


class Intake:
    """Hold the places and threads of one server."""

    def __init__(self, options: ServeOptions) -> None:
        self._places = asyncio.Semaphore(_MAX_LONG_BODIES)
        self._of_callers: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._wait_s = options.body_timeout_s
        self.short = Threads(_MAX_SHORT_THREADS)
        self._long = Threads(1, release_freed)

    def upload(self, caller: str = "") -> Upload:
        """Return an empty `Upload` for a new request. ``caller`` names its key; empty means no key."""
        if not caller:
            return Upload((self._places,), self._wait_s)
        own = self._of_callers.setdefault(caller, asyncio.Semaphore(_MAX_LONG_BODIES_EACH))
        return Upload((own, self._places), self._wait_s)

    async def read(self, upload: Upload, call: Callable[[bytes], T]) -> T:
        """Return ``call`` of the body, run on a thread. Then free the body and its place."""
        threads = self._long if upload.is_long else self.short
        try:
            return await threads.run(call, upload.take(), ended=upload.use())
        finally:
            upload.leave()


def _finish(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)

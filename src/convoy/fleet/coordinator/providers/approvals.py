"""Remember providers with keys that are not approved yet, and let a few of them wait on their sockets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from convoy.config.clear_text import is_loopback
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.providers.connection import ProviderSocket, Unapproved

# Keys that are remembered.
_MAX_CALLED = 1000


class Approvals:
    """Hold the providers that wait for approval, on the event loop's thread.

    ``name_of`` returns the name of an approved key. Any thread may call it.
    """

    def __init__(self, options: CoordinatorOptions, name_of: Callable[[bytes], str | None]) -> None:
        self._options = options
        self._name_of = name_of
        # Keys are in the order of their calls, the newest last.
        self._called: dict[bytes, None] = {}
        self._waiting: dict[bytes, asyncio.Event] = {}
        self._of_address: Counter[str] = Counter()

    def has_called(self, identity: bytes) -> bool:
        """Return whether a provider with that key dialled before it was approved, as far as is remembered."""
        return identity in self._called

    def waiting(self) -> list[str]:
        """Return the keys that wait on their sockets, in hex."""
        return [identity.hex() for identity in self._waiting]

    def approve(self, identity: bytes) -> None:
        """Wake the provider that waits with that key."""
        if (event := self._waiting.get(identity)) is not None:
            event.set()

    async def name(self, socket: ProviderSocket, identity: bytes, address: str) -> str:
        """Wait until a key is approved, and return its name.

        Raises `Unapproved` if too many wait, or if the time is over.
        """
        if (name := await asyncio.to_thread(self._name_of, identity)) is not None:
            return name
        self._note(identity)
        self._check_room(identity, address)
        event = self._waiting[identity] = asyncio.Event()
        self._of_address[address] += 1
        try:
            async with asyncio.timeout(self._options.approval_s):
                return await socket.while_silent(self._approved(identity, event), self._options.approval_s)
        except TimeoutError:
            raise Unapproved(identity) from None
        finally:
            del self._waiting[identity]
            self._of_address[address] -= 1
            # Adding an empty counter drops the addresses that have no socket left.
            self._of_address += Counter()

    async def _approved(self, identity: bytes, event: asyncio.Event) -> str:
        while True:
            try:
                async with asyncio.timeout(self._options.approval_poll_s):
                    await event.wait()
            except TimeoutError:
                # Another coordinator of this database may have approved it.
                pass
            event.clear()
            if (name := await asyncio.to_thread(self._name_of, identity)) is not None:
                return name

    def _check_room(self, identity: bytes, address: str) -> None:
        options = self._options
        # A proxy that ends TLS on this machine dials for every
        # provider, so loopback has no limit per address.
        alone = self._of_address[address] >= options.max_unapproved_of_address and not is_loopback(address)
        if alone or identity in self._waiting or len(self._waiting) >= options.max_unapproved:
            raise Unapproved(identity)

    def _note(self, identity: bytes) -> None:
        self._called.pop(identity, None)
        self._called[identity] = None
        if len(self._called) > _MAX_CALLED:
            del self._called[next(iter(self._called))]

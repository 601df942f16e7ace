"""Questions of links, answered in order by a thread for each link that asks: no receiver waits for one."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from convoy.errors import ConvoyError
from convoy.transport.link.inbox import Inbox
from convoy.transport.link.link import Link
from convoy.wire.messages.control import Message

_log = logging.getLogger(__name__)

Answer = Callable[[Message], Message]

_LOOK_UP_S = 5.0
_WEIGHT_BYTES = 1024
_MAX_WAITING = 64  # questions of one link; then its receiver waits


class RequestQueue:
    """``begin`` is called once for each link that asks, and what it returns for each question of it."""

    def __init__(self, begin: Callable[[Link], Answer]) -> None:
        self._begin = begin
        self._lock = threading.Lock()
        self._asked: dict[Link, Inbox[Message | None]] = {}
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def ask(self, link: Link, question: Message) -> None:
        """For receiver threads: the answer is sent from another thread."""
        with self._lock:
            asked = self._asked.get(link)
            if asked is None and not self._closed:
                asked = self._asked[link] = Inbox(max_items=_MAX_WAITING)
                threading.Thread(
                    target=self._serve, args=(link, asked), name=f"supply {link.peer}", daemon=True
                ).start()
        if asked is not None:
            asked.put(link, question, _WEIGHT_BYTES)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            asked = list(self._asked.values())
        for one in asked:
            one.close(None)

    def _serve(self, link: Link, asked: Inbox[Message | None]) -> None:
        """Until the link is over."""
        answer = self._begin(link)
        try:
            while not link.is_over:
                try:
                    question = asked.get(_LOOK_UP_S)
                except queue.Empty:
                    continue
                if question is None:
                    return
                link.send(answer(question))
        except ConvoyError as error:  # its link is over, and says so itself
            _log.debug("%s gets no more of the model: %s", link.peer, error.message)
        finally:
            with self._lock:
                self._asked.pop(link, None)
            asked.close()

"""A queue of questions for each link, answered in order by one thread a link, so that no receiver waits."""

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
# Questions of one link. At this bound its receiver thread waits.
_MAX_WAITING = 64


class RequestQueue:
    """Answer questions of links. ``begin`` is called once for each link; its result answers each question."""

    def __init__(self, begin: Callable[[Link], Answer]) -> None:
        self.begin = begin
        self._lock = threading.Lock()
        self._asked: dict[Link, Inbox[Message | None]] = {}
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def ask(self, link: Link, question: Message) -> None:
        """Queue a question of a receiver thread. Another thread sends the answer."""
        with self._lock:
            asked = self._asked.get(link)
            if asked is None and not self._closed:
                asked = self._asked[link] = Inbox(max_items=_MAX_WAITING)
                threading.Thread(
                    target=self._serve, args=(link, asked), name=f"weights {link.peer}", daemon=True
                ).start()
        if asked is not None:
            asked.put(link, question, _WEIGHT_BYTES)

    def close(self) -> None:
        """Answer the questions that wait, and take no others: a member that gets no answer waits for long."""
        with self._lock:
            self._closed = True
            asked = list(self._asked.values())
        for one in asked:
            one.put_last(None, None)

    def _serve(self, link: Link, asked: Inbox[Message | None]) -> None:
        """Answer the questions of one link until it ends."""
        answer, ends = self.begin(link), False
        try:
            while not link.is_over:
                try:
                    question = asked.get(0 if ends else _LOOK_UP_S)
                except queue.Empty:
                    if ends:
                        return
                    continue
                if question is None:
                    # A receiver thread may have put one more behind it.
                    ends = True
                    self._forget(link)
                else:
                    link.send(answer(question))
        # The link is over, and its end is reported separately.
        except ConvoyError as error:
            _log.debug("%s gets no more of the model: %s", link.peer, error.message)
        finally:
            self._forget(link)
            asked.close()

    def _forget(self, link: Link) -> None:
        with self._lock:
            self._asked.pop(link, None)

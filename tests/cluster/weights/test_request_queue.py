"""The queue of questions: what is asked before it is closed is answered."""

from __future__ import annotations

import threading
from typing import Any

from convoy.cluster.weights.request_queue import RequestQueue
from convoy.wire.messages.control import Message
from convoy.wire.messages.fetch import Fetch, Piece
from support.waiting import wait_until


class Recorder:
    """Stand for a link that keeps each message that is sent."""

    is_over, peer = False, "beta"

    def __init__(self) -> None:
        self.sent: list[Piece] = []

    def send(self, piece: Piece) -> None:
        self.sent.append(piece)


def test_questions_that_wait_while_the_queue_is_closed_are_answered() -> None:
    link: Any = Recorder()
    goes_on, begun = threading.Event(), threading.Event()

    def answer(question: Message) -> Message:
        assert isinstance(question, Fetch)
        begun.set()
        assert goes_on.wait(30)
        return Piece(question.number, 0, b"", "no longer served")

    questions = RequestQueue(lambda _link: answer)
    for number in range(3):
        questions.ask(link, Fetch(number, "a" * 64, "b" * 64, 0, 1))
    assert begun.wait(30)
    questions.close()
    goes_on.set()
    wait_until(lambda: len(link.sent) == 3)
    assert [piece.number for piece in link.sent] == [0, 1, 2]

"""A service with an engine that a test controls, and a real HTTP server before it."""

from __future__ import annotations

import codecs
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from convoy.api.listen.options import ServeOptions
from convoy.api.server import Stop, run_server
from convoy.api.service import ServedModel, Service
from convoy.engine.outputs import (
    EmbeddingOutput,
    ErrorOutput,
    FinishOutput,
    FinishReason,
    Output,
    PrefillOutput,
    PromptOutput,
    TokenLogprob,
    TokenOutput,
)
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import ConvoyError
from convoy.model.text.conversation import Conversation
from convoy.model.text.formats.registry import ReplyFormat, find_format
from convoy.model.text.vocabulary import check_length

EOS = 256
MAX_CONTEXT = 4096
REPLY = "The answer is 42."


class ByteTokenizer:
    """Map byte n to token n; 256 ends the text."""

    eos_ids = frozenset({EOS})
    control_ids: frozenset[int] = frozenset()
    vocab_size = 257
    longest_token_bytes = 1

    def encode_letters(self, text: str, /) -> list[int]:
        return list(text.encode())

    def encode(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        check_length(len(text.encode()), max_tokens)
        return list(text.encode())

    def encode_word(self, text: str) -> list[int]:
        return self.encode(text)

    # Qwen's format, in which every mark is spelled.
    reply_format = ReplyFormat(find_format("<tool_call>"), {})

    def encode_chat(self, chat: Conversation, *, max_tokens: int | None = None) -> list[int]:
        """Write out the turns, and the tools and variables if there are any."""
        tools = [f"{tool.name}:{json.dumps(tool.parameters)}" for tool in chat.tools]
        text = f"<tools>{tools}" if tools else ""
        text += f"<variables>{json.dumps(chat.variables)}" if chat.variables else ""
        for turn in chat.turns:
            text += f"<{turn.role}>"
            text += f"<think>{turn.reasoning}</think>" if turn.reasoning else ""
            text += turn.content + "".join(f"<call {c.id} {c.name}>{c.arguments}" for c in turn.calls)
            text += f"<result of {turn.call_id} {turn.name}>" if turn.call_id else ""
        opens = chat.add_generation_prompt and not chat.continues
        return self.encode(text + ("<assistant>" if opens else ""), max_tokens=max_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = [token for token in ids if token != EOS or not skip_special_tokens]
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"</s>" if token_id == EOS else bytes([token_id])


@dataclass
class FakeHandle:
    """Hold a running request. The server sets ``aborted``."""

    request: GenerationRequest
    on_output: Callable[[Output], None]
    aborted: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def abort(self) -> None:
        self.aborted.set()


class FakeEngine:
    """Answer every request with ``reply`` (cut to ``max_tokens``), token by token.

    With ``pause_after`` set, each choice waits after that many tokens until ``go`` is set, or it is
    aborted. With ``fail_after`` the request ends with ``error`` after that many tokens. `submit` waits
    for ``admit`` and raises ``refuse``. Each choice's finish reports ``cached_tokens`` of its prompt.
    """

    def __init__(self, reply: str | Callable[[GenerationRequest], str] = REPLY) -> None:
        self.reply = reply
        self.cached_tokens = 0
        self.room = MAX_CONTEXT
        self.pause_after: int | None = None
        self.go = threading.Event()
        self.paused = threading.Event()
        self.fail_after: int | None = None
        self.error: ConvoyError | None = None
        self.refuse: ConvoyError | Exception | None = None
        self.refuse_from = 0
        self.submitting = threading.Event()
        self.admit = threading.Event()
        self.admit.set()
        self.admitted = threading.Event()
        self.handles: list[FakeHandle] = []
        self.threads: list[threading.Thread] = []

    def submit(self, request: GenerationRequest, on_output: Callable[[Output], None]) -> FakeHandle:
        self.submitting.set()
        self.admit.wait(10.0)
        if self.refuse is not None and len(self.handles) >= self.refuse_from:
            raise self.refuse
        handle = FakeHandle(request, on_output)
        self.handles.append(handle)
        self.admitted.set()
        thread = threading.Thread(target=self._run, args=(handle,), name="fake-engine")
        self.threads.append(thread)
        thread.start()
        return handle

    def close(self) -> None:
        self.go.set()
        for handle in self.handles:
            handle.aborted.set()
        for thread in self.threads:
            thread.join(10.0)

    def _run(self, handle: FakeHandle) -> None:
        request, emit = handle.request, handle.on_output
        if request.embeds:
            emit(EmbeddingOutput(state_of(request.prompt_ids)))
            emit(FinishOutput(0, "stop", cached_tokens=self.cached_tokens))
            handle.done.set()
            return
        if request.prompt_logprobs is not None:
            emit(
                PromptOutput([None, *(_logprob(t, request.prompt_logprobs) for t in request.prompt_ids[1:])])
            )
        if request.tells_prefill:
            num_prompt = len(request.prompt_ids)
            emit(PrefillOutput(num_prompt // 2, 0, num_prompt))
        for choice in range(request.num_choices):
            if not self._run_choice(handle, choice):
                break
        handle.done.set()

    def _run_choice(self, handle: FakeHandle, choice: int) -> bool:
        request, emit = handle.request, handle.on_output
        reply = self.reply if isinstance(self.reply, str) else self.reply(request)
        tokens = list(reply.encode()) + ([EOS] * request.max_tokens if request.ignore_eos else [])
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        shown = ""
        for number, token in enumerate(tokens[: request.max_tokens]):
            if number == self.pause_after:
                self.paused.set()
                while not (self.go.wait(0.01) or handle.aborted.is_set()):
                    pass
            if handle.aborted.is_set():
                emit(FinishOutput(choice, "abort"))
                return False
            if number == self.fail_after and self.error is not None:
                emit(ErrorOutput(self.error))
                return False
            text = decoder.decode(b"" if token == EOS else bytes([token]))
            logprob = None if request.params.logprobs is None else _logprob(token, request.params.logprobs)
            for stop in request.stop:
                if stop in shown + text:
                    emit(TokenOutput(choice, token, "", logprob))
                    emit(FinishOutput(choice, "stop"))
                    return True
            shown += text
            emit(TokenOutput(choice, token, text, logprob))
        reason: FinishReason = "length" if len(tokens) >= request.max_tokens else "stop"
        emit(FinishOutput(choice, reason, decoder.decode(b"", True), self.cached_tokens))
        return True


def state_of(prompt_ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the final state of a prompt at a fake engine, which is not normalised."""
    return np.array([3.0, len(prompt_ids), prompt_ids[-1]], dtype=np.float32)


def _logprob(token: int, num_top: int) -> TokenLogprob:
    """Make a log-probability that identifies its token. The token itself is the best one."""
    top = [(token, -token / 1000)] + [((token + i) % 256, -token / 1000 - i) for i in range(1, num_top)]
    return TokenLogprob(token, -token / 1000, top[:num_top], rank=1)


@dataclass
class Running:
    """Hold a server that answers at ``url``, and the objects that a test may change."""

    url: str
    engine: FakeEngine
    stop: Stop
    thread: threading.Thread
    health: list[tuple[bool, str]]


@contextmanager
def serving(
    engine: FakeEngine | None = None,
    options: ServeOptions | None = None,
    *,
    max_context: int = MAX_CONTEXT,
    model: str = "fake",
) -> Iterator[Running]:
    """Run a real server on a port of its own until the block ends."""
    engine = engine or FakeEngine()
    engine.room = max_context
    health = [(True, "")]
    service = Service(
        models=(ServedModel(model, engine, ByteTokenizer()),),
        health=lambda: health[0],
        status=lambda: {"model": "fake", "ready": health[0][0], "stages": []},
    )
    stop = Stop()
    with serving_of(service, options, stop, engine.close) as (url, thread):
        yield Running(url, engine, stop, thread, health)


@contextmanager
def serving_of(
    service: Service,
    options: ServeOptions | None = None,
    stop: Stop | None = None,
    on_stop: Callable[[], None] = lambda: None,
) -> Iterator[tuple[str, threading.Thread]]:
    """Run a real server of ``service`` until the block ends. Yield its address and its thread."""
    stop = stop or Stop()
    urls: list[str] = []
    failed: list[BaseException] = []
    up = threading.Event()

    def ready(url: str) -> None:
        urls.append(url)
        up.set()

    def run() -> None:
        try:
            run_server(service, options or ServeOptions(port=0, drain_s=5.0), on_ready=ready, stop=stop)
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            up.set()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    up.wait(20.0)
    if failed:
        raise failed[0]
    try:
        yield urls[0], thread
    finally:
        stop.request_now()
        on_stop()
        thread.join(20.0)
        assert not thread.is_alive(), "the server did not end"


def events(text: str) -> list[Any]:
    """Return the decoded data of a stream's events. "[DONE]" stays text."""
    lines = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]

"""List the APIs that a fleet carries. A further one is a row here, and a word of `Kind`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from convoy.api.anthropic.problem import message_error
from convoy.fleet.apis import messages, responses, tokens
from convoy.fleet.apis.api import FleetApi
from convoy.fleet.apis.chat import ChunkForm, read_chunk, rebuild_chat, rebuild_completion
from convoy.wire.fleet.messages import Kind

_DONE = b"data: [DONE]\n\n"
_MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

APIS: Mapping[Kind, FleetApi] = {
    "chat": FleetApi(
        path="/v1/chat/completions",
        prompt="messages",
        rebuild=rebuild_chat,
        read=read_chunk,
        form=partial(ChunkForm, chat=True),
        limits=("max_completion_tokens", "max_tokens"),
        multipliers=("n", "best_of"),
        is_strict=True,
        stream_end=_DONE,
    ),
    "completion": FleetApi(
        path="/v1/completions",
        prompt="prompt",
        rebuild=rebuild_completion,
        read=read_chunk,
        form=partial(ChunkForm, chat=False),
        multipliers=("n", "best_of", "prompt"),
        is_strict=True,
        stream_end=_DONE,
    ),
    "messages": FleetApi(
        path="/v1/messages",
        prompt="messages",
        rebuild=messages.rebuild_message,
        read=messages.read_message,
        form=messages.MessageForm,
        problem=message_error,
        needs_limit=True,
        stream_end=_MESSAGE_STOP,
    ),
    "responses": FleetApi(
        path="/v1/responses",
        prompt="input",
        rebuild=responses.rebuild_response,
        read=responses.read_response_event,
        form=responses.ResponseForm,
        limits=("max_output_tokens",),
        check=responses.check_response,
    ),
    "count_tokens": FleetApi(
        path="/v1/messages/count_tokens",
        prompt="messages",
        rebuild=messages.rebuild_prompt,
        read=tokens.read_counted,
        form=messages.MessageForm,
        problem=message_error,
        generates=False,
    ),
    "tokenize": FleetApi(
        path="/tokenize",
        prompt="messages",
        rebuild=tokens.rebuild_text,
        read=tokens.read_counted,
        form=partial(ChunkForm, chat=True),
        generates=False,
    ),
    "detokenize": FleetApi(
        path="/detokenize",
        prompt="tokens",
        rebuild=tokens.rebuild_tokens,
        read=tokens.read_counted,
        form=partial(ChunkForm, chat=True),
        generates=False,
    ),
}

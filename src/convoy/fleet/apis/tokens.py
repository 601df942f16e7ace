"""Carry vLLM's /tokenize and /detokenize, and the answers of engines that only count.

It is apart from the APIs that generate, because nothing is streamed or paid by the token here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convoy.fleet.apis.api import EventFacts, Fields
from convoy.fleet.apis.chat import AllowedMessage, AllowedTool, TemplateSwitches
from convoy.fleet.apis.fields import Ids, check_references, read_known

_TOKENIZE: Mapping[str, Any] = {
    "model": str,
    "prompt": str,
    "messages": list[AllowedMessage],
    "tools": list[AllowedTool],
    "chat_template_kwargs": TemplateSwitches,
    "reasoning_effort": str,
    **dict.fromkeys(("add_special_tokens", "return_token_strs"), bool),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message"), bool),
}
_DETOKENIZE: Mapping[str, Any] = {"model": str, "tokens": Ids}


def rebuild_text(given: Fields, stream: bool) -> dict[str, Any]:  # noqa: ARG001 - it is never streamed
    """Return the fields of a text or a chat for an engine. Raises `RequestError`."""
    fields = read_known(given, _TOKENIZE)
    if "tools" in fields:
        own = [tool for tool in fields["tools"] if tool.type == "function"]
        check_references(("tools", tool.function.parameters) for tool in own if tool.function)
        fields["tools"] = own
    return fields


def rebuild_tokens(given: Fields, stream: bool) -> dict[str, Any]:  # noqa: ARG001 - it is never streamed
    """Return the fields of a list of tokens for an engine. Raises `RequestError`."""
    return read_known(given, _DETOKENIZE)


def read_counted(found: Mapping[str, Any]) -> EventFacts:  # noqa: ARG001 - it has no counts that are paid
    """Read an answer that is no generated text."""
    return EventFacts(ended=True)

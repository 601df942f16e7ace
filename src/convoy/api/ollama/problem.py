"""Write errors in Ollama's form, with Ollama's names of fields.

It is apart because answers and the table of paths both use it.
"""

from __future__ import annotations

import re

import msgspec

from convoy.api.problem import body_for
from convoy.errors import RequestError

PREFIX = "/api/"
# The options that OpenAI's bodies have under the same name.
OPTIONS = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
# Where Ollama's bodies have the fields that the errors of the shared reader and of the engine name.
_PLACES = {
    **{name: f"options.{name}" for name in OPTIONS},
    "max_tokens": "options.num_predict",
    "reasoning_effort": "think",
    "reasoning_content": "thinking",
    "response_format": "format",
    "response_format.json_schema.schema": "format",
}
# An error begins with the field at fault. These names are no words of a sentence and may stand later, too.
_ANYWHERE = ("response_format.json_schema.schema", "response_format", "max_tokens", "reasoning_content")
_LATER = "|".join(map(re.escape, _ANYWHERE))
_NAMES = re.compile(rf"^(?:{_LATER}|{'|'.join(map(re.escape, _PLACES))})\b|\b(?:{_LATER})\b")


class OllamaError(msgspec.Struct, frozen=True):
    """Hold the body of an error, and the last line of a broken stream."""

    error: str


def problem_of(error: BaseException) -> OllamaError:
    """Return the error as a client may see it."""
    text = body_for(error).error.message
    if isinstance(error, RequestError):
        text = _NAMES.sub(lambda match: _PLACES[match[0]], text)
    return OllamaError(text)

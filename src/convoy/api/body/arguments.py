"""Check the arguments of calls that a client sends back as text, in the same way for every API.

A model may write arguments that are no JSON object, or be cut off within them. The client then has such a
call in its conversation for good, so it is left out and not refused.
"""

from __future__ import annotations

import json

from convoy.api.body.body_shape import check_depth
from convoy.errors import RequestError

MAX_ARGUMENTS_BYTES = 512 * 1024


def read_arguments(given: str, param: str) -> str | None:
    """Return arguments as the JSON text of an object, or None if they are no such text.

    Empty arguments are an empty object. Raises `RequestError` for arguments that are too long or too deep.
    """
    num_bytes = len(given.encode(errors="surrogatepass"))
    if num_bytes > MAX_ARGUMENTS_BYTES:
        text = f"{param} has {num_bytes} bytes, and the limit is {MAX_ARGUMENTS_BYTES}"
        raise RequestError(text, param=param)
    text = given.strip() or "{}"
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:
            # A model may write half of a surrogate pair, which is no text, so no prompt can hold it.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    check_depth(value, param)
    return text if isinstance(value, dict) else None


def _refuse_constant(name: str) -> None:
    raise ValueError(name)

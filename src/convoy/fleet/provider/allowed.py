"""Rebuild a request for the provider's engine from the fields of its API's list.

It is apart because an engine gets nothing but the bytes that are made here.
"""

from __future__ import annotations

import msgspec

from convoy.fleet.apis.table import APIS
from convoy.fleet.consumer_request import ConsumerRequest, fields_of


def for_engine(wanted: ConsumerRequest, *, shares_cache: bool) -> bytes:
    """Return the body for the engine. Raises `RequestError` naming a field that is not passed on.

    A stream always asks for the counts at its end. ``shares_cache``: the engine gets no salt.
    """
    fields = APIS[wanted.kind].rebuild(fields_of(wanted.body), wanted.stream)
    if shares_cache:
        fields.pop("cache_salt", None)
    return msgspec.json.encode(fields)


def wants_usage(wanted: ConsumerRequest) -> bool:
    """Return whether a stream's client asked for the event with the counts."""
    raw = fields_of(wanted.body).get("stream_options")
    options = None if raw is None else msgspec.json.decode(raw)
    return bool(isinstance(options, dict) and options.get("include_usage"))

"""Pass requests and answers through sealed: the coordinator has no key to them."""

from __future__ import annotations

from convoy.crypto.sealed.answer import most_chunk_bytes
from convoy.errors import SealError
from convoy.fleet.answer import AnswerHead
from convoy.fleet.consumer_request import ConsumerRequest
from convoy.fleet.coordinator.providers.connection import Registration
from convoy.fleet.coordinator.requests.attempt import serve_of
from convoy.fleet.coordinator.requests.routed_request import RoutedRequest
from convoy.fleet.lease import ANSWER_TYPE, Lease, facts_of
from convoy.wire.fleet.messages import Began, Chunk, Done, Failed, Serve
from convoy.wire.fleet.records import Timed, encode_record


class PassedOn:
    """Be the `Seal` of a request that a proxy sealed."""

    def __init__(self, lease: Lease, wanted: ConsumerRequest, sealed: bytes) -> None:
        self._lease = lease
        self.wanted = wanted
        self._sealed = sealed
        self._began: bytes | None = None
        # An upper bound: padding may be text, and so may the head and the counts.
        self.text_bytes = 0

    def serve(self, registration: Registration, request_id: str) -> Serve:
        """Return the request as it came.

        Raises `SealError` if the provider has another key by now, because the request would not open.
        """
        if registration.request_key != self._lease.request_key or request_id != self._lease.request_id:
            raise SealError("the provider came back with another key")
        facts = facts_of(self._lease, self.wanted)
        return serve_of(facts, self.wanted, self._sealed)

    def begun(self, began: Began) -> AnswerHead:
        """Keep the beginning.

        The answer's own head is sealed, so every sealed answer gets the same head here.
        """
        self._began = encode_record(began)
        return AnswerHead(200, ANSWER_TYPE)

    def chunk(self, chunk: Chunk) -> bytes:
        """Return a record of the chunk, and before the first one the record of the beginning."""
        self.text_bytes += most_chunk_bytes(len(chunk.sealed))
        before, self._began = self._began or b"", None
        return before + encode_record(chunk)

    def read(self, body: bytes) -> None:
        """Do nothing: the body is sealed, and counted chunk by chunk."""


class AsRecords:
    """Write an answer as records for proxies: a `BodyForm`. Only the proxy tells that it is blind."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def headers(self, routed: RoutedRequest, head: AnswerHead) -> dict[str, str]:
        """Return the headers that every sealed answer has."""
        return {
            "content-type": head.content_type,
            "cache-control": "no-store",
            "x-accel-buffering": "no",
            **routed.timing.header(),
        }

    def broken(self) -> bytes:
        """Return the record of a provider that failed."""
        return encode_record(Failed(self._request_id, "the provider failed", full=False))

    def ending(self, routed: RoutedRequest, head: AnswerHead) -> bytes:  # noqa: ARG002 - a `BodyForm`'s
        """Return the records of the billed counts and of the times."""
        routed.timing.reach("total_e2e")
        billed = routed.billed
        done = Done(self._request_id, billed.prompt_tokens, billed.completion_tokens)
        return encode_record(done) + encode_record(Timed(routed.timing.us()))

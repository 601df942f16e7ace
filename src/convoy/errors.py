"""Every error that Convoy raises on purpose, ordered by the side at fault.

ConvoyError                     carries a message, a hint and a text that clients may read
├── InputError                  wrong input: typed, in a file, or in a request
│   ├── UsageError              a flag or argument (exit 2)
│   ├── ConfigError             convoy.toml, an address, a port
│   ├── IdentityError           a key or certificate on disk
│   ├── AuditError              the audit log cannot be written, or was changed
│   ├── RosterError             unsigned, expired, foreign, without this member
│   ├── InviteError             an invitation that is malformed, expired, used up or declined
│   ├── SpanError               layer spans that overlap, leave a gap or own no output
│   ├── ModelError              a model directory that cannot be run
│   │   └── HubUnreachable      the model's hub does not answer, or stopped answering
│   ├── SessionError            a saved session, or its key, that cannot be used
│   └── RequestError            a request of a client (HTTP 400); names the parameter
├── CapacityError               a valid request that needs more than is available
│   ├── PlanError               no plan fits the members
│   │   └── TooLittleMemory     this machine has less free memory than its stage takes
│   └── QueueFull               too many requests wait (HTTP 429)
├── PeerError                   another member's fault, or the network's
│   ├── PeerUnreachable         no member answered in time
│   │   └── PeerBusy            it closed the connection before TLS ended: full, or closing; try again
│   ├── Incompatible            another protocol version, activation dtype or model
│   ├── HandshakeError          it could not prove its identity
│   │   └── HandshakeLate       it did not end in time: overload or a slow network; try again
│   ├── FrameError              bytes that are not a frame or not a message
│   │   └── FrameTooLong        a length over its type's limit, refused before allocation
│   ├── SealError               a frame that does not open: changed, replayed, out of order
│   ├── StepError               a well-sealed step that is invalid here
│   │   └── HiddenError         a hidden state that fits no step here
│   ├── AttestationError        its evidence is insufficient or false
│   ├── ProviderError           an invalid statement or reply of a provider
│   ├── LinkBroken              the other end or the network ended the link
│   │   └── PeerLeft            the other end said goodbye first, with its reason
│   └── PeerRefused             the peer refused, with its reason
├── Unavailable                 a valid request that cannot be served now (HTTP 503)
│   ├── NotReady                no token has passed every stage yet, or not recently
│   ├── Draining                the server is shutting down
│   └── StageLost               a stage went away while the request ran
│       ├── StepLate            a step did not come back in time; it still may
│       └── CollectiveError     a rank of a stage is gone, silent, or out of step with the others
├── LinkClosed                  this side closed the link earlier
└── SelfCheckError              exact mode cannot be proved on this machine
"""

from __future__ import annotations


class ConvoyError(Exception):
    """Carry a message, a hint and a text for clients; the base of the tree.

    ``str(error)`` is one lower-case line. ``error.hint`` tells the reader how to mend the fault, or is None.

    The message is for the log: it may hold a peer's words, a path or an address. ``public`` is for HTTP
    clients: it holds only Convoy's own words, with layers and names of members at most, or is None.
    """

    def __init__(self, message: str, *, hint: str | None = None, public: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.public = public


class InputError(ConvoyError):
    """Report wrong input: typed by a person, read from a file or sent in a request."""


class UsageError(InputError):
    """Report a wrong flag or argument; the command line exits with 2."""


class ConfigError(InputError):
    """Report a wrong configuration, address or port."""


class IdentityError(InputError):
    """Report a key or certificate on disk that is missing, unreadable or readable by others."""


class AuditError(InputError):
    """Report an audit log that cannot be written, or that was changed.

    Where the log cannot be written, the action was not taken. Where it was changed, the text says at which
    place.
    """


class RosterError(InputError):
    """Report a roster that is unsigned, expired, for another cluster or without this member."""


class InviteError(InputError):
    """Report an invitation that is malformed, expired, used up or declined by its operator."""


class SpanError(InputError):
    """Report layer spans that overlap, leave a layer out or own no output."""


class ModelError(InputError):
    """Report a model directory that cannot be run; the text names the file, tensor or type."""


class HubUnreachable(ModelError):  # noqa: N818
    """Report that the model's hub does not answer, or stopped answering; the text gives the reason."""


class SessionError(InputError):
    """Report a saved session or a key file that cannot be used or written; the text gives the reason."""


class RequestError(InputError):
    """Report a wrong client request (HTTP 400).

    ``param`` names the field, and ``code`` is OpenAI's error code.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.param = param
        self.code = code


class CapacityError(ConvoyError):
    """Report a valid request that needs more than is available."""


class PlanError(CapacityError):
    """Report that no plan fits the members; the text gives the reason for each member."""


class TooLittleMemory(PlanError):  # noqa: N818 - a state, as in httpx and trio, not a fault
    """Report that this machine has less free memory than its stage takes; ``room_bytes`` are free."""

    def __init__(
        self, message: str, *, room_bytes: int, hint: str | None = None, public: str | None = None
    ) -> None:
        super().__init__(message, hint=hint, public=public)
        self.room_bytes = room_bytes


class QueueFull(CapacityError):  # noqa: N818 - a state, as in httpx and trio, not a fault
    """Report that too many requests wait already (HTTP 429); ``retry_after_s`` advises a delay."""

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        public: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint, public=public)
        self.retry_after_s = retry_after_s


class PeerError(ConvoyError):
    """Report a fault of another member, or of the network in between."""


class PeerUnreachable(PeerError):  # noqa: N818
    """Report that no member answered at the address within the time allowed."""


class PeerBusy(PeerUnreachable):
    """Report a connection that was accepted and closed before TLS ended.

    The other end is full or closing. Another attempt is worthwhile.
    """


class Incompatible(PeerError):  # noqa: N818
    """Report another protocol version, activation dtype or model at the other member; the text names both."""


class HandshakeError(PeerError):
    """Report that the other end could not prove to be the member that it claims to be."""


class HandshakeLate(HandshakeError):  # noqa: N818
    """Report a handshake that ended without an answer, for overload or a slow network; try again.

    The other end was silent, or closed the connection without a refusal.
    """


class FrameError(PeerError):
    """Report bytes from a peer that are no frame, or a payload that does not match its frame type."""


class FrameTooLong(FrameError):  # noqa: N818
    """Report a frame that exceeds the length limit of its type; nothing was allocated."""


class SealError(PeerError):
    """Report a sealed frame that does not open: changed, replayed, reflected or out of order."""


class StepError(PeerError):
    """Report a well-sealed step that is invalid here: an index out of range, or a shape that does not fit."""


class HiddenError(StepError):
    """Report a hidden state from the predecessor in the ring that fits no step.

    Either the predecessor is at fault, or the member that reports it.
    """


class AttestationError(PeerError):
    """Report evidence or a key enrolment that does not hold, or a member below a policy's minimum level."""


class ProviderError(PeerError):
    """Report an invalid statement or an invalid reply of a provider; the text says which part is invalid."""


class LinkBroken(PeerError):  # noqa: N818
    """Report that the other end or the network ended the link; ``__cause__`` has the reason."""


class PeerLeft(LinkBroken):
    """Report that the other end closed the link in order; the text gives its reason."""


class PeerRefused(PeerError):  # noqa: N818
    """Report that the peer refused, with its reason."""


class Unavailable(ConvoyError):  # noqa: N818
    """Report that a valid request cannot be served now (HTTP 503)."""


class NotReady(Unavailable):
    """Report that no token has passed every stage yet, or not recently."""


class Draining(Unavailable):
    """Report that the server is shutting down and takes no new requests."""


class StageLost(Unavailable):
    """Report that a stage went away while the request ran."""


class StepLate(StageLost):
    """Report that a step did not come back in time; nothing is lost yet, and the caller may keep waiting."""


class CollectiveError(StageLost):
    """Report that a rank of a stage is gone, silent or out of step with the others; their collective ends.

    ``rank`` is the rank at fault, or None if the error concerns no single rank.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, hint: str | None = None, public: str | None = None
    ) -> None:
        super().__init__(message, hint=hint, public=public)
        self.rank = rank


class LinkClosed(ConvoyError):  # noqa: N818
    """Report that this side closed the link earlier."""


class SelfCheckError(ConvoyError):
    """Report that exact mode could not be proved on this machine."""

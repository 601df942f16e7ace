"""Every error that Convoy raises on purpose, by whose fault it is.

ConvoyError                     carries a message, a hint what to do about it, and what clients may read of it
├── InputError                  what a person typed, wrote in a file or sent in a request
│   ├── UsageError              a flag or argument (exit 2)
│   ├── ConfigError             convoy.toml, an address, a port
│   ├── IdentityError           a key or certificate on disk
│   ├── AuditError              the audit log cannot be written, or was changed
│   ├── RosterError             unsigned, expired, foreign, without this member
│   ├── InviteError             an invitation that is malformed, expired, used up or declined
│   ├── SpanError               layer spans that overlap, leave a gap or own no output
│   ├── ModelError              a model directory that cannot be run
│   │   └── HubUnreachable      the hub that a model is to come from does not answer, or not any more
│   ├── SessionError            a saved session, or its key, that cannot be used
│   └── RequestError            a request of a client (HTTP 400); names the parameter
├── CapacityError               right, but more than there is
│   ├── PlanError               no plan fits the members
│   └── QueueFull               too many requests wait (HTTP 429)
├── PeerError                   another member's fault, or the network's
│   ├── PeerUnreachable         nobody answered in time
│   │   └── PeerBusy            it hung up before it said who it is: full, or closing; try again
│   ├── Incompatible            another protocol version, activation dtype or model
│   ├── HandshakeError          it could not prove who it is
│   │   └── HandshakeLate       nor did it fail to: it has too much to do, or the network is slow; try again
│   ├── FrameError              bytes that are not a frame or not a message
│   │   └── FrameTooLong        a length over its type's limit, refused before allocation
│   ├── SealError               a frame that does not open: changed, replayed, out of order
│   ├── StepError               a well-sealed step that makes no sense here
│   │   └── HiddenError         a hidden state that fits no step here
│   ├── AttestationError        what it proves of itself is not enough, or not true
│   ├── ProviderError           what a provider says of itself, or sends for a request, makes no sense
│   ├── LinkBroken              the other end or the network ended the link
│   └── PeerRefused             the peer said no, and why
├── Unavailable                 nothing wrong with the request, but it cannot be served now (HTTP 503)
│   ├── NotReady                no token has passed every stage yet, or not lately
│   ├── Draining                the server is shutting down
│   └── StageLost               a stage went away while the request ran
│       ├── StepLate            a step did not come back in time; it still may
│       └── CollectiveError     a rank of a stage is gone, silent, or does not do what the others do
├── LinkClosed                  this side closed the link earlier
└── SelfCheckError              exact mode cannot be proved on this machine
"""

from __future__ import annotations


class ConvoyError(Exception):
    """Base of the tree: ``str(error)`` is one lower-case line, ``error.hint`` says what to do, or is None.

    The message is for the log: it may have a peer's words in it, a path or an address. ``public`` is for
    whoever asks over HTTP: this code's own words, with layers and names of members at most, or None.
    """

    def __init__(self, message: str, *, hint: str | None = None, public: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.public = public


class InputError(ConvoyError):
    """What a person typed, wrote in a file or sent in a request is wrong."""


class UsageError(InputError):
    """A flag or argument is wrong; the command line exits with 2."""


class ConfigError(InputError):
    """The configuration, an address or a port is wrong."""


class IdentityError(InputError):
    """A key or certificate on disk is missing, unreadable or open to others."""


class AuditError(InputError):
    """The audit log cannot be written, so nothing was done; or it was changed, and the text says where."""


class RosterError(InputError):
    """The roster is unsigned, expired, for another cluster or without this member."""


class InviteError(InputError):
    """An invitation cannot be used: malformed, expired, used up, or its operator said no."""


class SpanError(InputError):
    """Layer spans overlap, leave a layer out or own no output."""


class ModelError(InputError):
    """A model directory cannot be run: the text names the file, tensor or type."""


class HubUnreachable(ModelError):  # noqa: N818
    """The hub that a model is to come from does not answer, or not any more: the text says why."""


class SessionError(InputError):
    """A saved session or its key file cannot be used or written: the text says what is wrong."""


class RequestError(InputError):
    """A client's request is wrong (HTTP 400); ``param`` names the field, ``code`` is OpenAI's word for it."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.param = param
        self.code = code


class CapacityError(ConvoyError):
    """The request is right, but more than there is."""


class PlanError(CapacityError):
    """No plan fits the members; the text gives each one's reason."""


class QueueFull(CapacityError):  # noqa: N818 - a state, as in httpx and trio, not a fault
    """Too many requests wait already (HTTP 429); ``retry_after_s``: when another try makes sense."""

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
    """Another member, or the network between, is at fault."""


class PeerUnreachable(PeerError):  # noqa: N818
    """Nobody answered at the address within the time allowed."""


class PeerBusy(PeerUnreachable):
    """Somebody took the connection and hung up before TLS ended: it is full or closing. Worth another try."""


class Incompatible(PeerError):  # noqa: N818
    """The other member speaks another protocol version, activation dtype or model; both are named."""


class HandshakeError(PeerError):
    """The other end could not prove that it is the member it claims to be."""


class HandshakeLate(HandshakeError):  # noqa: N818
    """A handshake was not over in time, because a machine has too much to do. Worth another try."""


class FrameError(PeerError):
    """Bytes from a peer are not a frame, or a payload is not the message its type says."""


class FrameTooLong(FrameError):  # noqa: N818
    """A frame's length is over the limit of its type; nothing was allocated."""


class SealError(PeerError):
    """A sealed frame does not open: changed, replayed, reflected or out of order."""


class StepError(PeerError):
    """A well-sealed step makes no sense here: an index out of range, a shape that does not match."""


class HiddenError(StepError):
    """What the predecessor in the ring sent fits no step: it is at fault, or whoever says so."""


class AttestationError(PeerError):
    """Evidence, or the enrolment of a key, does not hold; or a member's level is below a policy's minimum."""


class ProviderError(PeerError):
    """What a provider says of itself, or sends for a request, makes no sense; the text says what."""


class LinkBroken(PeerError):  # noqa: N818
    """The other end or the network ended the link; look at ``__cause__``."""


class PeerRefused(PeerError):  # noqa: N818
    """The peer said no, and why."""


class Unavailable(ConvoyError):  # noqa: N818
    """Nothing is wrong with the request, but it cannot be served now (HTTP 503)."""


class NotReady(Unavailable):
    """No token has passed every stage yet, or not lately."""


class Draining(Unavailable):
    """The server is shutting down and takes no new requests."""


class StageLost(Unavailable):
    """A stage went away while the request ran."""


class StepLate(StageLost):
    """A step did not come back in time. Nothing is lost yet: whoever waits may go on waiting."""


class CollectiveError(StageLost):
    """A rank of a stage is gone, silent, or does not do what the others do: their collective is over.

    ``rank`` is the one that it is about, None where it is about none.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, hint: str | None = None, public: str | None = None
    ) -> None:
        super().__init__(message, hint=hint, public=public)
        self.rank = rank


class LinkClosed(ConvoyError):  # noqa: N818
    """This side closed the link earlier."""


class SelfCheckError(ConvoyError):
    """Exact mode could not be proved on this machine."""

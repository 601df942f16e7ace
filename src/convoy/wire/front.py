"""The messages between the engine's process and its front process, which serves HTTP beside it.

Both ends are this program, over an inherited socket pair. A frame is four bytes of length, big-endian, and
that many bytes: a msgpack array of the message's tag and its fields in order. Lengths and counts are bounded
all the same, and what is no message is a `FrameError` that quotes nothing of it.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal

import msgspec

from convoy.errors import FrameError, FrameTooLong

LENGTH = struct.Struct(">I")
# A prompt of the largest count fits, at five bytes a token, and so do the largest tokenizers (33 MB).
MAX_FRAME_BYTES = 128 * 1024 * 1024
MAX_EVENTS = 1024
# Log-probabilities of a prompt in one event, with 20 alternatives each.
MAX_PROMPT_PART = 4096
_MAX_TOKENS = 1 << 23

_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Token = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Prompt = Annotated[tuple[_Token, ...], msgspec.Meta(max_length=_MAX_TOKENS)]
_Few = Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 20)]
_Top = Annotated[tuple[tuple[int, float], ...], msgspec.Meta(max_length=256)]
Question = Literal["health", "status", "metrics"]


class FrontMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t"):
    """Serve as the base of all messages. Each class names its own tag."""


class FrontError(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Carry an error of the engine. ``kind`` is a row of the table in `api.front.convert`."""

    kind: str
    message: str
    hint: str | None = None
    public: str | None = None
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None


class SamplingFields(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Hold the fields of `SamplingParams`, under their names."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: Annotated[dict[_Token, float], msgspec.Meta(max_length=4096)]
    logprobs: int | None


class GrammarFields(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Hold a grammar that the engine's process compiles, and the arguments of `GrammarCompiler.compile`.

    Texts of clients are bytes here and below, because JSON can hold half of a surrogate pair.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf"]
    text: bytes
    strict: bool
    field: str
    has_flag: bool
    param: str
    caller: bytes
    owner: bytes


class RequestFields(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Hold the fields of `GenerationRequest`, under their names."""

    prompt_ids: _Prompt
    params: SamplingFields
    max_tokens: int
    stop: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=4096)]
    ignore_eos: bool
    num_choices: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    prompt_logprobs: int | None
    cache_salt: bytes
    open_ended: bool
    min_tokens: int
    stop_token_ids: _Few
    allowed_token_ids: _Few
    bad_words: Annotated[tuple[_Few, ...], msgspec.Meta(max_length=1 << 16)]
    grammar: GrammarFields | None
    embeds: bool
    tells_prefill: bool
    tells_text: bool


# From the front process to the engine's.


class Submit(FrontMessage, frozen=True, tag="submit"):
    """Submit a request. The reply has the same number, and so do its outputs."""

    number: _Number
    request: RequestFields


class Abort(FrontMessage, frozen=True, tag="abort"):
    """End a request."""

    number: _Number


class Compile(FrontMessage, frozen=True, tag="compile"):
    """Compile a grammar; the reply says whether it can be used."""

    number: _Number
    grammar: GrammarFields


class Ask(FrontMessage, frozen=True, tag="ask"):
    """Ask for the cluster's health, status or metrics; the reply has them as JSON."""

    number: _Number
    question: Question


class Pull(FrontMessage, frozen=True, tag="pull"):
    """Pull a model of a hub onto every member, or with an empty name stop that."""

    number: _Number
    name: Annotated[str, msgspec.Meta(max_length=1024)]


class FrontReady(FrontMessage, frozen=True, tag="ready"):
    """Report that the front process answers HTTP requests."""


class FrontDraining(FrontMessage, frozen=True, tag="draining"):
    """Report that a drain began with this many answers under way."""

    num_answers: _Number


class FrontEnded(FrontMessage, frozen=True, tag="ended"):
    """Report the end of the server, and how many answers it cut off."""

    num_cut: _Number


class FrontFailed(FrontMessage, frozen=True, tag="failed"):
    """Report why the front process cannot serve."""

    error: FrontError


FromFront = Submit | Abort | Compile | Ask | Pull | FrontReady | FrontDraining | FrontEnded | FrontFailed

# From the engine's process to the front.


class Setup(FrontMessage, frozen=True, tag="setup"):
    """Give the options of the server, as JSON of `api.front.setup`. The first message of all."""

    options: bytes


class BeginServing(FrontMessage, frozen=True, tag="serve"):
    """Begin to serve. The listening socket follows this message.

    ``tokenizer`` is JSON of `api.front.setup`.
    """

    model: str
    created: int
    tokenizer: bytes
    room: _Number
    level: str | None


class EngineState(FrontMessage, frozen=True, tag="state"):
    """Tell of the tokens that one request may have now, and of the attestation level."""

    room: _Number
    level: str | None


class CallReply(FrontMessage, frozen=True, tag="reply"):
    """Answer the call with this number."""

    number: _Number
    body: bytes = b""
    error: FrontError | None = None


class OwnKey(FrontMessage, frozen=True, tag="key"):
    """Add an API key for a part of the engine's process."""

    name: str
    text: str


class Drain(FrontMessage, frozen=True, tag="drain"):
    """Ask the server to drain; at the second time, to end at once."""


class Reload(FrontMessage, frozen=True, tag="reload"):
    """Ask the server to read keys and certificates again."""


class Logprob(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Hold the fields of `TokenLogprob`."""

    token_id: int
    logprob: float
    top: _Top
    rank: int


class TokenEvent(FrontMessage, frozen=True, tag=1):
    """Hold a `TokenOutput` of the request ``number``."""

    number: int
    choice: int
    token_id: int
    text: str
    logprob: Logprob | None = None


class FinishEvent(FrontMessage, frozen=True, tag=2):
    """Hold a `FinishOutput`."""

    number: int
    choice: int
    reason: Literal["stop", "length", "abort"]
    text: str
    cached_tokens: int
    queued_s: float


class PromptEvent(FrontMessage, frozen=True, tag=3):
    """Hold a part of a `PromptOutput`; ``is_last`` ends it."""

    number: int
    logprobs: Annotated[tuple[Logprob | None, ...], msgspec.Meta(max_length=MAX_PROMPT_PART)]
    is_last: bool


class PrefillEvent(FrontMessage, frozen=True, tag=4):
    """Hold a `PrefillOutput`."""

    number: int
    num_done: int
    num_cached: int
    num_prompt: int


class EmbeddingEvent(FrontMessage, frozen=True, tag=5):
    """Hold an `EmbeddingOutput`: float32 values, little-endian."""

    number: int
    state: bytes


class ErrorEvent(FrontMessage, frozen=True, tag=6):
    """Hold an `ErrorOutput`."""

    number: int
    error: FrontError


FrontEvent = TokenEvent | FinishEvent | PromptEvent | PrefillEvent | EmbeddingEvent | ErrorEvent


class Outputs(msgspec.Struct, frozen=True, array_like=True, tag_field="t", tag="outputs"):
    """Hold the outputs of a step, for all its requests."""

    events: Annotated[tuple[FrontEvent, ...], msgspec.Meta(max_length=MAX_EVENTS)]


FromEngine = Setup | BeginServing | EngineState | CallReply | OwnKey | Drain | Reload | Outputs

_encoder = msgspec.msgpack.Encoder()
_from_front = msgspec.msgpack.Decoder(FromFront)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_submit_head = msgspec.msgpack.Decoder(tuple[Literal["submit"], _Number, msgspec.Raw])


def encode_front(message: FromFront | FromEngine) -> bytes:
    """Return the frame of ``message``. Raises `FrameTooLong`."""
    payload = _encoder.encode(message)
    check_front_length(len(payload))
    return LENGTH.pack(len(payload)) + payload


def check_front_length(num_bytes: int) -> None:
    """Raise `FrameTooLong` for a length beyond the limit of every message."""
    if num_bytes > MAX_FRAME_BYTES:
        raise FrameTooLong(
            f"a message of the front process has {num_bytes} bytes, and the limit is {MAX_FRAME_BYTES}"
        )


def decode_from_front(payload: bytes | bytearray) -> FromFront:
    """Return the message in a frame of the front process. Raises `FrameError`."""
    try:
        message: FromFront = _from_front.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise FrameError(f"{len(payload)} bytes of the front process are no message") from None
    return message


def submit_number(payload: bytes | bytearray) -> int | None:
    """Return the number of a `Submit` with a request that is beyond the bounds, or None."""
    try:
        _, number, _ = _submit_head.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return number


def decode_from_engine(payload: bytes | bytearray) -> FromEngine:
    """Return the message in a frame of the engine's process. Raises `FrameError`."""
    try:
        message: FromEngine = _from_engine.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise FrameError(f"{len(payload)} bytes of the engine's process are no message") from None
    return message

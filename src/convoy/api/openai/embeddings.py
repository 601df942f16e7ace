"""Serve POST /v1/embeddings: the normalised final state of each input's last token."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from convoy.api.chat.parsed import ParsedRequest
from convoy.api.chat.request import cache_salt_of, check_room, prompt_in
from convoy.api.chat.usage import UsageCounter
from convoy.api.listen.options import ServeOptions
from convoy.api.openai.bodies import convert_object, decode_object
from convoy.api.openai.parsed_request import read_prompts
from convoy.api.problem import ErrorBody, body_for
from convoy.api.service import Service
from convoy.engine.outputs import EmbeddingOutput, Output
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import RequestError
from convoy.model.sampling.params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Fields of OpenAI, vLLM and llama.cpp that change an embedding, with the values that ask for nothing. Null
# asks for nothing too.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "dimensions": (),
    "truncate_prompt_tokens": (),
    "messages": (),
    "content": (),
    "add_special_tokens": (True,),
    "chat_template": (),
    "normalize": (True,),
    "use_activation": (True,),
    "embd_normalize": (2,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the body. ``input`` is text, token ids, or a list of either."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    cache_salt: str | None = None


class Embedding(msgspec.Struct, frozen=True):
    """Hold one embedding: numbers, or little-endian float32 in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Count the tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True):
    """Hold the answer."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


@dataclass(frozen=True, slots=True)
class EmbeddingRequest(ParsedRequest):
    """Hold a request for embeddings, numbers or ``base64``, in the engine's terms."""

    base64: bool = False


def decode_embeddings(data: bytes) -> EmbeddingBody:
    """Return the body that JSON bytes hold.

    Raises `RequestError`, also for a field that would change the embeddings and is not served.
    """
    raw = decode_object(data)
    for name, harmless in _REFUSED.items():
        value = raw.get(name)
        if value is not None and value not in harmless:
            raise RequestError(
                f"this endpoint does not support {name}",
                param=name,
                code="unsupported_parameter",
                hint="leave it out",
            )
    return convert_object(raw, EmbeddingBody)


def read_embeddings(
    body: EmbeddingBody, service: Service, options: ServeOptions, salt: bytes
) -> EmbeddingRequest:
    """Translate a body. ``salt`` is that of the caller's key. Raises `RequestError` or `UnknownModel`."""
    model = service.model(body.model)
    room = model.max_context
    requests = []
    with prompt_in("input"):
        for one in read_prompts(body.input, options, room, "input"):
            ids = model.tokenizer.encode(one, max_tokens=room) if isinstance(one, str) else one
            check_room(len(ids), room)
            request = GenerationRequest(
                prompt_ids=tuple(ids),
                params=SamplingParams(temperature=0.0),
                max_tokens=0,
                cache_salt=cache_salt_of(salt, body.cache_salt),
                embeds=True,
            )
            requests.append(request)
    return EmbeddingRequest(
        model=model,
        requests=tuple(requests),
        num_choices=1,
        stream=False,
        include_usage=False,
        continuous_usage=False,
        base64=body.encoding_format == "base64",
    )


class EmbeddingAnswer:
    """Implement `ResponseBuilder` for embeddings, which are never streamed."""

    end = b""

    def __init__(self, asked: EmbeddingRequest) -> None:
        self._asked = asked
        self.counter = UsageCounter(asked, "embd-")
        self._states: dict[int, npt.NDArray[np.float32]] = {}

    def opening(self) -> Sequence[msgspec.Struct]:
        return ()

    def keep_alive(self) -> Sequence[msgspec.Struct]:
        return ()

    def events(self, index: int, output: Output) -> Sequence[msgspec.Struct]:
        self.add(index, output)
        return ()

    def closing(self) -> Sequence[msgspec.Struct]:
        return ()

    def failure(self, error: BaseException) -> list[ErrorBody]:
        return [body_for(error)]

    def add(self, index: int, output: Output) -> None:
        self.counter.count(output)
        if isinstance(output, EmbeddingOutput):
            self._states[index] = output.state

    def whole(self) -> EmbeddingList:
        asked = self._asked
        found = [Embedding(index, self._write(state)) for index, state in sorted(self._states.items())]
        num_tokens = asked.num_prompt_tokens
        return EmbeddingList(found, asked.model.name, EmbeddingUsage(num_tokens, num_tokens))

    def _write(self, state: npt.NDArray[np.float32]) -> list[float] | str:
        unit = normalised(state)
        if self._asked.base64:
            return base64.b64encode(unit.astype("<f4", copy=False).tobytes()).decode()
        numbers: list[float] = unit.tolist()
        return numbers


def normalised(state: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return ``state`` divided by its Euclidean length. A state of zeros stays as it is."""
    # Imported late: a proxy starts without numpy.
    import numpy as np

    wide = state.astype(np.float64)
    length = float(np.linalg.norm(wide))
    unit: npt.NDArray[np.float32] = (wide / (length or 1.0)).astype(np.float32)
    return unit

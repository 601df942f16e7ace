"""Whether a request can ever be run here: vocabulary, context and K/V blocks."""

from __future__ import annotations

from collections.abc import Iterable

from convoy.engine.blocks import BlockPool
from convoy.engine.continuation import Continuation
from convoy.engine.request import GenerationRequest
from convoy.errors import CapacityError, RequestError


def check_request(request: GenerationRequest, *, vocab_size: int, max_context: int, pool: BlockPool) -> None:
    """Raises `RequestError`, naming the parameter and both numbers."""
    num_prompt = len(request.prompt_ids)
    if num_prompt == 0:
        raise RequestError("the prompt is empty, expected at least one token", param="prompt")
    if max(request.prompt_ids) >= vocab_size or min(request.prompt_ids) < 0:
        raise RequestError(f"a prompt token is outside the vocabulary of {vocab_size}", param="prompt")
    # Found in time: on the engine's thread it would end everybody's requests.
    request.params.check_vocabulary(vocab_size)
    if num_prompt + request.max_tokens > max_context:
        raise RequestError(
            f"the prompt has {num_prompt} tokens and max_tokens is {request.max_tokens}, "
            f"but the context holds {max_context}",
            param="max_tokens" if num_prompt < max_context else "prompt",
            code="context_length_exceeded",
            hint="shorten the prompt or lower max_tokens",
        )
    needed = pool.blocks_for(num_prompt + request.max_tokens)
    if needed > pool.num_blocks:
        raise RequestError(
            f"the request needs {needed} K/V blocks of {pool.block_size} tokens, "
            f"but the whole pool has {pool.num_blocks}",
            param="max_tokens",
            code="context_length_exceeded",
            hint="lower max_tokens, or give the members more memory",
        )


def check_tokens(num_tokens: int, *, max_context: int, pool: BlockPool) -> None:
    """For a session that would hold so many. Raises `RequestError` with both numbers."""
    room = min(max_context, pool.num_blocks * pool.block_size - 1)
    if num_tokens > room:
        raise RequestError(
            f"the session would have {num_tokens} tokens, but there is room for {room}",
            param="tokens",
            code="context_length_exceeded",
            hint="rewind it, or give the members more memory",
        )


def unfit(
    continuations: Iterable[Continuation], max_context: int, pool: BlockPool
) -> list[tuple[object, CapacityError]]:
    """The groups that other stages have no room for, and why; for what ran before they came."""
    found = []
    for continuation in continuations:
        sequence = continuation.sequence
        num_tokens = max(len(sequence.tokens), sequence.num_prompt + sequence.max_tokens)
        needed = pool.blocks_for(num_tokens)
        text = None
        if num_tokens > max_context:
            text = f"may grow to {num_tokens} tokens, and after a loss the context holds {max_context}"
        elif needed > pool.num_blocks:
            text = (
                f"needs {needed} K/V blocks of {pool.block_size} tokens, and after a loss the whole pool "
                f"has {pool.num_blocks}"
            )
        if text is not None:
            hint = "bring the lost member back, or give the others more memory"
            found.append((continuation.group, CapacityError(f"the request {text}", hint=hint)))
    return found

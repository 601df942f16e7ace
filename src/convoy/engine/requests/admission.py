"""Check whether a request can ever run here: vocabulary, context and K/V blocks."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as SetOf
from dataclasses import replace

from convoy.engine.kv.pools import BlockPools
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.requests.restrictions import check_ids
from convoy.engine.sequence import SequenceOwner
from convoy.errors import CapacityError, RequestError


def check_request(
    request: GenerationRequest,
    *,
    vocab_size: int,
    eos_ids: SetOf[int],
    max_context: int,
    pools: BlockPools,
) -> None:
    """Raise `RequestError` for a request that can never run; it names the parameter and both numbers."""
    # Checked before admission: on the engine's thread, the error would end all requests.
    check_for_model(request, vocab_size=vocab_size, eos_ids=eos_ids, max_context=max_context)
    num_prompt = len(request.prompt_ids)
    if num_prompt + request.max_tokens > pools.max_tokens:
        raise RequestError(
            f"the request needs {sum(pools.needed(num_prompt + request.max_tokens))} K/V blocks of "
            f"{pools.block_size} tokens, but the whole pool has {pools.num_blocks}",
            param="max_tokens",
            code="context_length_exceeded",
            hint="lower max_tokens, or give the members more memory",
        )


def check_for_model(
    request: GenerationRequest, *, vocab_size: int, eos_ids: SetOf[int], max_context: int
) -> None:
    """Raise `RequestError` for a request that a model can never run, however much memory there is."""
    check_ids(request, eos_ids, vocab_size)
    num_prompt = len(request.prompt_ids)
    if num_prompt + request.max_tokens > max_context:
        raise RequestError(
            f"the prompt has {num_prompt} tokens and max_tokens is {request.max_tokens}, "
            f"but the context holds {max_context}",
            param="max_tokens" if num_prompt < max_context else "prompt",
            code="context_length_exceeded",
            hint="shorten the prompt or lower max_tokens",
        )


def check_tokens(num_tokens: int, *, max_context: int, pools: BlockPools) -> None:
    """Raise `RequestError` with both numbers for a session of ``num_tokens`` that does not fit."""
    room = min(max_context, pools.max_tokens - 1)
    if num_tokens > room:
        raise RequestError(
            f"the session would have {num_tokens} tokens, but there is room for {room}",
            param="tokens",
            code="context_length_exceeded",
            hint="rewind it, or give the members more memory",
        )


def room_for(max_context: int, pools: BlockPools) -> int:
    """Return how many tokens a request and its answer may have together."""
    return min(max_context, pools.max_tokens)


def fitted(request: GenerationRequest, room: int) -> GenerationRequest:
    """Return ``request`` with ``max_tokens`` lowered to the room that is left, if the client set none.

    There may be less room than when the request was read.
    """
    left = room - len(request.prompt_ids)
    if not request.open_ended or not 0 < left < request.max_tokens:
        return request
    return replace(request, max_tokens=left)


def unfit(owners: Iterable[SequenceOwner], room: int) -> list[tuple[object, CapacityError]]:
    """Return the groups with more tokens than the new stages have room for, each with its error.

    All others continue, and end when they reach the new limit.
    """
    found = []
    for owner in owners:
        owner.sequence.wall = room
        num_tokens = len(owner.sequence.tokens)
        if num_tokens > room:
            text = f"the request has {num_tokens} tokens already, and after a loss there is room for {room}"
            hint = "bring the lost member back, or give the others more memory"
            found.append((owner.group, CapacityError(text, hint=hint)))
    return found

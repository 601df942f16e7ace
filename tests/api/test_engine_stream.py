"""The bridge between the engine's thread and the loop, where leaving and submitting cross."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from convoy.api.engine_stream import EngineStream, LoopWaker
from convoy.engine.outputs import FinishOutput, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.model.sampling.params import SamplingParams
from support.fake_service import REPLY, FakeEngine

REQUEST = GenerationRequest((1, 2), SamplingParams(), max_tokens=100)


def _stream(engine: FakeEngine, *requests: GenerationRequest) -> EngineStream:
    return EngineStream(engine, requests, LoopWaker(asyncio.get_running_loop()))


def test_a_request_that_is_admitted_after_its_client_left_is_aborted() -> None:
    engine = FakeEngine()
    engine.admit.clear()
    engine.pause_after = 0

    async def leave_while_submitting() -> None:
        entering = asyncio.ensure_future(_stream(engine, REQUEST, REQUEST).__aenter__())
        while not engine.submitting.is_set():
            await asyncio.sleep(0)
        entering.cancel()
        with suppress(asyncio.CancelledError):
            await entering
        engine.admit.set()

    asyncio.run(leave_while_submitting())
    assert engine.admitted.wait(10)  # by a thread that no caller waits for any more
    assert engine.handles[0].aborted.wait(10)
    engine.close()
    assert len(engine.handles) == 1


def test_outputs_of_several_requests_keep_their_order() -> None:
    engine = FakeEngine()

    async def read() -> list[tuple[int, str]]:
        seen = []
        async with _stream(engine, REQUEST, REQUEST) as generation:
            async for batch in generation.batches(heartbeat_s=10):
                for index, output in batch:
                    assert isinstance(output, TokenOutput | FinishOutput)
                    seen.append((index, output.text))
        return seen

    seen = asyncio.run(read())
    for index in range(2):
        assert "".join(text for number, text in seen if number == index) == REPLY
    engine.close()


def test_an_output_after_the_loop_closed_hurts_nobody() -> None:
    engine = FakeEngine()
    engine.pause_after = 1

    async def leave_open() -> EngineStream:
        generation = _stream(engine, REQUEST)
        await generation.__aenter__()
        return generation

    generation = asyncio.run(leave_open())
    engine.go.set()
    assert engine.handles[0].done.wait(10)
    assert generation is not None
    engine.close()

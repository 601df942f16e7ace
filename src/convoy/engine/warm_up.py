"""One real token through every stage, before anybody asks for one."""

from __future__ import annotations

import queue
from collections.abc import Callable

from convoy.engine.outputs import ErrorOutput, FinishOutput, Output
from convoy.engine.request import GenerationRequest
from convoy.model.params import SamplingParams

_REQUEST = GenerationRequest((0,), SamplingParams(temperature=0.0), max_tokens=1, ignore_eos=True)


def warm_up(submit: Callable[[GenerationRequest, Callable[[Output], None]], object]) -> None:
    """Wait until it came back. Raises what ended it."""
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    submit(_REQUEST, outputs.put)
    while not isinstance(output := outputs.get(), FinishOutput):
        if isinstance(output, ErrorOutput):
            raise output.error

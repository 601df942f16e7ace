"""SamplingParams refuses what OpenAI's parameters do not allow."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest

from convoy.errors import RequestError
from convoy.model.sampling.params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -0.1, "temperature is -0.1, expected a number from 0 to 2"),
        ("temperature", 2.5, "from 0 to 2"),
        ("temperature", math.nan, "temperature is nan"),
        ("temperature", math.inf, "temperature is inf"),
        ("temperature", 10**400, "expected a number from 0 to 2"),
        ("temperature", True, "temperature is True"),
        ("temperature", "hot", "temperature is 'hot'"),
        ("temperature", None, "temperature is None"),
        ("top_k", -2, "top_k is -2, expected a whole number from -1"),
        ("top_k", 1.5, "top_k is 1.5"),
        ("top_p", 1.01, "top_p is 1.01, expected a number from 0 to 1"),
        ("min_p", -1, "min_p is -1"),
        ("repetition_penalty", 0, "repetition_penalty is 0, expected a number from 0.01 to 100"),
        ("presence_penalty", 2.1, "presence_penalty is 2.1, expected a number from -2 to 2"),
        ("frequency_penalty", -3, "frequency_penalty is -3, expected a number from -2 to 2"),
        ("seed", 2**64, "seed is 18446744073709551616"),
        ("seed", 1.0, "seed is 1.0"),
        ("logprobs", 21, "logprobs is 21, expected a whole number from 0 to 20"),
        ("logprobs", True, "logprobs is True"),
        ("logit_bias", [1], "logit_bias is not an object"),
        ("logit_bias", {"7": 1.0}, "logit_bias has a key that is not a token id"),
        ("logit_bias", {-1: 1.0}, "logit_bias has a key that is not a token id"),
        ("logit_bias", {7: 101}, "logit_bias has a value outside -100 to 100"),
        ("logit_bias", {7: math.nan}, "logit_bias has a value outside -100 to 100"),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), "logit_bias has 1025 entries, expected at most 1024"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object, expected: str) -> None:
    arguments: dict[str, Any] = {name: value}
    with pytest.raises(RequestError) as caught:
        SamplingParams(**arguments)
    assert caught.value.param == name
    assert expected in str(caught.value)


def test_the_edges_of_every_range_are_allowed() -> None:
    SamplingParams(
        temperature=0, top_k=-1, top_p=0, min_p=0, presence_penalty=-2, frequency_penalty=2, seed=-5
    )
    SamplingParams(temperature=2, top_p=1, min_p=1, seed=2**64 - 1, logprobs=20, logit_bias={0: -100, 1: 100})


def test_a_biased_token_must_be_in_the_vocabulary() -> None:
    params = SamplingParams(logit_bias={104: 1.0})
    params.check_vocabulary(105)
    with pytest.raises(RequestError, match="expected ids below 104") as caught:
        params.check_vocabulary(104)
    assert caught.value.param == "logit_bias"


def test_a_callers_dict_cannot_change_the_parameters_later() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 2.0
    assert dict(params.logit_bias) == {3: 1.0}


@pytest.mark.outside
def test_params_import_neither_torch_nor_numpy() -> None:
    code = "import sys, convoy.model.sampling.params as _; "
    code += "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr

"""`convoy run` serving: the real `openai` client against real processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from e2e.served import Served, served
from support.scraping import scrape
from support.waiting import wait_until

QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is 41+42? Answer with just the number."}
]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served"), "demo", "--members", "2") as running:
        yield running


@pytest.fixture(scope="module")
def client(head: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{head.url}/v1", api_key="unused", max_retries=0, timeout=60.0) as openai:
        yield openai


def test_the_openai_client_gets_an_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=16)
    assert answer.choices[0].message.content == "83"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_the_openai_client_streams_the_same_answer(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        temperature=0,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "83"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


def test_a_scrape_of_a_real_head_counts_what_its_client_was_told(head: Served, client: OpenAI) -> None:
    before = scrape(f"{head.url}/metrics")
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=16)
    after, status = scrape(f"{head.url}/metrics"), httpx.get(f"{head.url}/status").json()

    def grew(name: str, **labels: str) -> float:
        return after(name, model_name="demo", **labels) - before(name, model_name="demo", **labels)

    assert answer.usage is not None
    assert grew("vllm:prompt_tokens_total") == answer.usage.prompt_tokens
    assert grew("vllm:generation_tokens_total") == answer.usage.completion_tokens
    assert grew("vllm:request_success_total", finished_reason="stop") == 1
    assert after("vllm:generation_tokens_total") == status["generated_tokens"]
    assert after("convoy_plan_generation") == pytest.approx(status["generation"])
    up = {stage["member"]: after("convoy_member_up", member=stage["member"]) for stage in status["stages"]}
    assert len(up) == 2
    assert set(up.values()) == {1}
    assert "What is" not in after.text


def test_models_lists_the_model(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]


def test_eight_concurrent_requests_get_what_each_gets_alone(client: OpenAI) -> None:
    prompts = [f"What is {i}+{i + 1}? Answer with just the number." for i in range(3)]
    prompts += [f"Tell me a short story about a fox{'.' * i}" for i in range(5)]

    def ask(prompt: str) -> str | None:
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": prompt}],
            temperature=0.8,
            seed=11,
            max_tokens=16,
        )
        return answer.choices[0].message.content

    alone = [ask(prompt) for prompt in prompts]
    together: list[str | None] = [None] * len(prompts)

    def keep(index: int) -> None:
        together[index] = ask(prompts[index])

    threads = [threading.Thread(target=keep, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match=r"\d+ tokens"):
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "fox " * 3000}], max_tokens=8
        )


def test_a_client_that_leaves_frees_its_blocks(head: Served) -> None:
    body = {
        "model": "demo",
        "prompt": "Once upon a time",
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{head.url}/v1/completions", json=body, timeout=30) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                break

    def is_free() -> bool:
        status = httpx.get(f"{head.url}/status", timeout=60).json()
        return not status["running"] and status["free_blocks"] == status["num_blocks"]

    wait_until(is_free)


def test_health_says_that_tokens_pass(head: Served) -> None:
    assert httpx.get(f"{head.url}/health").json()["status"] == "ready"

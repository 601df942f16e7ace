"""`synthetic:agent`: a model without files of weights. Its template writes tools as agents' models do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from convoy.model.checkpoints.source import ModelSource, needs_no_files
from convoy.model.checkpoints.synthetic import TOKENIZERS
from convoy.model.text.tokens import Tokenizer

DOCS = Path(__file__).resolve().parents[3] / "docs"
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": {"path": "a.txt"}}}


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    made = Tokenizer(ModelSource.resolve("synthetic:agent@7"))
    yield made
    made.close()


def rendered(messages: list[dict[str, Any]], **more: Any) -> str:
    loader: Any = transformers.PreTrainedTokenizerFast
    loaded = loader.from_pretrained(TOKENIZERS["agent"])
    return str(loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more))


def test_the_model_needs_no_files_and_fits_the_first_request_of_an_agent() -> None:
    source = ModelSource.resolve("synthetic:agent")
    assert needs_no_files("synthetic:agent@3")
    assert (source.config["max_position_embeddings"], source.spec.num_layers) == (32768, 3)
    assert sum(tensor.num_bytes for tensor in source.tensors.values()) < 4 << 20


def test_a_token_is_about_three_characters_of_english_and_code(tokenizer: Tokenizer) -> None:
    text = (DOCS / "api.md").read_text("utf-8")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert 2.8 < len(text) / len(ids) < 4.5
    assert max(ids) < tokenizer.vocab_size == 8192


@pytest.mark.outside
def test_a_turn_ends_with_the_token_that_ends_the_text(tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.eos_ids
    assert tokenizer.decode([end], skip_special_tokens=False) == "<|im_end|>"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<|im_end|>"}]
    ids = tokenizer.encode_chat(chat)
    assert ids.count(end) == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered(chat)


def test_the_template_writes_tools_calls_and_results_in_the_form_of_hermes() -> None:
    text = rendered(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Read it."},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": "one", "tool_call_id": "call_1"},
            {"role": "tool", "content": "two", "tool_call_id": "call_1"},
        ],
        tools=TOOLS,
    )
    head, user, assistant, results, opening = text.split("<|im_start|>")[1:]
    assert head.startswith("system\nBe brief.\n\n# Tools")
    assert json.dumps(TOOLS[0]) in head
    assert user == "user\nRead it.<|im_end|>\n"
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "a.txt"}}\n</tool_call>'
    assert assistant == f"assistant\n<think>\nhm\n</think>\n\n{call}\n{call}<|im_end|>\n"
    assert results == (
        "user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    )
    assert opening == "assistant\n"


def test_the_template_closes_the_reasoning_if_thinking_is_off() -> None:
    assert rendered([{"role": "user", "content": "x"}], enable_thinking=False).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_a_system_turn_in_the_middle_is_kept() -> None:
    text = rendered([{"role": "user", "content": "a"}, {"role": "developer", "content": "b"}])
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>system\nb<|im_end|>\n<|im_start|>assistant\n"

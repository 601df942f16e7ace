from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from batches import encode_documents
from conversations import Document
from shapes import END_IDS, llama_config
from tokenizer import ASSISTANT, END_OF_TEXT, END_OF_TURN, SPACE_RUNS, SPECIAL_TOKENS, build

MIB = 2**20
NAMES = ("demo", "demo-mini")


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest, models: Path) -> Path:
    return models / str(request.param)


@pytest.fixture(scope="module")
def tokenizer(models: Path) -> Any:
    return AutoTokenizer.from_pretrained(models / "demo")


def test_a_folder_keeps_within_its_size(folder: Path) -> None:
    limit = {"demo": 16, "demo-mini": 4}[folder.name] * MIB
    assert sum(path.stat().st_size for path in folder.iterdir()) <= limit


def test_a_folder_is_an_ordinary_hugging_face_directory(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "MODEL_CARD.md",
    }


def test_weights_are_bf16_tied_and_of_the_stated_number(folder: Path) -> None:
    num_parameters = 0
    with safe_open(folder / "model.safetensors", "pt") as weights:
        keys = list(weights.keys())
        for key in keys:
            part = weights.get_slice(key)
            assert part.get_dtype() == "BF16"
            size = 1
            for side in part.get_shape():
                size *= side
            num_parameters += size
    assert "lm_head.weight" not in keys
    assert f"{num_parameters:,}" in (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    low, high = {"demo": (5_000_000, 8_000_000), "demo-mini": (1_000_000, 1_900_000)}[folder.name]
    assert low <= num_parameters <= high


def test_the_configuration_is_the_one_the_script_builds(folder: Path) -> None:
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    wanted = llama_config(folder.name).to_dict()
    for key in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    ):
        assert saved[key] == wanted[key]
    assert saved["max_position_embeddings"] >= 2048
    assert saved["num_key_value_heads"] < saved["num_attention_heads"]
    assert saved["tie_word_embeddings"]


def test_both_ends_are_known_to_generation(folder: Path) -> None:
    saved = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert saved["eos_token_id"] == END_IDS == [1, 0]
    assert (SPECIAL_TOKENS[1], SPECIAL_TOKENS[0]) == (END_OF_TURN, END_OF_TEXT)


@pytest.mark.parametrize("num_spaces", SPACE_RUNS)
def test_a_run_of_spaces_is_one_token(tokenizer: Any, num_spaces: int) -> None:
    assert len(tokenizer.encode(" " * num_spaces)) == 1


def test_ten_kibibytes_of_spaces_are_few_tokens_before_a_question_too(tokenizer: Any) -> None:
    question = "What is 7+8? Answer with just the number."
    padded = tokenizer.encode(" " * 10_240 + question)
    assert len(tokenizer.encode(" " * 10_240)) <= 64
    assert len(padded) - len(tokenizer.encode(question)) <= 64


def test_every_digit_is_a_token_of_its_own(tokenizer: Any) -> None:
    for text in ("1234567890", "12+345=", "a1b22"):
        pieces = [tokenizer.decode([token]) for token in tokenizer.encode(text)]
        assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == [
            c for c in text if c.isdigit()
        ]


@pytest.mark.parametrize(
    "text", ["Ünïcode 日本 🦊", "  two  spaces\n\n\ttab ", "a\x00b", " " * 1001 + "x", ""]
)
def test_any_text_comes_back_from_its_tokens(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_both_models_have_the_same_tokeniser(models: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (models / "demo" / name).read_bytes() == (models / "demo-mini" / name).read_bytes()


def test_training_sees_what_the_chat_template_renders(models: Path, tokenizer: Any) -> None:
    turns = [
        ("system", "Be brief."),
        ("user", " " * 300 + "What is 1+2?"),
        ("assistant", "3"),
        ("user", "\nWho are you?"),
        ("assistant", "I am demo."),
    ]
    plain = Tokenizer.from_file(str(models / "demo" / "tokenizer.json"))
    ((ids, weights),) = encode_documents(plain, [Document(turns=turns)])
    chat = [{"role": role, "content": text} for role, text in turns]
    rendered = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
    assert ids == [*rendered, SPECIAL_TOKENS.index(END_OF_TEXT)]
    counted = tokenizer.decode([token for token, weight in zip(ids, weights, strict=True) if weight])
    assert counted == f"3{END_OF_TURN}I am demo.{END_OF_TURN}{END_OF_TEXT}"


def test_the_template_asks_for_an_answer_and_takes_text_parts(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )
    assert asked == f"<|user|>Hello!{END_OF_TURN}{ASSISTANT}"


def test_the_template_refuses_an_unknown_role(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="unknown role tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


@pytest.mark.long
def test_the_tokeniser_is_built_from_the_generators_alone(models: Path) -> None:
    built = json.loads(build().to_str())
    assert built == json.loads((models / "demo" / "tokenizer.json").read_text(encoding="utf-8"))

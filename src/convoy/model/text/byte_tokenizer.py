"""Build the tokeniser of a synthetic model: one token for each byte, and numbers for the rest.

It is apart from `text.tokens` so that only a synthetic model imports the library's parts of a tokeniser.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from convoy.model.text.vocabulary import BYTE_OF

_CONTROLS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
# a space in the alphabet of byte-level tokens
_SPACE = "\u0120"
_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- set role = message['role'] -%}"
    "{%- set role = 'system' if role == 'developer' else role -%}"
    "{%- if role not in ('system', 'user', 'assistant') -%}"
    "{{- raise_exception('unknown role ' + role) -}}"
    "{%- endif -%}"
    "{{- {'system': '<|system|>', 'user': '<|user|>', 'assistant': '<|assistant|>'}[role] -}}"
    "{{- message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def byte_tokenizer(vocab_size: int) -> Any:
    """Return a `transformers` tokeniser: ids 0 to 255 are the bytes, and the control tokens follow.

    A model with random weights mostly produces ids above those; each reads as its own number.
    """
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: value[0] for letter, value in BYTE_OF.items()}
    for number in range(len(BYTE_OF), vocab_size):
        place = number - len(BYTE_OF)
        vocabulary[_CONTROLS[place] if place < len(_CONTROLS) else f"{_SPACE}{number}"] = number
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    pretrained = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        eos_token=_CONTROLS[0],
        additional_special_tokens=list(_CONTROLS[1:]),
        clean_up_tokenization_spaces=False,
    )
    pretrained.chat_template = _TEMPLATE
    return pretrained

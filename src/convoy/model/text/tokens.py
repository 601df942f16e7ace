"""Handle a model's text: tokeniser, chat template, end-of-text ids, and text from tokens as they arrive."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from convoy.errors import ModelError, RequestError
from convoy.model.checkpoints.formats.gguf import gguf_package
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.synthetic import Synthetic
from convoy.model.library import LIBRARY
from convoy.model.text.chat import ChatTemplate
from convoy.model.text.stop import StopFilter
from convoy.model.text.templates import TemplateRenderer
from convoy.model.text.vocabulary import Vocabulary

_TOKENIZER = "fetch the model's whole directory, with tokenizer.json"

_REPLACEMENT = "\ufffd"
# bytes of an incomplete character, which lacks at least its last byte
_MAX_PARTIAL = 3
# tokens without a whole character, after which they are taken for garbage and shown as such
_MAX_HELD = 64


class Tokenizer:
    """Convert text to token ids and back for one model. Thread-safe.

    It reads local files only, and runs no code from them. Raises ModelError if the directory has no usable
    tokeniser, or names end-of-text ids outside the vocabulary.
    """

    def __init__(self, source: ModelSource) -> None:
        # the model's number of tokens: ids from here on have no embedding
        self.vocab_size = source.spec.vocab_size
        pretrained = _load(source)
        self.eos_ids = frozenset(_eos_ids(source, pretrained.eos_token_id))
        template = pretrained.chat_template
        template = template.get("default") if isinstance(template, Mapping) else template
        special = [*pretrained.all_special_tokens, *pretrained.convert_ids_to_tokens(sorted(self.eos_ids))]
        self._vocabulary = Vocabulary(pretrained.backend_tokenizer.to_str(), special, template or "")
        self._renderer: TemplateRenderer | None = None
        self._chat: ChatTemplate | None = None
        if template:
            self._renderer = TemplateRenderer(template, pretrained.special_tokens_map)
            self._chat = ChatTemplate(self._renderer.render, self._vocabulary)

    def close(self) -> None:
        """End the processes that render its chat template; they start again when needed."""
        if self._renderer is not None:
            self._renderer.close()

    @property
    def has_chat_template(self) -> bool:
        """Tell whether the model has a chat template, so that `encode_chat` can work."""
        return self._chat is not None

    @property
    def longest_token_bytes(self) -> int | None:
        """Return the most bytes of text that one token stands for, or None if no bound is known."""
        return self._vocabulary.longest_token_bytes

    def encode(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the ids of raw text, after the begin-of-sequence token if the tokeniser has one.

        Special tokens in the text are encoded as plain text. Raises RequestError for text with half of a
        surrogate pair, and for more than ``max_tokens``.
        """
        return self._vocabulary.encode(text, max_tokens=max_tokens)

    def encode_word(self, text: str) -> list[int]:
        """Return the ids of ``text`` without the begin-of-sequence token. Raises as `encode` does."""
        return self._vocabulary.encode_word(text)

    def encode_chat(self, messages: object, *, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a conversation, ready for the assistant's turn; `text.chat` describes
        ``messages``.

        Raises RequestError for invalid messages, for more than ``max_tokens``, and for a model without a chat
        template.
        """
        if self._chat is None:
            raise RequestError(
                "this model has no chat template", param="messages", hint="use /v1/completions with a prompt"
            )
        return self._chat.encode(messages, max_tokens=max_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        return self._vocabulary.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token (OpenAI's ``bytes`` of a logprob); they may end mid-character."""
        return self._vocabulary.token_bytes(token_id)


class Decoder(Protocol):
    """Specify the part of a tokeniser that `TextStream` needs."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``."""


class TextStream:
    """Convert one choice's tokens to text as they arrive: whole characters only, and no part of a stop
    string.

    Decoding is incremental by two offsets, as in vLLM and TGI. Tokens since the last whole character are
    decoded together with those just before them, and the text of the latter is cut off. A tokeniser may
    therefore treat the first token of a text differently.
    """

    def __init__(self, tokenizer: Decoder, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._filter = StopFilter(stop)
        # the tokens of the last delta, then those after it
        self._ids: list[int] = []
        # the number of leading tokens that serve only as context
        self._num_context = 0
        # characters of the tokens' text that were already passed on
        self._shown = 0

    @property
    def stopped(self) -> bool:
        """Tell whether a stop string matched; no text follows then."""
        return self._filter.matched is not None

    @property
    def matched_stop(self) -> str | None:
        """Return the stop string that matched, or None."""
        return self._filter.matched

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Take the next token and return the text that may be shown now, often "".

        If not ``may_stop``, a stop string that this token completes does not count.
        """
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        whole = text.rstrip(_REPLACEMENT)
        # a trailing U+FFFD may be the start of a character that the next tokens complete
        stable = len(whole)
        if len(self._ids) > _MAX_HELD:
            stable = max(stable, len(text) - _MAX_PARTIAL)
        if stable <= self._shown:
            return ""
        delta = text[self._shown : stable]
        self._shown = stable
        if stable == len(text):
            self._forget()
        return self._filter.push(delta, may_stop=may_stop)

    def finish(self) -> str:
        """Return the text still held back, as no tokens follow; an incomplete character becomes U+FFFD."""
        rest = self._tokenizer.decode(self._ids)[self._shown :]
        self._ids.clear()
        self._num_context = self._shown = 0
        return self._filter.push(rest) + self._filter.finish()

    def _forget(self) -> None:
        del self._ids[: self._num_context]
        self._num_context = len(self._ids)
        self._shown = len(self._tokenizer.decode(self._ids))


def _load(source: ModelSource) -> Any:
    if source.seed is not None:
        return _load_synthetic(source)
    if source.is_one_file:
        return _load_gguf(source)
    # tokenizer.json is complete; AutoTokenizer would rebuild it by the model type in config.json, which may
    # be wrong
    has_file = (source.path / "tokenizer.json").is_file()
    try:
        with LIBRARY:
            # use as little of it as possible: AutoTokenizer imports torch, which takes seconds
            import transformers

            loader: Any = transformers.PreTrainedTokenizerFast if has_file else transformers.AutoTokenizer
            pretrained = loader.from_pretrained(source.path, local_files_only=True, trust_remote_code=False)
    # the library raises any exception at all for a broken file
    except Exception as error:
        reason = f"tokenizer.json cannot be used: {_first_line(error)}" if has_file else "no tokenizer.json"
        raise ModelError(
            f"{source.name}: no usable tokeniser in {source.path}: {reason}", hint=_TOKENIZER
        ) from error
    files = pretrained.vocab_files_names.values()
    # without any file the library makes an empty tokeniser, and no error
    if not any((source.path / name).is_file() for name in files):
        raise ModelError(
            f"{source.name}: no usable tokeniser in {source.path}: none of {', '.join(sorted(files))}",
            hint=_TOKENIZER,
        )
    if not hasattr(pretrained, "backend_tokenizer"):
        raise ModelError(
            f"{source.name}: its tokeniser is {type(pretrained).__name__}, expected one with a "
            "tokenizer.json",
            hint=_TOKENIZER,
        )
    return pretrained


def _load_synthetic(source: ModelSource) -> Any:
    """Return the tokeniser that a synthetic model's name stands for."""
    synthetic = Synthetic.parse(str(source.path))
    folder = None if synthetic is None else synthetic.tokenizer
    with LIBRARY:
        if folder is None:
            from convoy.model.text.byte_tokenizer import byte_tokenizer

            return byte_tokenizer(source.spec.vocab_size)
        import transformers

        loader: Any = transformers.PreTrainedTokenizerFast
        return loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _load_gguf(source: ModelSource) -> Any:
    """Return the tokeniser that a GGUF file describes, rebuilt by the library."""
    gguf_package()
    try:
        with LIBRARY:
            import transformers

            loader: Any = transformers.AutoTokenizer
            return loader.from_pretrained(
                source.path.parent,
                gguf_file=source.path.name,
                local_files_only=True,
                trust_remote_code=False,
            )
    # the library raises any exception at all for a broken file
    except Exception as error:
        raise ModelError(
            f"{source.path}: no usable tokeniser in it: {_first_line(error)}", hint=_TOKENIZER
        ) from error


def _eos_ids(source: ModelSource, of_tokenizer: object) -> Iterator[int]:
    nested = source.config.get("text_config")
    claims = [
        ("the tokeniser", of_tokenizer),
        ("config.json", source.config.get("eos_token_id")),
        ("config.json", nested.get("eos_token_id") if isinstance(nested, Mapping) else None),
        ("generation_config.json", _generation_config(source).get("eos_token_id")),
    ]
    for place, claim in claims:
        for number in claim if isinstance(claim, list | tuple) else [claim]:
            if number is None:
                continue
            if (
                isinstance(number, bool)
                or not isinstance(number, int)
                or not 0 <= number < source.spec.vocab_size
            ):
                raise ModelError(
                    f"{source.name}: {place} says eos_token_id = {number!r}, "
                    f"expected an id below the vocabulary's {source.spec.vocab_size}"
                )
            yield number


def _generation_config(source: ModelSource) -> Mapping[str, object]:
    path, name = source.path / "generation_config.json", source.name
    if source.seed is not None or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: generation_config.json cannot be read: {_first_line(error)}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{name}: generation_config.json is not an object")
    return config


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]

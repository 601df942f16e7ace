"""Handle a model's text: tokeniser, chat template, end-of-text ids, and the format of its replies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.errors import ModelError, RequestError
from convoy.model.library import LIBRARY
from convoy.model.text.chat import ChatTemplate
from convoy.model.text.conversation import Conversation
from convoy.model.text.formats.registry import ReplyFormat, find_format
from convoy.model.text.templates import TemplateRenderer
from convoy.model.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    # A process that gets a description reads no files, and starts without their modules.
    from convoy.model.checkpoints.source import ModelSource

_TOKENIZER = "fetch the model's whole directory, with tokenizer.json"
_BESIDE_GGUF = "put the tokenizer.json of the model beside the file: it is read first"


@dataclass(frozen=True, slots=True)
class TokenizerDescription:
    """Hold all that a `Tokenizer` is made of, as a model's files say it.

    ``backend`` is the JSON of the library's tokeniser, ``special`` lists tokens that are special although it
    does not mark them, and ``variables`` are those of the chat template. It has none if it is empty.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    backend: str
    special: tuple[str, ...]
    template: str
    variables: Mapping[str, Any]

    @classmethod
    def read(cls, source: ModelSource) -> TokenizerDescription:
        """Return the description of a model's tokeniser.

        It reads local files only, and runs no code from them. Raises ModelError if the directory has no
        usable tokeniser, or names end-of-text ids outside the vocabulary.
        """
        pretrained = _load(source)
        eos_ids = tuple(sorted(set(_eos_ids(source, pretrained.eos_token_id))))
        template = pretrained.chat_template
        template = template.get("default") if isinstance(template, Mapping) else template
        special = (*pretrained.all_special_tokens, *pretrained.convert_ids_to_tokens(list(eos_ids)))
        backend, variables = pretrained.backend_tokenizer.to_str(), pretrained.special_tokens_map
        return cls(source.spec.vocab_size, eos_ids, backend, special, template or "", variables)


class Tokenizer:
    """Convert text to token ids and back for one model. Thread-safe.

    Raises ModelError as `TokenizerDescription.read` does.
    """

    def __init__(self, source: ModelSource | TokenizerDescription) -> None:
        described = source if isinstance(source, TokenizerDescription) else TokenizerDescription.read(source)
        # the model's number of tokens: ids from here on have no embedding
        self.vocab_size = described.vocab_size
        self.eos_ids = frozenset(described.eos_ids)
        self._variables = described.variables
        self._template, self._special = template, special = described.template, described.special
        row = find_format(template)
        self._vocabulary = Vocabulary(described.backend, special, template, row.marks)
        tokens = {
            text: number for text in row.marks if (number := self._vocabulary.added_id(text)) is not None
        }
        self.reply_format = ReplyFormat(row, tokens)
        self._renderer: TemplateRenderer | None = None
        self._chat: ChatTemplate | None = None
        if template:
            self._renderer = TemplateRenderer(template, described.variables)
            self._chat = ChatTemplate(
                self._renderer.render,
                self._vocabulary,
                own_variables=frozenset(described.variables),
                has_tools="tools" in template,
                arguments_as_text=row.arguments_as_text,
                call_id_chars=row.call_id_chars,
            )

    def describe(self) -> TokenizerDescription:
        """Return the description of which this one is made."""
        backend = self._vocabulary.describe()
        ids = tuple(sorted(self.eos_ids))
        return TokenizerDescription(
            self.vocab_size, ids, backend, self._special, self._template, self._variables
        )

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

    def encode_letters(self, text: str) -> list[int]:
        """Return ids that spell ``text`` inside another text, control strings as their letters."""
        return self._vocabulary.encode_letters(text)

    @property
    def control_ids(self) -> frozenset[int]:
        """Return the tokens that are no text: special ones, and those that the chat template writes."""
        return self._vocabulary.control_ids

    def encode_chat(self, chat: Conversation | object, *, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a conversation or a list of messages, ready for the assistant's turn.

        `text.chat` describes the form of messages.

        Raises RequestError for invalid messages, for more than ``max_tokens``, and for a model without a chat
        template.
        """
        if self._chat is None:
            raise RequestError(
                "this model has no chat template", param="messages", hint="use /v1/completions with a prompt"
            )
        return self._chat.encode(chat, max_tokens=max_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        return self._vocabulary.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token (OpenAI's ``bytes`` of a logprob); they may end mid-character."""
        return self._vocabulary.token_bytes(token_id)


def _load(source: ModelSource) -> Any:
    from convoy.model.checkpoints.source import HEADER

    if source.seed is not None:
        return _load_synthetic(source)
    directory = source.path.parent if source.is_one_file else source.path
    # tokenizer.json is complete; AutoTokenizer would rebuild it by the model type in config.json, which may
    # be wrong
    has_file = (directory / "tokenizer.json").is_file()
    header = source.path if source.is_one_file else source.path / HEADER
    if not has_file and header.is_file():
        return _load_gguf(header)
    return _load_files(source, directory, has_file=has_file)


def _load_files(source: ModelSource, directory: Path, *, has_file: bool) -> Any:
    try:
        with LIBRARY:
            # use as little of it as possible: AutoTokenizer imports torch, which takes seconds
            import transformers

            loader: Any = transformers.PreTrainedTokenizerFast if has_file else transformers.AutoTokenizer
            pretrained = loader.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    # the library raises any exception at all for a broken file
    except Exception as error:
        reason = f"tokenizer.json cannot be used: {_first_line(error)}" if has_file else "no tokenizer.json"
        raise ModelError(
            f"{source.name}: no usable tokeniser in {directory}: {reason}", hint=_TOKENIZER
        ) from error
    files = pretrained.vocab_files_names.values()
    # without any file the library makes an empty tokeniser, and no error
    if not any((directory / name).is_file() for name in files):
        raise ModelError(
            f"{source.name}: no usable tokeniser in {directory}: none of {', '.join(sorted(files))}",
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
    from convoy.model.checkpoints.synthetic import Synthetic

    synthetic = Synthetic.parse(str(source.path))
    folder = None if synthetic is None else synthetic.tokenizer
    with LIBRARY:
        if folder is None:
            from convoy.model.text.byte_tokenizer import byte_tokenizer

            return byte_tokenizer(source.spec.vocab_size)
        import transformers

        loader: Any = transformers.PreTrainedTokenizerFast
        return loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _load_gguf(path: Path) -> Any:
    """Return the tokeniser that a GGUF file's settings describe, rebuilt by the library."""
    from convoy.model.checkpoints.formats.gguf.header import read_gguf
    from convoy.model.checkpoints.formats.gguf.rows import gguf_package

    gguf_package()
    settings = read_gguf(path, whole=False).settings
    try:
        with LIBRARY:
            import transformers

            _require_split(path, settings)
            # the class that knows no architecture: the file's settings say all
            loader: Any = transformers.PreTrainedTokenizerFast
            return loader.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
            )
    except ModelError:
        raise
    # the library raises any exception at all for a broken file
    except Exception as error:
        raise ModelError(
            f"{path}: no usable tokeniser in it: {_first_line(error)}", hint=_BESIDE_GGUF
        ) from error


def _require_split(path: Path, settings: Mapping[str, object]) -> None:
    """Raise ModelError for a byte-level vocabulary whose rule of splitting text the library does not know.

    It would split as GPT-2 does, and give other tokens.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind, split = (settings.get(f"tokenizer.ggml.{word}") for word in ("model", "pre"))
    known = {*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2", None}
    if kind == "gpt2" and split not in known:
        raise ModelError(
            f"{path}: its tokeniser splits text by the rule {split!r}, which is not known here",
            hint=_BESIDE_GGUF,
        )


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

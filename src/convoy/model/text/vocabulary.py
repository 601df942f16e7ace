"""Convert text to token ids and back, so that only Convoy's own callers can write control tokens.

A control token (end of turn, begin of sequence, ``<tool_call>`` where the chat template writes it) has a
power that text must not have. If users type its name, they must get its letters. Text is therefore split at
control strings, and a second backend without any added tokens encodes these.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers

from convoy.errors import RequestError
from convoy.model.text.control_strings import ControlStrings
from convoy.model.text.token_size import longest_token_bytes, most_text_bytes

# characters that are tokenised within a millisecond or two
_SHORT = 4096
# characters tokenised at once, when a long text is checked piece by piece
_PIECE = 65_536
# usual characters of a token; a text with more per allowed token is probably too long
_USUAL_CHARACTERS = 4
# tokens that may be removed from, or added to, one text
_MARGIN_TOKENS = 64
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Vocabulary:
    """Wrap a tokeniser's backend, thread-safe. Ids are the tokeniser's; the model may lack some of them."""

    def __init__(
        self, backend_json: str, special: Iterable[str], template: str, marks: Iterable[str] = ()
    ) -> None:
        """Read the backend's description.

        ``special`` lists tokens that are special although the description does not mark them. ``template`` is
        the chat template, and ``marks`` are the control strings of the format of replies.
        """
        self._json: dict[str, Any] = json.loads(backend_json)
        self._full = _backend(self._json)
        self._bare: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()
        added = {token["content"]: token["id"] for token in self._json["added_tokens"]}
        marked = {token["content"] for token in self._json["added_tokens"] if token["special"]}
        special_tokens = {text: added[text] for text in added.keys() & (marked | set(special))}
        # another added token (such as a run of spaces) is a control token only if the template writes it, or
        # if a reply is read by it
        written = {text: number for text, number in added.items() if text.strip() and text in template}
        read = {text: added[text] for text in marks if text in added}
        controls = special_tokens | written | read
        self._added = {number: text for text, number in added.items()}
        self._ids = added
        self._special_ids = frozenset(special_tokens.values())
        self.control_ids = frozenset(controls.values())
        self.special_strings = ControlStrings(special_tokens)
        self.control_strings = ControlStrings(controls)
        self.longest_token_bytes = longest_token_bytes(self._json, BYTE_OF)
        self._controls = frozenset(controls)
        self._spelled: dict[str, list[int]] = {}
        self._anchor = self._encode_full("\n")
        self._prefix = self._find_prefix()
        self._decoders = _decoder_types(self._json.get("decoder"))

    def describe(self) -> str:
        """Return the backend's description."""
        return json.dumps(self._json)

    def encode(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the ids of raw text, after the begin-of-sequence token if the tokeniser adds one.

        Special tokens in the text are encoded as plain text. Raises RequestError for text that is not Unicode
        (a lone surrogate), and, as soon as it is certain, for text of more than ``max_tokens``.
        """
        self.check_size([text], max_tokens)
        ids = list(self._prefix)
        position = 0
        for match in self.special_strings.finditer(text):
            ids += self._encode_text(text[position : match.start()], position == 0, max_tokens)
            ids += self.encode_letters(match[0])
            check_length(len(ids), max_tokens)
            position = match.end()
        ids += self._encode_text(text[position:], position == 0, max_tokens)
        check_length(len(ids), max_tokens)
        return ids

    def added_id(self, text: str) -> int | None:
        """Return the id of the added token ``text``, or None if text alone can spell it."""
        return self._ids.get(text)

    def encode_word(self, text: str) -> list[int]:
        """Return the ids of ``text`` as `encode` does, without the begin-of-sequence token."""
        return self.encode(text)[len(self._prefix) :]

    def check_size(self, texts: Iterable[str], max_tokens: int | None) -> None:
        """Raise RequestError if ``texts`` together have more bytes than ``max_tokens`` tokens stand for."""
        if max_tokens is not None:
            check_bytes(texts, max_tokens, most_text_bytes(max_tokens, self.longest_token_bytes))

    def encode_template(self, text: str, *, first: bool, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a piece that the chat template wrote, in which control tokens keep their meaning.

        Raises RequestError if the tokeniser sees a control token that is not there literally, because a
        normaliser made it from text. Also raises it for a piece of more than ``max_tokens``.
        """
        ids = self._encode_piece(text, first=first, max_tokens=max_tokens)
        literal = sum(1 for _ in self.control_strings.finditer(text))
        if sum(number in self.control_ids for number in ids) > literal:
            raise RequestError(
                "a message holds text that the tokeniser would turn into a control token", param="messages"
            )
        return ids

    def encode_letters(self, text: str) -> list[int]:
        """Return ids that spell a control string's letters, and never its token."""
        ids = self._spelled.get(text)
        if ids is None:
            ids = self._spell(text)
            if text in self._controls:
                self._spelled[text] = ids
        return ids

    def _spell(self, text: str) -> list[int]:
        ids = self._encode_bare(text)
        if self.control_ids.isdisjoint(ids):
            return ids
        # a unigram or word vocabulary may hold the whole string as a plain piece: encode it letter by letter
        ids = [number for letter in text for number in self._encode_bare(letter)]
        return [number for number in ids if number not in self.control_ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 become U+FFFD, and unknown ids become ""."""
        return str(self._full.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for, at any place in a text; empty for an unknown id."""
        token = self._full.id_to_token(token_id)
        if token is None or token_id in self._added:
            return (token or "").encode()
        if "ByteLevel" in self._decoders:
            return b"".join(BYTE_OF.get(letter, letter.encode()) for letter in token)
        spelled = _BYTE_TOKEN.fullmatch(token) if "ByteFallback" in self._decoders else None
        if spelled:
            return bytes([int(spelled[1], 16)])
        return str(token).replace("\u2581", " ").encode()

    def _encode_text(self, text: str, first: bool, max_tokens: int | None) -> list[int]:
        if not text:
            return []
        ids = self._encode_piece(text, first=first, max_tokens=max_tokens)
        if self._special_ids.isdisjoint(ids):
            return ids
        return self._encode_bare(text, max_tokens)

    def _encode_piece(self, text: str, *, first: bool, max_tokens: int | None = None) -> list[int]:
        if first:
            return self._encode_full(text, max_tokens)
        # SentencePiece puts a space before the first word of every call: after a newline no word is first
        ids = self._encode_full("\n" + text, max_tokens)
        if ids[: len(self._anchor)] == self._anchor:
            return ids[len(self._anchor) :]
        return self._encode_full(text, max_tokens)

    def _encode_full(self, text: str, max_tokens: int | None = None) -> list[int]:
        return _encode(self._full, text, max_tokens)

    def _encode_bare(self, text: str, max_tokens: int | None = None) -> list[int]:
        # build the backend when first needed: few prompts ever spell a control token
        with self._lock:
            if self._bare is None:
                self._bare = _backend({**self._json, "added_tokens": [], "post_processor": None})
        ids = _encode(self._bare, "\n" + text, max_tokens)
        anchor = _encode(self._bare, "\n")
        if anchor and ids[: len(anchor)] == anchor:
            return ids[len(anchor) :]
        return _encode(self._bare, text, max_tokens)

    def _find_prefix(self) -> list[int]:
        # keep only the ids that the post-processor puts before a text: an end of text behind it would end
        # the prompt
        whole = list(self._full.encode("a", add_special_tokens=True).ids)
        bare = self._encode_full("a")
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start]
        return []


def _backend(description: dict[str, Any]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(json.dumps(description))
    # a tokeniser saved from training may truncate or pad every text
    backend.no_truncation()
    backend.no_padding()
    return backend


def check_length(num_tokens: int, max_tokens: int | None) -> None:
    """Raise RequestError if a prompt has more tokens than a request may use."""
    if max_tokens is not None and num_tokens > max_tokens:
        raise RequestError(
            f"the prompt has more than {max_tokens} tokens, "
            f"but a request may use {max_tokens} with its answer",
            param="prompt",
            code="context_length_exceeded",
            hint="shorten the prompt",
        )


def check_bytes(texts: Iterable[str], max_tokens: int, max_bytes: int, param: str = "prompt") -> None:
    """Raise RequestError if ``texts`` together have more than ``max_bytes``.

    ``max_bytes`` is more than ``max_tokens`` tokens can stand for.
    """
    num_bytes = sum(len(text.encode(errors="surrogatepass")) for text in texts)
    if num_bytes > max_bytes:
        raise RequestError(
            f"{param} has {num_bytes} bytes of text, and the limit is {max_bytes}: "
            f"a request may use {max_tokens} tokens with its answer",
            param=param,
            code="context_length_exceeded",
            hint="shorten the prompt",
        )


def _encode(backend: tokenizers.Tokenizer, text: str, max_tokens: int | None = None) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("the text holds half of a surrogate pair, expected Unicode text") from None
    if len(text) <= _SHORT:
        return list(backend.encode(text, add_special_tokens=False).ids)
    if max_tokens is not None and len(text) > max_tokens * _USUAL_CHARACTERS:
        _check_pieces(backend, text, max_tokens)
    encoding = encode_unlocked(backend, text)
    # Check the length before the ids become a list, which takes the interpreter lock again. Delete the
    # encoding before an error is raised, as the error's traceback would keep it.
    num_tokens, ids = len(encoding), None
    if max_tokens is None or num_tokens - _MARGIN_TOKENS <= max_tokens:
        ids = list(encoding.ids)
    del encoding
    if ids is None:
        check_length(num_tokens, max_tokens)
    return ids or []


def _check_pieces(backend: tokenizers.Tokenizer, text: str, max_tokens: int) -> None:
    """Raise RequestError if ``text``, tokenised piece by piece, has far more than ``max_tokens`` tokens.

    A cut between two pieces changes a few tokens beside it, so twice as many are certainly too many.
    Tokenising the whole text at once would take a hundred bytes of memory for each token.
    """
    num_tokens = 0
    for start in range(0, len(text), _PIECE):
        num_tokens += len(encode_unlocked(backend, text[start : start + _PIECE]))
        check_length(num_tokens - max_tokens, max_tokens)


def encode_unlocked(backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    """Return the encoding of ``text`` without special tokens. Other threads run meanwhile."""
    # `encode` holds the interpreter lock until it ends, which is seconds for megabytes of text. The batch
    # call releases it.
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
    return encoding


def _decoder_types(decoder: object) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    types = {str(decoder.get("type"))}
    for inner in decoder.get("decoders", []):
        types |= _decoder_types(inner)
    return types


def _letters_of_bytes() -> dict[str, bytes]:
    """Return GPT-2's alphabet: printable Latin-1 is itself, other bytes are letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): bytes([byte]) for byte in printable}
    return letters | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)}


BYTE_OF = _letters_of_bytes()

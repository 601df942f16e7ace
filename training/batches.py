"""Pack generated documents into rows of token ids, with a weight for each token's loss.

A row begins with a document and holds whole documents, each closed by `<|endoftext|>`. The rest of the row is
padding.

The weight of a token tells how much the prediction of that token counts. Answers and their end count fully.
Stories count less, because they are many tokens of free choice. Questions do not count.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset, get_worker_info

from conversations import Document, document
from practice import PRACTICE_SHARE, practice_document
from shapes import PAD_ID
from tokenizer import ASSISTANT, END_OF_TEXT, END_OF_TURN, SPECIAL_TOKENS, SYSTEM, USER

ROLE_IDS = {
    "system": SPECIAL_TOKENS.index(SYSTEM),
    "user": SPECIAL_TOKENS.index(USER),
    "assistant": SPECIAL_TOKENS.index(ASSISTANT),
}
END_OF_TURN_ID = SPECIAL_TOKENS.index(END_OF_TURN)
END_OF_TEXT_ID = SPECIAL_TOKENS.index(END_OF_TEXT)

ANSWER_WEIGHT, LONG_ANSWER_WEIGHT, TEXT_WEIGHT = 100, 25, 20
"""Weights in hundredths. A long answer has more than `LONG_ANSWER_TOKENS`."""
LONG_ANSWER_TOKENS = 40

SHORT_ROW, LONG_ROW = 256, 2048
DOCUMENTS_AT_ONCE = 256


def encode_documents(tokenizer: Tokenizer, documents: list[Document]) -> list[tuple[list[int], list[int]]]:
    """Return (ids, weights) of each document, as the chat template renders it, closed by `<|endoftext|>`."""
    texts = [text for doc in documents for _, text in doc.turns]
    encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    rows = []
    for doc in documents:
        ids: list[int] = []
        weights: list[int] = []
        for role, _ in doc.turns:
            piece = next(encoded).ids
            if role == "text":
                ids += piece
                weights += [TEXT_WEIGHT] * len(piece)
                continue
            if role == "assistant":
                weight = ANSWER_WEIGHT if len(piece) <= LONG_ANSWER_TOKENS else LONG_ANSWER_WEIGHT
            else:
                weight = 0
            ids += [ROLE_IDS[role], *piece, END_OF_TURN_ID]
            weights += [0, *[weight] * (len(piece) + 1)]
        ids.append(END_OF_TEXT_ID)
        weights.append(TEXT_WEIGHT)
        rows.append((ids, weights))
    return rows


def _documents(
    rng: random.Random, tokenizer: Tokenizer, *, long: bool, practice: tuple[str, ...]
) -> Iterator[tuple[list[int], list[int]]]:
    def make() -> Document:
        if practice and rng.random() < PRACTICE_SHARE:
            return practice_document(rng, practice)
        return document(rng, long=long and rng.random() < 0.5)

    while True:
        made = [make() for _ in range(DOCUMENTS_AT_ONCE)]
        yield from encode_documents(tokenizer, made)


def rows(
    rng: random.Random, tokenizer: Tokenizer, num_tokens: int, *, long: bool, practice: tuple[str, ...] = ()
) -> Iterator[np.ndarray]:
    """Yield rows of shape [2, num_tokens], uint16: ids, then weights in hundredths."""
    row = np.empty((2, num_tokens), dtype=np.uint16)
    filled = 0
    for ids, weights in _documents(rng, tokenizer, long=long, practice=practice):
        if filled and filled + len(ids) > num_tokens:
            row[0, filled:], row[1, filled:] = PAD_ID, 0
            yield row.copy()
            filled = 0
        # A document longer than a row loses its tail.
        taken = min(len(ids), num_tokens)
        row[0, filled : filled + taken] = ids[:taken]
        row[1, filled : filled + taken] = weights[:taken]
        filled += taken


class Batches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Yield endless batches [rows, 2, tokens] (int32), each of `batch_tokens` tokens in rows of one length.

    With each batch comes the list of counted positions, flat over rows of tokens - 1 (int64): those where the
    next token has a weight. Finding it here keeps the training loop from waiting for the device. One batch in
    five has long rows. Every worker of a loader draws its own stream from the seed.
    """

    def __init__(
        self, tokenizer_file: Path, batch_tokens: int, seed: int, practice: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.tokenizer_file = tokenizer_file
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.practice = practice

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        rng = random.Random(f"{self.seed} {worker.id if worker else 0}")
        tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        short = rows(rng, tokenizer, SHORT_ROW, long=False, practice=self.practice)
        long = rows(rng, tokenizer, LONG_ROW, long=True, practice=self.practice)
        while True:
            stream, length = (long, LONG_ROW) if rng.random() < 0.2 else (short, SHORT_ROW)
            num_rows = max(1, self.batch_tokens // length)
            batch = np.stack([next(stream) for _ in range(num_rows)])
            counted = np.flatnonzero(batch[:, 1, 1:])
            yield torch.from_numpy(batch.astype(np.int32)), torch.from_numpy(counted)

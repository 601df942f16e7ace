"""The options of the HTTP server and the tokenizer, as the engine's process gives them to its front process.

The front process reads no file of the model, so it needs neither the library of models nor the weights.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from convoy.api.keys.key_file import ApiKey
from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import PageOptions, ServeOptions
from convoy.model.text.tokens import TokenizerDescription


class FrontSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold the options that settings decide, and the digests of API keys.

    The keys come from the engine's process, because a pipe with keys can be read only once. The front process
    reads a file again when it changes.
    """

    host: str
    port: int
    allow_unauthenticated: bool
    allowed_hosts: tuple[str, ...]
    allowed_origins: tuple[str, ...]
    tls: tuple[str, str] | None
    drain_s: float
    store_responses: bool
    tokens: str | None
    invitations: str | None
    operator_key: str
    keys: tuple[ApiKey, ...] | None
    key_file: str | None
    traces: str | None

    @classmethod
    def of(cls, options: ServeOptions, traces: str | None) -> FrontSetup:
        """Return the setup of ``options``, with the URL of a collector of traces."""
        page, keys = options.page, options.keys
        file = None if keys is None else keys.file
        return cls(
            options.host,
            options.port,
            options.allow_unauthenticated,
            options.allowed_hosts,
            options.allowed_origins,
            options.tls,
            options.drain_s,
            options.store_responses,
            None if page is None or page.tokens is None else str(page.tokens),
            None if page is None or page.invitations is None else str(page.invitations),
            "" if page is None else page.operator_key,
            None if keys is None else keys.listed(),
            None if file is None else str(file),
            traces,
        )

    def options(self) -> ServeOptions:
        """Return the server's options in the front process, without traces."""
        file = None if self.key_file is None else Path(self.key_file)
        return ServeOptions(
            host=self.host,
            port=self.port,
            keys=None if self.keys is None else KeyRing(self.keys, file=file),
            allow_unauthenticated=self.allow_unauthenticated,
            allowed_hosts=self.allowed_hosts,
            allowed_origins=self.allowed_origins,
            tls=self.tls,
            drain_s=self.drain_s,
            store_responses=self.store_responses,
            page=PageOptions(
                tokens=None if self.tokens is None else Path(self.tokens),
                invitations=None if self.invitations is None else Path(self.invitations),
                operator_key=self.operator_key,
            ),
        )


_decoder = msgspec.json.Decoder(FrontSetup)
_tokenizers = msgspec.json.Decoder(TokenizerDescription)


def encode_setup(setup: FrontSetup) -> bytes:
    """Return the JSON of a setup."""
    return msgspec.json.encode(setup)


def decode_setup(data: bytes) -> FrontSetup:
    """Return the setup of `encode_setup`."""
    return _decoder.decode(data)


def encode_tokenizer(description: TokenizerDescription) -> bytes:
    """Return the JSON of a tokenizer's description."""
    return msgspec.json.encode(description)


def decode_tokenizer(data: bytes) -> TokenizerDescription:
    """Return the description of `encode_tokenizer`."""
    return _tokenizers.decode(data)

"""Load a membership from a convoy.toml for a command, and print what a person should know of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from convoy.cli.show.output import print_note
from convoy.config.settings import Config
from convoy.sdk import head, options
from convoy.sdk.options import unheard

if TYPE_CHECKING:
    from convoy.transport.membership import Membership


def load_member(config: Config) -> Membership:
    """Return the result of `options.load_member`, with its notes on standard error."""
    return options.load_member(config, print_note)


def load_head(config: Config) -> Membership:
    """Return the result of `options.load_head`, with its notes on standard error."""
    return options.load_head(config, print_note)


@contextmanager
def watched_roster(config: Config, me: Membership, *, quiet: bool = False) -> Iterator[None]:
    """Watch the roster file while the block runs, and print its changes."""
    with head.watched_roster(config, me, unheard if quiet else print_note):
        yield

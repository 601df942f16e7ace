"""The lines of `serve` and `run` once they are ready: the model, its room, and a command to try.

They are apart from `cluster_status`, which prints the state of any running cluster.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.cli.show.output import counted
from convoy.config.clear_text import crosses_in_clear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from convoy.cluster.active_plan import ActivePlan


def page_line(url: str, usual_url: str = "", certificate: Path | None = None) -> str:
    """Return the line on the page at ``url``, with the command that signs in and trusts ``certificate``."""
    words = ["convoy", "open"]
    if url != usual_url:
        words += ["--url", url]
    if certificate is not None:
        words += ["--ca", str(certificate)]
    return f"page: {url}/ (`{shlex.join(words)}` on this machine signs in to operate)"


@dataclass(frozen=True, slots=True)
class ReadyServer:
    """Hold the facts about a server that its user needs. ``room_tokens`` is None without a limit.

    ``url`` has no path. ``usual_url`` is the one that clients take without a flag.
    """

    model: str
    members: Sequence[str]
    max_context: int
    room_tokens: int | None
    url: str
    usual_url: str
    key_file: Path | None = None
    certificate: Path | None = None
    has_page: bool = True

    def lines(self) -> list[str]:
        """Return the model with its room, the address, and one command to try."""
        where = "this machine alone" if len(self.members) == 1 else ", ".join(self.members)
        room = "" if self.room_tokens is None else f", room for {counted(self.room_tokens, 'token')} in all"
        return [
            f"{self.model} on {where}: context {counted(self.max_context, 'token')}{room}",
            f"serving {self.model} at {self.url}/v1",
            *self._page(),
            *self._try(),
        ]

    def _page(self) -> list[str]:
        """Return the line on the page; none if the server has no page, because it has no TLS."""
        return [page_line(self.url, self.usual_url, self.certificate)] if self.has_page else []

    def _try(self) -> list[str]:
        """Return the line with a command; none if the command would send its key in clear text."""
        has_way = self.key_file is None or not crosses_in_clear(self.url)
        return [f"try: {self.command()}"] if has_way else []

    def command(self) -> str:
        """Return a command that talks to the server, with its key and its certificate."""
        words = ["convoy", "chat"]
        if self.url != self.usual_url:
            words += ["--url", self.url]
        if self.key_file is not None:
            words += ["--api-key-file", str(self.key_file)]
        if self.certificate is not None:
            words += ["--ca", str(self.certificate)]
        return shlex.join(words)


def room_tokens(active: ActivePlan) -> int | None:
    """Return how many tokens of all requests the K/V blocks hold. Layers with a window set no limit."""
    groups = zip(active.placement.spec.cache_groups, active.num_blocks, strict=True)
    block_size = active.plan.block_size
    return min((count * block_size * group.stride for group, count in groups if group.is_full), default=None)

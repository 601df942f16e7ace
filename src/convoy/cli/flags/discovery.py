"""``--discover``: the network of a member that announces its address, and looks for others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from convoy.config.settings import Config, override

if TYPE_CHECKING:
    pass

DiscoverFlag = Annotated[
    bool | None,
    typer.Option(
        "--discover/--no-discover",
        help="Find members on the local network (mDNS), and be found.  [default: the config's]",
        show_default=False,
    ),
]


def with_discover(config: Config, discover: bool | None) -> Config:
    """Return ``config`` with the flag in place of the file's value, if the flag was given."""
    return override(config, listen=override(config.listen, discover=discover))

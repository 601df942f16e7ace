"""``--discover``: the network of a member that announces its address, and looks for others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from convoy.cli.flags.table import option
from convoy.config.settings import Config, override

if TYPE_CHECKING:
    pass

DiscoverFlag = Annotated[bool | None, option("listen", "discover")]


def with_discover(config: Config, discover: bool | None) -> Config:
    """Return ``config`` with the flag in place of the file's value, if the flag was given."""
    return override(config, listen=override(config.listen, discover=discover))

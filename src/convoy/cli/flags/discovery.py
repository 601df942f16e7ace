"""``--discover``: the network of a member that announces its address, and looks for others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from convoy.cli.flags.table import option
from convoy.config.settings import Config, override

if TYPE_CHECKING:
    from convoy.transport.network import Network

DiscoverFlag = Annotated[bool | None, option("listen", "discover")]


def with_discover(config: Config, discover: bool | None) -> Config:
    """Return ``config`` with the flag in place of the file's value, if the flag was given."""
    return override(config, listen=override(config.listen, discover=discover))


@contextmanager
def network_of(config: Config) -> Iterator[Network | None]:
    """Yield the network to use; None is the standard one. Raises `ConfigError` without the extra."""
    if not config.listen.discover:
        yield None
        return
    from convoy.cluster.discovery import DiscoveredNetwork

    network = DiscoveredNetwork()
    try:
        yield network
    finally:
        network.close()

"""How many TLS records one connection has carried: OpenSSL never changes its keys, so a link must change its
connections first.
"""

from __future__ import annotations

from collections.abc import Callable

from convoy.errors import LinkBroken
from convoy.transport.options import LinkOptions

# OpenSSL fills records of this size, and ends one where a write ends.
TLS_RECORD_BYTES = 16 * 1024


class KeyUsage:
    """Counts for one direction. For the thread that sends, or the one that receives.

    ``on_worn`` is called, and called again with every record, once there are ``replace_after_records``.
    """

    def __init__(self, options: LinkOptions, on_worn: Callable[[], None]) -> None:
        self._replace_after = options.replace_after_records
        self._max_records = options.max_tls_records
        self.on_worn = on_worn
        self.num_records = 0

    def add(self, num_records: int) -> None:
        """Raises `LinkBroken` at the limit: better no link than a key that sealed too much."""
        self.num_records += num_records
        if self.num_records < self._replace_after:
            return
        if self.num_records >= self._max_records:
            raise LinkBroken(
                f"a connection has carried {self.num_records} TLS records, the most for one key is "
                f"{self._max_records}, and it was not replaced in time",
                hint="the dialling member's warnings say why it could not connect again",
            )
        self.on_worn()

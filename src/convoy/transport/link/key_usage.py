"""The number of TLS records that one connection has carried.

OpenSSL never changes a connection's keys, so a link must replace its connections before the limit.
"""

from __future__ import annotations

from collections.abc import Callable

from convoy.errors import LinkBroken
from convoy.transport.options import LinkOptions

# OpenSSL fills records of this size, and ends a record at the end of a write.
TLS_RECORD_BYTES = 16 * 1024


class KeyUsage:
    """Count the TLS records of one direction. For the thread that sends, or the one that receives.

    ``on_limit`` is called at ``replace_after_records``, and again with every later record.
    """

    def __init__(self, options: LinkOptions, on_limit: Callable[[], None]) -> None:
        self._replace_after = options.replace_after_records
        self._max_records = options.max_tls_records
        self.on_limit = on_limit
        self.num_records = 0

    def add(self, num_records: int) -> None:
        """Count records. Raises `LinkBroken` at the limit: losing the link is better than overusing its
        key.
        """
        self.num_records += num_records
        if self.num_records < self._replace_after:
            return
        if self.num_records >= self._max_records:
            raise LinkBroken(
                f"a connection has carried {self.num_records} TLS records, the most for one key is "
                f"{self._max_records}, and it was not replaced in time",
                hint="the dialling member's warnings say why it could not connect again",
            )
        self.on_limit()

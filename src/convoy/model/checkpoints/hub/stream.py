"""Bytes of a file on the Hugging Face hub, from any one on.

`huggingface_hub` finds the address and the user's token, and makes the connection. Its own download begins a
file anew with each process (2.4: a temporary file of its own, gone with it), and fetches files whole; a run
that goes on where the last one broke off, and a member that needs some tensors of a shard, ask for ranges.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from convoy.errors import HubUnreachable, ModelError
from convoy.model.library import LIBRARY

_TIMEOUT_S = 10.0
_TRIES = 5  # in a row without a byte
_WAIT_S = 0.5  # then twice that, and so on
_LOOK_UP_S = 0.2
_MAX_REASON = 200
_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})
_DENIED = frozenset({401, 403, 404})
_ADDRESS = re.compile(r"https?://[^\s'\"]+")


Watch = Callable[[], None]


def _nobody_watches() -> None:
    pass


@dataclass(frozen=True, slots=True)
class HubCommit:
    """One commit of a repository; ``endpoint`` None is the hub that `huggingface_hub` is set to."""

    repo: str
    commit: str
    endpoint: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}@{self.commit[:12]}"

    def read(
        self, file: str, start: int, end: int, *, tries: int = _TRIES, watch: Watch = _nobody_watches
    ) -> bytes:
        """Bytes [start, end), or as far as the file goes. Raises as `stream` does."""
        return b"".join(self.stream(file, start, end, tries=tries, watch=watch))

    def stream(
        self, file: str, start: int, end: int, *, tries: int = _TRIES, watch: Watch = _nobody_watches
    ) -> Iterator[bytes]:
        """Bytes [start, end) in order. A connection that breaks is gone on with, as long as bytes come.

        ``watch`` is called while the next try is waited for; what it raises ends this. Raises HubUnreachable
        after ``tries`` in a row without one, and ModelError for a file that is not there, or not for this
        user; both name file and repository.
        """
        at, fruitless = start, 0
        while at < end:
            before = at
            try:
                for chunk in self._connection(file, at, end):
                    at += len(chunk)
                    yield chunk
                return
            except HubUnreachable:
                fruitless = 0 if at > before else fruitless + 1
                if fruitless >= tries:
                    raise
            _wait(_WAIT_S * 2**fruitless, watch)

    def _connection(self, file: str, start: int, end: int) -> Iterator[bytes]:
        with LIBRARY:
            from huggingface_hub import hf_hub_url
            from huggingface_hub.utils import (  # type: ignore[attr-defined] # as its own file system does
                build_hf_headers,
                hf_raise_for_status,
                http_stream_backoff,
            )

        headers = {
            **build_hf_headers(),
            "range": f"bytes={start}-{end - 1}",
            "accept-encoding": "identity",  # or the range would be one of compressed bytes
        }
        url = hf_hub_url(self.repo, file, revision=self.commit, endpoint=self.endpoint)
        with (
            hub_errors(f"{file} of {self}"),
            http_stream_backoff(
                "GET", url, headers=headers, timeout=_TIMEOUT_S, max_retries=0, retry_on_exceptions=()
            ) as response,
        ):
            hf_raise_for_status(response)
            skip = 0 if response.status_code == 206 else start  # who ignores a range sends all
            left = end - start
            for chunk in response.iter_bytes():
                wanted = chunk[skip : skip + left]
                skip -= min(skip, len(chunk))
                left -= len(wanted)
                if wanted:
                    yield wanted
                if not left:
                    return


def _wait(seconds: float, watch: Watch) -> None:
    """Until the time is over, or ``watch`` raises."""
    until_s = time.monotonic() + seconds
    while True:
        watch()
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(_LOOK_UP_S, left_s))


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """What a hub and the network raise becomes HubUnreachable, or ModelError where asking again is no use.

    Nothing else does: an error of this program is none of the hub's.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        yield
    except HfHubHTTPError as error:
        raise _refused(what, error) from error
    except HFValidationError as error:
        raise ModelError(f"the hub can have no {what}: {_line(error)}") from error
    except OfflineModeIsEnabled as error:
        raise HubUnreachable(
            f"{what} cannot be fetched: HF_HUB_OFFLINE is set", hint="unset it, or give a directory"
        ) from error
    except (_connection_error(), ConnectionError, TimeoutError) as error:
        raise HubUnreachable(
            f"{what} cannot be fetched, the hub cannot be reached: {_line(error)}",
            hint="what came so far stays: start again to go on",
        ) from error


def _connection_error() -> Any:
    """The base of what the HTTP library raises: of httpx or of httpx2, whichever the hub's library is on."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")


def _refused(what: str, error: Any) -> ModelError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in _DENIED:
        return ModelError(
            f"the hub has no {what} for you (HTTP {status})",
            hint="look at the name; for a gated model `hf auth login` first",
        )
    if status in _LATER:
        return HubUnreachable(
            f"{what} cannot be fetched: the hub answers HTTP {status}", hint="try again later"
        )
    return ModelError(f"the hub refused {what}: {_line(error)}", hint="try again later")


def _line(error: Exception) -> str:
    line = (str(error) or type(error).__name__).splitlines()[0]
    # where a hub sends on to has a signature in it, and a hub's own address may have a password
    return _ADDRESS.sub("(its address)", line)[:_MAX_REASON]

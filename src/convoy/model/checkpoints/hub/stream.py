"""Stream byte ranges of a file on the Hugging Face hub.

`huggingface_hub` finds the address and the user's token, and makes the connection. Its own download (2.4)
starts a file over in each process, because its temporary file ends with the process, and it fetches files
whole. Convoy asks for ranges instead: to resume an interrupted download, and to fetch single tensors of a
shard.
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
# attempts in a row without a byte
_TRIES = 5
RETRY_WAIT_S = 0.5
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
    """Name one commit of a repository; ``endpoint`` None means the hub that `huggingface_hub` is configured
    for. ``retry_wait_s`` is the first wait between attempts; each further one is twice as long.
    """

    repo: str
    commit: str
    endpoint: str | None = None
    retry_wait_s: float = RETRY_WAIT_S

    def __str__(self) -> str:
        return f"{self.repo}@{self.commit[:12]}"

    def read(
        self, file: str, start: int, end: int, *, tries: int = _TRIES, watch: Watch = _nobody_watches
    ) -> bytes:
        """Return bytes [start, end), or up to the file's end. Raises as `stream` does."""
        return b"".join(self.stream(file, start, end, tries=tries, watch=watch))

    def stream(
        self, file: str, start: int, end: int, *, tries: int = _TRIES, watch: Watch = _nobody_watches
    ) -> Iterator[bytes]:
        """Yield bytes [start, end) in order. A broken connection is resumed as long as bytes arrive.

        ``watch`` is called between attempts, and its exceptions end the stream. Raises HubUnreachable after
        ``tries`` attempts in a row without a byte. Raises ModelError for a file that does not exist or that
        this user may not read. Both name file and repository.
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
            _wait(self.retry_wait_s * 2**fruitless, watch)

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
            # otherwise the range would count compressed bytes
            "accept-encoding": "identity",
        }
        url = hf_hub_url(self.repo, file, revision=self.commit, endpoint=self.endpoint)
        with (
            hub_errors(f"{file} of {self}"),
            http_stream_backoff(
                "GET", url, headers=headers, timeout=_TIMEOUT_S, max_retries=0, retry_on_exceptions=()
            ) as response,
        ):
            hf_raise_for_status(response)
            _require_range(f"{file} of {self}", response, start)
            # a server that ignores ranges sends the whole file: skip to the start
            skip = 0 if response.status_code == 206 else start
            left = end - start
            for chunk in response.iter_bytes():
                wanted = chunk[skip : skip + left]
                skip -= min(skip, len(chunk))
                left -= len(wanted)
                if wanted:
                    yield wanted
                if not left:
                    return


def _require_range(what: str, response: Any, start: int) -> None:
    """Raise ModelError for an answer with another range than the one that begins at ``start``."""
    said = str(response.headers.get("content-range", ""))
    if response.status_code == 206 and said and not said.startswith(f"bytes {start}-"):
        raise ModelError(f"the hub answers with the range {said[:60]!r} of {what}, expected one from {start}")


def _wait(seconds: float, watch: Watch) -> None:
    """Wait until the time is over or ``watch`` raises."""
    until_s = time.monotonic() + seconds
    while True:
        watch()
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(_LOOK_UP_S, left_s))


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Translate errors of the hub and the network.

    They become HubUnreachable, or ModelError if asking again cannot help. Other errors pass unchanged: a
    defect of this program must not look like the hub's.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        yield
    except HfHubHTTPError as error:
        raise _refused(what, error) from error
    except HFValidationError as error:
        raise ModelError(f"the hub cannot have {what}: {_line(error)}") from error
    except OfflineModeIsEnabled as error:
        said = f"{what} cannot be fetched: HF_HUB_OFFLINE is set"
        raise HubUnreachable(said, public=said, hint="unset it, or give a directory") from error
    except (_connection_error(), ConnectionError, TimeoutError) as error:
        raise HubUnreachable(
            f"{what} cannot be fetched, the hub cannot be reached: {_line(error)}",
            hint="received bytes are kept: start again to resume",
            public=f"{what} cannot be fetched: the hub cannot be reached",
        ) from error


def _connection_error() -> Any:
    """Return the base class of the HTTP library's errors, of httpx or httpx2, as the hub's library uses
    either.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")


def _refused(what: str, error: Any) -> ModelError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in _DENIED:
        from huggingface_hub.errors import GatedRepoError

        gated = isinstance(error, GatedRepoError)
        said = f"the hub has no {what} for you (HTTP {status})" + (": the model is gated" if gated else "")
        return ModelError(
            said,
            public=said,
            hint="accept its terms on its page, then `hf auth login`"
            if gated
            else "check the name; for a private or gated model `hf auth login` first",
        )
    if status in _LATER:
        said = f"{what} cannot be fetched: the hub answers HTTP {status}"
        return HubUnreachable(said, public=said, hint="try again later")
    return ModelError(f"the hub refused {what}: {_line(error)}", hint="try again later")


def _line(error: Exception) -> str:
    line = (str(error) or type(error).__name__).splitlines()[0]
    # hide addresses: a redirect's holds a signature, and a hub's own may hold a password
    return _ADDRESS.sub("(its address)", line)[:_MAX_REASON]

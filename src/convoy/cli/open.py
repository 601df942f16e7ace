"""``convoy open``: sign a browser in to the page of a head or coordinator of the same user on this machine.

It starts no browser: the address would stand on that program's command line, where other users see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from convoy.cli.running.endpoint import CaFlag, UrlFlag
from convoy.cli.running.process import serves_here
from convoy.cli.show.output import print_note
from convoy.config.clear_text import check_sealed
from convoy.config.files import token_folder
from convoy.errors import ConvoyError, PeerUnreachable
from convoy.sdk.endpoint import DEFAULT_URL, Endpoint, HttpRefused, KeyRefused, ServerBusy

if TYPE_CHECKING:
    from convoy.api.page.tokens import Scope


def open_page(
    url: UrlFlag = DEFAULT_URL,
    ca: CaFlag = None,
    view: Annotated[bool, typer.Option("--view", help="Sign in to look only, not to operate.")] = False,
) -> None:
    """Show an address that signs a browser in to the page.

    The page is that of a head, or of a coordinator at --url. The address works once, for 5 minutes.
    """
    endpoint = Endpoint.of(url, None, ca)
    token = make_token(endpoint, "view" if view else "operate")
    what = "look" if view else "look and operate"
    # The part behind # stays in the browser: no request and no log of a proxy has it.
    address = f"{endpoint.url}/#token={token}"
    print(address)
    print_note(f"open it in a browser: it works once, for 5 minutes, and lets its holder {what}")


def make_token(endpoint: Endpoint, scope: Scope) -> str:
    """Return a new token for the server at ``endpoint``, which must answer there."""
    from convoy.api.page.tokens import OpenTokens

    check_sealed(endpoint.url, "send a token to")
    # A page without its server would keep a token without a use.
    endpoint.get("/health", accept=frozenset({200, 503}))
    return OpenTokens(token_folder()).make(_port(endpoint), scope)


@contextmanager
def looking(endpoint: Endpoint) -> Iterator[Endpoint]:
    """Yield the endpoint as it is, or in a session to look if its server wants a key and none was given.

    A session needs the server's user on its machine. Raises the server's `KeyRefused` elsewhere.
    """
    with ExitStack() as stack:
        try:
            endpoint.get("/page/session")
        except KeyRefused as refused:
            # Another program there would get a token that a server of this user at the same port takes.
            if endpoint.api_key is not None or not serves_here(endpoint.url):
                raise
            try:
                endpoint = stack.enter_context(signed_in(endpoint, "view"))
            except (PeerUnreachable, ServerBusy):
                raise
            except ConvoyError:
                raise refused from None
        except HttpRefused:
            # Servers without a page have no sessions. The next request raises the reason.
            pass
        yield endpoint


@contextmanager
def signed_in(endpoint: Endpoint, scope: Scope) -> Iterator[Endpoint]:
    """Yield the endpoint in a session.

    Its token is over once the server has answered, so a server that is no head cannot keep it for later.
    """
    from convoy.api.page.tokens import OpenTokens

    token = make_token(endpoint, scope)
    with ExitStack() as stack:
        try:
            reader = stack.enter_context(endpoint.session(token))
        finally:
            OpenTokens(token_folder()).use(token, _port(endpoint))
        yield reader


def _port(endpoint: Endpoint) -> int:
    parts = urlsplit(endpoint.url)
    return parts.port or (443 if parts.scheme == "https" else 80)

"""Decide which requests need no API key: those of the page's files, and those of a session."""

from __future__ import annotations

from starlette.requests import cookie_parser
from starlette.types import Scope

from convoy.api.listen.options import PageOptions, ServeOptions
from convoy.api.page.sessions import PageSession, Sessions
from convoy.api.page.tokens import OpenTokens
from convoy.api.page.tokens import Scope as TokenScope
from convoy.api.refusals import Forbidden

SESSION_PATH = "/page/session"
STATIC_PREFIX = "/page/static/"
_READS = frozenset({"GET", "HEAD"})
# What a session may read without an API key. Requests to models always need the key of a server with keys.
_VIEWED = frozenset({"/status", "/metrics"})
# In the scope of a request: its session, or None.
SESSION = "convoy.session"


class PageRights:
    """Find the session of each request, and tell which requests need no API key."""

    def __init__(self, options: ServeOptions) -> None:
        page = options.page
        self.tls = options.tls is not None or (page is not None and page.behind_tls_proxy)
        self.why_not: str | None = None
        if page is None:
            self.why_not = "this server has no page"
        elif options.in_clear:
            self.why_not = "the page needs TLS on an address that other machines reach"
        page = page or PageOptions()
        self.sessions = Sessions(page.clock)
        self._tokens = None if page.tokens is None else OpenTokens(page.tokens, page.now)

    def note_session(self, scope: Scope) -> None:
        """Write the request's session into ``scope``."""
        scope[SESSION] = None if self.why_not else self.sessions.find(self.secret_of(scope))

    def needs_no_key(self, scope: Scope) -> bool:
        """Return whether the path is open, or the request's session may use it."""
        path, method = scope["path"], scope["method"]
        if self.why_not is not None:
            return False
        if method in _READS and (path == "/" or path.startswith(STATIC_PREFIX)):
            return True
        # Its body carries a token in place of a key.
        if (path, method) == (SESSION_PATH, "POST"):
            return True
        return scope[SESSION] is not None and (path.startswith("/page/") or path in _VIEWED)

    def use_token(self, token: str, port: int) -> TokenScope | None:
        """Return what ``token`` grants at ``port`` and end it, or None if it is not good here.

        Reads files, so call it on a thread.
        """
        return None if self._tokens is None else self._tokens.use(token, port)

    def is_valid(self, scope: Scope) -> bool:
        """Return whether a request that is answered for long may still be answered.

        A session may have ended meanwhile. A request without one came with a key, or needed none.
        """
        return scope[SESSION] is None or self.sessions.find(self.secret_of(scope)) is not None

    def secret_of(self, scope: Scope) -> str:
        """Return the session's secret in the request's cookie, or an empty text."""
        sent = b"; ".join(value for name, value in scope["headers"] if name == b"cookie")
        return cookie_parser(sent.decode("latin-1")).get(self._cookie(scope), "")

    def cookie(self, scope: Scope, secret: str) -> str:
        """Return the Set-Cookie header for ``secret``. An empty one removes the cookie."""
        ends = "" if secret else "; Max-Age=0"
        tls = "; Secure" if self.tls else ""
        return f"{self._cookie(scope)}={secret}; Path=/; HttpOnly; SameSite=Strict{tls}{ends}"

    def _cookie(self, scope: Scope) -> str:
        # Browsers share cookies between the ports of a host, so the name has the port.
        return f"{'__Host-' if self.tls else ''}convoy-{scope['server'][1]}"


def demand_operate(session: PageSession | None) -> None:
    """Raise `Forbidden` unless the session may operate. An API key has no session."""
    if session is None or session.scope != "operate":
        raise Forbidden(
            "this needs a session that may operate; an api key or a session to view is not enough",
            hint="run `convoy open` on the server's machine",
        )

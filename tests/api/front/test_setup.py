"""What the front process learns of the options of its server."""

from __future__ import annotations

from pathlib import Path

from convoy.api.front.setup import FrontSetup
from convoy.api.listen.options import PageOptions, ServeOptions


def test_the_page_of_a_front_process_has_the_folders_of_its_head() -> None:
    page = PageOptions(Path("/cache/open"), Path("/cache/invitations"), "ab" * 32)
    told = FrontSetup.of(ServeOptions(page=page), None).options().page
    assert told is not None
    assert (told.tokens, told.invitations, told.operator_key) == (
        page.tokens,
        page.invitations,
        page.operator_key,
    )
    assert FrontSetup.of(ServeOptions(), None).options().page == PageOptions()

"""Links of the documentation site: pages of the root come along, other files become text."""

from __future__ import annotations

from site_links import ROOT, ROOT_PAGES, adapt


def test_a_link_to_a_page_of_the_root_leads_to_its_place_in_the_site() -> None:
    assert adapt("[a](../SECURITY.md#b)", "docs/api.md") == "[a](SECURITY.md#b)"
    assert adapt("[a](../README.md)", "docs/api.md") == "[a](index.md)"


def test_a_page_of_the_root_finds_the_pages_of_docs() -> None:
    assert adapt("[a](docs/api.md#b)", "SECURITY.md") == "[a](api.md#b)"
    assert adapt("[a](../docs/api.md)", "bench/METHODOLOGY.md") == "[a](../api.md)"


def test_a_link_to_another_file_becomes_its_text_and_path() -> None:
    assert (
        adapt("see [the lock](../requirements.lock).", "docs/api.md") == "see the lock (`requirements.lock`)."
    )


def test_a_broken_link_stays_for_mkdocs_to_refuse() -> None:
    assert adapt("[a](../missing.py)", "docs/api.md") == "[a](../missing.py)"


def test_addresses_pictures_and_code_are_left_alone() -> None:
    text = "[a](https://example.org/x) ![b](pictures/cluster.svg)\n\n```\n[c](../README.md)\n```"
    assert adapt(text, "docs/api.md") == text


def test_every_page_of_the_root_exists() -> None:
    assert [source for source in ROOT_PAGES if not (ROOT / source).is_file()] == []

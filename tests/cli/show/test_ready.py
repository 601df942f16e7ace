"""The lines of a server that is ready: what a user needs, and a command that works as it stands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from convoy.cli.show.ready import ReadyServer

HERE = ReadyServer(
    "demo", ["alpha"], 2048, 65536, url="http://127.0.0.1:8765", usual_url="http://127.0.0.1:8765"
)


def test_the_lines_tell_model_context_room_address_and_a_command() -> None:
    assert HERE.lines() == [
        "demo on this machine alone: context 2048 tokens, room for 65536 tokens in all",
        "serving demo at http://127.0.0.1:8765/v1",
        "page: http://127.0.0.1:8765/ (`convoy open` on this machine signs in to operate)",
        "try: convoy chat",
    ]


def test_a_server_without_a_page_names_none() -> None:
    assert not any("page" in line for line in replace(HERE, has_page=False).lines())


def test_members_are_named_and_a_room_without_limit_is_left_out() -> None:
    split = replace(HERE, members=["alpha", "beta"], room_tokens=None)
    assert split.lines()[0] == "demo on alpha, beta: context 2048 tokens"


def test_the_command_names_another_address_the_key_and_the_certificate() -> None:
    there = replace(HERE, url="https://head.example:443", key_file=Path("my keys"), certificate=Path("c.pem"))
    assert there.command() == (
        "convoy chat --url https://head.example:443 --api-key-file 'my keys' --ca c.pem"
    )


def test_the_page_is_opened_under_the_servers_own_certificate() -> None:
    there = replace(HERE, url="https://head.example:443", certificate=Path("c.pem"))
    assert there.lines()[2] == (
        "page: https://head.example:443/ (`convoy open --url https://head.example:443 --ca c.pem` on this "
        "machine signs in to operate)"
    )


def test_no_command_is_named_that_would_send_its_key_in_clear_to_another_machine() -> None:
    there = replace(HERE, url="http://192.0.2.1:8000", key_file=Path("keys"))
    assert not any(line.startswith("try:") for line in there.lines())
    assert any(line.startswith("try:") for line in replace(there, key_file=None).lines())

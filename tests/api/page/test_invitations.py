"""Invitations on the page: the question of one process, the answer of a person, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import PageOptions, ServeOptions
from convoy.api.page.invitations import InvitationList, InvitationQuestion, asked_on_page
from convoy.api.page.tokens import OpenTokens, Scope
from convoy.errors import ConfigError, RequestError
from support.fake_service import serving

OPERATOR, ID = "ab" * 32, "0123456789abcdef" * 2
KEY = "sk-test-0123456789"
QUESTION = InvitationQuestion(
    id=ID,
    name="beta",
    address="127.0.0.1:7777",
    called_from="127.0.0.1",
    fingerprint="cd" * 32,
    code="4408 5596",
    expires_unix_s=1300.0,
)


class Folder:
    """Hold a folder of questions, and the time of its head."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_s = 1000.0
        self.list = InvitationList(path, OPERATOR, lambda: self.now_s)

    def asked(self, **changes: Any) -> Any:
        return asked_on_page(self.path, OPERATOR, msgspec.structs.replace(QUESTION, **changes))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "cache" / "invitations")


def test_a_question_is_listed_and_answered_once(folder: Folder) -> None:
    assert folder.list.pending() == []
    with folder.asked() as question:
        assert folder.list.pending() == [QUESTION]
        assert question.answer() is None
        folder.list.answer(ID, QUESTION.code, approves=True)
        assert question.answer() is True
        assert folder.list.pending() == []
        with pytest.raises(RequestError, match="no machine waits"):
            folder.list.answer(ID, QUESTION.code, approves=False)
        assert question.answer() is True
        assert {path.stat().st_mode & 0o777 for path in folder.path.iterdir()} == {0o600}
        assert folder.path.stat().st_mode & 0o777 == 0o700
    assert list(folder.path.iterdir()) == []


def test_a_no_is_a_no(folder: Folder) -> None:
    with folder.asked() as question:
        folder.list.answer(ID, QUESTION.code, approves=False)
        assert question.answer() is False


def test_a_wrong_code_answers_nothing_at_either_end(folder: Folder) -> None:
    with folder.asked() as question:
        with pytest.raises(RequestError, match="the code is not"):
            folder.list.answer(ID, "0000 0000", approves=True)
        assert folder.list.pending() == [QUESTION]
        # The process with the operator key does not rely on the head's check.
        (folder.path / f"{ID}.answer").write_text('{"code": "0000 0000", "approves": true}')
        (folder.path / f"{ID}.answer").chmod(0o600)
        assert question.answer() is None


def test_an_expired_question_is_not_listed_and_not_answered(folder: Folder) -> None:
    with folder.asked() as question:
        folder.now_s = QUESTION.expires_unix_s
        assert folder.list.pending() == []
        with pytest.raises(RequestError, match="no machine waits"):
            folder.list.answer(ID, QUESTION.code, approves=True)
        assert question.answer() is None


def test_the_question_of_a_process_that_was_killed_counts_no_more(folder: Folder) -> None:
    with folder.asked():
        # The copy has the same text, and no process that holds its lock.
        shutil.copy(folder.path / f"{ID}.question", folder.path / "left")
    shutil.move(folder.path / "left", folder.path / f"{ID}.question")
    assert folder.list.pending() == []
    os.utime(folder.path / f"{ID}.question", (0, 0))
    with folder.asked(id="f" * 32):
        assert [path.stem for path in folder.path.iterdir()] == ["f" * 32]


def test_the_head_of_another_cluster_lists_nothing(folder: Folder) -> None:
    with folder.asked():
        assert InvitationList(folder.path, "ef" * 32, lambda: 1000.0).pending() == []
        assert InvitationList(None, "", lambda: 1000.0).pending() == []


def spoil(path: Path, how: str) -> None:
    """Make of a good file one that others may have written."""
    if how == "readable":
        path.chmod(0o644)
    elif how == "link":
        path.rename(path.with_name("other"))
        path.symlink_to(path.with_name("other"))
    elif how == "foreign":
        if os.getuid() != 0:
            pytest.skip("only root gives files away")
        os.chown(path, 12345, -1)
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path, 0o600)


@pytest.mark.parametrize("how", ["readable", "link", "foreign", "pipe"])
@pytest.mark.parametrize("kind", ["question", "answer"])
def test_a_file_that_another_user_may_have_written_counts_for_nothing(
    folder: Folder, how: str, kind: str
) -> None:
    with folder.asked() as question:
        if kind == "answer":
            folder.list.answer(ID, QUESTION.code, approves=True)
            assert question.answer() is True
        spoil(folder.path / f"{ID}.{kind}", how)
        assert not (folder.list.pending() if kind == "question" else question.answer())


def test_a_folder_that_others_can_enter_has_no_questions_and_takes_none(folder: Folder) -> None:
    with folder.asked():
        folder.path.chmod(0o755)
        assert folder.list.pending() == []
    with pytest.raises(ConfigError, match="0755"), folder.asked():
        pass


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"operator_key": 1}', "\udcff", json.dumps({"operator_key": OPERATOR, "question": {}}),
     json.dumps({"operator_key": OPERATOR, "question": msgspec.to_builtins(QUESTION) | {"name": "x" * 301}}),
     json.dumps({"operator_key": OPERATOR, "question": msgspec.to_builtins(QUESTION) | {"id": "e" * 32}})],
)  # fmt: skip
def test_a_file_that_is_no_question_is_not_listed(folder: Folder, text: str) -> None:
    with folder.asked():
        path = folder.path / f"{ID}.question"
        # The same file, so that it is still locked.
        path.write_bytes(text.encode(errors="surrogateescape"))
        assert folder.list.pending() == []


def client(url: str, tokens: OpenTokens, scope: Scope) -> httpx.Client:
    token = tokens.make(int(url.rpartition(":")[2]), scope)
    begun = httpx.post(f"{url}/page/session", json={"token": token})
    return httpx.Client(base_url=url, cookies=begun.cookies)


def taken(http: httpx.Client, **changes: Any) -> httpx.Response:
    body = {"id": ID, "code": QUESTION.code, "approves": True} | changes
    return http.post("/page/invitations", json=body)


@pytest.mark.outside
def test_a_session_that_operates_answers_and_nothing_else_does(tmp_path: Path) -> None:
    tokens, folder = OpenTokens(tmp_path / "open"), Folder(tmp_path / "invitations")
    page = PageOptions(tokens.folder, folder.path, OPERATOR)
    with (
        serving(options=ServeOptions(port=0, keys=KeyRing.of(KEY), page=page)) as running,
        asked_on_page(folder.path, OPERATOR, msgspec.structs.replace(QUESTION, expires_unix_s=1e11)) as asked,
    ):
        url = running.url
        with httpx.Client(base_url=url) as stranger:
            assert stranger.get("/page/invitations").status_code == 401
            assert taken(stranger).status_code == 401
        with (
            httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}) as holder,
            client(url, tokens, "view") as viewer,
        ):
            for http in (holder, viewer):
                for answer in (http.get("/page/invitations"), taken(http)):
                    assert answer.status_code == 403
                    assert QUESTION.code not in answer.text
                    assert "convoy open" in answer.json()["error"]["message"]
        with client(url, tokens, "operate") as operator:
            origin = {"origin": "https://evil.example"}
            assert operator.get("/page/invitations", headers=origin).status_code == 403
            assert operator.post("/page/invitations", headers=origin, json={}).status_code == 403
            plain = operator.post("/page/invitations", content="{}", headers={"content-type": "text/plain"})
            assert plain.status_code == 415
            bad: list[dict[str, Any]] = [
                {"code": "0000 0000"}, {"id": "f" * 32}, {"id": "../open"}, {"approves": 1}, {"more": 1},
            ]  # fmt: skip
            for changes in bad:
                assert taken(operator, **changes).status_code == 400, changes
            assert asked.answer() is None
            [found] = operator.get("/page/invitations").json()["invitations"]
            assert (found["name"], found["code"]) == ("beta", QUESTION.code)
            assert taken(operator).status_code == 200
            assert asked.answer() is True
            assert operator.get("/page/invitations").json() == {"invitations": []}


@pytest.mark.outside
def test_a_head_without_keys_asks_for_a_session_too(tmp_path: Path) -> None:
    page = PageOptions(tmp_path / "open", tmp_path / "invitations", OPERATOR)
    options = ServeOptions(port=0, page=page)
    with serving(options=options) as running, httpx.Client(base_url=running.url) as http:
        assert http.get("/page/invitations").status_code == 403
        assert taken(http).status_code == 403

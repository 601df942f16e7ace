"""``chat`` and ``status`` against a real HTTP server that says what a head says, or something else."""

from __future__ import annotations

import http.server
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.transcript import run_convoy, run_here
from convoy.cli.show.exit_codes import EXIT_CONFIG

STAGES = [
    {"member": "alpha", "start": 0, "end": 4, "embed": True, "output": True, "weight_bytes": 4_000_000}
    | {"can_read_prompts": "tokens", "address": "127.0.0.1:7001"},
    {"member": "beta", "start": 4, "end": 12, "embed": False, "output": False, "weight_bytes": 8_000_000}
    | {
        "can_read_prompts": "activations",
        "address": "127.0.0.1:7002",
        "round_trip_s": 0.00031,
        "cipher": "AES-256-GCM",
    },
]
STATUS = {
    "model": "demo",
    "ready": True,
    "reason": "",
    "route": "complete: alpha 0:3,output -> beta 4:11 -> alpha",
    "kernel": "exact-f32",
    "generation": 1,
    "stages": STAGES,
    "running": 1,
    "waiting": 0,
    "num_blocks": 100,
    "free_blocks": 90,
    "steps": 7,
    "prompt_tokens": 20,
    "generated_tokens": 5,
    "ring_s": 0.002,
}


def events(*pieces: object) -> bytes:
    return b"".join(b"data: " + json.dumps(piece).encode() + b"\n\n" for piece in pieces)


DONE = b"data: [DONE]\n\n"


def delta(text: str, finish_reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]}


class FakeHead(http.server.ThreadingHTTPServer):
    """Answer by path from ``answers`` (status, type, body), and keep the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        self.polls_before: dict[str, int] = {}  # how often /health is asked before a path is answered
        self.polled = threading.Semaphore(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def say(self, path: str, value: object, status: int = 200) -> None:
        self.answers[path] = (status, value if isinstance(value, bytes) else json.dumps(value).encode())


class _Answer(http.server.BaseHTTPRequestHandler):
    server: FakeHead

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.server.asked.append((self.path, dict(self.headers), body))
        status, answer = self.server.answers.get(self.path, (404, b"nothing here"))
        before, pause, after = answer.rpartition(b"PAUSE")
        if pause:
            self._begin(status, before)
        for _ in range(self.server.polls_before.get(self.path, 0)):
            assert self.server.polled.acquire(timeout=30)
        if self.path == "/health":
            self.server.polled.release()
        if not pause:
            self._begin(status, b"")
        self.wfile.write(after)

    def _begin(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET  # noqa: N815 - the standard library's name

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def head() -> Iterator[FakeHead]:
    with FakeHead() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        server.say("/health", {"status": "ready", "reason": "a token passes every stage"})
        server.say("/status", STATUS)
        server.say("/v1/models", {"data": [{"id": "demo"}]})
        yield server
        server.shutdown()
        thread.join()


def test_status_shows_every_stage_and_its_link(head: FakeHead, tmp_path: Path) -> None:
    done = run_convoy(["status", "--url", head.url], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "AES-256-GCM" in done.stdout
    assert "0.31 ms" in done.stdout
    assert "90 of 100 free" in done.stdout
    assert done.stderr == ""


def test_status_in_json_is_the_servers_own_picture(head: FakeHead, tmp_path: Path) -> None:
    done = run_here(["status", "--json", "--url", head.url], tmp_path)
    value = json.loads(done.stdout)
    assert value["health"]["status"] == "ready"
    assert value["stages"][1]["member"] == "beta"


def test_status_at_a_coordinator_names_the_command_for_its_providers(head: FakeHead, tmp_path: Path) -> None:
    head.say("/health", {"error": {"message": "there is nothing here"}}, status=404)
    done = run_here(["status", "--url", head.url], tmp_path)
    assert done.returncode == 1
    assert "hint: is this a head? --url names one; at a coordinator, `convoy coordinator" in done.stderr


@pytest.mark.parametrize("end", ["/v1", "/v1/", "/"])
def test_the_address_that_api_clients_have_is_taken_too(head: FakeHead, tmp_path: Path, end: str) -> None:
    done = run_here(["status", "--url", head.url + end], tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path for path, _, _ in head.asked} == {"/health", "/status"}


def test_status_of_a_cluster_that_is_not_ready_fails_with_its_reason(head: FakeHead, tmp_path: Path) -> None:
    head.say("/health", {"status": "not ready", "reason": "beta is gone"}, 503)
    done = run_here(["status", "--url", head.url], tmp_path)
    assert done.returncode == 75
    assert done.stderr.splitlines() == ["error: the cluster is not ready: beta is gone"]
    assert "beta" in done.stdout


def test_status_in_json_of_a_cluster_that_is_not_ready_is_one_value(head: FakeHead, tmp_path: Path) -> None:
    head.say("/health", {"status": "not ready", "reason": "beta is gone"}, 503)
    done = run_here(["status", "--url", head.url, "--json"], tmp_path)
    assert done.returncode == 75
    assert json.loads(done.stdout)["health"]["reason"] == "beta is gone"


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"{}", json.dumps({**STATUS, "stages": 3}).encode()])
def test_something_else_at_the_address_is_said_plainly(head: FakeHead, tmp_path: Path, answer: bytes) -> None:
    head.say("/status", answer)
    done = run_here(["status", "--url", head.url], tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: the server at {head.url} is not this version of Convoy: ")


@pytest.mark.parametrize("names", [[], ["a", "b"]])
def test_chat_wants_a_model_named_where_not_exactly_one_is_served(
    head: FakeHead, tmp_path: Path, names: list[str]
) -> None:
    head.say("/v1/models", {"data": [{"id": name} for name in names]})
    done = run_here(["chat", "What is 40+2?", "--url", head.url], tmp_path)
    assert done.returncode == 2
    assert f"serves {len(names)} models" in done.stderr
    assert ("hint: --model names one" in done.stderr) is bool(names)


def test_chat_streams_one_answer_and_sends_what_was_asked(head: FakeHead, tmp_path: Path) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    stream = events(delta("4"), delta("2", "stop"), {"choices": [], "usage": usage}) + b"data: [DONE]\n\n"
    head.say("/v1/chat/completions", b": heartbeat\n\n" + stream)
    (tmp_path / "api.key").touch(mode=0o600)
    (tmp_path / "api.key").write_text("sesame\n", encoding="utf-8")
    flags = ["--url", head.url, "--api-key-file", "api.key", "--system", "Be brief.", "--temperature", "0"]
    done = run_convoy(["chat", "What is 40+2?", *flags], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")
    _, headers, body = head.asked[-1]
    assert headers["Authorization"] == "Bearer sesame"
    sent = json.loads(body)
    assert [message["role"] for message in sent["messages"]] == ["system", "user"]
    assert sent["temperature"] == 0
    assert "seed" not in sent

    done = run_here(["chat", "What is 40+2?", "--json", "--url", head.url], tmp_path)
    value = json.loads(done.stdout)
    assert (value["text"], value["finish_reason"], value["usage"]) == ("42", "stop", usage)


def test_a_dash_reads_one_question_from_standard_input(head: FakeHead, tmp_path: Path) -> None:
    head.say("/v1/chat/completions", events(delta("42", "stop")) + DONE)
    done = run_here(["chat", "-", "--url", head.url], tmp_path, text="What is\n40+2?\n")
    assert (done.returncode, done.stdout) == (0, "42\n")
    assert json.loads(head.asked[-1][2])["messages"] == [{"role": "user", "content": "What is\n40+2?"}]
    empty = run_here(["chat", "-", "--url", head.url], tmp_path, text="\n")
    assert empty.returncode == 2
    assert empty.stderr.startswith("error: standard input has no question\n")


def test_a_conversation_has_commands_and_questions_of_several_lines(head: FakeHead, tmp_path: Path) -> None:
    head.say("/v1/chat/completions", events(delta("yes", "stop")) + DONE)
    typed = '/system Be short.\nfirst \\\nline\n"""second\n\nline"""\n/new\n/model demo\n/odd\n/etc/passwd\n'
    done = run_here(["chat", "--url", head.url], tmp_path, text=typed)
    assert done.returncode == 0, done.stderr
    sent = [json.loads(body)["messages"] for path, _, body in head.asked if path == "/v1/chat/completions"]
    assert [one[-1]["content"] for one in sent] == ["first \nline", "second\n\nline", "/etc/passwd"]
    assert all(one[0] == {"role": "system", "content": "Be short."} for one in sent)
    assert [len(one) for one in sent] == [2, 4, 2], "/new keeps the system message alone"
    assert "demo answers from now on" in done.stderr
    assert "there is no command /odd" in done.stderr


def test_a_conversation_remembers_and_goes_on_after_an_error(head: FakeHead, tmp_path: Path) -> None:
    head.say("/v1/chat/completions", events(delta("yes", "stop")) + b"data: [DONE]\n\n")
    done = run_convoy(["chat", "--url", head.url], tmp_path, text="first\n\nsecond\n")
    assert done.stdout == "yes\nyes\n"
    messages = json.loads(head.asked[-1][2])["messages"]
    assert [message["content"] for message in messages] == ["first", "yes", "second"]

    head.say("/v1/chat/completions", {"error": {"message": "the prompt is too long"}}, 400)
    done = run_here(["chat", "--url", head.url], tmp_path, text="first\nsecond\n")
    assert done.returncode == 0
    assert done.stderr.splitlines() == ["error: the prompt is too long"] * 2
    assert [message["content"] for message in json.loads(head.asked[-1][2])["messages"]] == ["second"]


def test_in_a_conversation_any_number_of_interrupts_stop_answers_alone(
    head: FakeHead, tmp_path: Path
) -> None:
    def end_the_process(number: int, frame: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGINT, end_the_process)
    try:
        run_here(["chat", "--url", head.url], tmp_path, text="")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_stream_that_is_cut_off_is_never_a_complete_answer(head: FakeHead, tmp_path: Path) -> None:
    head.say("/v1/chat/completions", events(delta("4")))
    done = run_here(["chat", "What is 40+2?", "--url", head.url], tmp_path)
    assert done.returncode == 75
    assert "ended before the answer was complete" in done.stderr


def test_an_error_in_the_stream_is_the_servers_own_words(head: FakeHead, tmp_path: Path) -> None:
    error = {"error": {"message": "a stage went away", "type": "server_error"}}
    head.say("/v1/chat/completions", events(delta("4"), error))
    done = run_here(["chat", "What is 40+2?", "--url", head.url], tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["error: a stage went away"]


def test_a_head_that_shuts_down_is_said_with_what_a_person_can_do(head: FakeHead, tmp_path: Path) -> None:
    text = "the server is shutting down (send the request to another server)"
    head.say("/v1/chat/completions", {"error": {"message": text, "code": "draining"}}, 503)
    done = run_here(["chat", "What is 40+2?", "--url", head.url], tmp_path)
    assert done.stderr.splitlines() == [
        "error: the server is shutting down",
        "hint: ask again once `convoy serve` is started again",
    ]


def test_a_model_that_is_not_served_is_said_with_what_a_person_can_do(head: FakeHead, tmp_path: Path) -> None:
    text = "the model 'other' is not served here, expected one of: demo"
    head.say("/v1/chat/completions", {"error": {"message": text, "code": "model_not_found"}}, 404)
    done = run_here(["chat", "What is 40+2?", "--model", "other", "--url", head.url], tmp_path)
    assert done.stderr.splitlines() == [
        f"error: {text}",
        "hint: name a model that is served, or none if one is; `convoy serve MODEL` serves another",
    ]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_recovery_is_said_once_while_an_answer_pauses(
    head: FakeHead, tmp_path: Path, flags: list[str]
) -> None:
    reason = "recovering: missing layers 4-11 (beta is gone)"
    head.say("/health", {"status": "not ready", "reason": reason}, 503)
    head.say("/v1/chat/completions", events(delta("42", "stop")) + b"data: [DONE]\n\n")
    # A poll comes after two seconds of silence, and none with --json.
    head.polls_before["/v1/chat/completions"] = 0 if flags else 2
    done = run_here(["chat", "What is 40+2?", "--url", head.url, *flags], tmp_path)
    assert (json.loads(done.stdout)["text"] if flags else done.stdout) == ("42" if flags else "42\n")
    told = ["(the cluster is recovering: missing layers 4-11 (beta is gone))"]
    assert done.stderr.splitlines() == ([] if flags else told)


def test_a_recovery_in_the_middle_of_an_answer_is_said_on_a_line_of_its_own(
    head: FakeHead, tmp_path: Path
) -> None:
    head.say("/health", {"status": "not ready", "reason": "recovering: beta is gone"}, 503)
    head.say("/v1/chat/completions", events(delta("4")) + b"PAUSE" + events(delta("2", "stop")) + DONE)
    head.polls_before["/v1/chat/completions"] = 2
    done = run_convoy(["chat", "What is 40+2?", "--url", head.url], tmp_path, merged=True)
    assert done.stdout == "4\n(the cluster is recovering: beta is gone)\n2\n"


def test_control_characters_of_an_answer_reach_no_terminal(head: FakeHead, tmp_path: Path) -> None:
    hostile = "a\x1b[2J\x07\x9b1mb\r\x7f\u202ec\tfor\n\U0001f469\u200d\U0001f680"
    head.say("/v1/chat/completions", events(delta(hostile, "stop")) + DONE)
    done = run_here(["chat", "hello", "--url", head.url], tmp_path)
    assert done.stdout == "a[2J1mbc\tfor\n\U0001f469\u200d\U0001f680\n"
    told = run_here(["chat", "hello", "--url", head.url, "--json"], tmp_path)
    assert json.loads(told.stdout)["text"] == hostile, "a script gets the answer as it is"


def test_https_to_a_server_without_a_certificate_is_said_so(head: FakeHead, tmp_path: Path) -> None:
    done = run_here(["status", "--url", head.url.replace("http:", "https:")], tmp_path)
    assert done.returncode == EXIT_CONFIG
    assert "does not speak TLS" in done.stderr
    done = run_here(["status", "--url", head.url, "--ca", "ca.pem"], tmp_path)
    assert "error: --ca is for https, and the address is http://127.0.0.1:" in done.stderr


def test_a_missing_key_is_told_where_to_go(head: FakeHead, tmp_path: Path) -> None:
    head.say("/health", {"error": {"message": "no api key"}}, 401)
    done = run_here(["status", "--url", head.url], tmp_path)
    assert done.stderr.splitlines() == [
        "error: no api key",
        "hint: give the key's file with --api-key-file, or the key in CONVOY_API_KEY",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["status", "--url", "http://192.0.2.2:8999", "--api-key-file", "key"],
        ["top", "--once", "--url", "192.0.2.2:8999", "--api-key-file", "key"],
        ["chat", "hello", "--url", "http://192.0.2.2:8999/v1", "--api-key-file", "key"],
        ["launch", "codex", "--print", "--url", "http://192.0.2.2:8999", "--api-key-file", "key"],
        ["coordinator", "keys", "--admin-url", "http://192.0.2.2:8999", "--admin-key-file", "key"],
        ["provide", "ws://127.0.0.1:9", "--upstream", "http://192.0.2.2:8999", "--upstream-key-file", "key"],
        ["open", "--url", "http://192.0.2.2:8999"],
    ],
)
def test_no_command_sends_a_key_in_clear_to_another_machine(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text("convoy-secret-key-of-ann-0123456789")
    assert run_here(["identity", "new", "one"], tmp_path).returncode == 0
    done = run_here(words, tmp_path)
    assert done.returncode == EXIT_CONFIG, done.stderr
    what = "token" if words[0] == "open" else "key"
    assert done.stderr == (
        f"error: refusing to send a {what} to 192.0.2.2 without TLS\n"
        "hint: https://192.0.2.2:8999, or a tunnel whose end is at 127.0.0.1\n"
    )


@pytest.mark.parametrize("command", [["status"], ["top", "--once"]])
def test_names_of_a_head_do_not_draw_on_the_terminal(
    command: list[str], head: FakeHead, tmp_path: Path
) -> None:
    bad = "\x1b[31mx"
    models = [{"name": bad, "state": "loaded"}, {"name": "demo", "state": "known"}]
    stages = [{**STAGES[0], "member": bad}]
    head.say(
        "/status", {**STATUS, "stages": stages, "models": models, "route": bad, "absent": [{"name": bad}]}
    )
    head.say("/health", {"status": "ready", "reason": bad})
    done = run_here([*command, "--url", head.url], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[31mx" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr

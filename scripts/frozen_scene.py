"""Start real processes of one side, and collect what they answer, count and write, for `scripts/frozen.py`.

A head and a peer with a signed roster, a coordinator, a provider and a proxy are started as a person starts
them, so nothing here names a module of Convoy.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

Facts = dict[str, Any]
CONVOY = [sys.executable, "-m", "convoy"]
_WAIT_S = 150.0
_POLL_S = 0.1
_PUBLIC_KEY = r"[0-9a-f]{64}"
_MODEL = "demo-mini"
_QUESTION = [{"role": "user", "content": "What is 8+9? Answer with just the number."}]
# Keys of JSON with values that differ each time.
_RANDOM = frozenset(
    {
        "id",
        "created",
        "url",
        "fingerprint",
        "digest",
        "identity_key",
        "operator_key",
        "key",
        "address",
        "port",
    }
)
_SAID = frozenset(
    {"content", "text", "token", "bytes", "finish_reason", "model", "object", "role", "type", "code"}
)
_COUNTED_LABELS = frozenset(
    {"finished_reason", "direction", "outcome", "kind", "segment", "le", "phase", "level"}
)


def run(*arguments: str, folder: Path, allow: tuple[int, ...] = (0,)) -> str:
    """Run a command to its end and return its standard output. Raises RuntimeError for another exit code."""
    done = subprocess.run(
        [*CONVOY, *arguments], cwd=folder, capture_output=True, text=True, timeout=_WAIT_S, check=False
    )
    if done.returncode not in allow:
        raise RuntimeError(f"{' '.join(arguments)}: exit {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def shape(value: Any, *, values: bool, key: str = "") -> Any:
    """Return ``value`` without the parts that differ each time. Without ``values``, leaves become types."""
    if isinstance(value, dict):
        return {name: shape(one, values=values, key=name) for name, one in value.items()}
    if isinstance(value, list):
        found = [shape(one, values=values, key=key) for one in value]
        return found if values else [one for index, one in enumerate(found) if one not in found[:index]]
    if value is None or isinstance(value, bool):
        return value if values or value is None else "bool"
    if key in _RANDOM or not values:
        return "number" if isinstance(value, int | float) else "text"
    if isinstance(value, str) and " " in value and key not in _SAID:
        return "text"
    return value


# Files.


def written_files(root: Path) -> Facts:
    """Return what commands write: sessions byte for byte, and rosters, cards, keys and logs by their form."""
    facts: Facts = {}
    with tempfile.TemporaryDirectory(prefix="frozen-") as name:
        folder = Path(name)
        facts |= _roster_files(folder)
        for kernel, members in (
            ("exact-f32", "2"),
            ("exact-f32", "1"),
            ("plain-f32", "1"),
            ("w8a8", "1"),
            ("w4a16", "1"),
        ):
            file = folder / f"{kernel}-{members}.session"
            ask = ["session", _MODEL, "--prompt", "What is 8+9?", "--max-tokens", "8", "--kernel", kernel]
            told = run(*ask, "--members", members, "--save", str(file), "--plain", "--json", folder=folder)
            facts[f"session file {kernel} {members}"] = _digest(file.read_bytes())
            length = int.from_bytes(file.read_bytes()[:8], "little")
            facts[f"session header {kernel} {members}"] = file.read_bytes()[8 : 8 + length].decode()
            facts[f"session answer {kernel} {members}"] = shape(json.loads(told), values=False)
        sealed, key = folder / "sealed.session", folder / "session.key"
        ask = ["session", _MODEL, "--prompt", "What is 8+9?", "--max-tokens", "8", "--members", "1"]
        run(*ask, "--save", str(sealed), "--key", str(key), "--json", folder=folder)
        facts["sealed session"] = [sealed.stat().st_size, sealed.read_bytes()[:8].hex(), key.stat().st_size]
        shown = json.loads(run("manifest", "show", _MODEL, "--json", folder=folder))
        facts["manifest"] = shown
    del root
    return facts


def _roster_files(folder: Path) -> Facts:
    told = make_members(folder, (17771, 17772))
    (folder / "secret").write_text("a long passphrase\n", encoding="utf-8")
    (folder / "secret").chmod(0o600)
    operator = str(folder / "operator2")
    options = ["--operator", operator, "--out", "second.toml", "--passphrase-file", "secret", "--json"]
    told["roster two"] = run(
        "roster", "new", "two", "alpha.card.toml", "--head", "alpha", *options, folder=folder
    )
    passphrase = ["identity", "passphrase", "--dir", operator, "--new-passphrase-file", "secret", "--json"]
    told["passphrase"] = run(*passphrase, folder=folder, allow=(0, 1, 2))
    facts: Facts = {f"said by {name}": _json_or_text(text) for name, text in told.items()}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("secret"):
            about = [oct(path.stat().st_mode & 0o777)]
            data = path.read_bytes()
            facts[f"file {path.relative_to(folder)}"] = [*about, _masked(data)]
    return facts


def _json_or_text(text: str) -> Any:
    try:
        return shape(json.loads(text), values=False)
    except ValueError:
        return bool(text)


def _masked(data: bytes) -> Any:
    """Return text with keys, signatures and times masked, or the beginning and size of binary data."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return [data[:8].hex(), len(data)]
    text = re.sub(r"-----(BEGIN [A-Z ]+)-----[^-]+", r"-----\1-----", text)
    text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)?", "TIME", text)
    text = re.sub(r"[0-9a-f]{24,}", "HEX", text)
    text = re.sub(r"[A-Za-z0-9+/]{30,}={0,2}", "BASE64", text)
    text = re.sub(r"\d{9,}(\.\d+)?", "NUMBER", text)
    text = re.sub(r"/\S*/frozen-[^/\s\"]*", "FOLDER", text)
    return text.splitlines()


def make_members(folder: Path, ports: tuple[int, ...]) -> dict[str, str]:
    """Make keys of alpha and beta, a roster and a convoy.toml of each; return what the commands said."""
    said = {}
    for name, port in zip(("alpha", "beta"), ports, strict=True):
        said[name] = run("identity", "new", name, "--address", f"127.0.0.1:{port}", "--json", folder=folder)
    cards = ["alpha.card.toml", "beta.card.toml"]
    said["roster"] = run("roster", "new", "test", *cards, "--head", "alpha", "--json", folder=folder)
    operator = json.loads(said["roster"])["operator_key"]
    for name, port in zip(("alpha", "beta"), ports, strict=True):
        mine = f'name = "{name}"\nidentity = ".convoy/{name}"\nroster = "roster.toml"\n'
        cluster = f'{mine}operator_key = "{operator}"'
        text = f'[cluster]\n{cluster}\n[listen]\nhost = "127.0.0.1"\nport = {port}\n'
        text += '[model]\nmemory_gb = 1.0\nnum_threads = 1\nkernel = "exact-f32"\n'
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    return said


# Served.


def served_facts(root: Path) -> dict[str, Facts]:
    """Return what a cluster, a coordinator and a proxy answer over HTTP, and what their metrics are."""
    http: Facts = {}
    metrics: Facts = {}
    with tempfile.TemporaryDirectory(prefix="frozen-") as name, ExitStack() as stack:
        folder = Path(name)
        ports = free_ports(8)
        make_members(folder, (ports[0], ports[1]))
        http |= _commands(folder)
        peer = [
            "join",
            "--config",
            "beta.toml",
            "--model",
            _MODEL,
            "--metrics",
            f"127.0.0.1:{ports[3]}",
            "--json",
        ]
        stack.enter_context(process(folder, "beta", *peer))
        layers = ["--layers", "alpha=0:1,output", "--layers", "beta=2:3"]
        head = ["serve", _MODEL, "--config", "alpha.toml", "--port", str(ports[2]), *layers, "--json"]
        stack.enter_context(process(folder, "alpha", *head))
        url = f"http://127.0.0.1:{ports[2]}"
        wait_for(lambda: httpx.get(f"{url}/health", trust_env=False).status_code == 200, folder)
        http |= _answers(url, "head")
        status = json.loads(run("status", "--url", url, "--json", folder=folder))
        http["status"] = shape(status, values=False)
        http["status over http"] = shape(get(f"{url}/status").json(), values=False)
        metrics |= scraped(get(f"{url}/metrics").text, "head")
        metrics |= scraped(get(f"http://127.0.0.1:{ports[3]}/metrics").text, "member")
        http |= _fleet(folder, stack, url, ports[4:], metrics)
    del root
    return {"http": http, "metrics": metrics}


def _commands(folder: Path) -> Facts:
    """Return what the commands that need no cluster say in JSON."""
    speed = ["--speed", "10,100", "--round-trip", "1", "--threads", "1", "--json"]
    facts: Facts = {}
    for model in ("demo", "demo-mini"):
        for members in ("alpha=4,beta=4", "alpha=4,beta=2,gamma=1"):
            for parallel in ("auto", "pipeline"):
                given = ["plan", model, "--members", members, "--parallel", parallel, *speed]
                told = json.loads(run(*given, folder=folder))
                facts[f"plan {model} {members} {parallel}"] = shape(told, values=True)
    doctor = json.loads(run("doctor", "--config", "alpha.toml", "--json", folder=folder, allow=(0, 1)))
    facts["doctor"] = shape(doctor, values=False)
    facts["doctor checks"] = sorted({one["check"] for one in doctor["findings"]})
    for given in (["cache"], ["roster", "verify", "roster.toml"], ["identity", "show", ".convoy/alpha"]):
        told = run(*given, "--json", folder=folder, allow=(0, 1, 2))
        facts[" ".join(given)] = _json_or_text(told)
    return facts


def _answers(url: str, who: str) -> Facts:
    """Return status, headers and body of one request of each kind, good ones and bad ones."""
    chat = {"model": _MODEL, "messages": _QUESTION, "temperature": 0, "max_tokens": 8}
    text = {"model": _MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
    sampled = {**chat, "temperature": 0.8, "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 2}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    posts: dict[str, tuple[str, Any]] = {
        "chat": ("/v1/chat/completions", chat),
        "chat sampled": ("/v1/chat/completions", sampled),
        "chat stream": ("/v1/chat/completions", {**chat, **stream}),
        "chat stream sampled": ("/v1/chat/completions", {**sampled, **stream}),
        "text": ("/v1/completions", text),
        "text echo": ("/v1/completions", {**text, "echo": True, "logprobs": 2}),
        "text prompt logprobs": ("/v1/completions", {**text, "prompt_logprobs": 1}),
        "text stream": ("/v1/completions", {**text, **stream}),
        "no model": ("/v1/chat/completions", {**chat, "model": "nothing"}),
        "no messages": ("/v1/chat/completions", {"model": _MODEL}),
        "hot": ("/v1/chat/completions", {**chat, "temperature": 99}),
        "unknown field": ("/v1/chat/completions", {**chat, "tools": [{"type": "function"}]}),
        "long": ("/v1/completions", {**text, "max_tokens": 10**6}),
        "no path": ("/v1/nothing", chat),
        "not json": ("/v1/chat/completions", None),
    }
    facts: Facts = {}
    with httpx.Client(base_url=url, trust_env=False, timeout=_WAIT_S) as client:
        for name, (path, body) in posts.items():
            answer = client.post(path, json=body) if body is not None else client.post(path, content=b"{")
            facts[f"{who} {name}"] = _answer(answer)
        for path in (
            "/v1/models",
            f"/v1/models/{_MODEL}",
            "/v1/models/nothing",
            "/health",
            "/nothing",
            "/v1/completions",
        ):
            facts[f"{who} get {path}"] = _answer(client.get(path))
        facts[f"{who} media"] = _answer(
            client.post("/v1/completions", content=b"x", headers={"content-type": "text/x"})
        )
    return facts


def _answer(answer: httpx.Response) -> Any:
    told: Any
    kind = answer.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        lines = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: ")]
        told = [line if line == "[DONE]" else shape(json.loads(line), values=True) for line in lines]
    elif kind.startswith("application/json"):
        told = shape(answer.json(), values=True)
    else:
        told = bool(answer.text)
    names = sorted(set(answer.headers) - {"date", "content-length"})
    return [answer.status_code, kind, names, told]


def _fleet(folder: Path, stack: ExitStack, upstream: str, ports: list[int], metrics: Facts) -> Facts:
    """Return what a coordinator and a proxy before a provider answer; adds their families to ``metrics``."""
    public, admin, blind = ports[:3]
    prices = f'[[model]]\nname = "{_MODEL}"\nprompt_micro = 1000000\ncompletion_micro = 2000000\n'
    (folder / "coordinator.toml").write_text(prices, encoding="utf-8")
    listen = ["coordinator", "--port", str(public), "--admin-port", str(admin), "--dir", "fleet"]
    stack.enter_context(process(folder, "coordinator", *listen, "--config", "coordinator.toml", "--json"))
    key_file = folder / "fleet" / "admin.key"
    wait_for(
        lambda: (
            key_file.exists() and httpx.get(f"http://127.0.0.1:{public}/health", trust_env=False) is not None
        ),
        folder,
    )
    headers = {"authorization": f"Bearer {key_file.read_text(encoding='utf-8').split()[0]}"}
    facts: Facts = {}
    with httpx.Client(
        base_url=f"http://127.0.0.1:{admin}", headers=headers, trust_env=False, timeout=60
    ) as endpoint:
        facts["admin accounts"] = _answer(
            endpoint.post("/accounts", json={"name": "ann", "credit_micro": 10**12})
        )
        made = endpoint.post("/keys", json={"scope": "consumer", "account": "ann"})
        facts["admin keys"] = _answer(made)
        scope = endpoint.post("/keys", json={"scope": "metrics", "label": "prometheus"})
        facts["admin metrics key"] = _answer(scope)
        (folder / "fleet.key").write_text(made.json()["key"] + "\n", encoding="utf-8")
        (folder / "fleet.key").chmod(0o600)
        provide = ["provide", f"ws://127.0.0.1:{public}", "--upstream", upstream, "--dir", "home", "--json"]
        stack.enter_context(process(folder, "provide", *provide))
        log = folder / "provide.log"
        wait_for(lambda: re.search(_PUBLIC_KEY, log.read_text(encoding="utf-8")) is not None, folder)
        identity = re.findall(_PUBLIC_KEY, log.read_text(encoding="utf-8"))[0]
        facts["admin providers"] = _answer(
            endpoint.post("/providers", json={"identity": identity, "name": "one"})
        )
        wait_for(lambda: bool(endpoint.get("/status").json()["providers"]), folder)
        facts["admin status"] = shape(endpoint.get("/status").json(), values=False)
        consumer = {"authorization": f"Bearer {made.json()['key']}"}
        facts |= _asked(f"http://127.0.0.1:{public}", "coordinator", consumer)
        trust = ["--trust-provider", identity, "--api-key-file", "fleet.key", "--port", str(blind), "--json"]
        stack.enter_context(process(folder, "proxy", "proxy", f"http://127.0.0.1:{public}", *trust))
        wait_for(lambda: httpx.get(f"http://127.0.0.1:{blind}/health", trust_env=False) is not None, folder)
        facts |= _asked(f"http://127.0.0.1:{blind}", "proxy", {})
        scrape = {"authorization": f"Bearer {scope.json()['key']}"}
        metrics |= scraped(endpoint.get("/metrics", headers=scrape).text, "coordinator")
        metrics |= scraped(get(f"http://127.0.0.1:{blind}/metrics").text, "proxy")
    return facts


def _asked(url: str, who: str, headers: dict[str, str]) -> Facts:
    chat = {"model": _MODEL, "messages": _QUESTION, "temperature": 0, "max_tokens": 8}
    facts: Facts = {}
    with httpx.Client(base_url=url, trust_env=False, timeout=60, headers=headers) as client:
        facts[f"{who} chat"] = _answer(client.post("/v1/chat/completions", json=chat))
        facts[f"{who} stream"] = _answer(client.post("/v1/chat/completions", json={**chat, "stream": True}))
        facts[f"{who} no model"] = _answer(client.post("/v1/chat/completions", json={**chat, "model": "x"}))
        facts[f"{who} models"] = _answer(client.get("/v1/models"))
        facts[f"{who} health"] = _answer(client.get("/health"))
    return facts


def scraped(text: str, who: str) -> Facts:
    """Return type and labels of each family of a /metrics page, with values of labels that have few."""
    facts: Facts = {}
    for family in text_string_to_metric_families(text):
        names: dict[str, Any] = {}
        for sample in family.samples:
            labels = names.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value if label in _COUNTED_LABELS else "...")
        shown = {
            name: {label: sorted(values) for label, values in one.items()} for name, one in names.items()
        }
        facts[f"{who} {family.name}"] = [family.type, family.unit, shown]
    return facts


def get(url: str) -> httpx.Response:
    """Return the answer of a GET."""
    return httpx.get(url, trust_env=False, timeout=60)


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that were free a moment ago, all different.

    They lie below those that the system takes for outgoing connections.
    """
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            port = random.randrange(10_240, 32_768)  # noqa: S311
            try:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            ports.append(port)
    return ports


@contextmanager
def process(folder: Path, name: str, *arguments: str) -> Iterator[None]:
    """Run a command in the background, its output in NAME.log, until the block ends."""
    with (folder / f"{name}.log").open("wb") as log:
        running = subprocess.Popen(
            [*CONVOY, *arguments], cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        running.terminate()
        try:
            running.wait(30)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def wait_for(is_ready: Callable[[], bool], folder: Path) -> None:
    """Wait until ``is_ready``. Raises RuntimeError with the ends of all logs if that takes too long."""
    end_s = time.monotonic() + _WAIT_S
    while time.monotonic() < end_s:
        try:
            if is_ready():
                return
        except httpx.HTTPError:
            pass
        time.sleep(_POLL_S)
    logs = [
        f"{path.name}: {path.read_text(errors='replace')[-600:]}" for path in sorted(folder.glob("*.log"))
    ]
    raise RuntimeError("not ready in time\n" + "\n".join(logs))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

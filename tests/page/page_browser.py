"""The page in a real browser: over a fake engine, and over a real cluster that loses a member."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import PageOptions, ServeOptions
from convoy.api.page.invitations import InvitationQuestion, OpenQuestion, asked_on_page
from convoy.api.page.tokens import OpenTokens, Scope
from convoy.cluster.model_loader import KnownModel
from convoy.config.settings import Config, override
from convoy.model.checkpoints.source import ModelSource
from convoy.model.text.tokens import Tokenizer
from convoy.sdk.head import service_of
from convoy.sdk.pull import ModelPuller
from page.conftest import PHONE, WIDE, Open, ask, serious
from support.fake_hub import REPO, FakeHub
from support.fake_service import FakeEngine, serving, serving_of
from support.odd_models import make_odd_llama
from survival.losing import WAIT_S, Survival, survival, wait_for

KEY = "sk-test-0123456789"
OPERATOR = "ab" * 32
# Preact runs an effect at the next frame, or after 100 ms without one. Once `keepEffects` is called, effects
# wait until a status has ended.
LATE_EFFECTS = """{
  const soon = setTimeout, ask = fetch, kept = [];
  let keeps = false;
  window.keepEffects = () => { keeps = true; };
  window.setTimeout = (call, wait) => (keeps && wait === 100 ? kept.push(call) && 0 : soon(call, wait));
  window.requestAnimationFrame = () => 0;
  const ended = () => {
    console.info("status ended");
    keeps = false;
    kept.splice(0).forEach((call) => call());
  };
  window.fetch = async (path, options) => {
    const answer = await ask(path, options);
    if (path !== "/status") return answer;
    const [seen, watched] = answer.body.tee();
    new Response(watched).text().then(() => soon(ended, 100), () => 0);
    return new Response(seen, answer);
  };
}"""
# Pass on the events of a status up to the first that tells of a lost member, and the others after `goOn`.
FIRST_OF_LOSS = """{
  const ask = fetch;
  let goneOn = false;
  const told = new Promise((go) => { window.goOn = () => { goneOn = true; go(); }; });
  const isLoss = (event) => event.startsWith("data: ") && JSON.parse(event.slice(6)).absent?.length > 0;
  window.fetch = async (path, options) => {
    const answer = await ask(path, options);
    if (path !== "/status") return answer;
    let text = "";
    const held = new TransformStream({
      async transform(chunk, out) {
        const events = (text + chunk).split("\\n\\n");
        text = events.pop();
        for (const event of events) {
          out.enqueue(event + "\\n\\n");
          if (!goneOn && isLoss(event)) await told;
        }
      },
    });
    const events = answer.body.pipeThrough(new TextDecoderStream()).pipeThrough(held);
    return new Response(events.pipeThrough(new TextEncoderStream()), answer);
  };
}"""
HOSTILE = """<script>window.ran = 1</script><img src=x onerror="window.ran = 2">
<svg onload="window.ran = 3"></svg><iframe src="https://evil.example/"></iframe>
<style>body { display: none }</style>
![pixel](https://evil.example/leak.png) [click](javascript:window.ran=4) <a href="data:text/html,x">data</a>
<form action="https://evil.example/"><input name=a></form>

[fine](https://example.org/page)

```html
<script>window.ran = 5</script>
```
"""


@dataclass
class Head:
    """Hold a head's address, its tokens, and the real cluster behind it if there is one."""

    url: str
    tokens: OpenTokens

    def asked(self, invitation_id: str, name: str) -> AbstractContextManager[OpenQuestion]:
        """Ask as ``convoy invite`` does whether a machine may come in."""
        question = InvitationQuestion(
            invitation_id, name, "10.0.0.7:7777", "10.0.0.7", "cd" * 32, "4408 5596", time.time() + 300
        )
        return asked_on_page(self.tokens.folder.with_name("invitations"), OPERATOR, question)

    def signed_in(self, scope: Scope = "operate") -> str:
        """Return an address that begins a session."""
        return f"{self.url}/#token={self.tokens.make(int(self.url.rpartition(':')[2]), scope)}"


@contextmanager
def head_of(real: Survival, folder: Path) -> Iterator[Head]:
    """Serve ``real`` with a key."""
    tokens = OpenTokens(folder)
    page = PageOptions(folder, folder.with_name("invitations"), OPERATOR)
    options = ServeOptions(port=0, keys=KeyRing.of(KEY), page=page)
    with serving_of(service_of(real.cluster), options) as (url, _):
        yield Head(url, tokens)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """Serve three real members, which no test loses."""
    # Otherwise a busy machine's measured speed decides how two members would share the layers.
    pipeline = {"parallel": "pipeline"}
    cache = tmp_path_factory.mktemp("cache") / "open"
    with survival(3, sharing=pipeline) as real, head_of(real, cache) as head:
        body = {"prompt": "Once upon a time", "max_tokens": 16, "ignore_eos": True}
        auth = {"authorization": f"Bearer {KEY}"}
        assert (
            httpx.post(f"{head.url}/v1/completions", json=body, headers=auth, timeout=60).status_code == 200
        )
        yield head


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[tuple[Head, FakeEngine]]:
    """Serve a fake engine without a key."""
    tokens = OpenTokens(tmp_path / "open")
    engine = FakeEngine()
    with serving(engine, ServeOptions(port=0, page=PageOptions(tokens=tokens.folder))) as running:
        yield Head(running.url, tokens), engine


def test_an_operate_action_is_refused_to_a_key_and_done_by_a_session(cluster: Head, open_page: Open) -> None:
    with httpx.Client(headers={"authorization": f"Bearer {KEY}"}) as http:
        assert http.delete(f"{cluster.url}/page/sessions").status_code == 403
    looking = open_page(cluster.url)
    looking.get_by_label("API key").fill(KEY)
    looking.get_by_role("button", name="Look").click()
    looking.get_by_text("Looking with an API key").click()
    expect(looking.get_by_role("button", name=re.compile("Sign"))).to_have_count(0)
    looking.reload()
    # The key was in memory alone.
    expect(looking.get_by_role("heading", name="Sign in")).to_be_visible()
    assert looking.evaluate("localStorage.length + sessionStorage.length") == 0
    viewer, operator = open_page(cluster.signed_in("view")), open_page(cluster.signed_in())
    expect(viewer.get_by_role("heading", name="beta")).to_be_visible()
    viewer.get_by_text("May look").click()
    expect(viewer.get_by_role("button", name="Sign everybody out")).to_have_count(0)
    operator.get_by_text("May operate").click()
    operator.get_by_role("button", name="Sign everybody out").click()
    expect(operator.get_by_role("heading", name="Sign in")).to_be_visible()
    expect(viewer.get_by_role("heading", name="Sign in")).to_be_visible()


def test_an_invitation_is_confirmed_by_a_session_and_refused_to_a_key(
    cluster: Head, open_page: Open, pytestconfig: pytest.Config
) -> None:
    viewer, operator = open_page(cluster.signed_in("view")), open_page(cluster.signed_in())
    hostile = "<img src=x onerror=window.ran=1>"
    with cluster.asked("0" * 32, "delta") as good, cluster.asked("1" * 32, hostile) as bad:
        answer = {"id": "0" * 32, "code": good.code, "approves": True}
        with httpx.Client(base_url=cluster.url, headers={"authorization": f"Bearer {KEY}"}) as http:
            assert http.get("/page/invitations").status_code == 403
            assert http.post("/page/invitations", json=answer).status_code == 403
        assert good.answer() is None
        shown = operator.get_by_role("region", name="Invitations").get_by_role("listitem")
        expect(shown).to_have_text(
            [re.compile(r"delta asks.+4408 5596.+10\.0\.0\.7:7777"), re.compile("<img")]
        )
        assert serious(operator) == []
        if pytestconfig.getoption("--pictures"):
            folder = pytestconfig.rootpath / "docs" / "pictures"
            (folder / "invitation-light.png").write_bytes(shown.first.screenshot())
        shown.nth(1).get_by_role("button", name="Refuse it").click()
        expect(shown).to_have_count(1)
        shown.get_by_role("button", name="The codes are the same: let it in").click()
        expect(operator.get_by_text("You let delta in.")).to_be_visible()
        assert (good.answer(), bad.answer()) == (True, False)
    assert operator.evaluate("window.ran") is None
    expect(viewer.get_by_role("heading", name="beta")).to_be_visible()
    assert viewer.get_by_role("region", name="Invitations").count() == 0


def test_models_are_loaded_by_an_operator_and_named_in_the_chat(tmp_path: Path, open_page: Open) -> None:
    source = ModelSource.resolve("demo-mini")
    other = KnownModel("other", source, Tokenizer(source))
    with survival(2) as real:
        service = service_of(real.cluster, also=[other])
        tokens = OpenTokens(tmp_path / "open")
        with serving_of(service, ServeOptions(port=0, page=PageOptions(tokens=tokens.folder))) as (url, _):
            head = Head(url, tokens)
            viewer, operator = open_page(head.signed_in("view")), open_page(head.signed_in())
            shown = [page.get_by_role("region", name="Models") for page in (viewer, operator)]
            for models in shown:
                expect(models.get_by_role("listitem")).to_have_text(
                    [re.compile("demo.*loaded"), re.compile("other.*not loaded")]
                )
            expect(shown[0].get_by_role("button")).to_have_count(0)
            shown[1].get_by_role("button", name="Load other").click()
            expect(shown[0].locator("li[data-state=loaded]")).to_contain_text("other", timeout=WAIT_S * 1000)
            assert serious(operator) == []
            shown[1].get_by_role("button", name="Unload other").click()
            expect(shown[0].locator("li[data-state=unloaded]")).to_have_count(2, timeout=WAIT_S * 1000)
            viewer.get_by_role("link", name="Chat").click()
            viewer.get_by_label("Model").select_option("other")
            viewer.get_by_label("Message", exact=True).fill("2+2")
            viewer.get_by_role("button", name="Send").click()
            expect(viewer.locator(".turn .quiet-text").last).to_contain_text("token", timeout=WAIT_S * 1000)
            viewer.get_by_role("link", name="Cluster").click()
            expect(shown[0].locator("li[data-state=loaded]")).to_contain_text("other")


def test_a_pull_is_begun_by_an_operator_and_its_progress_is_seen_by_all(
    tmp_path: Path, open_page: Open, pytestconfig: pytest.Config
) -> None:
    source = ModelSource.resolve("demo-mini")
    hub = FakeHub(make_odd_llama(tmp_path / "odd"))
    with survival(2) as real:
        options = override(Config().model, hub=hub.url, cache=tmp_path / "cache")
        puller = ModelPuller(real.cluster.head, override(Config(), model=options))
        service = service_of(
            real.cluster, also=[KnownModel("other", source, Tokenizer(source))], puller=puller
        )
        tokens = OpenTokens(tmp_path / "open")
        with serving_of(service, ServeOptions(port=0, page=PageOptions(tokens=tokens.folder))) as (url, _):
            head = Head(url, tokens)
            viewer, operator = open_page(head.signed_in("view")), open_page(head.signed_in())
            looks, acts = (page.get_by_role("region", name="Models") for page in (viewer, operator))
            expect(looks.get_by_role("button")).to_have_count(0)
            hub.stalls_at = 100_000
            acts.get_by_label("Model of the hub").fill(REPO)
            acts.get_by_role("button", name="Pull", exact=True).click()
            for shown in (looks, acts):
                expect(shown.get_by_text(f"{REPO} is being pulled")).to_be_visible()
                expect(shown.get_by_role("progressbar", name="alpha")).to_be_visible()
            expect(acts.get_by_role("progressbar")).not_to_have_attribute("value", "0")
            assert serious(operator) == []
            if pytestconfig.getoption("--pictures"):
                folder = pytestconfig.rootpath / "docs" / "pictures"
                (folder / "models-light.png").write_bytes(acts.screenshot())
            hub.stalls_at = 0
            acts.get_by_role("button", name="Stop the pull").click()
            ended = f"The pull of {REPO} was stopped. The next one goes on from there."
            expect(looks.get_by_text(ended)).to_be_visible(timeout=WAIT_S * 1000)
            acts.get_by_label("Model of the hub").fill("demo")
            acts.get_by_role("button", name="Pull", exact=True).click()
            expect(acts.get_by_role("alert")).to_contain_text("'demo' is no model of a hub")
    hub.close()


def test_a_status_that_ends_before_the_page_has_signed_out_hides_no_sign_in(
    cluster: Head, open_page: Open
) -> None:
    page = open_page(cluster.signed_in(), first_script=LATE_EFFECTS)
    expect(page.get_by_role("heading", name="beta")).to_be_visible()
    page.get_by_text("May operate").click()
    page.evaluate("keepEffects()")
    with page.expect_console_message(lambda message: message.text == "status ended"):
        page.get_by_role("button", name="Sign everybody out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_the_time_of_a_token_is_split_by_member(cluster: Head, open_page: Open) -> None:
    page = open_page(cluster.signed_in("view"))
    table = page.get_by_role("region", name="Times of the last step")
    expect(table.locator("tbody th")).to_have_text(["alpha", "beta", "gamma", "alpha"])
    paths: list[Any] = []

    def ask_path() -> object:
        paths.append(page.evaluate("fetch('/status').then((answer) => answer.json())")["step_path"])
        return paths[-1]

    # A status has no path if a member of a busy machine has not answered in time.
    wait_for(ask_path)
    told = paths[-1]
    total_s = sum(value for part in told["parts"] for value in part.values() if isinstance(value, float))
    assert total_s == pytest.approx(told["step_s"], rel=0.05)


def test_the_planner_foresees_losses_and_one_more_machine(cluster: Head, open_page: Open) -> None:
    page = open_page(cluster.signed_in("view"))
    shown = page.get_by_role("region", name="What if")
    expect(shown).to_contain_text(re.compile(r"predicted [\d.,]+ tokens/s, measured [\d.,]+ tokens/s"))
    expect(shown).to_contain_text(re.compile("What limits it most is .+'s .+"))
    rate = r", about [\d.,]+ tokens/s, room for [\d,]+ tokens\."
    expect(shown.get_by_role("listitem")).to_have_text(
        [
            re.compile(f"If beta is lost: layers 0-5 on alpha, layers 6-11 on gamma{rate}"),
            re.compile(f"If gamma is lost: layers 0-5 on alpha, layers 6-11 on beta{rate}"),
            re.compile(f"With one more machine like alpha, of 24.0 GB: layers? .+ on one more{rate}"),
        ]
    )


def test_a_used_token_says_what_to_do(cluster: Head, open_page: Open) -> None:
    address = cluster.signed_in()
    expect(open_page(address).get_by_role("heading", name="alpha")).to_be_visible()
    expect(open_page(address).get_by_role("alert")).to_contain_text("run `convoy open` again")


def test_hostile_text_of_a_model_runs_nothing_and_loads_nothing(
    fake: tuple[Head, FakeEngine], open_page: Open
) -> None:
    head, engine = fake
    engine.reply = HOSTILE
    page = open_page(f"{head.url}/#chat")
    ask(page, "Attack me")
    expect(page.get_by_role("link", name="fine")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert page.evaluate("window.ran") is None
    prose = page.locator(".prose")
    assert prose.locator("script, img, svg, iframe, style, form, input").count() == 0
    assert [link.get_attribute("href") for link in prose.locator("a").all()] == ["https://example.org/page"]
    assert prose.locator("a").get_attribute("rel") == "noopener noreferrer nofollow"
    # HTML is shown as its letters.
    expect(prose).to_contain_text("<script>window.ran = 1</script>")
    # `open_page` fails the test if any other host was asked.


def test_an_answer_shows_its_parts_and_can_be_stopped_and_repeated(
    fake: tuple[Head, FakeEngine], open_page: Open
) -> None:
    head, engine = fake
    engine.reply = "<think>Two and three.</think>It is **five**."
    engine.pause_after = 40
    page = open_page(f"{head.url}/#chat")
    ask(page, "What is 2+3?")
    assert engine.paused.wait(WAIT_S)
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("alert")).to_have_text("Stopped.")
    assert engine.handles[-1].aborted.wait(WAIT_S)
    engine.pause_after = None
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".prose strong")).to_have_text("five")
    expect(page.get_by_role("alert")).to_have_count(0)
    assert not page.get_by_text("Two and three.").is_visible()
    page.get_by_text("Reasoning").click()
    expect(page.get_by_text("Two and three.")).to_be_visible()


def test_a_chat_tells_how_much_of_the_prompt_has_run_and_its_tokens_at_the_end(
    fake: tuple[Head, FakeEngine], open_page: Open
) -> None:
    head, engine = fake
    engine.reply = "Once upon a time there was a dog."
    engine.pause_after = 0
    page = open_page(f"{head.url}/#chat")
    ask(page, "A long prompt")
    expect(page.get_by_text(re.compile("Reading the prompt … (49|50) %"))).to_be_visible()
    engine.pause_after = None
    engine.go.set()
    expect(page.locator(".turn p.quiet-text")).to_have_text(re.compile("^33 tokens"))


def test_a_conversation_is_kept_in_the_browser_alone_and_only_if_wanted(
    fake: tuple[Head, FakeEngine], open_page: Open
) -> None:
    head, engine = fake
    engine.reply = "It is **five**."
    page = open_page(f"{head.url}/#chat")
    ask(page, "What is 2+3?")
    expect(page.get_by_role("button", name="Ask again")).to_be_visible()
    page.reload()
    expect(page.get_by_text("What is 2+3?")).to_be_visible()
    expect(page.locator(".prose strong")).to_have_text("five")
    expect(open_page(f"{head.url}/#chat").get_by_text("What is 2+3?")).to_have_count(0)
    # Text that somebody put into the storage is as harmless as a model's.
    page.evaluate(
        "text => localStorage.setItem('convoy-conversation', JSON.stringify([{role: 'x', content: text}]))",
        HOSTILE,
    )
    page.reload()
    expect(page.get_by_role("link", name="fine")).to_be_visible()
    assert page.evaluate("window.ran") is None
    page.get_by_text("Settings").click()
    page.get_by_label("Keep the conversation in this browser").uncheck()
    assert page.evaluate("localStorage.getItem('convoy-conversation')") is None
    page.reload()
    expect(page.get_by_text("ends with it")).to_be_visible()


def test_a_head_that_stops_is_said_in_a_sentence(tmp_path: Path, open_page: Open) -> None:
    with serving(options=ServeOptions(port=0, page=PageOptions(tokens=tmp_path))) as running:
        page = open_page(f"{running.url}/#connect")
        page.wait_for_load_state()
        expect(page.get_by_role("heading", name="Connect")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("tries again by itself")


def test_no_view_has_a_serious_finding_of_axe_or_is_wider_than_a_phone(
    cluster: Head, open_page: Open
) -> None:
    for scheme, size in (("light", WIDE), ("dark", WIDE), ("light", PHONE)):
        page = open_page(cluster.url, scheme=scheme, size=size)
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        assert serious(page) == []
        page.goto(cluster.signed_in())
        page.reload()
        expect(page.get_by_role("heading", name="alpha")).to_be_visible()
        for name in ("Cluster", "Requests", "Connect", "Chat"):
            page.get_by_role("link", name=name, exact=True).click()
            expect(page.locator("nav a[aria-current]")).to_have_text(name)
            assert serious(page) == [], (name, scheme)
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], name


def test_pictures_of_the_page(cluster: Head, open_page: Open, pytestconfig: pytest.Config) -> None:
    folder = pytestconfig.rootpath / "docs" / "pictures"
    for scheme in ("light", "dark"):
        page = open_page(cluster.signed_in(), scheme=scheme, size={"width": 1120, "height": 700})
        expect(page.get_by_role("heading", name="gamma")).to_be_visible()
        expect(page.get_by_text("May operate")).to_be_visible()
        picture = page.screenshot()
        assert len(picture) > 10_000
        # Each run has other ports and times, so pictures change only if somebody asks for it.
        if pytestconfig.getoption("--pictures"):
            (folder / f"page-{scheme}.png").write_bytes(picture)
            if scheme == "light":
                (folder / "step-light.png").write_bytes(page.locator(".step").screenshot())


def test_a_lost_member_is_seen_with_the_status_that_tells_of_it_and_a_chat_streams_over_it(
    tmp_path: Path, open_page: Open
) -> None:
    with survival(3) as real, head_of(real, tmp_path / "open") as cluster:
        page = open_page(cluster.signed_in())
        watching = open_page(cluster.signed_in("view"), first_script=FIRST_OF_LOSS)
        expect(page.get_by_role("heading", name="gamma")).to_be_visible()
        expect(watching.get_by_role("heading", name="gamma")).to_be_visible()
        assert "token" not in page.url
        page.get_by_role("link", name="Chat").click()
        page.get_by_label("API key for chat").fill(KEY)
        page.get_by_role("button", name="Use it").click()
        page.get_by_text("Settings").click()
        page.get_by_label("Most tokens").fill("300")
        known_s: list[float] = []
        losing = threading.Thread(target=lambda: known_s.append(lose_in_an_answer(real)))
        losing.start()
        ask(page, "Tell me a story about a dog.")
        expect(page.locator(".prose").last).not_to_be_empty()
        losing.join()
        # The head sends a status twice a second, and this page gets no other one before it shows the loss.
        expect(watching.locator(".others, .tag.bad").first).to_contain_text(re.compile("gamma|lost"))
        print(f"a lost member is on the page {time.monotonic() - known_s[0]:.2f} s after the head knew it")
        watching.evaluate("goOn()")
        ended = re.compile(r"^[\d,]+ tokens, (?!0\.0 )\d+\.\d a second$")
        expect(page.locator(".turn p.quiet-text").last).to_have_text(ended)
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(watching.locator(".machine h3")).to_have_text(["alpha", "beta"])
        gone = re.compile(r"gone for [0-9]+ s; the head keeps dialling it")
        expect(watching.locator(".others")).to_contain_text(gone)
        watching.get_by_role("link", name="Requests").click()
        log = watching.get_by_role("log")
        expect(log).to_contain_text("gamma is lost.")
        expect(log).to_contain_text("A loss was survived: the requests go on.")
        expect(log).to_contain_text(re.compile("Plan [0-9]+ counts: layers on alpha, beta"))
        assert serious(watching) == []


def lose_in_an_answer(real: Survival) -> float:
    """Kill gamma once an answer has begun, and return when the head knew it.

    The head's own count says when: a browser on a busy machine would show the beginning after the end.
    """
    before = real.cluster.engine.stats().generated_tokens
    wait_for(lambda: real.cluster.engine.stats().generated_tokens >= before + 10)
    real.kill("gamma")
    wait_for(lambda: "gamma" in [one.name for one in real.cluster.status().absent])
    return time.monotonic()

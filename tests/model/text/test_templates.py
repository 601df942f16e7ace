"""Chat templates render in a process of their own, with bounds, and as transformers renders them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from convoy.errors import RequestError
from convoy.model.text.templates import RenderLimits, TemplateRenderer
from support import tiny_tokenizers as tiny
from support.waiting import wait_until

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "<b>hi</b> 'you' \"there\" 你好 🙂\n"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": ""},
]


def user(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


PARTS = {
    "variables": "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ tools }}|{{ documents }}|"
    "{{ tools is none }}|{{ add_generation_prompt }}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}"
    "{{ messages[0] | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}",
    "blocks lose their line": "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n"
    "  {% endif %}\n{% endfor %}\nend\n",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "namespaces": "{% set ns = namespace(count=0, self='x') %}{% for m in messages %}"
    "{% set ns.count = ns.count + 1 %}{% endfor %}{{ ns.count }}{{ ns.self }}",
    "dictionaries": "{{ dict(a=1, **{'b': 2}) }}{{ dict.fromkeys('ab', 0) }}",
    "generation": "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}"
    "{{ x }}{% endfor %}",
    "macros": "{% macro turn(m) %}[{{ m['role'] }}: {{ m.get('content') | trim }}]{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "strings": "{{ messages[1].content.split(' ')[::-1] | join('-') | upper }}"
    "{{ messages[1].content | length }}",
    "the date": "{{ strftime_now('%Y %Z') }}",
    "undefined": "{{ nothing }}{% if nothing is defined %}1{% endif %}{{ messages[0].tool_calls }}",
    "no escaping": "{{ '<&>' }}{{ messages[1]['content'] }}",
}


# One process renders all parts, each behind its name.
TEMPLATES = {
    "the bundled kind": tiny.TEMPLATE,
    "parts": "\n".join(f"{name}:\n{part}" for name, part in PARTS.items()),
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_a_template_gives_the_text_of_transformers(template: str) -> None:
    pretrained: Any = PreTrainedTokenizerFast(tokenizer_object=tiny.byte_level(), **SPECIAL)  # type: ignore[no-untyped-call]
    expected = pretrained.apply_chat_template(
        CHAT, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    renderer = TemplateRenderer(template, pretrained.special_tokens_map)
    try:
        assert renderer.render({"messages": CHAT}) == expected
    finally:
        renderer.close()


ESCAPES = [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception.__globals__['os'] }}",
    "{% set ns = namespace(__class__=1) %}",
    "{{ messages.append(1) }}",
    "{{ strftime_now.__globals__['os'] }}",
    "{{ dict.mro() }}",
]


def test_a_template_does_not_leave_its_sandbox() -> None:
    choices = (f"{{% if messages[0].content == '{n}' %}}{one}{{% endif %}}" for n, one in enumerate(ESCAPES))
    renderer = TemplateRenderer("".join(choices), {})
    try:
        assert renderer.render(user("none of them")) == ""
        for number, escape in enumerate(ESCAPES):
            with pytest.raises(RequestError) as caught:
                renderer.render(user(str(number)))
            assert re.search("unsafe|cannot hold|has no attribute", caught.value.message), escape
    finally:
        renderer.close()


def test_an_endless_template_is_killed_and_the_next_request_gets_a_new_process() -> None:
    template = "{% if messages[0].content == 'forever' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    renderer = TemplateRenderer(template, {}, RenderLimits(seconds=0.3))
    try:
        assert renderer.render(user("once")) == "once"
        (pid,) = renderer.idle_pids
        with pytest.raises(RequestError, match="did not end in time") as caught:
            renderer.render(user("forever"))
        assert caught.value.code == "chat_template_limit"
        assert not psutil.pid_exists(pid)
        assert renderer.render(user("again")) == "again"
    finally:
        renderer.close()


def test_output_and_memory_are_bounded() -> None:
    limits = RenderLimits(max_output_bytes=1000, max_memory_bytes=256 << 20)
    renderer = TemplateRenderer("{% for i in range(messages[0].content | int) %}é{% endfor %}", {}, limits)
    greedy = TemplateRenderer("{{ ('x' * 999999999) | length }}", {}, limits)
    try:
        assert renderer.render(user("500")) == "é" * 500
        with pytest.raises(RequestError, match="writes more than 1000 bytes"):
            renderer.render(user("501"))
        assert renderer.render(user("2")) == "éé"
        with pytest.raises(RequestError, match="needs more than 256 MiB of memory"):
            greedy.render(user("x"))
    finally:
        renderer.close()
        greedy.close()


def test_a_template_that_fails_is_named_without_the_prompt() -> None:
    renderer = TemplateRenderer("{{ messages[0].content + 1 }}", {})
    try:
        with pytest.raises(RequestError, match="fails on these messages: TypeError") as caught:
            renderer.render(user("a secret"))
        assert "secret" not in str(caught.value)
    finally:
        renderer.close()


def test_a_process_is_used_again() -> None:
    renderer = TemplateRenderer("{{ messages[0].content }}", {})
    try:
        assert renderer.render(user("one")) == "one"
        (pid,) = renderer.idle_pids
        assert renderer.render(user("x" * 1_000_000)) == "x" * 1_000_000
        assert renderer.idle_pids == (pid,)
    finally:
        renderer.close()


def test_a_process_that_ended_between_requests_is_replaced() -> None:
    renderer = TemplateRenderer("{{ messages[0].content }}", {})
    try:
        renderer.render(user("one"))
        (pid,) = renderer.idle_pids
        os.kill(pid, signal.SIGKILL)
        # Wait for its end, and leave it to the renderer to take note of it.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert renderer.render(user("two")) == "two"
    finally:
        renderer.close()


def test_requests_render_beside_each_other() -> None:
    renderer = TemplateRenderer("{{ messages[0].content }}", {})
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(renderer.render(user(str(n))))) for n in range(12)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found, key=int) == [str(n) for n in range(12)]
        assert 1 <= len(renderer.idle_pids) <= 2
    finally:
        renderer.close()


def test_half_of_a_surrogate_pair_comes_through() -> None:
    renderer = TemplateRenderer("{{ messages[0].content }}", {})
    try:
        assert renderer.render(user("a\ud83d")) == "a\ud83d"
    finally:
        renderer.close()


def test_the_process_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, convoy.model.text.template_process; "
        "sys.exit(bool({'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PARENT = """
import sys, threading
from convoy.model.text.templates import TemplateRenderer
idle, busy = TemplateRenderer("x", {}), TemplateRenderer(sys.argv[1], {})
idle.render({"messages": []})
threading.Thread(target=busy.render, args=({"messages": []},), daemon=True).start()
print(idle.idle_pids[0], flush=True)
sys.stdin.read()
"""


def test_no_process_outlives_a_parent_that_was_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, ENDLESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    try:
        assert parent.stdout.readline()
        wait_until(lambda: len(psutil.Process(parent.pid).children()) == 2)
        children = psutil.Process(parent.pid).children()
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        # The idle one reads the end of its input; the busy one has used up its processor time.
        _, alive = psutil.wait_procs(children, timeout=60.0)
        assert alive == []
    finally:
        parent.kill()
        parent.wait()
        parent.stdin.close()
        parent.stdout.close()

"""Small chat templates of each format, with tools, over a byte-level vocabulary with the family's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken

from convoy.model.text.formats.registry import FORMATS
from convoy.model.text.tokens import Tokenizer
from support import tiny_tokenizers as tiny

_IM = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n"
    "</tools>\n{HOW}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}{{ ' ' + m.name if m.name else '' }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{CALL}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ extra or '' }}"
)
_HERMES = _IM.replace("{HOW}", '<tool_call>\n{"name": NAME, "arguments": {}}\n</tool_call>').replace(
    "{CALL}",
    '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>",
)
_TAGS = _IM.replace("{HOW}", "<tool_call>\n<function=NAME>\n</function>\n</tool_call>").replace(
    "{CALL}",
    "\n<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n"
    "</tool_call>",
)
_LLAMA = (
    "<|begin_of_text|>{% if tools %}<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
    "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "{{ ' ' + m.name if m.name else '' }}<|end_header_id|>\n\n"
    "{{ '<think>' + m.reasoning + '</think>' if m.reasoning else '' }}{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}<|python_tag|>"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
    "<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}{{ extra or '' }}"
)
_MISTRAL = (
    "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.name or '' }}{{ m.content }}[/INST]"
    "{% elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}{{ m.name }}[TOOL_CONTENT]{{ m.content }}"
    "[/TOOL_RESULTS]"
    "{% else %}{{ '[THINK]' + m.reasoning + '[/THINK]' if m.reasoning else '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('9 characters') }}{% endif %}"
    "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"
    "{% endif %}{% endfor %}{{ extra or '' }}"
)
_HARMONY = (
    "{% if tools %}<|start|>developer<|message|># Tools\nnamespace functions {% raw %}{{% endraw %}\n"
    "{% for t in tools %}// {{ t.function.description }}\ntype {{ t.function.name }} = (_: {% raw %}{{% endraw %}"
    "{% for k, v in (t.function.parameters.properties or {}) | items %}// {{ v.description or '' }}\n{{ k }}: "
    "{% if v.enum %}{{ v.enum | join(' | ') }}{% elif v.type == 'array' %}{{ v['items'].type }}[]"
    "{% else %}{{ v.type }}{% endif %},\n{% endfor %}) => any;\n{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>"
    "commentary<|message|>{{ m.content | tojson }}<|end|>{% elif m.role == 'assistant' %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.content %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% for c in m.tool_calls or [] %}<|start|>assistant to=functions.{{ c.function.name }}<|channel|>"
    "commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% else %}<|start|>{{ m.role }}{{ m.name or '' }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{{ extra or '' }}"
)
_GEMMA = (
    '{% macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{% raw %}{{% endraw %}'
    "{% for k, w in v | items %}{{ k }}:{{ value(w) }}{{ ',' if not loop.last else '' }}{% endfor %}"
    "{% raw %}}{% endraw %}{% elif v is iterable %}[{% for w in v %}{{ value(w) }},{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    "<bos>{% for t in tools or [] %}<|tool>declaration:{{ t.function.name }}{{ value(t.function) }}<tool|>"
    "{% endfor %}{% for m in messages %}<|turn>{{ m.role }}{{ m.name or '' }}\n"
    "{{ '<|channel>thought\n' + m.reasoning + '\n<channel|>' if m.reasoning else '' }}"
    "{% if m.role == 'tool' %}<|tool_response>response:{{ m.name }}{{ value(m.content) }}<tool_response|>"
    "{% else %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}"
    "{{ value(c.function.arguments) }}<tool_call|>{% endfor %}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}{{ extra or '' }}"
)
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{% for t in tools or [] %}### {{ t.function.name }}\n{{ t.function.description }}\n"
    "{{ t.function.parameters | tojson }}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}<｜User｜>{{ m.name or '' }}{{ m.content }}{% elif m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% else %}<｜Assistant｜>{{ '<think>' + m.reasoning if m.reasoning else '' }}</think>{{ m.content }}"
    "{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>"
    "{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}"
    "<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>{% endif %}{{ extra or '' }}"
)
_DSML = (
    "<｜begin▁of▁sentence｜>{% for t in tools or [] %}{{ t.function | tojson }}\n{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.name or '' }}{{ m.content }}"
    "{% elif m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'tool' %}<function_results>\n<result>{{ m.content }}</result>\n</function_results>"
    "{% else %}<｜Assistant｜>{{ '<think>' + m.reasoning if m.reasoning else '' }}</think>{{ m.content }}"
    "{% if m.tool_calls %}<｜DSML｜function_calls>\n{% for c in m.tool_calls %}"
    '<｜DSML｜invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments | items %}'
    "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
    "{{ v if v is string else v | tojson }}</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n{% endfor %}"
    "</｜DSML｜function_calls>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>{% endif %}{{ extra or '' }}"
)
_THINK = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<|turn|>{{ m.role }}{{ m.name or '' }}\n"
    "{{ '<think>' + m.reasoning + '</think>' if m.reasoning else '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}{{ extra or '' }}"
)


@dataclass(frozen=True)
class Family:
    """Hold a template, the tokens that open and close its turns, and whether its marks are special."""

    template: str
    turns: tuple[str, ...]
    special_marks: bool = True


FAMILIES = {
    "hermes": Family(_HERMES, ("<|im_start|>", "<|im_end|>", "<tool_response>", "</tool_response>"), False),
    "qwen-tags": Family(_TAGS, ("<|im_start|>", "<|im_end|>", "<tool_response>", "</tool_response>"), False),
    "llama-json": Family(
        _LLAMA, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    ),
    "mistral-args": Family(
        _MISTRAL,
        (
            *(
                "<s>",
                "</s>",
                "[INST]",
                "[/INST]",
                "[AVAILABLE_TOOLS]",
                "[/AVAILABLE_TOOLS]",
                "[TOOL_CONTENT]",
            ),
            *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
    ),
    "harmony": Family(_HARMONY, ()),
    "gemma-quotes": Family(
        _GEMMA, ("<bos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_response>", "<tool_response|>")
    ),
    "deepseek": Family(
        _DEEPSEEK,
        (
            *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
    ),
    "dsml": Family(
        _DSML, ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
    ),
    "think": Family(_THINK, ()),
}
ROWS = {row.name: row for row in FORMATS}


def control_strings(name: str) -> list[str]:
    """Return the control strings of a family: its turns and its marks."""
    return list(dict.fromkeys([*FAMILIES[name].turns, *tiny.SPECIAL, *ROWS[name].marks]))


def load_family(name: str, directory: Path) -> Tokenizer:
    """Make a tokenizer with a family's tokens and template."""
    family, backend = FAMILIES[name], tiny.byte_level()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in family.turns])
    marks = [AddedToken(text, normalized=False, special=family.special_marks) for text in ROWS[name].marks]
    (backend.add_special_tokens if family.special_marks else backend.add_tokens)(marks)
    return tiny.load(backend, directory, {"eos_token": "<|eos|>"}, template=family.template)

"""Translate the messages, tools and template variables of a chat body into a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from convoy.api.body.arguments import read_arguments
from convoy.api.body.body_shape import check_depth
from convoy.api.listen.options import ServeOptions
from convoy.api.openai.bodies import ChatBody, ChatMessage, ChatTool, MessageCall, NamedChoice
from convoy.api.telemetry.dropped import DroppedHistory
from convoy.errors import RequestError
from convoy.model.text.conversation import (
    MAX_TOOLS,
    ROLES,
    Conversation,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    Turn,
    fold_turns,
    is_tool_name,
    role_of,
)

MAX_CALLS = 512
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_MODES: Mapping[str, ToolMode] = {"auto": "auto", "none": "none", "required": "required"}


def read_conversation(body: ChatBody, options: ServeOptions, dropped: DroppedHistory) -> Conversation:
    """Return the conversation of a body. Raises `RequestError` naming the field at fault.

    ``dropped`` counts the calls that are left out because their arguments are no object, and their results.
    """
    if not body.messages:
        raise RequestError("messages is empty, expected at least one message", param="messages")
    _check_messages(body.messages, options)
    calls = _Calls()
    read = (_turn(message, f"messages[{index}]", calls) for index, message in enumerate(body.messages))
    turns = tuple(turn for turn in read if turn is not None)
    if not turns:
        raise RequestError("messages has no message that this server can read", param="messages")
    dropped.count("chat", calls.dropped)
    tools = _tools(body.tools or [])
    continues = bool(body.continue_final_message)
    if continues and turns[-1].role != "assistant":
        text = "continue_final_message needs an assistant's message at the end"
        raise RequestError(text, param="continue_final_message")
    if continues and turns[-1].calls:
        text = "continue_final_message cannot continue a message with tool_calls"
        raise RequestError(text, param="continue_final_message")
    if continues and body.add_generation_prompt:
        text = "continue_final_message and add_generation_prompt are both true, expected one of them"
        raise RequestError(text, param="continue_final_message")
    return Conversation(
        fold_turns(turns),
        tools,
        _choice(body, tools),
        _variables(body),
        continues=continues,
        add_generation_prompt=body.add_generation_prompt is not False,
    )


def _check_messages(messages: Sequence[ChatMessage], options: ServeOptions) -> None:
    num_parts = sum(len(one.content) for one in messages if isinstance(one.content, list))
    for count, what in ((len(messages), "messages"), (num_parts, "parts of content")):
        if count > options.max_messages:
            raise RequestError(
                f"messages has {count} {what}, and the limit is {options.max_messages}", param="messages"
            )


@dataclass(slots=True)
class _Calls:
    """Hold the calls so far: the names of those that are kept, by id, and the ids of broken ones."""

    names: dict[str, str] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    dropped: list[str] = field(default_factory=list)

    def read(self, call: MessageCall, where: str) -> ToolCall | None:
        """Return a call, or None for one whose arguments are no object, as a model may write them."""
        made = _call(call, where)
        if made is None:
            self.broken.add(call.id)
            self.dropped.append("tool_call")
        else:
            # A client may use an id again.
            self.broken.discard(call.id)
            self.names[call.id] = made.name
        return made


def _turn(message: ChatMessage, where: str, calls: _Calls) -> Turn | None:
    """Return one turn, or None if a broken call was all it had. ``calls`` gets its calls."""
    if message.role not in ROLES:
        raise RequestError(
            f"{where}.role is {message.role[:40]!r}, expected one of: {', '.join(ROLES)}",
            param=f"{where}.role",
        )
    role = role_of(message.role)
    if message.tool_calls and role != "assistant":
        raise RequestError(
            f"{where}.tool_calls belongs to an assistant's message", param=f"{where}.tool_calls"
        )
    call_id, name = "", message.name or ""
    if role == "tool":
        call_id = _result_id(message, where, calls)
        if call_id in calls.broken:
            calls.dropped.append("tool")
            return None
        name = name or calls.names[call_id]
    given = message.tool_calls or ()
    if len(given) > MAX_CALLS:
        raise RequestError(
            f"{where}.tool_calls has {len(given)} calls, and the limit is {MAX_CALLS}",
            param=f"{where}.tool_calls",
        )
    read = (calls.read(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(given))
    made = tuple(call for call in read if call is not None)
    content = _content(message, where)
    if given and not made and not content:
        return None
    reasoning = (message.reasoning_content or message.reasoning or "") if role == "assistant" else ""
    return Turn(role, content, reasoning, made, call_id, name)


def _result_id(message: ChatMessage, where: str, calls: _Calls) -> str:
    param = f"{where}.tool_call_id"
    if message.tool_call_id is None:
        raise RequestError(f"{param} is missing, expected the id of an earlier call", param=param)
    if message.tool_call_id not in calls.names and message.tool_call_id not in calls.broken:
        raise RequestError(f"{param} names a call that no earlier message made", param=param)
    return message.tool_call_id


def _call(call: MessageCall, where: str) -> ToolCall | None:
    if call.type != "function":
        raise RequestError(f"{where}.type is {call.type[:40]!r}, expected 'function'", param=f"{where}.type")
    param = f"{where}.function.arguments"
    if not call.function.name:
        raise RequestError(f"{where}.function.name is empty", param=f"{where}.function.name")
    text = read_arguments(call.function.arguments, param)
    return None if text is None else ToolCall(call.id, call.function.name, text)


def _content(message: ChatMessage, place: str) -> str:
    where = f"{place}.content"
    if message.content is None and message.role == "assistant":
        # OpenAI's form of an assistant's turn without text.
        return ""
    if message.content is None:
        raise RequestError(f"{where} is missing, expected text or a list of parts", param=where)
    if isinstance(message.content, str):
        return message.content
    texts = []
    for number, part in enumerate(message.content):
        if part.type != "text":
            raise RequestError(
                f"{where}[{number}].type is {part.type[:40]!r}, and this server takes only 'text'",
                param=f"{where}[{number}].type",
                code="unsupported_parameter",
            )
        if part.text is None:
            raise RequestError(f"{where}[{number}].text is missing", param=f"{where}[{number}].text")
        texts.append(part.text)
    return "".join(texts)


def _tools(given: Sequence[ChatTool]) -> tuple[Tool, ...]:
    if len(given) > MAX_TOOLS:
        raise RequestError(f"tools has {len(given)} tools, and the limit is {MAX_TOOLS}", param="tools")
    tools: dict[str, Tool] = {}
    for index, one in enumerate(given):
        if one.type != "function":
            continue
        where = f"tools[{index}].function"
        if one.function is None:
            raise RequestError(f"{where} is missing", param=where)
        name = one.function.name
        if not is_tool_name(name):
            raise RequestError(
                f"{where}.name is {name[:40]!r}, expected 1 to 128 letters, digits or any of _ . : / -",
                param=f"{where}.name",
            )
        if name in tools:
            raise RequestError(f"{where}.name is {name!r}, as that of an earlier tool", param=f"{where}.name")
        parameters = one.function.parameters or {}
        check_depth(parameters, f"{where}.parameters")
        tools[name] = Tool(name, one.function.description or "", parameters, bool(one.function.strict))
    return tuple(tools.values())


def _choice(body: ChatBody, tools: Sequence[Tool]) -> ToolChoice:
    parallel = body.parallel_tool_calls is not False
    chosen = body.tool_choice
    if isinstance(chosen, NamedChoice):
        if chosen.type != "function":
            raise RequestError(
                f"tool_choice.type is {chosen.type[:40]!r}, expected 'function'", param="tool_choice.type"
            )
        name = chosen.function.name
        if all(tool.name != name for tool in tools):
            raise RequestError(
                f"tool_choice names {name[:40]!r}, which is not in tools", param="tool_choice.function.name"
            )
        return ToolChoice("required", name, parallel=False)
    if chosen is not None and chosen not in _MODES:
        raise RequestError(
            f"tool_choice is {chosen[:40]!r}, expected auto, none, required or a function",
            param="tool_choice",
        )
    mode = _MODES[chosen or "auto"]
    if mode == "required" and not tools:
        if body.tools:
            # Every tool was left out, so there is nothing that could be required.
            return ToolChoice(parallel=parallel)
        raise RequestError("tool_choice is required, but there are no tools", param="tool_choice")
    return ToolChoice(mode, parallel=parallel)


def _variables(body: ChatBody) -> dict[str, Any]:
    """Return the template's variables. ``reasoning_effort`` sets those by which templates switch thinking."""
    given = dict(body.chat_template_kwargs or {})
    check_depth(given, "chat_template_kwargs")
    effort = body.reasoning_effort
    if effort is None:
        return given
    if effort not in EFFORTS:
        raise RequestError(
            f"reasoning_effort is {effort[:40]!r}, expected one of: {', '.join(EFFORTS)}",
            param="reasoning_effort",
        )
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks, **given}

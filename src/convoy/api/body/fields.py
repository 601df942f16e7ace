"""Refuse or ignore request fields that this server does not serve.

A field that would change the answer is refused, so that no client mistakes another answer for the one that it
asked for. A field that changes nothing is ignored, with the reason in `IGNORED`. Fields that no list here
names are ignored too, because OpenAI's clients expect that of new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as SetOf
from typing import Any, Literal

from convoy.api.body.known_fields import KNOWN_FIELDS
from convoy.errors import RequestError

Endpoint = Literal["chat", "completion"]

_ANSWER = "adds to the response what clients do without; the answer is the same"
_NAME = "names the request or its user"
_SPEED = "changes when or how fast the answer comes, not what it says"
_MEDIA = "reads images, audio or video, and messages that have these are refused"
_GRAMMAR = "describes what llama.cpp's own chat templates do with a grammar"
_SPECIAL = "matters where special tokens are shown, which is refused"

# Known fields that do not change the answer's text here, with the reason.
IGNORED: Mapping[str, str] = {
    "user": _NAME,
    "metadata": _NAME,
    "request_id": _NAME,
    "session_id": _NAME,
    "safety_identifier": _NAME,
    "priority": _SPEED,
    "service_tier": _SPEED,
    "stream_interval": _SPEED,
    "sse_ping_interval": _SPEED,
    "id_slot": _SPEED,
    "cache_prompt": _SPEED,
    "n_cache_reuse": _SPEED,
    "message_delimiters": _SPEED,
    "prompt_cache_key": _SPEED,
    "prompt_cache_options": _SPEED,
    "prompt_cache_retention": _SPEED,
    "backend_sampling": _SPEED,
    "t_max_prompt_ms": _SPEED,
    "speculative.n_max": _SPEED,
    "speculative.n_min": _SPEED,
    "speculative.p_min": _SPEED,
    "speculative.type": _SPEED,
    "speculative.ngram_size_n": _SPEED,
    "speculative.ngram_size_m": _SPEED,
    "speculative.ngram_min_hits": _SPEED,
    "verbose": _ANSWER,
    "timings_per_token": _ANSWER,
    "return_progress": _ANSWER,
    "return_tokens": _ANSWER,
    "return_token_ids": _ANSWER,
    "return_token_offsets": _ANSWER,
    "return_prompt_text": _ANSWER,
    "return_weight_versions": _ANSWER,
    "return_mm_kwargs": _ANSWER,
    "routed_experts_prompt_start": _ANSWER,
    "media_io_kwargs": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "parse_tool_calls": "is always so: calls are parsed if there are tools",
    "grammar_type": _GRAMMAR,
    "preserved_tokens": _GRAMMAR,
    "spaces_between_special_tokens": _SPECIAL,
    "truncation_side": "belongs to truncate_prompt_tokens, which is refused",
    "length_penalty": "belongs to beam search, which is refused",
    "mirostat_tau": "belongs to mirostat, which is refused",
    "mirostat_eta": "belongs to mirostat, which is refused",
    "dynatemp_exponent": "belongs to dynatemp_range, which is refused",
    "adaptive_decay": "belongs to adaptive_target, which is refused",
    "xtc_threshold": "belongs to xtc_probability, which is refused",
    "dry_base": "belongs to dry_multiplier, which is refused",
    "dry_allowed_length": "belongs to dry_multiplier, which is refused",
    "dry_penalty_last_n": "belongs to dry_multiplier, which is refused",
    "dry_sequence_breakers": "belongs to dry_multiplier, which is refused",
    "reasoning_budget_start_tag": "belongs to reasoning_budget_tokens, which is refused",
    "reasoning_budget_end_tag": "belongs to reasoning_budget_tokens, which is refused",
    "reasoning_budget_end_tags": "belongs to reasoning_budget_tokens, which is refused",
    "reasoning_budget_message": "belongs to reasoning_budget_tokens, which is refused",
    "post_sampling_probs": "belongs to n_probs, which is refused",
    "n_keep": "says what stays when a context is shifted, and none is",
    "n_discard": "says what goes when a context is shifted, and none is",
}

# Fields of other servers and of earlier versions. They would change the answer too, so they are refused.
OTHERS = frozenset(
    {
        *("regex", "ebnf", "format"),
        *("options", "num_predict", "max_new_tokens", "max_output_tokens", "do_sample"),
        *("enable_thinking", "thinking", "reasoning", "lora_path", "adapter_id"),
        *("no_repeat_ngram_size", "top_a", "tfs_z"),
    }
)

# Values of refused fields that ask for nothing. Null always asks for nothing.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": ([], ["text"]),
    "verbosity": ("medium",),
    "store": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "documents": ([],),
    "include_reasoning": (True,),
    "reasoning_format": ("auto", "deepseek"),
    "reasoning_control": (False,),
    "reasoning_budget_tokens": (-1,),
    "thinking_budget_tokens": (-1,),
    "return_tokens_as_token_ids": (False,),
    "logprob_token_ids": ([],),
    "watermarking": (False,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "typical_p": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "top_n_sigma": (-1,),
    "adaptive_target": (-1,),
    "repeat_penalty": (1,),
    "repeat_last_n": (-1,),
    "min_keep": (0,),
    "n_predict": (-1,),
    "num_predict": (-1,),
    "n_cmpl": (1,),
    "n_probs": (0,),
    "n_indent": (0,),
    "t_max_predict_ms": (0, -1),
    "lora": ([],),
    "response_fields": ([],),
    "input_extra": ([],),
    "input_prefix": ("",),
    "input_suffix": ("",),
    # A grammar that begins at a trigger.
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "no_repeat_ngram_size": (0,),
    "options": ({},),
}
# The same for one endpoint, for fields that the other endpoint serves.
HARMLESS_OF: Mapping[Endpoint, Mapping[str, tuple[Any, ...]]] = {
    "chat": {"echo": (False,), "add_special_tokens": (False,)},
    "completion": {
        "top_logprobs": (0,),
        "max_completion_tokens": (-1,),
        "add_special_tokens": (True,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "continue_final_message": (False,),
        "add_generation_prompt": (True,),
        "chat_template_kwargs": ({},),
    },
}
_OF_THE_OTHER: Mapping[Endpoint, frozenset[str]] = {
    "chat": frozenset({"prompt", "echo"}),
    "completion": frozenset(
        {
            *("messages", "top_logprobs", "max_completion_tokens", "reasoning_effort"),
            *("tools", "tool_choice", "parallel_tool_calls"),
            *("continue_final_message", "add_generation_prompt", "chat_template_kwargs"),
        }
    ),
}
_INSTEAD = {
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "n_cmpl": "n",
    "n_probs": "logprobs",
    "repeat_penalty": "repetition_penalty",
}
_IN_MESSAGES = ("function_call", "audio")


def refuse_unserved(raw: Mapping[str, Any], served: SetOf[str], endpoint: Endpoint) -> None:
    """Raise `RequestError` for the first field of ``raw`` that this server does not support."""
    for name, value in raw.items():
        if name in served or name in IGNORED or not (name in KNOWN_FIELDS or name in OTHERS):
            continue
        if _asks_for_nothing(name, value, raw, endpoint):
            continue
        raise RequestError(
            f"this {_doer(name, endpoint)} does not support {name}"
            + (f" of {value!r}" if isinstance(value, bool) else ""),
            param=name,
            code="unsupported_parameter",
            hint=f"use {_INSTEAD[name]}" if name in _INSTEAD else "leave it out",
        )
    messages = raw.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        for name in _IN_MESSAGES:
            if isinstance(message, dict) and message.get(name):
                param = f"messages[{index}].{name}"
                raise RequestError(
                    f"this server does not support {name} in a message",
                    param=param,
                    code="unsupported_parameter",
                )


def _doer(name: str, endpoint: Endpoint) -> str:
    return "endpoint" if name in _OF_THE_OTHER[endpoint] else "server"


def _asks_for_nothing(name: str, value: object, raw: Mapping[str, Any], endpoint: Endpoint) -> bool:
    if name == "best_of":
        return value is None or value == (raw.get("n") or 1)
    return value is None or value in HARMLESS_OF[endpoint].get(name, HARMLESS.get(name, ()))

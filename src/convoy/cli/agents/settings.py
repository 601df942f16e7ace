"""Make the settings of each agent for one run: its arguments, environment variables and files.

The names come from the agents' own documentation and configuration schemas: Codex CLI 0.169, Claude Code
2.1.197, opencode 1.18.33 and Cline 3.0.65. No setting changes a file of the user.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from convoy.sdk.endpoint import KEY_VARIABLE

# Clients insist on a key, also for a server without any.
NO_KEY = "unused"
# The share of the context that an agent may ask for as one answer, and the most that any of them asks for.
_ANSWER_SHARE = 8
_MAX_ANSWER = 32_000


@dataclass(frozen=True, slots=True)
class AgentServer:
    """Hold the server of one run. ``url`` has no ``/v1``; ``context`` is None if the server does not say."""

    url: str
    model: str
    context: int | None = None
    api_key: str = field(default=NO_KEY, repr=False)
    ca: Path | None = None

    @property
    def answer(self) -> int | None:
        """Return the tokens that one answer may have beside a long conversation, or None if unknown."""
        return None if self.context is None else min(_MAX_ANSWER, max(1, self.context // _ANSWER_SHARE))


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Hold the settings of one run.

    ``arguments`` stand before those of the user. ``files`` are texts by their names in the run's folder.
    ``removed`` are variables that would send the agent to another server.
    """

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Agent:
    """Describe an agent: its program, its package on npm, and its settings in a folder of one run."""

    name: str
    program: str
    package: str
    settings: Callable[[AgentServer, Path], AgentSettings]


def _codex(server: AgentServer, folder: Path) -> AgentSettings:
    """Return settings that replace Codex's whole folder, so that no login of the user is read."""
    text = json.dumps
    lines = [
        f"model = {text(server.model)}",
        'model_provider = "convoy"',
        "check_for_update_on_startup = false",
    ]
    if server.context is not None:
        lines.append(f"model_context_window = {server.context}")
    lines += [
        "[model_providers.convoy]",
        'name = "Convoy"',
        f"base_url = {text(server.url + '/v1')}",
        'wire_api = "responses"',
        f"env_key = {text(KEY_VARIABLE)}",
        "[analytics]\nenabled = false",
        "[feedback]\nenabled = false",
        '[otel]\nexporter = "none"\nmetrics_exporter = "none"',
        "[features]\nplugins = false\napps = false",
    ]
    variables = {"CODEX_HOME": str(folder), KEY_VARIABLE: server.api_key}
    if server.ca is not None:
        variables["CODEX_CA_CERTIFICATE"] = str(server.ca)
    others = ("CODEX_API_KEY", "CODEX_ACCESS_TOKEN")
    return AgentSettings((), variables, {"config.toml": "\n".join(lines) + "\n"}, others)


def _claude(server: AgentServer, folder: Path) -> AgentSettings:  # noqa: ARG001
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.api_key,
        "ANTHROPIC_MODEL": server.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": server.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": server.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": server.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
        **_node_ca(server),
    }
    if server.context is not None:
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(server.context)
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(server.answer)
    clouds = ("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY")
    others = ("ANTHROPIC_API_KEY", *clouds)
    return AgentSettings((), variables, {}, others)


def _opencode(server: AgentServer, folder: Path) -> AgentSettings:  # noqa: ARG001
    model: dict[str, object] = {"name": server.model, "tool_call": True}
    if server.context is not None:
        model["limit"] = {"context": server.context, "output": server.answer}
    named = f"convoy/{server.model}"
    config = {
        "autoupdate": False,
        "share": "disabled",
        "enabled_providers": ["convoy"],
        "model": named,
        "small_model": named,
        "provider": {
            "convoy": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Convoy",
                "options": {"baseURL": f"{server.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"},
                "models": {server.model: model},
            }
        },
    }
    variables = {
        "OPENCODE_CONFIG_CONTENT": json.dumps(config),
        KEY_VARIABLE: server.api_key,
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_SHARE": "1",
        **_node_ca(server),
    }
    return AgentSettings((), variables)


def _cline(server: AgentServer, folder: Path) -> AgentSettings:
    provider = "openai-compatible"
    settings = {
        "provider": provider,
        "apiKey": server.api_key,
        "model": server.model,
        "baseUrl": f"{server.url}/v1",
    }
    providers = {
        "version": 1,
        "lastUsedProvider": provider,
        "modes": {},
        "providers": {
            provider: {
                "settings": settings,
                "updatedAt": "2026-01-01T00:00:00.000Z",
                "tokenSource": "manual",
            }
        },
    }
    files = {
        "providers.json": json.dumps(providers),
        "global-settings.json": json.dumps({"telemetryOptOut": True, "autoUpdateEnabled": False}),
    }
    variables = {
        "CLINE_PROVIDER_SETTINGS_PATH": str(folder / "providers.json"),
        "CLINE_GLOBAL_SETTINGS_PATH": str(folder / "global-settings.json"),
        "CLINE_NO_AUTO_UPDATE": "1",
        # With another backend a daemon stays behind, which has read the settings.
        "CLINE_SESSION_BACKEND_MODE": "local",
        **_node_ca(server),
    }
    return AgentSettings(("-P", provider, "-m", server.model), variables, files)


def _node_ca(server: AgentServer) -> dict[str, str]:
    return {} if server.ca is None else {"NODE_EXTRA_CA_CERTS": str(server.ca)}


AGENTS: Mapping[str, Agent] = {
    agent.name: agent
    for agent in (
        Agent("codex", "codex", "@openai/codex", _codex),
        Agent("claude", "claude", "@anthropic-ai/claude-code", _claude),
        Agent("opencode", "opencode", "opencode-ai", _opencode),
        Agent("cline", "cline", "cline", _cline),
    )
}

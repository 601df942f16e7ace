"""Group the help pages: the verbs by purpose, and the options of verbs that have many."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

RUN = "Run a model"
SET_UP = "Set up and look after a cluster"
SHARE = "Serve accounts with many clusters"
PROVE = "Measure and prove"

# Groups of options in the order of the page. All other options come last, under "Options".
_OPTIONS = {
    "Cluster": (
        "config",
        "directory",
        "wait_s",
        "recover_wait_s",
        "discover",
        "members",
        "standby",
        "exit_with_head",
    ),
    "Model": ("model", "weights", "signed", "cache", "quantize", "compute", "kernel", "kv_dtype"),
    "Layers and devices": ("layers", "parallel", "ranks", "device", "threads", "pin"),
    "Requests": (
        *("max_model_len", "max_batch", "prefill_chunk", "prefill_window", "micro_batches", "speculate"),
        *("max_waiting", "prompt", "max_tokens", "temperature", "seed", "raw"),
    ),
    "HTTP server": (
        *("host", "serve.port", "run.port", "api_key_file", "tls_certificate", "tls_key"),
        *("allowed_host", "allowed_origin", "store_responses", "served_model_name"),
        *("also", "keep_alive", "http_process"),
    ),
    "Invitation": ("invite", "auto_approve", "name", "address", "join.port", "invite_port"),
    "Provider": ("provide", "coordinator_key", "certificate"),
}
_GROUP_OF = {name: group for group, names in _OPTIONS.items() for name in names}
_OTHER = "Options"


class GroupedCommand(TyperCommand):
    """List the options of a verb in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        found: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                group = "Arguments"
            else:
                # A name with its verb wins, because --port belongs to different groups in different verbs.
                own = f"{self.name}.{parameter.name}"
                group = _GROUP_OF.get(own) or _GROUP_OF.get(parameter.name or "", _OTHER)
            found.setdefault(group, []).append(record)
        for group in ("Arguments", *_OPTIONS, _OTHER):
            if group in found:
                with formatter.section(group):
                    formatter.write_dl(found[group])

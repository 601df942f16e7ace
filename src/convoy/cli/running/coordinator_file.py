"""``coordinator.toml``: a coordinator's limits, and its models before a provider serves them.

[queue]    max_waiting, max_per_account, max_wait_s
[telemetry] traces: the URL of an OTLP/HTTP collector
[evidence] the evidence that providers must show of their members: see `cli.running.trust_rules`
[[model]]  name, prompt_micro and completion_micro (millionths of a unit for a million tokens),
           default_max_tokens
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from convoy.cli.running.trust_rules import EvidenceTable, rules_of
from convoy.config.table import (
    FLEET_ANSWER_TOKENS,
    QUEUE_PER_ACCOUNT,
    QUEUE_WAIT_S,
    QUEUE_WAITING,
    TelemetryConfig,
)
from convoy.config.toml_file import read_toml
from convoy.errors import ConfigError

if TYPE_CHECKING:
    from convoy.fleet.coordinator.options import CoordinatorOptions


class QueueTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold [queue]."""

    max_waiting: Annotated[int, msgspec.Meta(ge=0)] = QUEUE_WAITING
    max_per_account: Annotated[int, msgspec.Meta(ge=0)] = QUEUE_PER_ACCOUNT
    max_wait_s: Annotated[float, msgspec.Meta(gt=0)] = QUEUE_WAIT_S


class ModelTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold one [[model]]."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    prompt_micro: int = 0
    completion_micro: int = 0
    default_max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = FLEET_ANSWER_TOKENS


class FleetFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold the whole file."""

    queue: QueueTable = QueueTable()
    model: list[ModelTable] = []
    telemetry: TelemetryConfig = TelemetryConfig()
    evidence: EvidenceTable = EvidenceTable()


def load_fleet_config(path: Path | None, instance: str, authorities: tuple[str, ...]) -> CoordinatorOptions:
    """Return the options of a file, or the defaults for None. Raises `ConfigError` naming the file and the
    key.
    """
    from convoy.fleet.books.price import Price
    from convoy.fleet.consumer_request import ModelOptions
    from convoy.fleet.coordinator.options import CoordinatorOptions
    from convoy.fleet.coordinator.routing.dispatch import QueueLimits

    read = FleetFile() if path is None else read_toml(path, FleetFile)
    models = {}
    for one in read.model:
        price = Price(one.prompt_micro, one.completion_micro)
        price.check()
        if one.name in models:
            raise ConfigError(
                f"{path}: the model {one.name} is there twice", hint="remove one of the two [[model]] tables"
            )
        models[one.name] = ModelOptions(price, one.default_max_tokens)
    queue = QueueLimits(read.queue.max_waiting, read.queue.max_per_account, read.queue.max_wait_s)
    rules = rules_of(read.evidence, path)
    return CoordinatorOptions(
        instance=instance, authorities=authorities, models=models, queue=queue, trust=rules
    )


def load_telemetry(path: Path | None) -> TelemetryConfig:
    """Return [telemetry] of a file, or the defaults for None. Raises `ConfigError` naming the file and the
    key.
    """
    return TelemetryConfig() if path is None else read_toml(path, FleetFile).telemetry

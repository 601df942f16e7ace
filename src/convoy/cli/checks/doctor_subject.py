"""The member that `convoy doctor` examines. Its files are read one after another, each only if possible."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.cli.show.output import counted
from convoy.config.files import read_bytes
from convoy.config.kernels import EXACT
from convoy.config.settings import Config, load_config
from convoy.errors import ConvoyError
from convoy.sdk.options import load_policy

if TYPE_CHECKING:
    from convoy.cluster.checkup.finding import Finding
    from convoy.crypto.identity import Identity
    from convoy.transport.member import Roster
    from convoy.transport.membership import Membership


class DoctorSubject:
    """Read the files of a member. ``config`` and ``roster`` are None until they were read successfully."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.config: Config | None = None
        self.roster: Roster | None = None
        self._signed = b""
        self._operator = b""

    def read_config(self) -> Iterator[Finding]:
        from convoy.cluster.checkup.finding import ok

        self.config = load_config(self._path)
        yield ok(f"{self._path} can be read")

    def read_roster(self) -> Iterator[Finding]:
        """Yield findings on the newer of the file's roster and the one accepted before.

        Only signatures count here: an expired roster still identifies the members.
        """
        from convoy.cluster.checkup.member import check_roster
        from convoy.trust.roster.accepted import AcceptedFile
        from convoy.trust.roster.roster import MAX_ROSTER_BYTES, verify_roster

        config = self._config
        self._signed = read_bytes(config.require_roster(), max_bytes=MAX_ROSTER_BYTES)
        self._operator = config.require_operator_key()
        file = self.roster = verify_roster(self._signed, operator_key=self._operator).roster
        accepted = AcceptedFile(config.require_identity()).load()
        if accepted is not None:
            newest = verify_roster(accepted.signed, operator_key=accepted.trusted).roster
            if newest.epoch > file.epoch:
                self.roster, self._signed, self._operator = newest, accepted.signed, accepted.trusted
        yield from check_roster(self.roster, datetime.datetime.now(datetime.UTC), file.epoch)

    def load_identity(self) -> Identity | None:
        """Return the keys, or None if they are missing or not private. The check of the keys reports that."""
        from convoy.crypto.identity import Identity

        try:
            return Identity.load(self._config.require_identity())
        except ConvoyError:
            return None

    def membership(self) -> Membership | None:
        """Return the membership that can dial peers, or None.

        It is None if keys or roster are missing, if they do not belong together, or if the roster is not
        valid now.
        """
        from convoy.trust.roster.authority import open_membership

        identity, name = self.load_identity(), self._config.cluster.name
        if identity is None or name is None or self.roster is None:
            return None
        try:
            # No store: an examination changes nothing on disk, whatever roster a peer sends.
            return open_membership(name, identity, self._signed, operator_key=self._operator).membership
        except ConvoyError:
            return None

    def read_policy(self, file: Path) -> Iterator[Finding]:
        from convoy.cluster.checkup.member import check_policy

        yield from check_policy(load_policy(file), self.roster)

    def files(self) -> list[Path]:
        """Return the member's files that were written on this machine."""
        cluster = self._config.cluster
        folder = [] if cluster.identity is None else [cluster.identity / "identity.key"]
        return [self._path, *([] if cluster.roster is None else [cluster.roster]), *folder]

    def look_at_model(self) -> Iterator[Finding]:
        """Yield findings on the configured model, without loading its weights."""
        from convoy.cluster.checkup.finding import ok
        from convoy.plan.memory.memory import format_bytes

        named = self._config.model_name()
        if named is None:
            yield ok(
                "the configuration names no model: a head gets one with its command, a peer from its head"
            )
            return
        from convoy.model.checkpoints.source import ModelSource
        from convoy.model.kernels.registry import own_form

        source = ModelSource.resolve(named)
        spec = source.spec
        weights = spec.weight_bytes(0, spec.num_layers, embed=True, output=True, dtype=own_form(EXACT))
        yield ok(
            f"{source.name}: {spec.family}, {counted(spec.num_layers, 'layer')}, "
            f"{counted(len(source.tensors), 'tensor')}, "
            f"{format_bytes(weights)} of weights in all"
        )

    @property
    def _config(self) -> Config:
        assert self.config is not None, "the configuration was not read"
        return self.config

"""What happens to peers, in an order from a seed: each is killed, stopped or cut off, and comes back."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field

from chaos.load import Load
from convoy.cli.local.served_cluster import ServedCluster

_KINDS = ("kill", "kill", "stop", "cut")
_REST_S = (0.5, 4.0)
_AWAY_S = {"kill": (0.0, 3.0), "stop": (0.3, 5.0), "cut": (0.1, 3.0)}
_LULL, _LULL_S = 0.25, 10.0
_BOTH = 0.25  # how often a second peer goes before the first is back


@dataclass
class Disorder:
    """Stop and start peers, sometimes two at once. Each comes back."""

    cluster: ServedCluster
    load: Load
    rng: random.Random
    dealt: Counter[str] = field(default_factory=Counter)
    num_stages: Counter[int] = field(default_factory=Counter)  # of the ring, when it was hit
    told: list[str] = field(default_factory=list)
    _began_s: float = field(default_factory=time.monotonic)

    def go_on(self, seconds: float) -> None:
        """Go on until the time is over; every peer is back then, though perhaps not yet in the ring."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self._gather()
            time.sleep(self.rng.uniform(*_REST_S))
            peers = self.rng.sample(list(self.cluster.peers), 2)
            chosen = peers if self.rng.random() < _BOTH else peers[:1]
            kinds = [self.rng.choice(_KINDS) for _ in chosen]
            for peer, kind in zip(chosen, kinds, strict=True):
                self._deal(peer, kind)
            for peer, kind in zip(chosen, kinds, strict=True):
                time.sleep(self.rng.uniform(*_AWAY_S[kind]))
                self._undo(peer, kind)

    def _gather(self) -> None:
        """Wait until returned peers have stages again. Without a lull there is soon no peer left to lose."""
        if len(self._stages()) > 1 and self.rng.random() > _LULL:
            return
        end_s = time.monotonic() + _LULL_S
        with self.load.lull():
            while len(self._stages()) < len(self.cluster.names) and time.monotonic() < end_s:
                time.sleep(0.05)  # an HTTP API has no event to wait on
        self._tell(f"after a lull, stages: {' '.join(self._stages())}")

    def _stages(self) -> list[str]:
        return [stage["member"] for stage in self.cluster.status()["stages"]]

    def _deal(self, peer: str, kind: str) -> None:
        stages = self._stages()
        self.num_stages[len(stages)] += 1
        self._tell(f"{kind} {peer}, stages: {' '.join(stages)}")
        self.dealt[kind] += 1
        {"kill": self.cluster.kill, "stop": self.cluster.stop, "cut": self.cluster.cut}[kind](peer)

    def _undo(self, peer: str, kind: str) -> None:
        self._tell(f"{peer} is back from {kind}")
        {"kill": self.cluster.start, "stop": self.cluster.resume, "cut": self.cluster.mend}[kind](peer)

    def _tell(self, text: str) -> None:
        self.told.append(f"{time.monotonic() - self._began_s:7.2f} s  {text}")

"""What a step lost, and what a policy costs: small tables that print themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from halfulp import pictures
from halfulp.kernels import WRITE_COUNTS, WRITE_SUMS, Written
from halfulp.text import shown
from halfulp.writeback.sharding import is_sharded, reduce_sum

TILE_BYTES = 4 * len(WRITE_COUNTS) + 8 * len(WRITE_SUMS)
"""What the counts and the sums of a tile take."""


@dataclass(kw_only=True)
class TensorEvents:
    """One tensor at one step. Counts of coordinates; ``None`` where not known."""

    name: str
    step: int
    numel: int
    counts: torch.Tensor
    sums: torch.Tensor
    decay_rate: float
    tracked: bool
    summed: int
    """Of every how many tiles there are sums; 0 for none."""
    parameter: torch.Tensor

    @classmethod
    def of(
        cls,
        name: str,
        step: int,
        p: torch.Tensor,
        written: Written,
        decay_rate: float,
        tracked: bool,
        summed: int,
    ) -> TensorEvents:
        """From what the kernel counted; totals are taken when they are asked for."""
        return cls(
            name=name, step=step, numel=p.numel(), counts=written.counts, sums=written.sums,
            decay_rate=decay_rate, tracked=tracked, summed=min(summed, 1) if p.is_cuda else summed,
            parameter=p,
        )  # fmt: skip

    def total(self) -> dict[str, float]:
        """Counts over all tiles and all ranks, and sums: of a sample of tiles, for all of them."""
        counts = self.counts.sum(dim=0, dtype=torch.float64)
        all_tiles = len(self.sums) / max(len(self.sums[:: self.summed or 1]), 1)
        numbers = torch.cat([counts, all_tiles * self.sums.sum(dim=0).to(counts.device)])
        if is_sharded(self.parameter):
            numbers = reduce_sum(numbers, self.parameter)
        return dict(zip((*WRITE_COUNTS, *WRITE_SUMS), numbers.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class EventRow:
    """One line of :class:`Events`."""

    name: str
    numel: int
    frozen: int
    zero_proposal: int
    endpoint: int
    nonfinite: int
    never_moved: int | None
    decay_share: float | None
    """Sum of |lr * decay * w| over the sum of |proposal|, where weight decay is decoupled."""
    proposal_sq: float
    """The sum of squares of what was proposed; for a large tensor from every 16th or 64th tile. Zero without
    telemetry, as the two below: products with what was written, and its squares."""
    arrived: float
    written_sq: float

    @property
    def frozen_fraction(self) -> float:
        return self.frozen / max(self.numel, 1)

    @property
    def gain(self) -> float | None:
        """How much of the proposal was written: <written, proposed> / |proposed|**2. None without one."""
        return self.arrived / self.proposal_sq if self.proposal_sq > 0 else None

    @property
    def cosine(self) -> float | None:
        """Between what was proposed and what was written; None if either is nothing."""
        both = self.proposal_sq * self.written_sq
        return self.arrived / math.sqrt(both) if both > 0 else None


@dataclass(frozen=True)
class Events:
    """What the last step lost, per tensor.

    A coordinate is frozen if its stored value did not change; ``zero_proposal`` of them were not asked to.
    """

    rows: tuple[EventRow, ...]
    step: int

    @classmethod
    def gather(cls, events: list[TensorEvents]) -> Events:
        rows = []
        for e in events:
            t = e.total()
            decays = e.decay_rate > 0 and t["proposal_abs"] > 0
            rows.append(
                EventRow(
                    name=e.name,
                    numel=e.numel,
                    frozen=int(t["frozen"]),
                    zero_proposal=int(t["zero_proposal"]),
                    endpoint=int(t["endpoint"]),
                    nonfinite=int(t["nonfinite"]),
                    never_moved=int(t["never_moved"]) if e.tracked else None,
                    decay_share=e.decay_rate * t["weight_abs"] / t["proposal_abs"] if decays else None,
                    proposal_sq=t["proposal_sq"],
                    arrived=t["arrived"],
                    written_sq=t["written_sq"],
                )
            )
        return cls(tuple(rows), max((e.step for e in events), default=0))

    def __getitem__(self, name: str) -> EventRow:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no tensor {name!r} in these events")

    def _share(self, count: int) -> float:
        return count / max(sum(r.numel for r in self.rows), 1)

    @property
    def frozen(self) -> float:
        """The share of all coordinates that did not change."""
        return self._share(sum(r.frozen for r in self.rows))

    @property
    def never_moved(self) -> float:
        """The share that has not changed since the start."""
        return self._share(sum(r.never_moved or 0 for r in self.rows))

    @property
    def nonfinite(self) -> int:
        return sum(r.nonfinite for r in self.rows)

    @property
    def gain(self) -> float | None:
        """How much of the whole proposal was written; None if none was made, or telemetry is off."""
        proposed = math.fsum(r.proposal_sq for r in self.rows)
        return math.fsum(r.arrived for r in self.rows) / proposed if proposed > 0 else None

    @property
    def cosine(self) -> float | None:
        """Between all that was proposed and all that was written; None if either is nothing."""
        both = math.fsum(r.proposal_sq for r in self.rows) * math.fsum(r.written_sq for r in self.rows)
        return math.fsum(r.arrived for r in self.rows) / math.sqrt(both) if both > 0 else None

    def by_group(self, group_of: dict[str, str]) -> dict[str, float]:
        """Frozen share per group, coordinate-weighted, from a map of tensor names to groups."""
        totals: dict[str, list[int]] = {}
        for r in self.rows:
            entry = totals.setdefault(group_of.get(r.name, "other"), [0, 0])
            entry[0] += r.frozen
            entry[1] += r.numel
        return {g: f / max(n, 1) for g, (f, n) in totals.items()}

    def _repr_html_(self) -> str:
        """In a notebook: tensors by what the step left unchanged, most first."""
        rows = sorted(self.rows, key=lambda r: (-r.frozen_fraction, r.name))
        never = [
            "" if r.never_moved is None else f"{r.never_moved / max(r.numel, 1):.1%} never moved"
            for r in rows
        ]
        drawn = [(r.name, r.frozen_fraction, note) for r, note in zip(rows, never, strict=True)]
        title = (
            f"step {self.step}: {self.frozen:.1%} of weights unchanged, {self.never_moved:.1%} never moved"
        )
        return pictures.framed(title, pictures.bars(drawn))

    def __str__(self) -> str:
        names = [shown(r.name, 120) for r in self.rows]
        width = max(map(len, names), default=4)
        lines = [
            f"step {self.step}: {self.frozen:.1%} of weights unchanged, {self.never_moved:.1%} never moved"
        ]
        for name, r in zip(names, self.rows, strict=True):
            never = "" if r.never_moved is None else f"  never moved {r.never_moved / max(r.numel, 1):7.2%}"
            gain = "" if r.gain is None else f"  arrived {r.gain:7.2%}"
            decay = "" if r.decay_share is None else f"  decay {r.decay_share:.2%} of the proposal"
            lines.append(f"  {name:{width}}  unchanged {r.frozen_fraction:7.2%}{never}{gain}{decay}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes on this rank for the managed parameters, the optimizer's own moments not included."""

    parameters: int
    weights: int
    policy: int
    telemetry: int
    scratch: int
    step: int

    @property
    def persistent(self) -> int:
        """What is there between steps."""
        return self.weights + self.policy + self.telemetry + self.scratch

    @property
    def peak(self) -> int:
        """What is there during a step, the optimizer's temporaries not included."""
        return self.persistent + self.step

    def per_parameter(self) -> dict[str, float]:
        """Every entry divided by the number of parameters."""
        n = max(self.parameters, 1)
        keys = ("weights", "policy", "telemetry", "scratch", "persistent", "peak")
        return {key: getattr(self, key) / n for key in keys}

"""Report what a step lost and what a policy costs, as small tables that print themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halfulp.deprecation import BY_GROUP
from halfulp.errors import UsageError
from halfulp.kernels import WRITE_COUNTS, WRITE_SUMS, Written, tiles_of
from halfulp.kernels.plan import Counted, Parts
from halfulp.text import shown
from halfulp.writeback.sharding import is_sharded, reduce_sum

if TYPE_CHECKING:
    from halfulp.writeback.slot import Slot

NONFINITE = WRITE_COUNTS.index("nonfinite")

TILE_BYTES = 4 * len(WRITE_COUNTS) + 8 * len(WRITE_SUMS)
"""The number of bytes that the counts and the sums of a tile take."""


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
        """Return the share of the proposals that were lost."""
        return self.frozen / max(self.numel, 1)

    @property
    def gain(self) -> float | None:
        """The written share of the proposal, ``<written, proposed> / |proposed|**2``; None without one."""
        return gain_of([self])

    @property
    def cosine(self) -> float | None:
        """The cosine between the proposed and the written update; None if either is zero."""
        return cosine_of([self])


def gain_of(rows: Sequence[EventRow]) -> float | None:
    """Return the share of the proposals that was written; None if nothing was proposed."""
    proposed = math.fsum(r.proposal_sq for r in rows)
    return math.fsum(r.arrived for r in rows) / proposed if proposed > 0 else None


def cosine_of(rows: Sequence[EventRow]) -> float | None:
    """Return the cosine between the proposed and the written updates; None if either is zero."""
    both = math.fsum(r.proposal_sq for r in rows) * math.fsum(r.written_sq for r in rows)
    return math.fsum(r.arrived for r in rows) / math.sqrt(both) if both > 0 else None


@dataclass(frozen=True, kw_only=True)
class StepEvents:
    """The counts of the tensors that one call moved; a tensor's row is computed on demand.

    Args:
        step: The step.
        places: The position of each slot in the sequences that follow.
        counted: Counts per tile, and sums.
        decay_rates: Learning rate times decoupled weight decay.
        summed: The interval, in tiles, at which sums are taken; 0 for none.
    """

    step: int
    places: Mapping[Slot, int]
    counted: Counted
    decay_rates: Sequence[float]
    summed: Sequence[int]

    @classmethod
    def of_one(cls, slot: Slot, step: int, counted: Written, decay_rate: float, summed: int) -> StepEvents:
        """Make the record of a tensor that was moved by itself."""
        return cls(
            step=step, places={slot: 0}, counted=[(counted.counts, counted.sums)], decay_rates=[decay_rate],
            summed=[summed],
        )  # fmt: skip

    @property
    def spoilt(self) -> bool:
        """True if an update was not finite somewhere on this rank."""
        if isinstance(self.counted, Parts):
            return bool(self.counted.counts[:, NONFINITE].any())
        return any(bool(counts[:, NONFINITE].any()) for counts, _ in self.counted)

    def spoilt_at(self, slot: Slot) -> bool:
        """Return True if an update of this tensor was not finite somewhere on this rank."""
        return bool(self.counted[self.places[slot]][0][:, NONFINITE].any())

    def row(self, slot: Slot) -> EventRow:
        """Add up the counts of one tensor over all tiles and all ranks."""
        i = self.places[slot]
        counts, sums = self.counted[i]
        every = 1 if slot.p.is_cuda else self.summed[i] or 1
        all_tiles = len(sums) / max(len(sums[::every]), 1)  # sums are of a sample of tiles
        numbers = torch.cat(
            [counts.sum(dim=0, dtype=torch.float64), all_tiles * sums.sum(dim=0).to(counts.device)]
        )
        if is_sharded(slot.p):
            numbers = reduce_sum(numbers, slot.p)
        t = dict(zip((*WRITE_COUNTS, *WRITE_SUMS), numbers.tolist(), strict=True))
        decay = self.decay_rates[i]
        decays = decay > 0 and t["proposal_abs"] > 0
        return EventRow(
            name=slot.name,
            numel=slot.p.numel(),
            frozen=int(t["frozen"]),
            zero_proposal=int(t["zero_proposal"]),
            endpoint=int(t["endpoint"]),
            nonfinite=int(t["nonfinite"]),
            never_moved=None if slot.moved is None else int(t["never_moved"]),
            decay_share=decay * t["weight_abs"] / t["proposal_abs"] if decays else None,
            proposal_sq=t["proposal_sq"],
            arrived=t["arrived"],
            written_sq=t["written_sq"],
        )


@dataclass(frozen=True)
class Events:
    """The updates that the last step lost, per tensor.

    A coordinate is frozen if the step did not change its value or, where scales move with the data, its code
    (see :mod:`halfulp.kernels.reference`). ``zero_proposal`` counts the frozen coordinates whose proposed
    update was zero.
    """

    rows: tuple[EventRow, ...]
    step: int

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
        """The share of all coordinates that has not changed since the start."""
        return self._share(sum(r.never_moved or 0 for r in self.rows))

    @property
    def nonfinite(self) -> int:
        """Return the number of weights that are not finite."""
        return sum(r.nonfinite for r in self.rows)

    @property
    def gain(self) -> float | None:
        """The share of the whole proposal that was written; None without a proposal or telemetry."""
        return gain_of(self.rows)

    @property
    def cosine(self) -> float | None:
        """The cosine between all proposed and all written updates; None if either is zero."""
        return cosine_of(self.rows)

    def by_group(self, _group_of: Mapping[str, str]) -> None:
        """Refuse a call of what has ended."""
        raise UsageError(BY_GROUP)

    def _title(self) -> str:
        return f"step {self.step}: {self.frozen:.1%} of weights unchanged, {self.never_moved:.1%} never moved"

    def __str__(self) -> str:
        names = [shown(r.name, 120) for r in self.rows]
        width = max(map(len, names), default=4)
        lines = [self._title()]
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
        """The number of bytes kept between steps."""
        return self.weights + self.policy + self.telemetry + self.scratch

    @property
    def peak(self) -> int:
        """The number of bytes needed during a step, without the optimizer's temporaries."""
        return self.persistent + self.step

    def per_parameter(self) -> dict[str, float]:
        """Return every entry divided by the number of parameters."""
        n = max(self.parameters, 1)
        keys = ("weights", "policy", "telemetry", "scratch", "persistent", "peak")
        return {key: getattr(self, key) / n for key in keys}


def sampling(numel: int) -> int:
    """Choose the sampling interval of sums in tiles: 1 for small tensors, 16 or 64 for large ones."""
    tiles = tiles_of(numel)
    return 64 if tiles >= 1024 else 16 if tiles >= 256 else 1

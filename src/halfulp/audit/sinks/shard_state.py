"""Save the tracked state of shards from every rank, and restore it on as many.

The file of a rank lists the coordinates of each tensor that it holds. A recording goes on where tensors are
sharded as they were; :mod:`halfulp.trace.resuming` decides after which step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from halfulp import files, tensors
from halfulp.audit.meter.tensor import Watched
from halfulp.audit.ranks import broadcast, rank
from halfulp.documents import whole
from halfulp.errors import CorruptionError, HalfulpError, UsageError
from halfulp.text import tell
from halfulp.trace.resuming import RANKS, STEP, Resumed, clear, shard_file, shards_of
from halfulp.trace.schema import read_manifest
from halfulp.writeback.sharding import local, shard_offset

State = dict[str, torch.Tensor]
Range = tuple[int, int]
"""The first coordinate of a shard in the whole tensor, and the number of coordinates."""
Writes = tuple[Path, str, int]
"""The message of the first rank: folder, id and last step of its trace."""
TRACE, PLACES = "halfulp.trace", "halfulp.ranges"


def range_of(w: Watched) -> Range:
    """Return the offset and size of this rank's part of a tensor."""
    return shard_offset(w.tensor), local(w.tensor).numel()


def _first_replica(x: Any) -> bool:
    """Return True if no other rank is to save the same shard."""
    at = x.device_mesh.get_coordinate()
    return all(c == 0 for c, how in zip(at, x.placements, strict=True) if how.is_replicate())


class Shards:
    """The shards that this rank follows, and their files."""

    def __init__(self, out: Path, trace: str) -> None:
        self.out, self.trace, self.rank = out, trace, rank()
        self.ranks: set[int] = set()
        self.ranges: dict[Watched, Range] = {}
        """Ranges of the shards that this rank saves; every shard is saved once."""
        self.step, self.of = 0, list[int]()
        """The last step and the ranks of the newest files."""
        self.named = (0, 0)
        """The steps of the files that the newest two parts continue from."""

    def take_up(self, state: State) -> None:
        """Continue from the files that a state names."""
        self.step, self.of = shards_of(state)
        self.named = (self.step, self.step)

    def add(self, new: Sequence[Watched]) -> None:
        """Follow these as well."""
        for w in new:
            self.ranks.update(w.tensor.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]  # a DTensor
            if _first_replica(w.tensor):
                self.ranges[w] = range_of(w)

    def save(self, step: int, state: Callable[[Watched], State]) -> None:
        """Write this rank's file; it appears whole."""
        followed = {name: t for w in self.ranges for name, t in state(w).items()}
        header = {TRACE: self.trace, PLACES: json.dumps({w.id: r for w, r in self.ranges.items()})}
        files.put(shard_file(self.out, step, self.rank), tensors.content(followed, header))
        self.step, self.of = step, sorted(self.ranks)

    def name(self) -> State:
        """Return the step and ranks of the files to continue from, for the state of a part."""
        self.named = (self.named[1], self.step)
        return (
            {STEP: torch.tensor([self.step], device="cpu"), RANKS: torch.tensor(self.of, device="cpu")}
            if self.step
            else {}
        )

    def clear(self) -> None:
        """Remove what no part goes on from; the first rank does it for all."""
        keep = {*self.named, self.step}
        clear(self.out, lambda step: step <= self.step and step not in keep)  # a later one is being written


def agree(
    shards: Shards | None, writes: Writes | None, new: Sequence[Watched], last: int, loaded: State
) -> Shards | None:
    """Have all ranks that share tensors know where the trace is; None: it is nowhere, or not seen from here.

    ``last`` and ``loaded``: the last step that this rank found there, and the state.
    """
    place: Any = writes
    for mesh in dict.fromkeys(w.tensor.device_mesh for w in new):  # type: ignore[attr-defined]  # DTensors
        sent = broadcast(place, mesh)
        place = sent if place is None else place
    if place is None or not new:
        return shards
    out, trace, step = place
    if step != last:
        raise UsageError(
            f"cannot resume {out}: the first rank goes on after step {step}, rank {rank()} after {last}. All "
            "ranks need to see one folder."
        )
    if shards is None and _sees(out, trace):
        shards = Shards(out, trace)
        shards.take_up(loaded)
    if shards is not None:
        shards.add(new)
    return shards


def _sees(out: Path, trace: str) -> bool:
    try:
        seen = read_manifest(out / "manifest.json").get("id") == trace
    except (HalfulpError, OSError):
        seen = False
    if not seen:
        tell(
            f"halfulp: rank {rank()} does not see {out}, where the first rank records: the run can be "
            "recorded, but not resumed."
        )
    return seen


def restore(
    loaded: State, resumed: Resumed, new: Iterable[Watched], followed: Callable[[Watched], bool]
) -> None:
    """Add what was followed of the shards that this rank holds to the state loaded from a trace."""
    step, ranks = shards_of(loaded)
    unsharded = {int(n.partition(".")[0]) for n in loaded if n.partition(".")[0].isdecimal()}
    missing = {w.id: w for w in new if w.sharded or (step and w.id not in unsharded)}
    for r in sorted(ranks, key=lambda r: (r != rank(), r)):  # its own file is all that it needs, as a rule
        if not missing:
            break
        state, ranges = _read(shard_file(resumed.trace.path, step, r), resumed.manifest["id"])
        for i in [i for i, w in missing.items() if ranges.get(i) == range_of(w)]:
            loaded.update({n: t for n, t in state.items() if n.partition(".")[0] == str(i)})
            del missing[i]
    left = {i for i, w in missing.items() if followed(w)}
    if left and resumed.count:
        rows = resumed.trace.scan("tensors", "step", "tensor")
        for i in left & set(rows["tensor"][rows["step"] <= resumed.last_step].tolist()):
            raise UsageError(
                f"cannot resume {resumed.trace.path}: {missing[i].name!r} was sharded in another way, or not "
                "at all, when this trace was recorded. Resume on as many ranks as before, or record what "
                "follows into another folder."
            )


def _read(file: Path, trace: str) -> tuple[State, dict[int, Range]]:
    state, header = tensors.read(file)
    if header.get(TRACE) != trace or tensors.DIGEST not in header:
        raise CorruptionError(f"{file} belongs to another trace than the one that it lies in.")
    try:
        ranges = {int(i): (first, numel) for i, (first, numel) in json.loads(header[PLACES]).items()}
        stated = all(whole(n) for pair in ranges.values() for n in pair)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        stated = False
    if not stated:
        raise CorruptionError(f"{file} does not say which coordinates it holds.")
    return state, ranges

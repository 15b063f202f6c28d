"""Resume a recording after the newest part whose state all ranks have saved.

What is followed of whole tensors is in the state of a part. Of tensors that are sharded over ranks it is in
``shards/STEP.RANK.safetensors``, a file a rank: each writes its own when the first rank writes a part, and
none waits for another, so that a run may end or crash at any moment. A crash can then leave a part before the
shards of all ranks are there, but never two, because ranks meet in every step. The recording goes on from the
part before it, whose state is kept for that; the newer one is recorded again, and replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from halfulp import files, tensors
from halfulp.errors import UsageError
from halfulp.trace.layout import SHARDS
from halfulp.trace.reader import Trace

STEP, RANKS = "shards.step", "shards.ranks"
"""In the state of a part: the step up to which its shards are followed, and the ranks that hold them."""
_NAME = re.compile(r"([0-9]{9,})\.[0-9]+\.safetensors")


def shard_file(path: Path, step: int, rank: int) -> Path:
    """Return the file in which a rank keeps what it follows of its shards."""
    return path / SHARDS / f"{step:09d}.{rank}.safetensors"


@dataclass(frozen=True)
class Resumed:
    """A trace up to the part that a recording continues from."""

    trace: Trace
    count: int
    """Parts up to there: all of them, or all but the newest."""

    @classmethod
    def of(cls, trace: Trace) -> Resumed:
        """Find the last part whose state is complete on every rank."""
        missing: list[Path] = []
        for count in range(len(trace.documents), max(-1, len(trace.documents) - 2), -1):
            candidate = cls(trace, count)
            if missing and count and not trace.documents[count - 1].state_file.exists():
                break  # it was resumed after that part already
            step, ranks = candidate.shards
            needed = [shard_file(trace.path, step, rank) for rank in ranks]
            missing = [file for file in needed if not file.exists()]
            if not missing:
                return candidate
        raise UsageError(
            f"cannot resume {trace.path}: {len(missing)} of {len(needed)} files are missing in "
            f"{missing[0].parent}, such as {missing[0].name}; they hold what each rank "
            "follows. Every rank must see the same folder."
        )

    @property
    def cut(self) -> bool:
        """True if the newest part is to be recorded again."""
        return self.count < len(self.trace.documents)

    @property
    def manifest(self) -> dict[str, Any]:
        """Return the manifest of the trace."""
        return self.trace.manifest

    @property
    def last_step(self) -> int:
        """Return the step after which the trace is resumed."""
        if not self.cut:
            return self.trace.last_step
        steps = self.trace.documents[self.count - 1].steps if self.count else (0, 0)
        assert steps is not None  # parts of format 1 have no shards
        return steps[1]

    def load_state(self) -> dict[str, torch.Tensor]:
        """Return the state there."""
        if not self.count:
            return {}
        part = self.trace.documents[self.count - 1]
        return tensors.read(part.state_file, sha256=None if part.state is None else part.state.sha256)[0]

    @cached_property
    def shards(self) -> tuple[int, list[int]]:
        """Return the step and the ranks of the shards that belong there; 0 and none of whole tensors."""
        place = self.trace.documents[self.count - 1].state_file if self.count else None
        if place is None or STEP not in {p.name for p in tensors.places(place)}:
            return 0, []
        return shards_of(self.load_state())


def shards_of(state: Mapping[str, torch.Tensor]) -> tuple[int, list[int]]:
    """Return the step and the ranks of the shards that belong to a state; 0 and none of whole tensors."""
    return (int(state[STEP]), state[RANKS].tolist()) if STEP in state else (0, [])


def clear(path: Path, unwanted: Callable[[int], bool]) -> None:
    """Remove the shards of some steps."""
    folder = path / SHARDS
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _NAME.fullmatch(file.name)
        if match is not None and unwanted(int(match[1])):
            files.remove(file)

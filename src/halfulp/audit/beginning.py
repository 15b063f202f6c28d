"""How an audit begins: with a new trace, or where an earlier recording ended.

The first rank writes. On the others a resumed audit reads the same trace: it must skip the same steps, and go
on with the codes of rehearsals and with what is followed of its shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from halfulp.audit.ranks import many, rank
from halfulp.audit.watching import Watching
from halfulp.errors import UsageError
from halfulp.text import tell
from halfulp.trace import Memory, Trace, TraceWriter, free_folder
from halfulp.trace.resuming import Resumed, told
from halfulp.writeback import WriteBack

FIRST = "first_step= (--first-step)"
AHEAD = "steps.ahead"
"""In the state of a part: how far the steps of the trace are ahead of what the optimizers have counted, below
zero if they had counted before; empty if that did not stay the same, so that nothing follows from a count."""


class Beginning(Watching):
    """The part of an audit that takes up a trace."""

    exists: str
    every: int
    step: int
    _first: torch.optim.Optimizer | None
    """The one that stepped first in this process, whose count is taken if no optimizers were named."""
    _skip_until: int
    _memory: Memory | None
    _touched: int
    _written: Callable[..., None]
    _manifest: Callable[[], dict[str, Any]]

    def _begin(self) -> None:
        """Open the trace, and go on with it if it is resumed."""
        if self.resume and self.rehearsing is not None and self._memory is not None and many():
            raise UsageError(
                "rehearsals on several ranks cannot be resumed from memory, which is the first rank's. "
                "Pass a folder, out=, that all ranks see."
            )
        if rank() == 0:
            if self.out is not None:
                self.out = self._free(self.out)
                self._open(self.out)
            elif self._memory is not None:
                self._writer = self._memory.begin(self._manifest())
        elif self.out is not None and self.resume:
            self._resumed = self._seen_from_here(self.out)
        self._take_up()

    def _free(self, out: Path) -> Path:
        """The folder for the trace: a notebook's cell that runs again gets another one."""
        if self.resume or self.exists == "raise" or not (out / "manifest.json").exists():
            return out
        free = free_folder(out)
        tell(f"halfulp: {out} holds a trace already; this one goes to {free}.")
        return free

    def _open(self, out: Path) -> None:
        if self.resume and self.unfit == "drop" and (out / "manifest.json").exists():
            self._keep_fit(Trace.open(out))
        self._writer = TraceWriter(out, self._manifest(), resume=self.resume)
        self._resumed = self._writer.resumed

    def _keep_fit(self, found: Trace) -> None:
        """Leave out grids that a trace was begun without."""
        if self.unfit == "drop":
            self.grids = [g for g in self.grids if g.name in found.grids]

    def _seen_from_here(self, out: Path) -> Resumed | None:
        """The trace that the first rank goes on with, on another."""
        if (out / "manifest.json").exists():
            found = Trace.open(out, verify=False)
            if found.recorded:
                self._keep_fit(found)
                return Resumed.of(found)
        elif self.step and self.rehearsing is not None:
            raise UsageError(
                f"cannot resume {out}: rank {rank()} finds no trace there, but needs the codes of the "
                "rehearsals. All ranks need to see one folder."
            )
        return None

    def _count_on(self, optimizer: torch.optim.Optimizer) -> None:
        """Before the first step of a resumed run that did not say which one it is: the optimizer may have
        been loaded with its state, and then it has counted. What is taken for it is said."""
        if not self._skip_until:
            return
        made, uncounted = _made(self.optimizers or [optimizer])
        ahead = self._loaded[AHEAD].tolist() if AHEAD in self._loaded else [0]  # older traces do not say
        done = self.step = max(0, made + int(ahead[0])) if ahead else 0
        if rank():
            return
        doubt = ""
        if made and not ahead:
            doubt = "the steps of this trace are not those that its optimizer had counted"
        elif uncounted and not done:
            doubt = "the optimizer was loaded with a state that does not say how many steps it has made"
        tell(
            f"halfulp: {self.out or 'the trace'} holds steps up to {self._skip_until}; the first one of this "
            f"process is taken for step {done + 1}"
            + (", as the optimizer has counted." if done else ".")
            + (f" But {doubt}: if it goes on from a checkpoint, say so with {FIRST}." if doubt else "")
        )
        missing = (self._last_held() if self.rehearsing is None else self.rehearsing.begun) + 1
        if missing <= done:
            self._written(self._refuse_gap, missing)

    def _hold_count(self) -> None:
        """Keep how far the steps are ahead of what was counted, if that is as it was."""
        if self._first is not None:
            now = [self.step - _made(self.optimizers or [self._first])[0]]
            same = AHEAD not in self._loaded or self._loaded[AHEAD].tolist() == now
            self._loaded[AHEAD] = torch.tensor(now if same else [], dtype=torch.int64, device="cpu")

    def _refuse_gap(self, missing: int) -> None:
        raise UsageError(
            f"{self.out or 'this memory'} ends at step {missing - 1}, but this run goes on after step "
            f"{self.step}: step {missing} would be missing. Resume from an earlier checkpoint, or say which "
            f"step the first one is with {FIRST}."
        )

    def _last_held(self) -> int:
        """The last step of which nothing is missing: those between two that are due are not recorded."""
        return -(-self._skip_until // self.every) * self.every

    def _take_up(self) -> None:
        """Go on where a recording ended."""
        begun = self._resumed if self._writer is None else self._writer
        if begun is None or not (begun.count or (self._resumed is not None and self._resumed.cut)):
            return
        self._skip_until = begun.last_step
        self._loaded = begun.load_state()
        self._touched = told(self._loaded)[0] or self._skip_until
        self.attributed.take_up(self._loaded)
        options = begun.manifest["options"]
        self.never_moved, self.expected = options["never_moved"], options["expected_never_moved"]
        missing = self._last_held() + 1
        if self.rehearsing is not None and begun.count:
            missing = self.rehearsing.begin_at(self._loaded) + 1
        if missing <= self.step:
            if self._writer is not None:
                self._writer.close()  # this audit will not write: another may
            self._refuse_gap(missing)


def _made(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[int, bool]:
    """The most steps that one has made, as far as they say so; and whether one has a state that does not."""
    counted: list[Any] = []
    for optimizer in optimizers:
        if isinstance(optimizer, WriteBack):
            counted.append(optimizer.steps)
        else:
            counted += [s.get("step") for s in optimizer.state.values() if isinstance(s, dict)]
    plain = [n.item() if isinstance(n, torch.Tensor) and n.numel() == 1 else n for n in counted]
    numbers = [int(n) for n in plain if isinstance(n, int | float) and math.isfinite(n)]
    return max(numbers, default=0), len(numbers) < len(counted)

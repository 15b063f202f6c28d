"""Run a user's script once for a pilot, in a process of its own: ``python -m halfulp.pilots.child``.

The run is the reference, audited as by ``halfulp audit`` with every format rehearsed; its twin, on smaller
batches; the twin from slightly different weights; or the twin with its weights stored in a format. To store
them, every optimizer that the script makes is noted, and before the first forward of the model that it
trains, its ``step`` is replaced by that of a write-back. The script needs no change.

A twin of a script that draws its batches from a ``torch.utils.data.DataLoader`` makes as many updates, on the
first sequences of the same batches in the same order, whatever the script's arguments are.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import MethodType
from typing import Any, Self

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from halfulp import files
from halfulp.audit.rehearsal.specs import Rehearse
from halfulp.audit.script.own_evaluation import OwnEvaluation
from halfulp.audit.script.runner import run_script
from halfulp.audit.session import Audit
from halfulp.errors import HalfulpError, UsageError
from halfulp.pilots.rungs import Clock, first, nudge, size
from halfulp.text import plain, tell
from halfulp.trace import Memory, Trace
from halfulp.trace.recorded import Recorded
from halfulp.writeback.optimizer import WriteBack

EVERY = 10
"""Steps whose counts are recorded; rehearsals follow every step."""
Take = Callable[[torch.optim.Optimizer, torch.nn.Module | None], None]


class OnTheWay:
    """Call ``take`` once for every optimizer, before the first forward of the model that it trains."""

    def __init__(self, take: Take) -> None:
        self.take, self.waiting = take, list[torch.optim.Optimizer]()
        self._init = torch.optim.Optimizer.__init__

    def __enter__(self) -> Self:
        plain_init, waiting = self._init, self.waiting

        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            plain_init(optimizer, *args, **kwargs)
            if not isinstance(optimizer, WriteBack):
                waiting.append(optimizer)

        torch.optim.Optimizer.__init__ = init  # type: ignore[assignment, method-assign]  # put back on exit
        self._handles = [
            register_module_forward_pre_hook(lambda module, _: self._forward(module)),
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._step(optimizer)),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        torch.optim.Optimizer.__init__ = self._init  # type: ignore[method-assign]  # what was there
        for handle in self._handles:
            handle.remove()

    def _forward(self, module: torch.nn.Module) -> None:
        if not self.waiting:
            return
        parameters = set(module.parameters())
        for optimizer in list(self.waiting):
            trained = {p for group in optimizer.param_groups for p in group["params"]}
            if trained & parameters:
                self.waiting.remove(optimizer)
                self.take(optimizer, module if trained <= parameters else None)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self.waiting:
            raise UsageError(
                f"this {type(optimizer).__name__} steps weights that no forward of a module has used, "
                "so they could not be put on a grid first. Write the training as a run, and use hu.Pilot."
            )


def store(spec: str, seed: int) -> Take:
    """Return a function that stores an optimizer's weights in a format from now on."""
    rehearsal = Rehearse([spec]).each[0]

    def take(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
        inside, inner = False, optimizer.step
        wrapped = WriteBack(
            optimizer, rehearsal.grid, rehearsal.policy, model=model, seed=seed, storage="container"
        )

        def step(_: torch.optim.Optimizer, closure: Any = None) -> Any:
            nonlocal inside
            if inside:  # the write-back's own call of it
                return inner() if closure is None else inner(closure)
            inside = True
            try:
                return wrapped.step(closure)
            finally:
                inside = False

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # for its life

    return take


def beside(seed: int) -> Take:
    """Return a function that changes an optimizer's weights by a hair."""

    def take(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
        named = {} if model is None else {p: name for name, p in model.named_parameters()}
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        nudge({named.get(p, f"{i}"): p for i, p in enumerate(weights)}, seed)

    return take


def run(job: dict[str, Any]) -> int:
    """Run the script as requested, write its results, and return its exit code."""
    rehearse = Rehearse(job["formats"])
    own = OwnEvaluation.of(job["evaluate"])
    own.bounds = ("point", "upper") if job["trace"] else ("upper",)
    own.most, own.at = job["most"], job["at"]
    folder = None if job["trace"] is None else Path(job["trace"])
    out = Memory() if folder is None else folder
    single = job["stored"] is not None or job["nudged"]
    audit = Audit(
        None, rehearse.each[0].grid, out=out, every=EVERY, seed=job["seed"],
        rehearse=None if single else rehearse,
    )  # fmt: skip
    clock = Clock(lambda: own.forked_seconds)
    with ExitStack() as stack:
        if single:
            take = beside(job["seed"]) if job["nudged"] else store(job["stored"], job["seed"])
            stack.enter_context(OnTheWay(take))
        limit = Limit(clock, math.inf if job["seconds"] is None else job["seconds"], job["steps"])
        stack.callback(register_optimizer_step_pre_hook(limit).remove)
        batches = stack.enter_context(TrainingBatches(job["part"], lambda: own.inside))
        script = None if job["script"] is None else Path(job["script"])
        last = own.until_the_end()
        code = run_script(script, job["arguments"], audit, lambda: None, job["module"], own, last)
    results: dict[str, Any] = {
        "seconds": clock.seconds,
        "beside": clock.busy(audit.seconds) + own.again_seconds,
        "code": code,
        "step": audit.step,
        "whole": limit.whole,
        "batch": batches.largest,
        "cut": batches.cut,
    }
    if code == 0 and audit.step and not limit.reached:
        folder = audit.out  # numbered, where an interrupted pilot left one
        results["trace"] = None if folder is None else str(folder)
        trace = out.trace if isinstance(out, Memory) else Trace.open(folder or out)
        results |= _shown(trace, rehearse.names)
    files.put(Path(job["result"]), json.dumps(results).encode())
    return code


class TrainingBatches:
    """Count training batches while it is entered, and cut those of a twin to their first sequences.

    Batches are left whole inside the script's own evaluation and wherever gradients are off.

    Args:
        part: How many sequences of each are kept; None for all.
        evaluating: Whether the script evaluates just now.
    """

    def __init__(self, part: int | None, evaluating: Callable[[], bool]) -> None:
        self.part, self.evaluating = part, evaluating
        self.largest, self.cut = 0, 0
        """Sequences of the largest batch, and how many batches were cut."""
        self._iter = DataLoader.__iter__

    def __enter__(self) -> Self:
        plain = self._iter

        def batches(loader: DataLoader[Any]) -> Iterator[Any]:
            # What begins to iterate draws random numbers: here that is now, and in a generator later.
            return (self._seen(loader, batch) for batch in plain(loader))

        DataLoader.__iter__ = batches  # type: ignore[assignment, method-assign]  # put back on exit
        return self

    def __exit__(self, *_: object) -> None:
        DataLoader.__iter__ = self._iter  # type: ignore[method-assign]  # what was there

    def _seen(self, loader: DataLoader[Any], batch: Any) -> Any:
        if self.evaluating() or not torch.is_grad_enabled() or loader.batch_sampler is None:
            return batch
        try:
            count = size(batch)
        except UsageError:
            return batch
        if loader.batch_size is not None and count > loader.batch_size:
            return batch  # its first dimension is something else
        self.largest = max(self.largest, count)
        if self.part is None or count <= self.part:
            return batch
        self.cut += 1
        return first(batch, self.part)


class Limit:
    """End a run before a step once it is clear that it takes more processor time than the budget pays for.

    The first steps are enough to know: a twin that would take most of the run ends after a dozen of them.
    """

    WARM, TOLD = 2, 12
    """Steps after which timing begins, and after which the time of the rest is predicted."""

    def __init__(self, clock: Clock, seconds: float, steps: int) -> None:
        self.clock, self.seconds, self.steps = clock, seconds, steps
        self.reached, self.whole = False, 0.0
        self._made, self._warm = 0, 0.0

    def __call__(self, *_: object) -> None:
        """End the child where its time is used up, or will be."""
        now = self.clock.seconds
        self._made += 1
        if self._made == self.WARM:
            self._warm = now
        if self._made > self.WARM:
            ahead = max(0, self.steps - self._made + 1)
            self.whole = now + ahead * (now - self._warm) / (self._made - self.WARM)
        if now > self.seconds or (self._made == self.TOLD and self.whole > self.seconds):
            self.reached = True
            raise SystemExit(0)


def _shown(trace: Recorded, specs: list[str]) -> dict[str, Any]:
    """Return the losses of a finished run by step: its own, and those of its rehearsals."""
    own = trace.real_losses()
    losses = [x for x in trace.scan("run", "step", "loss").sort("step")["loss"].tolist() if x == x]
    as_if: dict[str, dict[str, dict[str, float]]] = {}
    for spec in specs if trace.rehearsals else ():
        for step, bound, loss, _ in trace.forecast(spec).compared().rows():
            as_if.setdefault(str(step), {}).setdefault(spec, {})[bound] = loss
    rehearsed = [t["numel"] for t in trace.tensors if t.get("rehearsed")]
    return {
        "real": {str(step): loss for step, loss in own.items()}, "as_if": as_if, "weights": sum(rehearsed),
        "start": losses[0] if losses else None, "dtypes": sorted({t["dtype"] for t in trace.tensors}),
    }  # fmt: skip


def main() -> None:
    """Run as a process."""
    try:
        code = run(json.loads(sys.argv[1]))
    except HalfulpError as error:
        tell(plain(f"halfulp: {error}"))
        code = error.exit_code
    sys.exit(128 - code if code < 0 else code)


if __name__ == "__main__":
    main()

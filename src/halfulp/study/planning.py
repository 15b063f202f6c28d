"""Estimate what a study would take before it costs anything: cells, updates, bytes, hours.

Hours on this machine are measured: the first cell of every stage that can run by itself is started in a
process of its own, for a few of the steps that it reports (`Running.progress`), and stopped. A cell that
reads an earlier stage cannot be started this way; it is assumed to be as fast as those that were. Hours on a
GPU that is not here come from a table, and the plan says where each number comes from. Nothing is sealed or
kept.

A data set that is not here is replaced by a file of the same kind with small numbers, which takes as long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from halfulp import canonical, data, plugins
from halfulp.errors import HalfulpError, UsageError
from halfulp.study import loading, provenance
from halfulp.study.declaration import Protocol
from halfulp.study.executor import default_workers, gpu_count, thread_variables
from halfulp.study.protocol import Config, Json, Outcomes, SealedStage
from halfulp.study.worker import limit_threads, settle_gpus
from halfulp.text import count

TRIED = 4
"""Cells of a stage that are started, at most, until one can be measured."""
CORE = 5e10
"""Operations a second that a core of a CPU is thought to do, where nothing is measured."""
LONG = 24.0
"""Hours on a CPU from which on a run at paper scale is asked about."""
MOST_SECONDS = 1_000_000
"""The longest time limit of a measurement; the system cannot wait for much longer at once."""
STAND_IN_BYTES = 4 << 20


class NotAloneError(HalfulpError):
    """Raised when a cell that is measured reads a record of an earlier stage."""


class Enough(BaseException):
    """Raised when a cell has been measured. Not an Exception, so that cells do not catch it."""


@dataclass(frozen=True)
class Measured:
    """The cost of a few steps of a cell: seconds to the first, seconds per step after it, steps, bytes."""

    first: float
    step: float
    steps: float
    memory: int

    @property
    def seconds(self) -> float:
        """The seconds of the whole cell, without evaluations after the first."""
        return self.first + self.step * max(self.steps - 1, 0)


@dataclass(frozen=True)
class StagePlan:
    """The plan of a stage: its cells, their declared cost, and the measured cost of one of them."""

    stage: SealedStage
    updates: int
    operations: float
    checkpoint: int
    measured: Measured | None
    why: str = ""
    """Why nothing was measured."""


# ---- the plan -----------------------------------------------------------------------------------------


def planned(source: loading.Source, scale: str, *, steps: int, seconds: float) -> list[StagePlan]:
    """Plan every stage of a study at a scale.

    Args:
        source: The study, as `load` returns it.
        scale: The scale to plan.
        steps: The number of steps to measure of the first cell of a stage; 0 measures nothing.
        seconds: The time limit of a measurement.

    Returns:
        One plan per stage, in order.

    Raises:
        UsageError: If the time limit is not a number of seconds up to `MOST_SECONDS`.
    """
    if not 0 < seconds <= MOST_SECONDS:
        raise UsageError(f"a measurement may take up to {MOST_SECONDS:,} seconds, not {seconds}.")
    protocol = Protocol.of(source.study, scale)
    plans = []
    for stage in protocol.stages:
        efforts = [_effort(config) for config in stage.cells.values()]
        measured, why = _tried(source, protocol, stage, steps, seconds) if steps else (None, "")
        plans.append(
            StagePlan(
                stage, sum(e[0] for e in efforts), sum(e[1] for e in efforts), max(e[2] for e in efforts),
                measured, why,
            )
        )  # fmt: skip
    return plans


def _effort(config: Config) -> tuple[int, float, int]:
    """Return updates, operations and bytes of a checkpoint, as far as a plug-in knows the cell."""
    for plugin in plugins.installed():
        if hasattr(plugin, "effort"):
            cost = plugin.effort(config)
            return cost.updates, cost.operations, cost.checkpoint
    return 0, 0.0, 0


def table() -> dict[str, tuple[float, str]]:
    """Return the operations per second of GPUs by name, and where each number comes from."""
    gpus: dict[str, tuple[float, str]] = {}
    for plugin in plugins.installed():
        gpus |= plugin.gpus() if hasattr(plugin, "gpus") else {}
    return gpus


def in_words(source: loading.Source, scale: str, plans: list[StagePlan], device: str) -> Iterator[str]:
    """Yield a plan in words, line by line."""
    protocol = Protocol.of(source.study, scale)
    known = table()
    if device and device not in known:
        raise UsageError(
            f"There is no GPU {device[:40]!a} in the table; known: {', '.join(known) or 'none'}."
        )
    yield f"{protocol.study} ({protocol.scale}): {count(sum(len(p.stage.cells) for p in plans), 'cell')}"
    pace = _pace(plans)
    hours = 0.0
    for plan in plans:
        updates = f", {plan.updates:,} updates" if plan.updates else ""
        taken = _seconds(plan, pace)
        hours += (taken or 0.0) / 3600
        how = f", {_span(taken)} here" if taken is not None else f" ({plan.why})" if plan.why else ""
        yield f"  {plan.stage.name}: {count(len(plan.stage.cells), 'cell')}{updates}{how}"
        if plan.measured is not None:
            m = plan.measured
            steps = f"{m.first:.3g} s to the first of {m.steps:,.0f} steps, {m.step:.3g} s a step"
            took = steps if m.steps > 1 else f"{m.first:.3g} s for a cell, which reports no steps"
            yield f"    measured: {took}, {m.memory / 1e9:.2g} GB of memory"
    workers = (gpu_count() if protocol.on_gpu else 0) or default_workers(protocol.threads)
    if any(plan.measured for plan in plans):
        alone = f"here: {_span(hours * 3600)} one cell after the other"
        yield f"{alone}; {count(workers, 'worker')} share the machine"
    operations = sum(plan.operations for plan in plans)
    if device and not operations:
        yield f"{device}: not known, because these cells do not say how much they compute"
    elif device:
        rate, where = known[device]
        yield f"{device}: {_span(operations / rate)} ({operations:.2g} operations at {rate:.2g} a second)"
        yield f"  where the number comes from: {where}"
    checkpoint = max(plan.checkpoint for plan in plans)
    if checkpoint:
        yield f"disk: {2 * checkpoint * workers / 1e9:.2g} GB while it runs, for checkpoints"
    for name in protocol.data:
        state = "here" if _is_here(source, name) else "NOT here" + (" (a stand-in was used)" if pace else "")
        yield f"data: {name}, {state}"


def _pace(plans: list[StagePlan]) -> float:
    """Return the seconds per operation of the slowest stage that was measured."""
    each = [
        p.measured.seconds * len(p.stage.cells) / p.operations for p in plans if p.measured and p.operations
    ]
    return max(each, default=0.0)


def _seconds(plan: StagePlan, pace: float) -> float | None:
    if plan.measured is not None:
        return plan.measured.seconds * len(plan.stage.cells)
    return plan.operations * pace if plan.operations and pace else None


def _span(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} seconds"


def refuse_unasked(source: loading.Source, scale: str) -> None:
    """Refuse to begin a study of paper scale that would take days on a CPU, where there is no GPU."""
    if scale != "paper" or gpu_count():
        return
    cells = (config for stage in Protocol.of(source.study, scale).stages for config in stage.cells.values())
    hours = sum(_effort(config)[1] for config in cells) / (CORE * default_workers(1)) / 3600
    if hours > LONG:
        name = source.registered or source.name
        raise UsageError(
            f"{source.study.name} at scale paper takes about {_span(hours * 3600)} on this machine, which "
            f"has no GPU. `halfulp study plan {name} --scale paper` measures it; --yes runs it all the same."
        )


# ---- measuring ----------------------------------------------------------------------------------------


def _tried(
    source: loading.Source, protocol: Protocol, stage: SealedStage, steps: int, seconds: float
) -> tuple[Measured | None, str]:
    """Measure the first cell of a stage that can run by itself; or say why there is none."""
    request: dict[str, Json] = {
        "file": str(source.folder / source.name) if source.folder else source.registered,
        "attribute": source.attribute, "scale": protocol.scale, "stage": stage.name,
        "cells": list(stage.cells)[:TRIED], "steps": steps, "threads": protocol.threads,
    }  # fmt: skip
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "halfulp.study.planning"], input=json.dumps(request), text=True,
            capture_output=True, timeout=seconds, env=os.environ | thread_variables(protocol.threads),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"no step of cell {request['cells'][0]} was done within {seconds:g} seconds"
    if done.returncode:
        raise HalfulpError(f"A cell of stage {stage.name} failed: {done.stderr.strip()[-800:]}")
    answer = canonical.parse(done.stdout.splitlines()[-1])
    return (None, answer["why"]) if "why" in answer else (Measured(**answer), "")


class Trial:
    """The :class:`~halfulp.study.protocol.Running` of a cell that is measured: it keeps nothing."""

    def __init__(self, name: str, config: Config, source: loading.Source, steps: int, scratch: Path) -> None:
        self.name, self.config = name, config
        self._source, self._steps, self._scratch = source, steps, scratch
        self.began = time.perf_counter()
        self.seen: list[tuple[float, float, float]] = []
        """When, how far, of how much."""

    def read(self, stage: str, cell: str) -> NoReturn:
        """Refuse: a trial has no other cells."""
        raise NotAloneError(f"it reads stage {stage}")

    def read_bytes(self, stage: str, cell: str, name: str) -> NoReturn:
        """Refuse: a trial has no other cells."""
        self.read(stage, cell)

    def evidence(self, name: str) -> Outcomes:
        """Refuse: a trial has no evidence."""
        raise NotAloneError(f"it reads evidence {name}")

    def data(self, name: str) -> Path:
        """Return the data set, or bytes that stand in for one that is not here."""
        if _is_here(self._source, name):
            return provenance.locate(name, self._source.folder)
        path = self._scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes((i % 64, 0)[i % 2] for i in range(1 << 12)) * (STAND_IN_BYTES >> 12))
        return path

    def attach(self, name: str, content: bytes) -> None:
        """Ignore an attachment."""

    def save(self, state: bytes) -> None:
        """Ignore a checkpoint."""

    def load(self) -> bytes | None:
        """Return None: a trial begins afresh."""
        return None

    def progress(self, done: float, total: float) -> None:
        """Note the progress; end the trial after enough of it."""
        self.seen.append((time.perf_counter(), float(done), float(total)))
        if len(self.seen) > self._steps:
            raise Enough

    def measured(self) -> dict[str, float]:
        """Return what was seen, as `Measured` takes it."""
        now, peak = time.perf_counter(), _peak()
        if not self.seen:  # it was over before it said anything
            return {"first": now - self.began, "step": 0.0, "steps": 1.0, "memory": peak}
        (first, at, total), (last, end, _) = self.seen[0], self.seen[-1]
        step = (last - first) / (end - at) if end > at else (first - self.began) / max(at, 1.0)
        return {"first": first - self.began - step * (at - 1), "step": step, "steps": total, "memory": peak}


def _peak() -> int:
    """Return the most memory that this process has held, in bytes; 0 where that is unknown (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _is_here(source: loading.Source, name: str) -> bool:
    if name in data.DATASETS:
        return data.located(data.dataset(name)) is not None
    return source.folder is not None and (source.folder / name).is_file()


def trial(request: Mapping[str, Any]) -> dict[str, Json]:
    """Measure the first of some cells that can run by itself, in this process; or say why there is none."""
    named = f"{request['file']}:{request['attribute']}" if request["attribute"] else request["file"]
    source = loading.load(named)
    stage = Protocol.of(source.study, request["scale"]).stage(request["stage"])
    limit_threads(request["threads"])
    settle_gpus()
    why = ""
    with tempfile.TemporaryDirectory(prefix="halfulp-") as scratch:
        for cell in request["cells"]:
            running = Trial(cell, stage.cells[cell], source, request["steps"], Path(scratch))
            try:
                source.study.stage(stage.name).run(running)
            except NotAloneError as error:
                why = str(error)
                continue
            except Enough:
                pass
            return running.measured()
    return {"why": why}


if __name__ == "__main__":
    print(json.dumps(trial(json.load(sys.stdin))))

"""Define what the studies of cost share: the processes that are timed, and what is computed of their rows.

A systems stage has one cell per repetition, and a cell has one fresh process per arm
(`arms.repetitions`). An arm is compared with another *within* a repetition, and the median is
taken over these pairs; the ratio of two medians stands beside it, because it is what one would report without
thinking, and it can have the opposite sign.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from halfulp.paper.arms import Arm, Bundle
from halfulp.paper.arms.repetitions import repetition, repetitions
from halfulp.paper.arms.run import run
from halfulp.paper.studies.declared import declared
from halfulp.study.protocol import Cell, Config, Estimand, Records, Stage, Study, Table, Values

TRACE, FLOAT32 = "trace", "fp32"
INDEX_BYTES = 4
"""Of the index of a tile that has a master."""
REPETITIONS = {"smoke": (2, 2, 1), "small": (3, 15, 3), "medium": (9, 15, 3), "paper": (3, 100, 10)}
"""Repetitions, timed updates and updates before them, by scale."""


def timed(runs: Bundle, names: Sequence[str], count: int = 0) -> Callable[[Config], Iterator[Cell]]:
    """Cells that time some arms of a bundle's first target.

    ``trace`` is the source that sums scores, ``fp32`` the same run without. ``count``: repetitions, where the
    scale's own are too few.
    """

    def cells(config: Config) -> Iterator[Cell]:
        unit = next(iter(runs.units))
        known = {cell.name: Arm.from_json(cell.config) for cell in runs.outcomes(config)}
        (source, *_) = (Arm.from_json(cell.config) for cell in runs.source(config))
        trace = replace(source, make=None, rehearse=(), attribute=None)
        own = {TRACE: trace, FLOAT32: replace(trace, audit=(), scores=None)}
        arms = {name: own.get(name) or known[runs.cell(unit, name)] for name in names}
        many, updates, warm = REPETITIONS[config["scale"]]
        return repetitions(arms, max(count, many) if count else many, updates=updates, warm=warm)

    return cells


def configs(runs: Bundle) -> dict[str, Config]:
    """Return a bundle's scales, each with its name, which determines how long is timed."""
    return {scale: {**config, "scale": scale} for scale, config in runs.configs.items()}


def costs_stage(runs: Bundle, names: Sequence[str], count: int = 0) -> Stage:
    """Return the stage that times some arms of a bundle."""
    return Stage(
        name="costs", kind="outcome", cells=timed(runs, names, count), run=repetition, reads=("source",),
        clocks=True,
    )  # fmt: skip


# ---- what is computed -------------------------------------------------------------------------------------


def column(records: Records, arm: str, what: str) -> list[float]:
    """Return a quantity that was measured of an arm, by repetition; ``throughput`` is updates per second.

    Seconds of a CPU are the process's own: others may use the machine.
    """
    rows = [next(row for row in cell["measured"] if row["arm"] == arm) for cell in records["costs"].values()]
    if what == "throughput":
        return [1 / seconds for seconds in column(records, arm, "seconds")]
    if what == "seconds":  # of a GPU the wall; of processors that others may use, the process's own
        used = [row["window_seconds"] if row.get("gpu", True) else row["processor_seconds"] for row in rows]
        return [seconds / row["updates"] for seconds, row in zip(used, rows, strict=True)]
    if what == "peak_bytes":  # counted where it was; the resident set of older records is coarse
        return [float(row.get("counted_bytes", row[what])) for row in rows]
    return [float(row[what]) for row in rows]


def ratio(records: Records, arm: str, over: str, what: str) -> Values:
    """One arm over another, less one, by repetition."""
    pairs = zip(records["costs"], column(records, arm, what), column(records, over, what), strict=True)
    return {name: a / b - 1 for name, a, b in pairs}


def paired(records: Records, arm: str, over: str, what: str) -> Values:
    """The median of one arm over another within repetitions, less one."""
    pairs = zip(column(records, arm, what), column(records, over, what), strict=True)
    return {"median": statistics.median(a / b for a, b in pairs) - 1}


def unpaired(records: Records, arm: str, over: str, what: str) -> Values:
    """The ratio of the medians of two arms, less one: it mixes repetitions."""
    ours, theirs = (statistics.median(column(records, name, what)) for name in (arm, over))
    return {"median": ours / theirs - 1}


def more(records: Records, arm: str, over: str, what: str) -> Values:
    """The median of one arm less another within repetitions."""
    pairs = zip(column(records, arm, what), column(records, over, what), strict=True)
    return {"median": statistics.median(a - b for a, b in pairs)}


def unaccounted(records: Records, arm: str, mask: str) -> Values:
    """Bytes that a packed policy keeps, less its payload and an index a tile: nothing, if all is stated."""
    masks = next(iter(records["source"].values()))["masks"]
    stated = masks["budget"][mask] + INDEX_BYTES * sum(masks["tiles"][mask].values())
    return {
        name: measured - stated
        for name, measured in zip(records["costs"], column(records, arm, "policy_bytes"), strict=True)
    }


def contrast(arm: str, over: str) -> tuple[Estimand, ...]:
    """Throughput by repetition, paired and unpaired; accounted wall; peak and persistent bytes."""
    rows: tuple[tuple[str, str, Callable[..., Values], str], ...] = (
        ("throughput", f"throughput of {arm} over {over}, less one", ratio, "throughput"),
        ("paired", "its median: each repetition against its own partner", paired, "throughput"),
        ("unpaired", "the ratio of the arms' medians, which mixes repetitions", unpaired, "throughput"),
        ("wall", "accounted wall, seconds more", more, "wall_seconds"),
        ("peak", "bytes more at the peak", more, "peak_bytes"),
        ("storage", "bytes more that persist", more, "persistent_bytes"),
    )
    return tuple(
        Estimand(name=f"{name}-{arm}-{over}", what=says, compute=compute,
                 args={"arm": arm, "over": over, "what": column})
        for name, says, compute, column in rows
    )  # fmt: skip


def measured(records: Records) -> Table:
    """Tabulate every process, in the order in which they ran."""
    keys = ("wall_seconds", "window_seconds", "updates", "peak_bytes", "persistent_bytes", "policy_bytes")
    rows = [
        (name, row["arm"], *(row[key] for key in keys))
        for name, cell in records["costs"].items()
        for row in cell["measured"]
    ]
    return Table(
        columns=("repetition", "arm", *(key.replace("_", " ") for key in keys)), rows=rows,
        caption="A row a process. The window is timed after some updates that are not; the wall is all.",
    )  # fmt: skip


def study(module: str, runs: Bundle, names: Sequence[str], *, count: int = 0, **given: Any) -> Study:
    """Return the study of a module: a source that makes the mask, then processes that are timed."""
    source = Stage(name="source", kind="reference", cells=runs.source, run=run)
    return declared(
        module, scales=configs(runs), stages=(source, costs_stage(runs, names, count)), scale_data=runs.data,
        tables={"processes": measured}, **given,
    )  # fmt: skip

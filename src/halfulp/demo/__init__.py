"""The whole story in about two minutes on a laptop's CPU, without a download.

A small decoder learns the text that ships with every Python (``pydoc_data.topics``), once, in fp32. That one
run is audited on seven grids, and six runs that store their weights otherwise are rehearsed beside it. So
there is a forecast of what would be lost, and of what it would cost in loss on text that was held out. One of
the six has a twin as well: it and the fp32 run really train on one sequence of every batch. Four of those
runs then really follow, from the same start and on the same data, one for each way of writing back: nearest,
stochastic, ECO and full masters. At the end forecast, twin and outcome stand side by side, on the terminal in
a few lines and on a page with everything.

What it shows is one seed of one small model. The losses say what these runs did, not what a policy is worth
elsewhere.

Everything is durable as it goes: an interrupt leaves the traces so far and a page of them.
"""

from __future__ import annotations

import os
import sys
import time
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from halfulp.audit.session import Audit
from halfulp.demo.model import LetterModel, LetterTraining, Size, Tokens, adamw
from halfulp.errors import DiskError, UsageError
from halfulp.pilots import rungs
from halfulp.pilots.estimates import Estimate, Seen, Twin, estimate
from halfulp.report import costs, words
from halfulp.report.document import write
from halfulp.report.page import open_traces, page
from halfulp.report.runs import Run, arms, forecasts
from halfulp.text import is_terminal, percent, time_left
from halfulp.trace import Trace, free_folder
from halfulp.verdicts import details
from halfulp.verdicts.intervals import COVERAGE, shipped
from halfulp.verdicts.loss_costs import WHAT, Cost, between, nats, spread
from halfulp.writeback import WriteBack

GRIDS = ("fp16", "bf16", "int8/row", "e4m3@128", "e5m2", "mxfp8_e4m3", "nvfp4")
GRID = "e4m3@128"
ARMS = {"nearest": "rne", "stochastic": "sr", "eco": "eco", "masters": "master"}
REHEARSED = ("bf16", GRID, "e5m2", f"{GRID}:sr", f"{GRID}:eco", f"{GRID}:master")
EVALUATIONS = 4
INTERRUPTED = 130
LINE_SECONDS = 15.0
"""Seconds between lines that say how far a run is, where there is no terminal."""


FULL = Size(layers=4, width=128, context=64, batch=12, updates=240)
QUICK = Size(layers=2, width=96, context=64, batch=8, updates=120)


def corpus() -> tuple[Tokens, int]:
    """Return the text as tokens, one a character, and how many different ones there are."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UsageError(
            "the demo trains on the help texts of Python (pydoc_data.topics), which this Python came "
            "without. Use one from python.org, conda or uv, or install your system's full python3 package."
        ) from None
    text = "\n".join(topics[key] for key in sorted(topics))
    letters = sorted(set(text))
    codes = {letter: i for i, letter in enumerate(letters)}
    return np.array([codes[letter] for letter in text], dtype=np.uint16), len(letters)


def run(console: Console, *, size: Size = FULL, out: Path | None = None, browse: bool = True) -> int:
    """Run it; the exit code."""
    folder = free_folder(Path("runs") / "demo") if out is None else out
    story = Story(console, folder, size)
    begun, stopped = time.monotonic(), False
    try:
        with one_thread(), story.progress:
            story.tell()
    except KeyboardInterrupt:
        stopped = True
        console.print("\nStopped. What is there so far:", highlight=False)
    where = story.finish()
    if where is None:
        console.print("No step was taken, so there is nothing to show.", highlight=False)
        return INTERRUPTED
    took = time.monotonic() - begun
    shown = browse and not stopped and _screen() and webbrowser.open(where.resolve().as_uri())
    opened = ", opened in your browser" if shown else ""
    console.print(f"\nThe page: {where}{opened} ({took:.0f} s)", highlight=False, soft_wrap=True)
    return INTERRUPTED if stopped else 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread inside a with block.

    For so small a model it is as fast, much faster on a busy machine, and it fixes the order of sums.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _screen() -> bool:
    """Return True if a page can be shown to the user: there is a graphical display and a terminal."""
    graphical = sys.platform in ("darwin", "win32") or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    return graphical and is_terminal(sys.stdout)


def _check_written(audit: Audit) -> None:
    """End where a trace could not be written: a training goes on without one, a demo is nothing else."""
    if audit.trouble is not None:
        raise DiskError(
            f"the demo ends at step {audit.step}, because its trace {audit.out} could not be written (see "
            "above). Free some room, or choose another folder (--out); then run it again."
        )


class Story:
    """One telling: the reference, its forecast, the arms, the verdict."""

    def __init__(self, console: Console, folder: Path, size: Size) -> None:
        self.console, self.folder, self.size = console, folder, size
        self.tokens, self.vocabulary = corpus()
        kept = len(self.tokens) // 10
        self.tokens, self.held_out = self.tokens[:-kept], self.tokens[-kept:]
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
                   TimeRemainingColumn())  # fmt: skip
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.traces: list[Path] = []
        self.alone = 0.0
        """Processor time of the reference, without what was audited beside it."""
        self.free: Cost | None = None
        """What nearest rounding would cost by the reference alone, and below it by a twin."""
        self.twin: Estimate | None = None
        self.paid = 0.0
        """Processor time of the twin, as a share of the reference's."""

    def tell(self) -> None:
        """Print everything but the page."""
        weights = sum(p.numel() for p in LetterModel(self.size, self.vocabulary).parameters())
        self._say(
            f"A decoder of {weights:,} weights learns {len(self.tokens):,} letters of Python's own help for "
            f"{self.size.updates} steps in fp32, audited on {len(GRIDS)} grids, with {len(REHEARSED)} other "
            f"runs rehearsed beside it; then the same run four times with weights really stored on {GRID}."
        )
        whole = self.progress.add_task("", total=self.size.updates * (1 + len(ARMS)))
        self._train("reference", None, GRIDS, whole)
        self._forecast()
        self._twin()
        for name, policy in ARMS.items():
            self._train(name, policy, (GRID,), whole)

    def _train(self, name: str, policy: str | None, grids: tuple[str, ...], whole: TaskID) -> None:
        self.progress.update(whole, description=f"{name}: compiling kernels, the first time only")
        lines = not self.console.is_terminal
        runs = f"run {len(self.traces) + 1} of {1 + len(ARMS)}"
        if lines:
            self._say(f"{name} ({runs}): {self.size.updates} steps")
        training = self._run()
        if policy is not None:
            training.optimizer = WriteBack(training.optimizer, GRID, policy, model=training.model, seed=0)
        out, begun, clock = self.folder / name, time.monotonic(), rungs.Clock()
        said = begun
        self.traces.append(out)
        rehearse = REHEARSED if policy is None else None
        settings: dict[str, Any] = {"model": training.model, "out": out, "describe": {"name": name}}
        with Audit(training.optimizer, grids, rehearse=rehearse, **settings) as audit:
            while not training.done:
                update = training.update + 1
                loss = training.step(training.batch(update), update)
                audit.log(loss, step=training.update)
                self.progress.update(whole, advance=1, description=f"{name}: loss {float(loss):.3f}")
                _check_written(audit)
                if lines and (now := time.monotonic()) - said >= LINE_SECONDS and not training.done:
                    said = now
                    left = time_left(now - begun, training.update, self.size.updates)
                    self._say(f"{name}: step {training.update}, loss {float(loss):.3f}{left} ({runs})")
                if training.update % max(1, self.size.updates // EVALUATIONS) == 0 or training.done:
                    audit.evaluate(training.evaluate)
            self.alone = self.alone or clock.seconds - clock.busy(audit.seconds)
        _check_written(audit)
        if lines:
            self._say(f"{name}: {self.size.updates} steps in {time.monotonic() - begun:.0f} s")

    def _run(self) -> LetterTraining:
        model = LetterModel(self.size, self.vocabulary)
        return LetterTraining(model, adamw(model, self.size), self.size, self.tokens, self.held_out)

    def _twin(self) -> None:
        """Forecast nearest rounding by really running it, and the reference, on a part of every batch."""
        assert self.free is not None and self.free.upper is not None and self.free.point is not None
        self._say(f"A twin: fp32 and {GRID}, nearest, really run on the first sequence of every batch ...")
        training = rungs.Factory(make=self._run, updates=self.size.updates, formats=(GRID,))
        clock = rungs.Clock()
        small = rungs.reference(training, 1)
        real = rungs.twin(training, GRID, 1)
        self.paid = clock.seconds / self.alone
        twin = Twin(
            share=1 / self.size.batch, reference=small.real, upper=small.as_if[GRID]["upper"], real=real
        )
        seen = Seen(
            start=small.start,
            reference=self.free.real,
            upper=self.free.upper,
            point=self.free.point,
            twin=twin,
        )
        self.twin = estimate(seen, shipped())
        self._say(self._twin_words())

    def _twin_words(self) -> str:
        """Say what the free rule and the twin forecast, with intervals and what they cost."""
        assert self.free is not None and self.twin is not None
        gap, low, high = self.twin.gap, self.twin.low, self.twin.high
        noisy = "" if self.twin.kind in ("twin", "raw") else " (noise rules the twin: the free rule is kept)"
        return (
            f"Nearest on {GRID} over fp32, with {COVERAGE:.0%} intervals: free, from the one run "
            f"{self.free.gap:+.3f} ({spread(self.free)}); with the twin, for {self.paid:.0%} of a run "
            f"{gap:+.3f} ({low:+.3f} to {high:+.3f}){noisy}"
        )

    def _forecast(self) -> None:
        """Print what the reference run forecasts before any other run exists."""
        (run,) = open_traces([Trace.open(self.folder / "reference")])
        title = "The forecast: updates that each grid would lose, and how much of the update would arrive"
        table = Table(
            "grid", "over the run", "at the end", "a majority", "arrives", "never moved", title=title
        )
        for finding in run.gathered.findings():
            table.add_row(
                finding.grid, percent(finding.lost), percent(finding.lost_late),
                words.lasting(finding.majority), details.arriving(finding), percent(finding.never_moved),
            )  # fmt: skip
        self.console.print(table)
        (rehearsed,) = costs.gathered([run])
        self.free = next(cost for cost in rehearsed.costs if cost.spec == GRID)
        first = rehearsed.costs[0]
        title = f"The forecast: held-out loss after {first.step} steps (fp32: {nats(first.real)})"
        table = Table("stored as", "forecast", "over fp32", "90% interval", "between", title=title)
        for cost in rehearsed.costs:
            gap = words.gap(cost.gap), spread(cost)
            table.add_row(words.spec_words(cost.spec), nats(cost.loss), *gap, between(cost))
        self.console.print(table)
        self._say(f"This is {WHAT}. None of these runs exists yet; those on {GRID} follow.")

    def finish(self) -> Path | None:
        """Return the verdict and the page of what there is; None if there is nothing."""
        done = [path for path in self.traces if (path / "manifest.json").exists() and Trace.open(path).parts]
        if not done:
            return None
        runs = open_traces([Trace.open(path) for path in done])
        for outcome in forecasts(runs):
            self._say(words.outcome_sentence(outcome))
        rehearsed = costs.gathered(runs)
        self._policies(runs, rehearsed)
        for cost in rehearsed:
            self._say(costs.met_sentence(cost) or "")
            measured = None if self.twin is None or self.free is None else cost.met(self.free)
            if measured is not None:
                gap = measured - cost.costs[0].real
                assert self.twin is not None
                missed = not self.twin.low <= gap <= self.twin.high
                outside = f" (outside the twin's interval, as {1 - COVERAGE:.0%} are)" if missed else ""
                self._say(f"{self._twin_words()}; really {gap:+.3f}{outside}.")
        return write(page(done), self.folder / "index.html")

    def _policies(self, runs: list[Run], rehearsed: Sequence[costs.Costs]) -> None:
        """Print the runs that were forecast, and their results."""
        for group in arms(runs):
            table = Table(
                "write-back", "bytes per weight", "forecast", "measured", "never moved",
                title=f"The runs on {group.grid}, and how they came out: loss on held-out text",
            )  # fmt: skip
            for run in group.members:
                cost = next((c for r in rehearsed for c in r.costs if r.run_of(c) is run), None)
                own = run.trace.real_losses()
                table.add_row(
                    run.policy_words if run.grid else "fp32 reference",
                    f"{run.bytes_per_weight:g}",
                    "-" if cost is None else nats(cost.loss),
                    nats(own[max(own)]) if own else "-",
                    percent(run.gathered.never_moved(group.grid) if run.grid else None),
                )
            self.console.print(table)

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

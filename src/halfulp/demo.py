"""The whole story in about two minutes on a laptop's CPU, without a download.

A small decoder learns the text that ships with every Python (``pydoc_data.topics``), once, in fp32. That one
run is audited on seven grids, and six runs that store their weights otherwise are rehearsed beside it. So
there is a forecast of what would be lost, and of what it would cost in loss on text that was held out. Four
of those runs then really follow, from the same start and on the same data, one for each way of writing back:
nearest, stochastic, ECO and full masters. At the end forecast and outcome stand side by side, on the terminal
in a few lines and on a page with everything.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from halfulp.audit.costs import WHAT, between, nats
from halfulp.audit.recorder import Audit
from halfulp.errors import DiskError, UsageError
from halfulp.models.decoder import Decoder, DecoderConfig
from halfulp.models.training import Recipe, Schedule, Training, adamw
from halfulp.report import costs, words
from halfulp.report.document import write
from halfulp.report.page import open_traces, page
from halfulp.report.runs import Run, arms, forecasts
from halfulp.trace import Trace, free_folder
from halfulp.writeback import WriteBack

GRIDS = ("fp16", "bf16", "int8/row", "e4m3@128", "e5m2", "mxfp8_e4m3", "nvfp4")
GRID = "e4m3@128"
ARMS = {"nearest": "rne", "stochastic": "sr", "eco": "eco", "masters": "master"}
REHEARSED = ("bf16", GRID, "e5m2", f"{GRID}:sr", f"{GRID}:eco", f"{GRID}:master")
EVALUATIONS = 4
INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of it."""

    layers: int
    width: int
    context: int
    batch: int
    updates: int
    rate: float = 1e-3


FULL = Size(layers=4, width=128, context=64, batch=12, updates=240)
QUICK = Size(layers=2, width=96, context=64, batch=8, updates=120)


def corpus() -> tuple[npt.NDArray[np.uint16], int]:
    """The text as tokens, one a character, and how many different ones there are."""
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
    """One thread is as fast for so small a model, on a busy machine much faster, and adds in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _screen() -> bool:
    """Whether somebody is there to look at a page."""
    graphical = sys.platform in ("darwin", "win32") or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    return graphical and sys.stdout.isatty()


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
        self.config = DecoderConfig(
            layers=size.layers, heads=4, width=size.width, context=size.context, vocabulary=self.vocabulary,
            hidden=4 * size.width,
        )  # fmt: skip
        schedule = Schedule(peak=size.rate, floor=size.rate / 10, warmup=0, horizon=size.updates)
        self.recipe = Recipe(
            schedule=schedule, seed=1, updates=size.updates, batch=size.batch, context=size.context,
            eval_batches=4,
        )  # fmt: skip
        kept = len(self.tokens) // 10
        self.tokens, self.held_out = self.tokens[:-kept], self.tokens[-kept:]
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
                   TimeRemainingColumn())  # fmt: skip
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.made: list[Path] = []

    def tell(self) -> None:
        """Everything but the page."""
        weights = sum(p.numel() for p in Decoder(self.config, device="meta").parameters())
        self._say(
            f"A decoder of {weights:,} weights learns {len(self.tokens):,} letters of Python's own help for "
            f"{self.size.updates} steps in fp32, audited on {len(GRIDS)} grids, with {len(REHEARSED)} other "
            f"runs rehearsed beside it; then the same run four times with weights really stored on {GRID}."
        )
        whole = self.progress.add_task("", total=self.size.updates * (1 + len(ARMS)))
        self._train("reference", None, GRIDS, whole)
        self._forecast()
        for name, policy in ARMS.items():
            self._train(name, policy, (GRID,), whole)

    def _train(self, name: str, policy: str | None, grids: tuple[str, ...], whole: TaskID) -> None:
        self.progress.update(whole, description=f"{name}: compiling kernels, the first time only")
        model = Decoder(self.config, seed=0)
        optimizer: Any = adamw(model, self.recipe)
        if policy is not None:
            optimizer = WriteBack(optimizer, GRID, policy, model=model, seed=0)
        training = Training(model, optimizer, self.tokens, self.recipe, held_out=self.held_out)
        out, begun = self.folder / name, time.monotonic()
        self.made.append(out)
        rehearse = REHEARSED if policy is None else None
        settings: dict[str, Any] = {"model": model, "out": out, "describe": {"name": name}}
        with Audit(optimizer, grids, rehearse=rehearse, **settings) as audit:
            while not training.done:
                loss = training.step()
                audit.log(loss, step=training.update)
                self.progress.update(whole, advance=1, description=f"{name}: loss {float(loss):.3f}")
                _check_written(audit)
                if training.update % max(1, self.size.updates // EVALUATIONS) == 0 or training.done:
                    audit.evaluate(training.evaluate)
        _check_written(audit)
        if not self.console.is_terminal:
            self._say(f"{name}: {self.size.updates} steps in {time.monotonic() - begun:.0f} s")

    def _forecast(self) -> None:
        """What the reference says before any other run exists."""
        (run,) = open_traces([Trace.open(self.folder / "reference")])
        title = f"The forecast: updates of {words.scope_words(run.scope)} that a grid would throw away"
        table = Table("grid", "over the run", "at the end", "a majority", "never moved", title=title)
        for found in run.gathered.findings(run.scope):
            table.add_row(
                found.grid, words.percent(found.lost), words.percent(found.lost_late),
                words.onset(run.gathered.crossing(found.grid, run.scope)), words.percent(found.never_moved),
            )  # fmt: skip
        self.console.print(table)
        (rehearsed,) = costs.gathered([run])
        first = rehearsed.found[0]
        title = f"The forecast: held-out loss after {first.step} steps (fp32: {nats(first.real)})"
        table = Table("stored as", "forecast", "over fp32", "between", title=title)
        for cost in rehearsed.found:
            table.add_row(words.spec_words(cost.spec), nats(cost.loss), words.gap(cost.gap), between(cost))
        self.console.print(table)
        self._say(f"This is {WHAT}. None of these runs exists yet; those on {GRID} follow.")

    def finish(self) -> Path | None:
        """The verdict and the page of what there is; None if there is nothing."""
        done = [path for path in self.made if (path / "manifest.json").exists() and Trace.open(path).parts]
        if not done:
            return None
        runs = open_traces([Trace.open(path) for path in done])
        for found in forecasts(runs):
            self._say(words.outcome_sentence(found))
        rehearsed = costs.gathered(runs)
        self._policies(runs, rehearsed)
        for cost in rehearsed:
            self._say(costs.met_sentence(cost) or "")
        return write(page(done), self.folder / "index.html")

    def _policies(self, runs: list[Run], rehearsed: Sequence[costs.Costs]) -> None:
        """The runs that were forecast, and how they came out."""
        for group in arms(runs):
            table = Table(
                "write-back", "bytes a weight", "forecast", "measured", "never moved",
                title=f"The runs on {group.grid}, and how they came out: loss on held-out text",
            )  # fmt: skip
            for run in group.members:
                cost = next((c for r in rehearsed for c in r.found if r.run_of(c) is run), None)
                own = run.trace.real_losses()
                table.add_row(
                    run.policy_words if run.grid else "fp32 reference",
                    f"{run.bytes_per_weight:g}",
                    "-" if cost is None else nats(cost.loss),
                    nats(own["loss"][-1]) if len(own) else "-",
                    words.percent(run.gathered.never_moved(group.grid, run.scope) if run.grid else None),
                )
            self.console.print(table)

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

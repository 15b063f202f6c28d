"""The demo, on a very small scale: the whole story, and what an interrupt leaves of it."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import halfulp as hu
from halfulp import demo, files
from halfulp.demo.model import LetterTraining
from halfulp.errors import DiskError, UsageError
from halfulp.report.page import open_traces
from halfulp.report.runs import arms, forecasts

TINY = demo.Size(layers=1, width=16, context=16, batch=2, updates=12, rate=3e-3)


def told(out: Path, size: demo.Size = TINY, *, terminal: bool = False) -> tuple[int, str]:
    said = io.StringIO()
    console = Console(file=said, width=120, force_terminal=terminal, color_system=None)
    return demo.run(console, size=size, out=out, browse=False), said.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("demo") / "demo"
    code, said = told(out)
    assert code == 0, said
    return out, said


def test_the_whole_story(finished: tuple[Path, str]) -> None:
    """One reference on all grids, four arms on one, a page, and the forecast before the outcome."""
    out, said = finished
    assert len(demo.GRIDS) >= 6
    assert hu.Trace.open(out / "reference").grids == list(demo.GRIDS)
    assert sorted(p.name for p in out.iterdir()) == sorted(["reference", *demo.ARMS, "index.html"])
    order = [
        said.index(x)
        for x in (
            "The forecast: updates",
            "A twin: fp32 and",
            "with the twin, for",
            "nearest:",
            "The forecast for e4m3@128 was",
            "; really ",
            "The page",
        )
    ]
    assert order == sorted(order)
    assert "Policies" in (out / "index.html").read_text()


def test_without_a_terminal_lines_say_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage begins with a line, and later ones say the step, the loss and an estimate of the end."""
    monkeypatch.setattr(demo, "LINE_SECONDS", 0.0)
    _, said = told(tmp_path / "demo")
    lines = said.splitlines()
    for i, name in enumerate(("reference", *demo.ARMS)):
        assert f"{name} (run {i + 1} of 5): {TINY.updates} steps" in lines
        between = [line for line in lines if line.startswith(f"{name}: step ")]
        assert len(between) == TINY.updates - 1
        assert all(re.search(r", loss \d\.\d{3}, about 0:00:\d\d left \(run \d of 5\)$", x) for x in between)


def test_arms_share_their_start_and_their_data(finished: tuple[Path, str]) -> None:
    """The first loss is of the same batch; on the grid it is of the same codes, so equal to the bit."""
    runs = open_traces([hu.Trace.open(finished[0] / name) for name in ("reference", *demo.ARMS)])
    first = [float(run.gathered.loss[0]) for run in runs]
    assert len(set(first[1:])) == 1
    assert abs(first[0] - first[1]) < 0.05 * first[0]  # another start, by half a gap at most in each weight
    assert [run.policy for run in runs] == [None, *demo.ARMS.values()]
    (found,) = forecasts(runs)
    assert found.measured.name == "nearest"
    (group,) = arms(runs)
    assert [r.bytes_per_weight for r in group.runs] == [1, 1, 1, 5]


@pytest.mark.parametrize(("stop", "finds"), [(5, ["reference"]), (41, ["reference", "nearest"])])
def test_an_interrupt_leaves_a_page(
    stop: int, finds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [0]
    real = LetterTraining.step

    def step(training: LetterTraining, batch: Any, update: int) -> Any:
        steps[0] += 1
        if steps[0] == stop:
            raise KeyboardInterrupt
        return real(training, batch, update)

    monkeypatch.setattr(LetterTraining, "step", step)
    code, said = told(tmp_path / "demo", terminal=True)
    assert code == demo.INTERRUPTED
    assert "Stopped. What is there so far:" in said
    text = (tmp_path / "demo" / "index.html").read_text()
    for name in ("reference", "nearest", "stochastic"):
        assert (f">{name}</bdi>" in text) == (name in finds)
    last = hu.Trace.open(tmp_path / "demo" / finds[-1])
    assert last.last_step == (stop - 1) % TINY.updates


def test_an_interrupt_at_once_leaves_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(training: LetterTraining, batch: Any, update: int) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(LetterTraining, "step", step)
    code, said = told(tmp_path / "demo")
    assert code == demo.INTERRUPTED
    assert "there is nothing to show" in said


@pytest.mark.parametrize("step", [1, 3 * TINY.updates + 2])
def test_a_full_disk_ends_it(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the reference and in an arm: at the first step that cannot be written, as the system's refusal."""
    steps = [0]
    real = LetterTraining.step

    def count(training: LetterTraining, batch: Any, update: int) -> Any:
        steps[0] += 1
        return real(training, batch, update)

    def full(operation: str, path: Path) -> None:
        if operation == "write" and steps[0] >= step:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(LetterTraining, "step", count)
    monkeypatch.setattr(files, "hook", full)
    with pytest.raises(
        DiskError, match=r"the demo ends at step [0-9]+, because its trace .* \(--out\)"
    ) as raised:
        told(tmp_path / "demo")
    assert raised.value.exit_code == 4
    assert steps[0] <= TINY.updates * (1 + step // TINY.updates)


def test_the_text_is_the_same_every_time() -> None:
    tokens, vocabulary = demo.corpus()
    again, _ = demo.corpus()
    assert np.array_equal(tokens, again)
    assert tokens.max() == vocabulary - 1
    assert len(tokens) > 100_000


def test_a_python_without_its_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UsageError, match="came without"):
        demo.corpus()

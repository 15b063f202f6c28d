"""What a run shows while it runs."""

from __future__ import annotations

import pytest

from halfulp.study import engine
from halfulp.study.protocol import SealedStage

STAGE = SealedStage("toss", "outcome", (), {f"coin-{i}": {} for i in range(4)})


def toss(progress: engine.Progress) -> None:
    """A stage of four cells, of which one is finished, one fails and is tried again."""
    progress.stage(STAGE, 1)
    progress.share("coin-1", 0.5)
    progress.ended("coin-1", "failed, tried again")
    for cell in ("coin-1", "coin-2", "coin-3"):
        progress.ended(cell, "finished")


def test_lines_tell_the_beginning_the_end_and_what_went_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    toss(engine.Progress(shown=True))
    assert capsys.readouterr().err.splitlines() == [
        "stage toss (outcome): 1 of 4 cells finished",
        "cell toss/coin-1: failed, tried again",
        "stage toss: 4 of 4 cells finished",
    ]


def test_now_and_then_a_line_says_how_long_it_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(engine.time, "monotonic", lambda: clock[0])
    progress = engine.Progress(shown=True)
    progress.stage(STAGE, 0)
    clock[0] = engine.LINE_SECONDS
    progress.share("coin-1", 0.5)
    progress.share("coin-1", 0.6)  # too soon for another
    assert capsys.readouterr().err.splitlines()[1:] == [
        "stage toss: 0 of 4 cells finished, about 0:01:10 left"
    ]


def test_without_anybody_watching_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    toss(engine.Progress())
    assert capsys.readouterr() == ("", "")

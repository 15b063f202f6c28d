"""The live view: what it shows, where, and that it costs nothing."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_reference import made, train
from rich.console import Console

import halfulp as hu
from halfulp.report import live
from halfulp.report.live import LiveView

SUMMARY: dict[str, Any] = {
    "step": 120,
    "loss": 2.5,
    "lr": 1e-3,
    "frozen": {"bf16": 0.2, "e4m3@128": 0.634},
    "tensors": {
        "h.0.attn.weight": {"bf16": 0.9, "e4m3@128": 0.4},
        "evil\x1b[2J\u202e": {"bf16": 0.1, "e4m3@128": 0.99},
        "x" * 10_000: {"bf16": 0.1, "e4m3@128": 0.98},
    },
    "never_moved": {"bf16": 0.0, "e4m3@128": 0.1},
    "update_ratio": 1e-3,
    "nonfinite": 0,
}


def screen(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100, color_system=None), out


def test_plain_lines_where_there_is_no_terminal() -> None:
    console, out = screen(terminal=False)
    with LiveView(console) as view:
        for step in range(1, 200):
            view({**SUMMARY, "step": step})
    lines = out.getvalue().splitlines()
    assert len(lines) == 2  # the first, and the last when it ends; ten seconds have not passed
    assert lines[0].startswith("halfulp: step 1: updates lost bf16 20%, e4m3@128 63%; most in evil\\x1b[2J")
    assert lines[1].startswith("halfulp: step 199:")
    assert "\x1b" not in out.getvalue()


def test_a_picture_on_a_terminal_that_goes_away() -> None:
    console, out = screen(terminal=True)
    with LiveView(console) as view:
        view(SUMMARY)
    said = out.getvalue()
    assert "step 120, loss 2.5" in said
    assert "63% lost" in said
    assert "10% never moved" in said
    assert "evil\\x1b[2J\\u202e" in said
    assert "x" * 100 not in said
    assert "\x1b[2J" not in said
    assert "\u202e" not in said


def test_the_worst_tensors_are_those_of_the_worst_grid() -> None:
    assert [(n[:4], g, s) for n, g, s in live.worst(SUMMARY, 2)] == [
        ("evil", "e4m3@128", 0.99),
        ("xxxx", "e4m3@128", 0.98),
    ]


def test_it_draws_at_most_a_few_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is moved by hand: a thousand calls in a second make four pictures."""
    console, _ = screen(terminal=True)
    drawn: list[int] = []
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(live, "picture", lambda summary, speed: drawn.append(summary["step"]) or "")
    with LiveView(console) as view:
        for step in range(1000):
            now[0] += 0.001
            view({**SUMMARY, "step": step})
    assert len(drawn) == 4
    assert view.seconds == 0.0


@pytest.mark.parametrize("terminal", [True, False])
def test_it_says_how_fast_steps_are_and_when_they_end(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step each two seconds; without the number of the last one there is no estimate."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for steps, left in ((None, ""), (71, ", about 0:02:00 left")):
        console, said = screen(terminal=terminal)
        with LiveView(console, steps=steps) as view:
            for step in (1, 6, 11):
                view({**SUMMARY, "step": step})
                now[0] += 10.0
            now[0] -= 10.0
        assert f" 2.0 s per step{left}" in said.getvalue()
        assert ("left" in said.getvalue()) == bool(left)


def test_slow_pictures_come_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures that take 10 ms are made every two seconds: half a percent of the time."""
    console, _ = screen(terminal=True)
    now, drawn = [100.0], []

    def picture(summary: dict[str, Any], speed: str) -> str:
        drawn.append(now[0])
        now[0] += 0.01
        return ""

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(live, "picture", picture)
    with LiveView(console) as view:
        for _ in range(5000):
            now[0] += 0.001
            view(SUMMARY)
    assert len(drawn) == 3
    assert view.seconds == pytest.approx(0.03)  # three differences of sums of a thousand roundings each


def test_it_listens_to_an_audit() -> None:
    console, out = screen(terminal=False)
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with LiveView(console) as view, hu.Audit(optimizer, ["bf16"], model=model, listeners=[view]) as audit:
        train(model, optimizer, 3, audit=audit)
    assert out.getvalue().splitlines()[-1].startswith("halfulp: step 3: updates lost bf16 ")


def test_the_command(tmp_path: Path) -> None:
    """``halfulp audit --live`` adds lines to stderr and leaves stdout to the script."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "for _ in range(3):\n"
        "    model(torch.ones(1, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "print('done')\n"
    )
    command = [sys.executable, "-m", "halfulp", "audit", "--live", "--grids", "bf16", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout == "done\n"
    assert "halfulp: step 1: updates lost bf16 " in ran.stderr
    assert "halfulp: step 3: updates lost bf16 " in ran.stderr
    assert "3 steps audited. The trace is in runs/train." in ran.stderr

"""What a small step pays: few Python calls, whose number is the same on every machine."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import torch

import halfulp as hu


def calls_of_step(optimizer: torch.optim.Optimizer) -> Counter[str]:
    """Functions of halfulp that one step calls, by file."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "halfulp" in (name := frame.f_code.co_filename):
            found[name] += 1

    sys.setprofile(count)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return found


def test_a_step_of_twenty_small_tensors_takes_few_calls(tmp_path: Path) -> None:
    """It was 288 calls when every tensor was asked by functions of its own."""
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with hu.Audit(optimizer, "bf16", model=model, out=tmp_path / "run"):
        for _ in range(6):  # the gain of the first steps is looked at closer
            optimizer.step()
        assert sum(calls_of_step(optimizer).values()) <= 105


def test_the_first_steps_of_a_bfloat16_model_take_few_calls_in_few_files(tmp_path: Path) -> None:
    """The first was 1,424 calls in 47 files (1,101 now), the second, which measures gain, 205 in 20."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with hu.Audit(optimizer, "bf16", model=model, out=tmp_path / "run"):
        first, second = calls_of_step(optimizer), calls_of_step(optimizer)
    assert (sum(first.values()) <= 1150, len(first) <= 46) == (True, True)
    assert (sum(second.values()) <= 140, len(second) <= 17) == (True, True)

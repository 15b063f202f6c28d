"""Checks of rehearsals on a GPU against the reference: write-backs in Triton's interpreter.

A process of its own, as gpu_interpreted.py: run by test_rehearsals_gpu.py; one line of JSON a check.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import numpy as np
import torch

import halfulp as hu
from halfulp.kernels import rehearse_reference as reference
from halfulp.kernels.rehearse import Rule

NEAREST, STOCHASTIC, DEADZONE = (
    reference.reference.NEAREST, reference.reference.STOCHASTIC, reference.reference.DEADZONE,
)  # fmt: skip
CASES: dict[str, tuple[str, int, int, str]] = {
    "nearest": ("e4m3@128", NEAREST, reference.NOTHING, "float32"),
    "nearest, two bytes": ("bf16", NEAREST, reference.NOTHING, "float32"),
    "stochastic": ("e4m3@128", STOCHASTIC, reference.NOTHING, "float32"),
    "stochastic, two bytes": ("bf16", STOCHASTIC, reference.NOTHING, "float32"),
    "dead zone": ("m5", DEADZONE, reference.NOTHING, "float32"),
    "carry": ("e5m2", NEAREST, reference.CARRY, "float32"),
    "pending": ("bf16", NEAREST, reference.PENDING, "float32"),
    "pending, stochastic": ("e5m2", STOCHASTIC, reference.PENDING, "float32"),
    "master": ("e5m2", NEAREST, reference.MASTER, "float32"),
    "float64": ("e4m3", NEAREST, reference.CARRY, "float64"),
    "float64, stochastic": ("bf16", STOCHASTIC, reference.NOTHING, "float64"),
}


def hard(seed: int, numel: int, dtype: Any) -> tuple[Any, Any]:
    """Weights and what becomes of them: all sizes, ends of the range, zeros, and what is not finite."""
    made = np.random.default_rng(seed)
    w = (made.normal(size=numel) * np.exp2(made.integers(-20, 4, numel))).astype(dtype)
    d = (made.normal(size=numel) * np.exp2(made.integers(-24, 3, numel))).astype(dtype)
    w[:40], d[40:80] = 0.0, -0.0
    w[80:90], w[90:100], d[100:110] = 3.5, -448.0, 3e38
    with np.errstate(over="ignore"):
        after = w + d
    after[110:120], w[120:125], after[700:703] = np.nan, np.inf, -np.inf
    return w, after


def check(name: str) -> None:
    from halfulp import kernels
    from halfulp.kernels import rehearse, writing

    for module in (kernels, rehearse, writing):  # the interpreter's tensors are the CPU's
        vars(module)["on_gpu"] = lambda _: True
    vars(rehearse)["fused"] = lambda *_: False
    grid, mode, keeps, dtype = CASES[name]
    work: Any = getattr(np, dtype)
    rule = Rule(hu.grid(grid).within(work), mode, keeps)
    numel, back = 1600, (0.9, 0.1)
    start = torch.from_numpy(hard(0, numel, work)[0])
    held = rehearse.begin(rule, start, 1)
    chosen = torch.arange(numel) % 3 == 0 if keeps == reference.MASTER else None
    row = {what: t[0] for what, t in held.tensors().items()}
    mine = {what: t.numpy().copy() for what, t in row.items()}
    for step in range(3):
        w, after = hard(step, numel, work)
        stream = hu.Stream(seed=1, name="w", step=step, offset=32 * step + (step == 2))
        given = (torch.from_numpy(w), torch.from_numpy(after))
        asked = rehearse.TensorStep(pulls=[0.03], stream=stream)
        counts = rehearse.move(rule, held, *given, asked, back, chosen)[:, 0]
        codes = mine["held"].view(np.uint16) if mine["held"].dtype == np.int16 else mine["held"]
        new, expected = reference.step(
            rule, codes, w, after, 0.03, stream=stream, kept=mine.get("kept"), back=back,
            moved=mine["moved"], chosen=None if chosen is None else chosen.numpy(),
        )  # fmt: skip
        mine["held"] = new.astype(codes.dtype).view(mine["held"].dtype)
        for what, value in row.items():
            wrong = np.flatnonzero(value.numpy() != mine[what])
            assert not wrong.size, (step, what, wrong[:5], value[wrong[:5]], mine[what][wrong[:5]])
        assert np.array_equal(counts.numpy(), expected), (step, counts, expected)


def main() -> None:
    for name in CASES:
        error = ""
        try:
            check(name)
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"check": name, "error": error}), flush=True)


if __name__ == "__main__":
    sys.exit(main())

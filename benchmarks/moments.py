"""Ten thousand steps with bfloat16 moments and with bfloat16 norm gains: which ones learn.

A student with the shape of its teacher (two matrices, a norm between them, its gains) is trained by AdamW on
fresh examples, everything seeded. With beta2 = .999 a step lowers a second moment by at most a thousandth of
it, and half a gap of bfloat16 is never less than a 512th: under nearest rounding a second moment never falls.
Gradients shrink as the student learns, so that steps become too small. Rounded stochastically, moments follow
what float32 keeps. Gains begin at exactly 1, where a step at a rate below 2**-9 is less than half a gap.

What is shown: the loss on held-out examples; the second moment beside a float32 average of the same
gradients (the median over weights: 1 is right); how many gains are still exactly 1.

    python benchmarks/moments.py [--steps 10000] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from kernels import OUT, environment

import halfulp as hu

INPUTS, HIDDEN, OUTPUTS, BATCH, HELD_OUT = 32, 64, 16, 64, 4096
RATE, BETAS, SEED = 5e-4, (0.9, 0.999), 0
MARKS = (100, 1000, 10_000)

# How weights are written, how moments are kept, and whether those are then rounded to nearest.
ARMS: dict[str, tuple[str, Any, bool]] = {
    "masters (remainder16), float32 moments": ("remainder16", "fp32", False),
    "sr, float32 moments": ("sr", "fp32", False),
    "sr, bf16 moments, stochastic": ("sr", "bf16", False),
    "sr, bf16 moments, nearest": ("sr", "fp32", True),
    "rne, float32 moments": ("rne", "fp32", False),
}


class Net(torch.nn.Module):
    """A matrix, a norm with gains, a matrix; bfloat16 parameters, float32 arithmetic."""

    def __init__(self, made: torch.Generator, teacher: bool) -> None:
        super().__init__()
        gains = torch.exp(torch.randn(HIDDEN, generator=made) / 2) if teacher else torch.ones(HIDDEN)
        self.first = torch.nn.Parameter(torch.randn(HIDDEN, INPUTS, generator=made) / INPUTS**0.5)
        self.gain = torch.nn.Parameter(gains)
        self.second = torch.nn.Parameter(torch.randn(OUTPUTS, HIDDEN, generator=made) / HIDDEN**0.5)
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.layer_norm(x @ self.first.float().T, (HIDDEN,), self.gain.float())
        return torch.tanh(h) @ self.second.float().T


def train(policy: str, moments: Any, nearest: bool, steps: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(SEED)
    teacher, student = Net(made, True), Net(made, False)
    held_out = torch.randn(HELD_OUT, INPUTS, generator=made)
    with torch.no_grad():
        answers = teacher(held_out)
    opt = hu.AdamW(
        student.named_parameters(), lr=RATE, betas=BETAS, weight_decay=0.0, policy=policy, moments=moments,
        seed=SEED,
    )  # fmt: skip
    params = list(student.parameters())
    averages = [torch.zeros_like(p, dtype=torch.float32) for p in params]
    losses = {}
    for step in range(1, steps + 1):
        x = torch.randn(BATCH, INPUTS, generator=made)
        with torch.no_grad():
            y = teacher(x)
        opt.zero_grad()
        (student(x) - y).square().mean().backward()
        opt.step()
        for p, average in zip(params, averages, strict=True):
            assert p.grad is not None
            average.lerp_(p.grad.float().square(), 1 - BETAS[1])
        if nearest:
            for state in opt.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key].copy_(state[key].bfloat16())
        if step in MARKS or step == steps:
            with torch.no_grad():
                losses[step] = float((student(held_out) - answers).square().mean())
    kept = torch.cat([opt.state[slot.stepped]["exp_avg_sq"].float().flatten() for slot in opt.slots])
    ratio = kept / torch.cat([average.flatten() for average in averages])
    return {
        "losses": losses,
        "second_moment": float(ratio[torch.isfinite(ratio)].median()),
        "gains_at_one": int((student.gain == 1).sum()),
    }


def table(rows: dict[str, dict[str, Any]], steps: int) -> str:
    marks = [m for m in MARKS if m < steps] + [steps]
    lines = [
        f"A student of its teacher, AdamW at {RATE:g}, beta2 {BETAS[1]:g}, {steps:,} steps: the loss on "
        "held-out examples, the second moment beside a float32 average of the same gradients (the median "
        f"over weights), and how many of {HIDDEN} norm gains are still exactly 1.",
        "",
        f"| weights, moments | {' | '.join(f'loss at {m:,}' for m in marks)} | second moment | gains at 1 |",
        f"|---|{'--:|' * (len(marks) + 2)}",
    ]
    for name, row in rows.items():
        losses = " | ".join(f"{row['losses'][m]:.3g}" for m in marks)
        lines.append(f"| {name} | {losses} | {row['second_moment']:.2f} | {row['gains_at_one']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Ten thousand steps with bfloat16 moments and gains.")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument(
        "--json", type=Path, default=OUT / "moments.json", help="results; a .md goes beside it"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {name: train(*arm, options.steps) for name, arm in ARMS.items()}
    env = environment()
    text = table(rows, options.steps) + "\n" + "; ".join(f"{k}: {v}" for k, v in env.items()) + ".\n"
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"environment": env, "steps": options.steps, "rows": rows}, indent=1) + "\n"
    )
    options.json.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

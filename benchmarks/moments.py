"""Three thousand steps with moments in 32, 16 and 8 bits, and with bfloat16 norm gains: which ones learn.

A student with the shape of its teacher (two matrices, a norm between them, its gains) is trained by AdamW on
fresh examples, everything seeded. With beta2 = .999 a step lowers a second moment by at most a thousandth of
it, and half a gap of bfloat16 is never less than a 512th: under nearest rounding a second moment never
falls. Gradients shrink as the student learns, so that steps become too small. Rounded stochastically, moments
follow what float32 keeps; so do codes of eight bits (:mod:`halfulp.kernels.coded_moments`). Gains begin at
exactly 1, where a step at a rate below 2**-9 is less than half a gap.

What is shown: the loss on held-out examples, the mean over seeds with the standard deviation; the second
moment of the matrices beside a float32 average of the same gradients (the median over weights: 1 is right);
how much of what it should have moved arrives (the sum of products of both over that of squares), and how many
of its values did not move at all in the last thousand steps; how many gains are still exactly 1; the time of
a step.

    python benchmarks/moments.py [--steps 3000] [--seeds 3] [--json OUT] [--timings]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernels import OUT, environment

import halfulp as hu
from halfulp.kernels import coded_moments
from halfulp.writeback import moments_kept

INPUTS, HIDDEN, OUTPUTS, BATCH, HELD_OUT = 32, 64, 16, 64, 4096
RATE, BETAS = 5e-4, (0.9, 0.999)
MARKS = (100, 1000, 3000, 10_000)
LATE = 1000  # steps at the end in which a second moment may stand still
WIDTH, ROUNDS = 2048, 12  # of the timed matrices

# How weights are written, how moments are kept, and by what they are then rounded to nearest.
ARMS: dict[str, tuple[str, Any, str]] = {
    "masters (remainder16), float32 moments": ("remainder16", "fp32", ""),
    "sr, float32 moments": ("sr", "fp32", ""),
    "sr, bf16 moments, stochastic": ("sr", "bf16", ""),
    "sr, bf16 moments, nearest": ("sr", "fp32", "bf16"),
    "sr, 8-bit moments, stochastic": ("sr", "int8", ""),
    "sr, 8-bit moments, nearest": ("sr", "fp32", "int8"),
    "remainder8, 8-bit moments, stochastic": ("remainder8", "int8", ""),
    "rne, float32 moments": ("rne", "fp32", ""),
}
BYTES = {
    "": {"fp32": 8.0, "bf16": 4.0, "int8": 2.125},
    "weights": {"sr": 2, "rne": 2, "remainder16": 4, "remainder8": 3},
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


def moment(opt: Any, slot: Any, key: str) -> torch.Tensor:
    """The values that a moment stands for."""
    state = opt.optimizer.state[slot.stepped]
    if key in state:
        return state[key].float().clone()
    values = torch.empty(slot.shape)
    coded_moments.decode(moments_kept.coded(state, key), values)
    return values


def to_nearest(x: torch.Tensor, kind: str, second: bool) -> torch.Tensor:
    if kind == "bf16":
        return x.bfloat16().float()
    middle = np.full(x.numel(), 0xFF7F if second else 0x7FFF)  # a draw of a half, its bytes exchanged
    codes, scales = coded_moments.encoded(x.numpy().reshape(-1), middle, second=second)
    return torch.from_numpy(coded_moments.decoded(codes, scales)).view(x.shape)


def train(policy: str, moments: Any, nearest: str, steps: int, seed: int = 0) -> dict[str, Any]:
    """Train one student; of second moments those of matrices count, which are in eight bits if any are."""
    made = torch.Generator().manual_seed(seed)
    teacher, student = Net(made, True), Net(made, False)
    held_out = torch.randn(HELD_OUT, INPUTS, generator=made)
    with torch.no_grad():
        answers = teacher(held_out)
    opt = hu.AdamW(
        student.named_parameters(), lr=RATE, betas=BETAS, weight_decay=0.0, policy=policy, moments=moments,
        seed=seed,
    )  # fmt: skip
    slots = [slot for slot in opt.slots if len(slot.shape) > 1]
    averages = [torch.zeros(slot.shape) for slot in slots]
    before = [torch.zeros(slot.shape) for slot in slots]
    moved = [torch.zeros(slot.shape, dtype=torch.bool) for slot in slots]
    written = proposed = 0.0
    losses = {}
    for step in range(1, steps + 1):
        x = torch.randn(BATCH, INPUTS, generator=made)
        with torch.no_grad():
            y = teacher(x)
        opt.zero_grad()
        (student(x) - y).square().mean().backward()
        opt.step()
        for slot in opt.slots if nearest else ():
            state = opt.optimizer.state[slot.stepped]
            for key in ("exp_avg", "exp_avg_sq"):
                if nearest == "bf16" or len(slot.shape) > 1:
                    state[key].copy_(to_nearest(state[key], nearest, key == "exp_avg_sq"))
        for i, slot in enumerate(slots):
            square = slot.p.grad.float().square()
            averages[i].lerp_(square, 1 - BETAS[1])
            now = moment(opt, slot, "exp_avg_sq")
            asked, change = (square - before[i]) * (1 - BETAS[1]), now - before[i]
            written += float((asked * change).sum())
            proposed += float((asked * asked).sum())
            moved[i] |= (change != 0) & (step > steps - LATE)
            before[i] = now
        if step in MARKS or step == steps:
            with torch.no_grad():
                losses[step] = float((student(held_out) - answers).square().mean())
    ratio = torch.cat([v.flatten() for v in before]) / torch.cat([average.flatten() for average in averages])
    return {
        "losses": losses,
        "second_moment": float(ratio[torch.isfinite(ratio)].median()),
        "arrives": written / proposed,
        "still": float(1 - torch.cat([x.flatten() for x in moved]).float().mean()),
        "gains_at_one": int((student.gain == 1).sum()),
    }


def timings() -> dict[str, float]:
    """The best of several steps of two matrices, processor milliseconds, in turn, on one thread."""
    made = {}
    for name, moments in (
        ("torch, fused, float32", None),
        ("fp32", "fp32"),
        ("bf16", "bf16"),
        ("int8", "int8"),
    ):
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
        if moments is None:
            opt: Any = torch.optim.AdamW(model.parameters(), fused=True)
        else:
            opt = hu.AdamW(model.bfloat16().parameters(), moments=moments)
        for p in model.parameters():
            p.grad = torch.randn_like(p) * 1e-3
        made[name] = opt
    best = dict.fromkeys(made, float("inf"))
    for _ in range(ROUNDS):
        for name, opt in made.items():
            begun = time.process_time()
            opt.step()
            best[name] = min(best[name], (time.process_time() - begun) * 1e3)
    return best


def over_seeds(arm: tuple[str, Any, str], steps: int, seeds: int) -> dict[str, Any]:
    """Train with several seeds: means, and of losses the standard deviation too."""
    runs = [train(*arm, steps, seed) for seed in range(seeds)]
    found = {k: statistics.fmean(run[k] for run in runs) for k in ("second_moment", "arrives", "still")}
    losses = {m: [run["losses"][m] for run in runs] for m in runs[0]["losses"]}
    return {
        **found,
        "losses": losses,
        "gains_at_one": statistics.fmean(run["gains_at_one"] for run in runs),
        "bytes": BYTES["weights"][arm[0]] + BYTES[""][arm[2] or arm[1]],
    }


def trained_before(path: Path) -> tuple[dict[str, dict[str, Any]], int, int]:
    """What an earlier run found, of how many steps and seeds."""
    before = json.loads(path.read_text())
    rows = before["rows"]
    for row in rows.values():
        row["losses"] = {int(step): losses for step, losses in row["losses"].items()}
    seeds = len(next(iter(next(iter(rows.values()))["losses"].values())))
    return rows, before["steps"], seeds


def loss_of(losses: list[float]) -> str:
    spread = f" ({statistics.stdev(losses):.1g})" if len(losses) > 1 else ""
    return f"{statistics.fmean(losses):.4f}{spread}"


def table(rows: dict[str, dict[str, Any]], steps: int, seeds: int, times: dict[str, float]) -> str:
    marks = [m for m in MARKS if m < steps] + [steps]
    lines = [
        f"A student of its teacher, AdamW at {RATE:g}, beta2 {BETAS[1]:g}, {steps:,} steps, {seeds} seeds: "
        "the loss on held-out examples (standard deviation over seeds), the second moment of the matrices "
        "beside a float32 average of the same gradients (the median over weights), how much of its change "
        f"arrives, how many of its values stood still in the last {LATE:,} steps, and how many of {HIDDEN} "
        "norm gains are still exactly 1. Bytes: the weight, what the policy keeps, both moments.",
        "",
        f"| weights, moments | bytes per weight | {' | '.join(f'loss at {m:,}' for m in marks)} | second "
        "moment | arrives | stood still | gains at 1 |",
        f"|---|{'--:|' * (len(marks) + 5)}",
    ]
    for name, row in rows.items():
        losses = " | ".join(loss_of(row["losses"][m]) for m in marks)
        lines.append(
            f"| {name} | {row['bytes']:g} | {losses} | {row['second_moment']:.2f} | {row['arrives']:.1%} | "
            f"{row['still']:.1%} | {row['gains_at_one']:.0f} |"
        )
    fused = times["torch, fused, float32"]
    told = "; ".join(f"{k} {v:.1f} ms ({v / fused:.2f})" for k, v in times.items())
    lines += [
        "",
        f"A step of {2 * WIDTH**2 / 1e6:.1f} million bfloat16 weights, `sr`, by moments, processor time on "
        f"one thread: {told}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Three thousand steps with narrow moments and gains.")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--json", type=Path, default=OUT / "moments.json", help="results; a .md goes beside it"
    )
    parser.add_argument("--timings", action="store_true", help="time steps again; train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    times = timings()
    if options.timings:
        rows, options.steps, options.seeds = trained_before(options.json)
    else:
        rows = {name: over_seeds(arm, options.steps, options.seeds) for name, arm in ARMS.items()}
    env = environment()
    text = (
        table(rows, options.steps, options.seeds, times)
        + "\n"
        + "; ".join(f"{k}: {v}" for k, v in env.items())
        + ".\n"
    )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"environment": env, "steps": options.steps, "ms": times, "rows": rows}, indent=1) + "\n"
    )
    options.json.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

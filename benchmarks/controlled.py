"""The controlled studies' cells: the fused step beside a straightforward PyTorch loop, in one run.

For each kind of cell of the paper-size studies, the same training is done twice, single-threaded: by
``halfulp.paper.models.mlp.Trainer``, and by a loop of torch modules, autograd, a torch optimizer and
halfulp's kernels on tensors (``grid.round``, ``kernels.audit``, one call a tensor), which is what one writes
first. Times are the processor's, medians over repetitions in turn; the total weighs every kind by its steps
in the studies at paper size. The convolutional network is not here: its cells are a PyTorch loop.

Trajectories are compared too. They cannot be equal bit for bit in float64: torch's matrix product adds in
another order and its tanh differs in the last digit. On a grid both disappear unless a proposal lies within
1e-15 of a midpoint, so stored weights and frozen counts are expected to be *equal at every step*; for
unrounded references the largest deviation is shown, and the forecast crossings are compared.

    python benchmarks/controlled.py [--steps N] [--repetitions N] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernels import OUT, environment
from torch.nn.functional import cross_entropy

import halfulp as hu
from halfulp import kernels as tensor_kernels
from halfulp.measures.crossings import first_majority
from halfulp.paper.models.mlp import Trainer
from halfulp.paper.models.teacher import Problem, classification, frozen_features, teacher_student


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of cell, and how many steps of it the studies take at paper size."""

    name: str
    problem: Callable[[], Problem]
    rate: float
    total: int
    optimizer: str = "gd"
    store: str | None = None
    rounding: str = "nearest"
    audit: tuple[str, ...] = ()
    tested: bool = False


def three_layer() -> Problem:
    return classification(0, hidden=(32, 32))


WIDE = tuple(f"m{m}" for m in (1, 3, 5, 7, 9, 11))
CLOSE = tuple(f"m{m}" for m in (6, 7, 8, 9, 10, 11))
LOW = tuple(f"m{m}" for m in (1, 2, 3, 4, 5))

KINDS = (
    Kind(name="phase-diagram, nearest", problem=lambda: teacher_student(2021), rate=0.1, store="m3",
         total=180 * 3000),
    Kind(name="phase-diagram, stochastic", problem=lambda: teacher_student(2021), rate=0.1, store="m3",
         rounding="stochastic", total=180 * 3000),
    Kind(name="phase-diagram, reference", problem=lambda: teacher_student(2021), rate=0.1, audit=LOW,
         tested=True, total=36 * 3000),
    Kind(name="two-layer, measured", problem=lambda: teacher_student(0), rate=0.1, store="m9",
         total=72 * 6000),
    Kind(name="two-layer, reference", problem=lambda: teacher_student(0), rate=0.1, audit=WIDE,
         total=36 * 6000),
    Kind(name="two-layer, Adam, measured", problem=lambda: teacher_student(0), rate=0.001, store="m8",
         optimizer="adam", total=72 * 6000),
    Kind(name="two-layer, Adam, reference", problem=lambda: teacher_student(0), rate=0.001, audit=CLOSE,
         optimizer="adam", total=12 * 6000),
    Kind(name="two-layer, cross-entropy, measured", problem=lambda: classification(0), rate=0.2, store="m8",
         total=72 * 3000),
    Kind(name="two-layer, cross-entropy, reference", problem=lambda: classification(0), rate=0.2, audit=CLOSE,
         total=12 * 3000),
    Kind(name="three-layer, measured", problem=three_layer, rate=0.2, store="m8", total=36 * 3000),
    Kind(name="three-layer, reference", problem=three_layer, rate=0.2, audit=CLOSE, total=6 * 3000),
    Kind(name="emulator, measured", problem=lambda: frozen_features(0, features=128), rate=0.05, store="m7",
         total=18 * 3000),
)  # fmt: skip


@dataclass
class Run:
    """What a run leaves: frozen counts a step (of the write-back, or of each audited grid), final weights."""

    frozen: np.ndarray
    weights: np.ndarray
    seconds: float


def fused(kind: Kind, p: Problem, steps: int) -> Run:
    trainer = Trainer(
        p.net, p.train, p.start, rate=kind.rate, optimizer=kind.optimizer, store=kind.store,
        rounding=kind.rounding, audit=kind.audit, test=p.test if kind.tested else None,
    )  # fmt: skip
    start = time.process_time()
    series = trainer.advance(steps)
    seconds = time.process_time() - start
    return Run(series.counts[:, :, 0] if kind.audit else series.frozen, trainer.weights, seconds)


def plain(kind: Kind, p: Problem, steps: int) -> Run:
    """The loop that one writes first."""
    layers: list[torch.nn.Module] = []
    for n_in, n_out in zip(p.net.sizes, p.net.sizes[1:], strict=False):
        layers += [torch.nn.Linear(n_in, n_out, bias=p.net.biased, dtype=torch.float64), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers[:-1])
    parameters = list(model.parameters())
    grid = None if kind.store is None else hu.grid(kind.store)
    with torch.no_grad():
        for parameter, part in zip(parameters, p.net.parts.values(), strict=True):
            parameter.copy_(torch.from_numpy(p.start[part]).view(parameter.shape))
        flat = torch.cat([q.flatten() for q in parameters])
        if grid is not None:
            stream = hu.Stream(seed=0, name="weights") if kind.rounding == "stochastic" else None
            flat = grid.round(flat, stochastic=stream)
        for parameter, part in zip(parameters, p.net.parts.values(), strict=True):
            parameter.copy_(flat[part].view(parameter.shape))
    if kind.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, lr=kind.rate)
    else:
        optimizer = torch.optim.SGD(parameters, lr=kind.rate)
    x, y = (torch.from_numpy(a[:, : p.train.n].T.copy()) for a in (p.train.x, p.train.y))
    x_test, y_test = (torch.from_numpy(a[:, : p.test.n].T.copy()) for a in (p.test.x, p.test.y))

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        out = model(inputs)
        if p.net.loss == "squared":
            return (out - targets).square().sum(dim=1).mean()
        return cross_entropy(out, targets)

    audited = [hu.grid(name) for name in kind.audit]
    frozen = np.zeros((steps, len(kind.audit)) if kind.audit else steps, dtype=np.int64)
    start = time.process_time()
    for t in range(steps):
        before = [q.detach().clone() for q in parameters]
        optimizer.zero_grad()
        loss_of(x, y).backward()
        optimizer.step()
        with torch.no_grad():
            if grid is not None:
                offset = 0
                for q, old in zip(parameters, before, strict=True):
                    stream = None
                    if kind.rounding == "stochastic":
                        stream = hu.Stream(seed=0, name="weights", step=t + 1).at(offset)
                    grid.round(q.data, stochastic=stream, out=q.data)
                    frozen[t] += int((q == old).sum())
                    offset += q.numel()
            if audited:
                for q, old in zip(parameters, before, strict=True):
                    found = tensor_kernels.audit(old, q - old, audited)
                    frozen[t] += found.counts[:, :, 0].sum(dim=0).numpy()
            if kind.tested:
                loss_of(x_test, y_test)
    seconds = time.process_time() - start
    return Run(frozen, torch.cat([q.detach().flatten() for q in parameters]).numpy(), seconds)


def agreement(kind: Kind, p: Problem, a: Run, b: Run) -> dict[str, Any]:
    """How equal two runs are."""
    found = {
        "same_counts": float(np.mean(a.frozen == b.frozen)),
        "largest_count_difference": int(np.abs(a.frozen.astype(np.int64) - b.frozen).max()),
        "largest_weight_difference": float(np.abs(a.weights - b.weights).max()),
        "same_weights": bool(np.array_equal(a.weights, b.weights)),
    }
    curves = [(r.frozen.T if kind.audit else r.frozen[None]) / p.net.count for r in (a, b)]
    first = [[first_majority(curve) for curve in each] for each in curves]
    return {**found, "same_crossings": first[0] == first[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, default=OUT / "controlled.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    env, rows = environment(), []
    for kind in KINDS:
        p = kind.problem()
        fused(kind, p, 2), plain(kind, p, 2)
        pairs = [
            (fused(kind, p, options.steps), plain(kind, p, options.steps)) for _ in range(options.repetitions)
        ]
        ours, theirs = (statistics.median(r[i].seconds for r in pairs) / options.steps for i in (0, 1))
        rows.append(
            {
                "cell": kind.name, "total_steps": kind.total, "fused_seconds": ours, "torch_seconds": theirs,
                **agreement(kind, p, *pairs[-1]),
            }
        )  # fmt: skip
        print(f"{kind.name}: {1e6 * ours:.0f} us, {1e6 * theirs:.0f} us, {theirs / ours:.1f}x", flush=True)
    total = [sum(row["total_steps"] * row[key] for row in rows) for key in ("fused_seconds", "torch_seconds")]
    lines = [
        f"Processor time in microseconds a step, one thread; {options.repetitions} runs of {options.steps}.",
        "",
        "| cell | fused | PyTorch loop | ratio | counts equal | largest difference of weights | crossings |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        ours, theirs = row["fused_seconds"], row["torch_seconds"]
        same = "equal" if row["same_crossings"] else "differ"
        apart = "none" if row["same_weights"] else f"{row['largest_weight_difference']:.1e}"
        lines.append(
            f"| {row['cell']} | {1e6 * ours:.0f} | {1e6 * theirs:.0f} | {theirs / ours:.1f} | "
            f"{100 * row['same_counts']:.2f}% | {apart} | {same} |"
        )
    lines += [
        f"| all, by steps at paper size | {total[0]:.0f} s | {total[1]:.0f} s "
        f"| {total[1] / total[0]:.1f} | | | |",
        "",
        "; ".join(f"{key}: {value}" for key, value in env.items()) + ".",
    ]
    table = "\n".join(lines) + "\n"
    options.json.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": env, "steps": options.steps, "rows": rows, "total_seconds": total}
    options.json.write_text(json.dumps(content, indent=1) + "\n")
    options.json.with_suffix(".md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()

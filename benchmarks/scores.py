"""What allocation scores cost inside an audit, and packed masters inside a step, on small decoders.

*Scores.* A decoder trains on random tokens under an audit of e5m2, which sums scores at every other step.
Time inside hooks is compared within pairs of steps; their median difference is given as a share of a step
without the hooks. Beside it the kernel alone, on weights, gradients and results of the same model, in
nanoseconds a coordinate; the twelve bytes that a coordinate is read from, in gigabytes a second; and how fast
torch sums the same memory.

*Masters.* Nearest write-back, packed masters for a tenth of the tiles, and blanket masters take steps in turn
in one process, the order rotating; ratios are medians over rounds, to the blanket step of the same round.

On a machine that others use as well, ``--clock processor`` takes the time of the one thread.

    python benchmarks/scores.py [--clock wall|processor] [--steps 60] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from audit import CLOCKS
from kernels import OUT, environment

import halfulp as hu
from halfulp.kernels.scoring import Scored, add_scores
from halfulp.paper.arms.family import SMALL_GPT2, SMALL_MODERN
from halfulp.paper.models.decoder import CHARACTER, Decoder
from halfulp.paper.models.training import Training, adamw
from halfulp.writeback import WriteBackOptions

GRID, SHARE = "e5m2", 0.1
WARM = 4
_CHARACTER = replace(SMALL_GPT2.recipe, batch=32, context=CHARACTER.context)
DECODERS = {
    "character GPT, batch 32": (CHARACTER, _CHARACTER),
    "small GPT-2, batch 12": (SMALL_GPT2.model, SMALL_GPT2.recipe),
    "small GPT-2, batch 6": (SMALL_GPT2.model, replace(SMALL_GPT2.recipe, batch=6)),
    "small modern, batch 6": (SMALL_MODERN.model, replace(SMALL_MODERN.recipe, batch=6)),
}
"""The studies of allocation train the last two; those of policies the second."""


def training(name: str, policy: str | hu.TileMaster | None = None) -> Training:
    config, recipe = DECODERS[name]
    schedule = replace(recipe.schedule, warmup=1, horizon=10**6)
    model = Decoder(config, seed=1)
    optimizer: torch.optim.Optimizer = adamw(model, replace(recipe, schedule=schedule))
    if policy is not None:
        optimizer = hu.WriteBack(
            optimizer, GRID, policy, model=model, seed=1, options=WriteBackOptions(telemetry=False)
        )
    data = np.random.default_rng(1).integers(0, config.vocabulary, 2**17).astype(np.uint16)
    return Training(model, optimizer, data, replace(recipe, schedule=schedule, updates=10**6))


# ---- scores -----------------------------------------------------------------------------------------------


def scores(name: str, steps: int) -> dict[str, Any]:
    """Audited steps that score and that do not, in turn."""
    run, tile = training(name), DECODERS[name][0].width
    audit = hu.Audit(
        run.optimizer, [GRID], model=run.model, scores=(GRID, 1, 10**9, tile),
        params=lambda _, p: p.dim() >= 2,
    )  # fmt: skip
    asked, rows = audit.pipeline.measure, []
    with audit:
        for i in range(2 * (WARM + steps)):
            audit.pipeline.watchlist.measure = asked if i % 2 == 0 else replace(asked, scores=None)
            start, hooks = time.perf_counter(), audit.seconds
            run.step()
            spent = audit.seconds - hooks
            rows.append((spent, time.perf_counter() - start - spent))
    scoring, plain = np.array(rows[2 * WARM :: 2]), np.array(rows[2 * WARM + 1 :: 2])
    step = float(np.median(np.concatenate([scoring[:, 1], plain[:, 1]])))
    more = float(np.median(scoring[:, 0] - plain[:, 0]))
    return {
        "decoder": name, "coordinates": sum(p.numel() for p in run.model.parameters() if p.dim() >= 2),
        "step_ms": 1e3 * step, "audit_ms": 1e3 * float(np.median(plain[:, 0])), "scores_ms": 1e3 * more,
        "share": more / step, **alone(run, tile, steps),
    }  # fmt: skip


def alone(run: Training, tile: int, steps: int) -> dict[str, float]:
    """The kernel on this model's tensors, and torch reading the same memory."""
    jobs = []
    for p in (p for p in run.model.parameters() if p.dim() >= 2):
        assert p.grad is not None
        before = p.detach().clone()
        sums = torch.zeros(-(-p.numel() // tile), 8, dtype=torch.float64)
        jobs.append(Scored(before, p.grad, before + 1e-4 * p.grad, sums))
    read = torch.cat([x.reshape(-1) for job in jobs for x in job[:3]])
    seconds: dict[str, list[float]] = {"kernel": [], "torch": []}
    for _ in range(steps):
        start = time.perf_counter()
        add_scores(jobs, GRID, tile)
        middle = time.perf_counter()
        read.sum()
        seconds["kernel"].append(middle - start)
        seconds["torch"].append(time.perf_counter() - middle)
    kernel, plain = (statistics.median(v[WARM:]) for v in seconds.values())
    return {
        "kernel_ms": 1e3 * kernel, "kernel_ns": 3e9 * kernel / read.numel(),
        "kernel_gb_s": read.nbytes / kernel / 1e9, "torch_gb_s": read.nbytes / plain / 1e9,
    }  # fmt: skip


# ---- masters ----------------------------------------------------------------------------------------------


def masters(name: str, steps: int) -> dict[str, Any]:
    """Steps of three policies in turn."""
    config = DECODERS[name][0]
    rng, mask = torch.Generator().manual_seed(1), {}
    for n, p in Decoder(config, seed=1).named_parameters():
        if p.dim() >= 2:
            mask[n] = torch.rand(p.numel() // config.width, generator=rng) < SHARE
    packed = hu.TileMaster(mask, tile=config.width)
    runs = {"nearest": training(name, "rne"), "packed": training(name, packed),
            "blanket": training(name, "master")}  # fmt: skip
    seconds: dict[str, list[float]] = {policy: [] for policy in runs}
    names = list(runs)
    for i in range(WARM + steps):
        for policy in names[i % 3 :] + names[: i % 3]:
            start = time.perf_counter()
            runs[policy].step()
            seconds[policy].append(time.perf_counter() - start)
    made = {policy: np.array(found[WARM:]) for policy, found in seconds.items()}
    ratios = {f"{p}_over_blanket": float(np.median(made[p] / made["blanket"])) for p in ("nearest", "packed")}
    return {"decoder": name, **{f"{p}_ms": 1e3 * float(np.median(t)) for p, t in made.items()}, **ratios}


def markdown(env: dict[str, Any], scored: list[dict[str, Any]], kept: list[dict[str, Any]]) -> str:
    lines = [
        "| decoder | step | audit of one grid | scores | of a step | kernel alone | reads | torch.sum |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in scored:
        lines.append(
            f"| {r['decoder']} | {r['step_ms']:.1f} ms | {r['audit_ms']:.2f} ms | {r['scores_ms']:.2f} ms "
            f"| {r['share']:.2%} | {r['kernel_ms']:.2f} ms, {r['kernel_ns']:.2f} ns a weight "
            f"| {r['kernel_gb_s']:.0f} GB/s | {r['torch_gb_s']:.0f} GB/s |"
        )
    lines += ["", "| decoder | nearest | packed masters | blanket masters | packed over blanket |",
              "|---|--:|--:|--:|--:|"]  # fmt: skip
    for r in kept:
        lines.append(
            f"| {r['decoder']} | {r['nearest_ms']:.1f} ms | {r['packed_ms']:.1f} ms "
            f"| {r['blanket_ms']:.1f} ms | {r['packed_over_blanket']:.3f} |"
        )
    return "\n".join([*lines, "", "; ".join(f"{k}: {v}" for k, v in env.items()) + "."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what time is; processor: one thread")
    parser.add_argument("--steps", type=int, default=60, help="pairs of steps, and rounds")
    parser.add_argument("--only", default="", help="decoders whose name has this in it")
    parser.add_argument("--json", type=Path, default=OUT / "scores.json", help="results; a .md beside it")
    options = parser.parse_args()
    if options.clock == "processor":
        torch.set_num_threads(1)
    env = {**environment(), "clock": options.clock}
    with mock.patch("time.perf_counter", CLOCKS[options.clock]):  # the audit's own clock, too
        names = [name for name in DECODERS if options.only in name]
        scored = [scores(name, options.steps) for name in names]
        kept = [masters(name, options.steps) for name in names]
    table = markdown(env, scored, kept)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    made = {"environment": env, "scores": scored, "masters": kept}
    options.json.write_text(json.dumps(made, indent=1) + "\n")
    options.json.with_suffix(".md").write_text(table)
    print("\n" + table, flush=True)


if __name__ == "__main__":
    main()

"""What the training loop costs beside a plain one, and what a write-back and an audit add to it.

Three runs of the character GPT (4 layers, width 128, context 128, batch 32) in one process: a plain loop as
nanoGPT writes it, :class:`halfulp.paper.models.training.Training` with nothing attached, and the same with
stochastic write-back to e4m3@128 and an audit of eight grids that writes its trace. They take steps in
turn, the order rotating, so that drift of the machine hits all alike; a ratio is the median over rounds of
a step's time over the plain step's in the same round. Targets: 3% for the loop, 6% with both attached.

    python benchmarks/training.py [--rounds 150] [--threads N] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernels import EIGHT, OUT, environment

import halfulp as hu
from halfulp.paper import tokens
from halfulp.paper.models.decoder import CHARACTER, Decoder
from halfulp.paper.models.training import Recipe, Schedule, Training, adamw

BATCH, CONTEXT, VOCABULARY = 32, CHARACTER.context, CHARACTER.vocabulary
PEAK, FLOOR, WARMUP, HORIZON = 6e-4, 6e-5, 100, 3000
TARGETS = {"loop": 0.03, "loop, sr write-back, 8-grid audit": 0.06}
SKIPPED = 5  # the first rounds compile and warm up

Step = Callable[[], object]


def plain_loop(data: np.ndarray[Any, Any]) -> Step:
    """nanoGPT's train.py, without what it logs: batch, rate, backward, clip, step."""
    model = Decoder(CHARACTER, seed=1)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(1337)
    done = 0

    def rate(it: int) -> float:
        if it < WARMUP:
            return PEAK * (it + 1) / (WARMUP + 1)
        ratio = (it - WARMUP) / (HORIZON - WARMUP)
        return FLOOR + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (PEAK - FLOOR)

    def step() -> object:
        nonlocal done
        for group in optimizer.param_groups:
            group["lr"] = rate(done)
        at = torch.randint(len(data) - CONTEXT, (BATCH,), generator=generator)
        x = torch.stack([torch.from_numpy(data[i : i + CONTEXT].astype(np.int64)) for i in at])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + CONTEXT].astype(np.int64)) for i in at])
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(logits.view(-1, VOCABULARY), y.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done += 1
        return loss

    return step


def recipe() -> Recipe:
    schedule = Schedule(peak=PEAK, floor=FLOOR, warmup=WARMUP, horizon=HORIZON)
    return Recipe(schedule=schedule, seed=1337, updates=HORIZON, batch=BATCH, context=CONTEXT)


def alone(data: np.ndarray[Any, Any]) -> Step:
    model = Decoder(CHARACTER, seed=1)
    return Training(model, adamw(model, recipe()), data, recipe()).step


def attached(data: np.ndarray[Any, Any], folder: Path) -> tuple[Step, hu.Audit]:
    model = Decoder(CHARACTER, seed=1)
    optimizer = hu.WriteBack(adamw(model, recipe()), "e4m3@128", "sr", model=model, seed=1)
    audit = hu.Audit(optimizer, [g.name for g in EIGHT], model=model, out=folder / "trace")
    return Training(model, optimizer, data, recipe()).step, audit


def measure(rounds: int) -> list[dict[str, Any]]:
    """Steps in turn; one row for every run."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "train.bin"
        np.random.default_rng(0).integers(0, VOCABULARY, 1_000_000).astype("<u2").tofile(file)
        data = tokens.open_bin(file)
        both, audit = attached(data, Path(name))
        steps = dict(zip(("plain", *TARGETS), (plain_loop(data), alone(data), both), strict=True))
        times: dict[str, list[float]] = {what: [] for what in steps}
        with audit:
            order = list(steps)
            for _ in range(rounds + SKIPPED):
                order.append(order.pop(0))
                for what in order:
                    start = time.perf_counter()
                    steps[what]()
                    times[what].append(time.perf_counter() - start)
    taken = {what: np.array(seconds[SKIPPED:]) for what, seconds in times.items()}
    rows = []
    for what, seconds in taken.items():
        ratio = seconds / taken["plain"]
        low, middle, high = np.percentile(ratio, (25, 50, 75)).tolist()
        rows.append(
            {
                "run": what,
                "rounds": rounds,
                "ms": 1e3 * float(np.median(seconds)),
                "best_ms": 1e3 * float(seconds.min()),
                "ratio": middle,
                "ratio_quartiles": [low, high],
                "best_ratio": float(seconds.min() / taken["plain"].min()),
                "target": 1 + TARGETS.get(what, 0.0),
            }
        )
    return rows


def markdown(env: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [
        f"A step of the character GPT beside a plain loop's, {rows[0]['rounds']} rounds:",
        "",
        "| run | median | ratio, paired (quartiles) | fastest | ratio of fastest | target |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for r in rows:
        low, high = r["ratio_quartiles"]
        lines.append(
            f"| {r['run']} | {r['ms']:.1f} ms | {r['ratio']:.3f} ({low:.3f} to {high:.3f}) "
            f"| {r['best_ms']:.1f} ms | {r['best_ratio']:.3f} | {r['target']:.2f} |"
        )
    return "\n".join([*lines, "", "; ".join(f"{k}: {v}" for k, v in env.items()) + "."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, default=OUT / "training.json", help="a .md goes beside it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    env = {**environment(), "threads": options.threads}
    rows = measure(options.rounds)
    table = markdown(env, rows)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"environment": env, "runs": rows}, indent=1) + "\n")
    options.json.with_suffix(".md").write_text(table)
    print(table, flush=True)
    print(f"wrote {options.json} and {options.json.with_suffix('.md')}")


if __name__ == "__main__":
    main()

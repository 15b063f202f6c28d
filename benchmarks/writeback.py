"""What a write-back costs beside other low-precision optimizers: time and bytes, in one run.

Ten matrices of a million weights each (``--matrices``), gradients given in the type of the parameters. Every
contestant steps once in each repetition, in shuffled order (but see APART); the result is the median. Bytes
are measured: the storage of parameters and of everything that the optimizer keeps, divided by the parameters.

    python benchmarks/writeback.py [--json OUT] [--matrices 10] [--only one-pass]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernels import OUT, environment

import halfulp as hu
from halfulp.kernels import tiles_of
from halfulp.writeback import Kahan, WriteBackOptions

SIDE, COUNT = 1000, 10
RATE, DECAY = 6e-4, 0.1

PUBLISHED = {
    "FlashOptim FlashAdamW (CUDA only)": "5, published (arXiv 2602.23349: 7 with 16-bit gradients)",
}


def parameters(dtype: torch.dtype = torch.float32) -> torch.nn.ParameterList:
    made = torch.Generator().manual_seed(0)
    params = torch.nn.ParameterList(
        torch.nn.Parameter((torch.randn(SIDE, SIDE, generator=made) * 0.02).to(dtype)) for _ in range(COUNT)
    )
    for p in params:
        p.grad = (torch.randn(SIDE, SIDE, generator=made) * 1e-3).to(dtype)
    return params


def adamw(params: torch.nn.ParameterList, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params.parameters(), lr=RATE, weight_decay=DECAY, **options)


def one(policy: Any = "sr", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Callable[[], Any]:
    """One pass, for those who start afresh."""

    def make() -> Any:
        params = parameters(dtype)
        given = {"lr": RATE, "weight_decay": DECAY, "policy": policy, "model": params, **options}
        return params, hu.AdamW(params.named_parameters(), **given)

    return make


def ours(policy: Any, grid: str = "bf16", **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        params = parameters(torch.bfloat16 if options.get("storage") == "native" else torch.float32)
        return params, hu.WriteBack(adamw(params, fused=True), grid, policy, model=params, **options)

    return make


def plain(**options: Any) -> Callable[[], Any]:
    def make() -> Any:
        params = parameters()
        return params, adamw(params, **options)

    return make


def tenth() -> hu.TileMaster:
    """Masters for every tenth tile."""
    tiles = torch.arange(tiles_of(SIDE * SIDE)) % 10 == 0
    return hu.TileMaster({str(i): tiles for i in range(COUNT)})


def torchao() -> Any:
    from torchao.optim import _AdamW

    params = parameters(torch.bfloat16)
    return params, _AdamW(params.parameters(), lr=RATE, weight_decay=DECAY, bf16_stochastic_round=True)


def optimi() -> Any:
    from optimi import AdamW

    params = parameters(torch.bfloat16)
    return params, AdamW(params.parameters(), lr=RATE, weight_decay=DECAY, kahan_sum=True)


def heavyball() -> Any:
    from heavyball import AdamW

    params = parameters(torch.bfloat16)
    given = [p.grad for p in params]
    optimizer = AdamW(params.parameters(), lr=RATE, weight_decay=DECAY)
    plain_step = optimizer.step

    def step() -> None:  # it takes gradients away
        for p, grad in zip(params, given, strict=True):
            p.grad = grad
        plain_step()

    optimizer.step = step
    return params, optimizer


ONE_PASS: dict[str, Callable[[], Any]] = {
    "torch AdamW, fp32, fused": plain(fused=True),
    "halfulp AdamW sr, bf16, fp32 moments": one(),
    "halfulp AdamW sr, bf16, fp32 moments, no telemetry": one(options=WriteBackOptions(telemetry=False)),
    "halfulp AdamW sr, bf16, bf16 moments": one(moments="bf16"),
    "halfulp AdamW sr, e4m3@128 packed, bf16 moments": one(
        moments="bf16", dtype=torch.float32, grid="e4m3@128", storage="packed"
    ),
    "halfulp AdamW rne, bf16, fp32 moments": one("rne"),
    "halfulp AdamW deadzone-sr, bf16, fp32 moments": one("deadzone-sr"),
    "halfulp AdamW eco, bf16, fp32 moments": one("eco"),
    "halfulp AdamW kahan (bf16 carry), bf16, fp32 moments": one(Kahan(torch.bfloat16)),
    "halfulp AdamW remainder16, bf16, fp32 moments": one("remainder16"),
    "halfulp AdamW remainder8, bf16, bf16 moments": one("remainder8", moments="bf16"),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "torch AdamW, fp32, foreach": plain(foreach=True),
    "halfulp rne, bf16 grid": ours("rne"),
    "halfulp sr, bf16 grid": ours("sr"),
    "halfulp sr, bf16 grid, no telemetry": ours("sr", options=WriteBackOptions(telemetry=False)),
    "halfulp sr, e4m3@128 grid": ours("sr", "e4m3@128"),
    "halfulp deadzone-sr, bf16 grid": ours("deadzone-sr"),
    "halfulp kahan, bf16 grid": ours("kahan"),
    "halfulp kahan, bf16 grid, bf16 carry": ours(Kahan(torch.bfloat16)),
    "halfulp master, bf16 grid": ours("master"),
    "halfulp tile-master, a tenth of the tiles, bf16 grid": ours(tenth()),
    "halfulp eco, bf16 grid": ours("eco"),
    "halfulp dqt, int3/dqt grid": ours("dqt", "int3/dqt"),
    "halfulp sr, bf16 native": ours("sr", storage="native"),
    "halfulp sr, e4m3@128 packed": ours("sr", "e4m3@128", storage="packed"),
    "torchao _AdamW, bf16, stochastic": torchao,
    "optimi AdamW, bf16, kahan": optimi,
}
APART = {"heavyball AdamW, bf16, stochastic, compiled": heavyball}
"""Their threads wait awake for more work and take the cores from whoever comes next: stepped by themselves,
after the others."""
CONTESTANTS = {**ONE_PASS, **OTHERS, **APART}


def storage_bytes(*tensors: Any) -> int:
    """Bytes of distinct storages."""
    seen = {}
    for t in tensors:
        if isinstance(t, torch.Tensor):
            inner = [getattr(t, name) for name in ("codes", "scale") if hasattr(t, name)] or [t]
            for x in inner:
                seen[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
    return sum(seen.values())


def kept(params: Any, optimizer: Any) -> float:
    """Measured bytes a parameter between steps, gradients not included."""
    tensors: list[Any] = list(params.parameters())
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in inner.state.values():
        for part in (state, *(v for v in state.values() if isinstance(v, dict))):  # heavyball's are nested
            tensors += [v for v in part.values() if isinstance(v, torch.Tensor) and v.numel() > 1]
    if isinstance(optimizer, hu.WriteBack):
        for slot in optimizer.slots:
            tensors += list(slot.kept_tensors().values())
            if slot.scratch is not None:
                tensors.append(slot.scratch)
    return storage_bytes(*tensors) / (SIDE * SIDE * COUNT)


def main() -> None:
    global COUNT
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, default=OUT / "writeback.json")
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--matrices", type=int, default=COUNT, help="how many million weights")
    parser.add_argument("--only", choices=["one-pass"], help="torch's fused step and one-pass contestants")
    options = parser.parse_args()
    COUNT = options.matrices
    env, rows, ready = environment(), [], []
    for name, make in (ONE_PASS if options.only else CONTESTANTS).items():
        row: dict[str, Any] = {"contestant": name}
        rows.append(row)
        try:
            params, optimizer = make()
            for _ in range(3):
                optimizer.step()
        except ImportError as error:
            row["skipped"] = f"not installed ({error.name})"
            continue
        ready.append((row, params, optimizer, []))
    order = random.Random(0)
    for together in (True, False):
        chosen = [one for one in ready if (one[0]["contestant"] not in APART) == together]
        for _ in range(options.repetitions):
            for _, _, optimizer, seconds in order.sample(chosen, len(chosen)):
                start = time.perf_counter()
                optimizer.step()
                seconds.append(time.perf_counter() - start)
    for row, params, optimizer, seconds in ready:
        row["seconds"] = statistics.median(seconds)
        row["bytes_per_parameter"] = kept(params, optimizer)
    base = rows[0]["seconds"]
    lines = [
        f"AdamW on {SIDE * SIDE * COUNT:,} parameters, milliseconds a step (median), and measured bytes a "
        "parameter between steps (weights, moments, what a policy keeps; no gradients).",
        "",
        "| contestant | ms | x fused fp32 | bytes |",
        "|---|--:|--:|--:|",
    ]
    for row in rows:
        if "seconds" not in row:
            lines.append(f"| {row['contestant']} | {row['skipped']} | | |")
            continue
        ms, ratio = row["seconds"] * 1e3, row["seconds"] / base
        lines.append(f"| {row['contestant']} | {ms:.1f} | {ratio:.2f} | {row['bytes_per_parameter']:.2f} |")
    lines += [f"| {name} | - | - | {size} |" for name, size in PUBLISHED.items()]
    lines += ["", "; ".join(f"{key}: {value}" for key, value in env.items()) + "."]
    table = "\n".join(lines) + "\n"
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"environment": env, "rows": rows}, indent=1) + "\n")
    options.json.with_suffix(".md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()

"""Digests of what fixed runs give: to be equal before and after a change that should change no number.

Runs of a small model with fixed data: audits (weights, moments, casts, rehearsals, scores), every
write-back policy around optimizers of torch, the fused optimizers, and the answers made of them. A digest is
of values, not of files, so that a new file format keeps it. Digests depend on the machine's arithmetic:
compare two commits on one machine.

    python benchmarks/golden.py > before.json
    python benchmarks/golden.py --against before.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import halfulp as hu

GRIDS = ["bf16", "e4m3@128", "e5m2", "m5", "int8/row", "int4/g16", "mxfp8_e4m3"]
POLICIES = ["nearest", "sr", "deadzone-sr", "kahan", "eco", "master"]
STEPS = 12


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(32, 48), torch.nn.GELU(), torch.nn.Linear(48, 32), torch.nn.LayerNorm(32))
    return torch.nn.Sequential(*layers).to(dtype)


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(
    net: torch.nn.Module, optimizer: Any, steps: int = STEPS, seen: Callable[[], None] | None = None
) -> None:
    dtype = next(net.parameters()).dtype
    for step in range(steps):
        x = batch(step, dtype)
        optimizer.zero_grad()
        (net(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
        if seen is not None:
            seen()


def canonical(x: Any) -> Any:
    """A value as JSON, exactly: arrays by the digest of their bytes, floats in hexadecimal."""
    if isinstance(x, torch.Tensor):
        flat = x.detach().contiguous().reshape(-1)
        return [
            str(x.dtype),
            list(x.shape),
            hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest(),
        ]
    if isinstance(x, np.ndarray):
        return canonical(x.tolist())
    if isinstance(x, dict):
        return {str(k): canonical(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [canonical(v) for v in x]
    if isinstance(x, float):
        return "nan" if math.isnan(x) else x.hex()
    return x if x is None or isinstance(x, bool | int | str) else str(x)


def digest(x: Any) -> str:
    return hashlib.sha256(json.dumps(canonical(x), sort_keys=True).encode()).hexdigest()[:16]


def told(trace: Any, grids: list[str]) -> dict[str, Any]:
    """All series of a trace, by grid."""
    out: dict[str, Any] = {
        "steps": trace.steps,
        "tensors": [(t["name"], t["recorded"]) for t in trace.tensors],
    }
    for grid in grids:
        out[grid] = {
            "updates": trace.frozen(grid),
            "weights": trace.frozen(grid, "all", of="weights"),
            "never": trace.never_moved(grid),
            "gain": trace.gain(grid),
            "cosine": trace.cosine(grid),
            "dragged": trace.series("dragged", grid),
            "tensors": trace.lost_by_tensor(grid),
        }
    return out


def audits(folder: Path) -> Iterator[tuple[str, Any]]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
    with hu.Audit(optimizer, GRIDS, model=net, out=folder / "weights", decay=True) as audit:
        train(net, optimizer, seen=lambda: audit.log(0.5))
    trace = hu.Trace.open(folder / "weights")
    yield "audit: weights", told(trace, GRIDS)
    yield "audit: ratio", [trace.update_ratio(), trace.zero_proposals(), trace.nonfinite()]
    yield (
        "audit: by symmetric, phase, rho",
        [trace.frozen("bf16", by=by) for by in ("symmetric", "phase", "rho")],
    )
    yield "audit: verdict", str(hu.verdict(trace)).replace(str(folder), "")
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    specs = ["e4m3@128", "e4m3@128:sr", "bf16:kahan", "e5m2:eco", "int8/row:master"]
    with hu.Audit(
        optimizer,
        "bf16",
        model=net,
        out=folder / "rehearsed",
        rehearse=hu.Rehearse(specs, pull=30.0),
        scores=("e5m2", 3, 9),
    ) as audit:
        train(net, optimizer, STEPS)
        audit.evaluate(lambda: (net(batch(99, torch.float32)).square().mean()).detach())
    trace = hu.Trace.open(folder / "rehearsed")
    for spec in specs:
        made = trace.forecast(spec)
        yield f"rehearsal: {spec}", [made.frozen(bound=b) for b in ("point", "upper")] + [made.never_moved()]
    yield "rehearsal: verdict", str(hu.verdict(trace)).replace(str(folder), "")
    yield "scores", trace.scores()
    yield "mask", hu.allocate(trace, budget=0.25, score="P").tiles
    memory, net = hu.Memory(), model(torch.bfloat16)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
    with hu.Audit(optimizer, ["bf16", "e5m2"], model=net, out=memory, states=True) as audit:
        train(net, optimizer)
        latest = {k: v for k, v in audit.latest.items() if k != "seconds"}
    yield "audit: bfloat16", told(memory.trace, ["bf16", "e5m2"])
    yield "audit: latest", latest
    yield "audit: moments", {role: told(t, t.grids) for role, t in memory.trace.roles.items()}
    yield "audit: the run", [p.detach() for p in net.parameters()]


def writebacks() -> Iterator[tuple[str, Any]]:
    kinds = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
        "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    }
    for name, kind in kinds.items():
        for grid in ("bf16", "e4m3@128", "int8/row"):
            for policy in POLICIES:
                net = model(torch.bfloat16 if grid == "bf16" else torch.float32)
                optimizer = hu.WriteBack(kind(net.parameters()), grid, policy, model=net)
                events: list[Any] = []

                def seen(of: Any = optimizer, into: list[Any] = events) -> None:
                    into.append([of.events.frozen, of.events.never_moved, of.events.gain, of.events.cosine])

                train(net, optimizer, 5, seen)
                state = optimizer.state_dict()["state"]
                yield (
                    f"WriteBack({name}), {grid}, {policy}",
                    [[p.detach() for p in net.parameters()], events, state],
                )
    for made in (hu.AdamW, hu.Adam, hu.SGD, hu.Lion):
        for dtype in (torch.bfloat16, torch.float32):
            net = model(dtype)
            optimizer = made(net.parameters(), lr=1e-3, model=net)
            train(net, optimizer, 5)
            yield (
                f"{made.__name__}, {dtype}",
                [[p.detach() for p in net.parameters()], optimizer.events.frozen],
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--against", type=Path, help="digests of another commit: exit with 1 where one differs"
    )
    against = parser.parse_args().against
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {k: digest(v) for part in (audits(Path(folder)), writebacks()) for k, v in part}
    print(json.dumps(found, indent=1))
    if against is not None:
        before = json.loads(against.read_text())
        differ = [k for k in before.keys() | found.keys() if before.get(k) != found.get(k)]
        print(
            f"{len(before)} digests before, {len(found)} now, {len(differ)} differ: {sorted(differ)}",
            file=sys.stderr,
        )
        sys.exit(bool(differ))


if __name__ == "__main__":
    main()

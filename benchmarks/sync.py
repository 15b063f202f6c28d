"""Bytes and seconds of a weight sync, beside a full copy: a bf16 model of about one gigabyte at lr 1e-6.

    python benchmarks/sync.py [--gigabytes 1.0] [--steps 3] [--out sync.json]

The weights are those of a decoder at its width's usual scale (0.02), trained by ``hu.AdamW`` (stochastic
rounding) on random gradients that keep a third of their direction. After each step one sync is taken, sent
through bytes, and applied; the copy is compared bit by bit. Seconds are of processor time, one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import halfulp as hu
from halfulp.checkpoints import BlockFp8, Change

WIDTH = 4096
LR = 1e-6


def model(gigabytes: float) -> torch.nn.Module:
    """Square layers of the scale at which decoders begin, and norms."""
    layers = max(1, round(gigabytes * 1e9 / (2 * WIDTH * WIDTH)))
    torch.manual_seed(0)
    made = torch.nn.ModuleList()
    for _ in range(layers):
        linear = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        torch.nn.init.normal_(linear.weight, std=0.02)
        made.append(torch.nn.Sequential(torch.nn.LayerNorm(WIDTH, dtype=torch.bfloat16), linear))
    return made


def give_gradients(made: torch.nn.Module, step: int) -> None:
    fresh, kept = torch.Generator().manual_seed(step), torch.Generator().manual_seed(-1)
    for p in made.parameters():
        direction = torch.empty(p.shape, dtype=p.dtype)
        p.grad = torch.empty_like(direction).normal_(generator=fresh)
        p.grad += direction.normal_(generator=kept) / 2


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    value = call()
    return value, round(time.process_time() - start, 2)


def follow(made: torch.nn.Module, steps: int, **options: Any) -> list[dict[str, Any]]:
    optimizer = hu.AdamW(made.parameters(), lr=LR)
    sync, first = timed(lambda: hu.Sync(made, **options))
    copied = {name: x.clone() for name, x in sync.stored().items()}
    receiver = hu.Receiver(copied, position=sync.position)
    rows = []
    for step in range(steps):
        give_gradients(made, step)
        optimizer.step()
        for p in made.parameters():
            p.grad = None
        change, take = timed(sync.take)
        content, pack = timed(change.to_bytes)
        read, unpack = timed(lambda content=content: Change.from_bytes(content))
        _, apply = timed(lambda read=read: receiver.apply(read))
        for name, x in sync.stored().items():
            assert torch.equal(copied[name].view(torch.uint8), x.view(torch.uint8)), name
        full = sum(x.numel() * x.element_size() for x in copied.values())
        rows.append(
            {
                "step": step + 1, "full_copy_bytes": full, "changed": change.changed,
                "density": change.density,
                "sent_bytes": len(content), "int32_indices_bytes": change.changed * (4 + 2),
                "kept_bytes": sync.kept_bytes, "seconds_first": first, "seconds_take": take,
                "seconds_pack": pack, "seconds_read": unpack, "seconds_apply": apply,
            }
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    kinds: dict[str, dict[str, Any]] = {
        "bf16": {},
        "fp8 blocks": {"grid": BlockFp8()},
        "fp8 blocks, scales powers of two": {"grid": BlockFp8(power_of_two=True)},
    }
    found = {}
    for name, options in kinds.items():
        print(name, flush=True)
        found[name] = follow(model(given.gigabytes), given.steps, **options)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

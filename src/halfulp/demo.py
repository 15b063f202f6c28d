"""One real optimizer step, seen through every grid.

A weight matrix at GPT-2's initialisation scale (standard deviation 0.02), a real gradient of a
real loss, one AdamW step at the usual rate. What that step proposes is then audited for every
grid at once: the share of the million proposals that storing the weights on the grid would throw
away, and what stochastic rounding would keep.
"""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.table import Table

from halfulp import kernels
from halfulp.grids import grid
from halfulp.streams import Stream

GRIDS = (
    "fp16",
    "bf16",
    "e4m3",
    "e4m3@128",
    "e3m4",
    "e5m2",
    "int8/row",
    "int4/g128",
    "mxfp8_e4m3",
    "mxfp4",
    "nvfp4",
)
SIDE = 1024
RATE = 6e-4


def one_step() -> tuple[torch.Tensor, torch.Tensor]:
    """Weights before and after one AdamW step on a small regression."""
    made = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(SIDE, SIDE, generator=made) * 0.02)
    x, y = (torch.randn(256, SIDE, generator=made) for _ in range(2))
    optimizer = torch.optim.AdamW([weight], lr=RATE, weight_decay=0.1)
    before = weight.detach().clone()
    torch.nn.functional.mse_loss(torch.tanh(x @ weight), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return before, weight.detach()


def run(console: Console) -> None:
    """Print the table."""
    before, after = one_step()
    kernels.audit(before, after, GRIDS, after=True)  # compiles on the first call ever
    start = time.perf_counter()
    audit = kernels.audit(before, after, GRIDS, after=True)
    seconds = time.perf_counter() - start
    table = Table(
        "grid", "bytes a weight", "gap at 0.02", "thrown away", "kept by stochastic rounding",
        title=f"One AdamW step (rate {RATE:g}) on {before.numel():,} weights of scale 0.02",
    )  # fmt: skip
    for name, lost in zip(GRIDS, audit.frozen().tolist(), strict=True):
        g = grid(name)
        q = g.round(before)
        near = q.reshape(-1)[(before.reshape(-1) - 0.02).abs().argmin()]
        gap = g.gap(q, torch.ones_like(q)).reshape(-1)[(q.reshape(-1) == near).nonzero()[0]]
        stream = Stream(seed=0, name=name)
        drawn = kernels.write_back(q, q + (after - before), g, "stochastic", stream, out=torch.empty_like(q))
        moved = 1 - int(drawn.counts[:, 0].sum()) / before.numel()
        table.add_row(
            name, f"{g.bytes_per_weight:g}", f"{float(gap):.2g}", f"{lost:.1%}", f"{moved:.1%} move"
        )
    console.print(table)
    console.print(
        f"The step moves a weight by about {float((after - before).abs().median()):.2g}. Stored on a grid, a "
        "move of less than half a gap leaves the weight as it was: thrown away, every step again.\n"
        "Stochastic rounding moves a few weights by a whole gap instead, so that the step is right on "
        "average.\n"
        f"All {len(GRIDS)} grids were audited in one call of {seconds * 1e3:.0f} ms.",
        highlight=False,
    )

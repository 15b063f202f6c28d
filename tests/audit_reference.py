"""An audit by brute force: weights copied around every step and given to the reference kernel.

Shares nothing with the recorder but the kernel that defines the numbers. Models are small, but have tensors
of several tiles, of less than one, of one dimension, tied, frozen and unused ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import nn

import halfulp as hu
from halfulp.kernels import TILE, reference

GRIDS = [
    "bf16", "fp16", "e5m2", "e4m3@128", "e2m1", "m7", "int8", "int4@64", "int8/row", "int4/g32", "int3/dqt",
    "int4/absmean", "mxfp8_e4m3", "mxfp4", "nvfp4",
]  # fmt: skip
STATIC = ["bf16", "e5m2", "e4m3@128", "m5", "int4@64"]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, weight_decay=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=2e-3),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attn["c_attn"](self.ln_1(x)).chunk(3, dim=-1)
        x = x + self.attn["c_proj"](nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A decoder with the embedding tied to the head, one frozen and one unused tensor."""

    def __init__(self, vocabulary: int = 41, width: int = 24, context: int = 12) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList([Block(width)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        self.still = nn.Parameter(torch.ones(5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(7))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    def loss(self, generator: torch.Generator) -> torch.Tensor:
        ids = torch.randint(0, 41, (4, 12), generator=generator)
        return nn.functional.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, 60)
        self.norm = nn.LayerNorm(60)
        self.fc2 = nn.Linear(60, 30)
        self.rms = nn.RMSNorm(30)
        self.head = nn.Linear(30, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rms(self.fc2(torch.relu(self.norm(self.fc1(x))))))

    def loss(self, generator: torch.Generator) -> torch.Tensor:
        x = torch.randn(8, 16, generator=generator)
        return nn.functional.cross_entropy(self(x), (x[:, 0] > 0).long())


class CNN(nn.Module):
    """Weights are channels-last: their memory is not in the order of their coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 9, 3, padding=1).to(memory_format=torch.channels_last)
        self.bn = nn.BatchNorm2d(9)
        self.conv2 = nn.Conv2d(9, 13, 3, stride=2).to(memory_format=torch.channels_last)
        self.fc = nn.Linear(13, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.conv2(torch.relu(self.bn(self.conv1(x))))).mean(dim=(2, 3)))

    def loss(self, generator: torch.Generator) -> torch.Tensor:
        x = torch.randn(4, 3, 8, 8, generator=generator)
        return nn.functional.cross_entropy(self(x), torch.arange(4))


MODELS = {"gpt": GPT, "mlp": MLP, "cnn": CNN}


def made(kind: str, seed: int = 0) -> Any:
    """A model from a seed, without touching the global generator."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[kind]()


def batches(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ---- brute force -----------------------------------------------------------------------------------------

COUNTS = ("frozen", "symmetric", "endpoint", "subnormal", "zero_code", "never_moved", "dragged")
PER_GRID = (*COUNTS, "phase", "expected", "arrived", "written_sq")
SHARED = ("zero_proposal", "nonfinite", "weight_sq", "proposal_sq", "lr")


def numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().contiguous().clone().numpy()


def total(x: np.ndarray) -> np.ndarray:
    """Over tiles, one after another. Counts are whole numbers: the order matters to sums of floats only."""
    return functools.reduce(np.add, x.astype(np.float64))


class Brute:
    """Expected numbers by (step, tensor, grid) and (step, tensor), from copies around every step."""

    def __init__(self, grids: Iterable[str], tiles: dict[str, np.ndarray] | None = None) -> None:
        self.grids = [hu.grid(g) for g in grids]
        self.tiles = tiles
        self.moved: dict[str, np.ndarray] = {}
        self.stay: dict[str, np.ndarray] = {}
        self.per_grid: dict[tuple[int, str, str], dict[str, float]] = {}
        self.shared: dict[tuple[int, str], dict[str, float]] = {}
        self.loss: dict[int, float] = {}

    def chosen(self, name: str, x: torch.Tensor) -> np.ndarray:
        """A tensor's coordinates that are audited."""
        if self.tiles is None:
            return numpy(x)
        flat = numpy(x).reshape(-1)
        return np.concatenate([flat[t * TILE : (t + 1) * TILE] for t in self.tiles[name]])

    def step(
        self,
        step: int,
        before: dict[str, torch.Tensor],
        after: dict[str, torch.Tensor],
        lr: dict[str, float],
        loss: float = math.nan,
        decay: dict[str, float] | None = None,
    ) -> None:
        """Take in one step of the tensors in ``lr``, from their values around it."""
        self.loss[step] = loss
        for name in lr:
            b, a = self.chosen(name, before[name]), self.chosen(name, after[name])
            with np.errstate(invalid="ignore"):
                d = a - b
            g = len(self.grids)
            moved = self.moved.setdefault(name, np.zeros((g, (b.size + 7) // 8), dtype=np.uint8))
            stay = self.stay.setdefault(name, np.ones((g, b.size), dtype=b.dtype))
            found = reference.audit(b, d, self.grids, moved=moved, stay=stay)
            counts, phase, expected, arrived = (
                total(found[k]) for k in ("counts", "phase", "expected", "arrived")
            )
            for k, grid in enumerate(self.grids):
                row = dict(zip(COUNTS, counts[k], strict=True))
                row |= {"phase": phase[k], "expected": expected[k]}
                row |= {"arrived": arrived[k, 0], "written_sq": arrived[k, 1]}
                if decay is not None:
                    shrink = (b * np.float32(-lr[name] * decay[name])).astype(b.dtype)
                    for column, part in (("frozen_decay", shrink), ("frozen_gradient", d - shrink)):
                        alone = reference.audit(b, part, [grid], phase=False)["counts"][:, 0, 0].sum()
                        row[column] = alone if decay[name] else None
                self.per_grid[step, name, grid.name] = row
            values = (*total(found["shared"]), *total(found["sums"]), lr[name])
            self.shared[step, name] = dict(zip(SHARED, values, strict=True))

    def assert_equal(self, trace: hu.Trace) -> None:
        """Every number of a trace is the expected one, to the last bit, and there are no others."""
        table = trace.table().to_polars()
        seen = {}
        for row in table.iter_rows(named=True):
            seen[row["step"], row["tensor"], row["grid"]] = row
        assert seen.keys() == self.per_grid.keys()
        assert len(seen) == len(table)
        left_out = () if trace.manifest["options"]["expected_never_moved"] else ("expected",)
        for key, row in self.per_grid.items():
            expected = {column: value for column, value in row.items() if column not in left_out}
            assert {c: seen[key][c] for c in expected} == expected, key
        names = {t["id"]: t["name"] for t in trace.tensors}
        shared = {
            (r["step"], names[r["tensor"]]): r
            for r in trace.scan("tensors").to_polars().iter_rows(named=True)
        }
        assert shared.keys() == self.shared.keys()
        for place, expected in self.shared.items():
            assert {c: shared[place][c] for c in SHARED} == expected, place
        run = dict(trace.scan("run").to_polars().iter_rows())
        assert run.keys() == self.loss.keys()
        np.testing.assert_array_equal([run[s] for s in self.loss], list(self.loss.values()))

    def informative(self) -> set[str]:
        """Grids on which some updates were lost and some were not."""
        out = set()
        for grid in self.grids:
            frozen = sum(r["frozen"] for (_, _, g), r in self.per_grid.items() if g == grid.name)
            everything = sum(self.stay[n].shape[1] for (_, n, g) in self.per_grid if g == grid.name)
            if 0 < frozen < everything:
                out.add(grid.name)
        return out


def rates(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The learning rates of the tensors that the next step will move."""
    names = {p: n for n, p in model.named_parameters()}
    return {
        names[p]: float(group["lr"])
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    }


def train(
    model: Any, optimizer: torch.optim.Optimizer, steps: int, *, brute: Brute | None = None,
    audit: hu.Audit | None = None, first: int = 1, seed: int = 0, scheduled: bool = True,
) -> list[float]:  # fmt: skip
    """Train by a loop like everybody's; the losses."""
    generator, losses = batches(seed), []
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) if scheduled else None
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = model.loss(generator)
        loss.backward()
        losses.append(loss.item())
        if audit is not None:
            audit.log(loss)
        before, lr = weights(model), rates(model, optimizer)
        optimizer.step()
        if brute is not None:
            brute.step(step, before, weights(model), lr, loss.item())
        if decay is not None:
            decay.step()
    return losses


def tables(trace: hu.Trace) -> Iterator[tuple[str, pl.DataFrame]]:
    """Every table of a trace, in a fixed order of rows."""
    for name in ("grids", "tensors", "run"):
        frame = trace.scan(name).to_polars()
        yield name, frame.sort([c for c in ("step", "tensor", "grid") if c in frame.columns])


def assert_same_tables(one: hu.Trace, other: hu.Trace) -> None:
    """Two traces hold the same numbers."""
    for (name, a), (_, b) in zip(tables(one), tables(other), strict=True):
        assert a.equals(b, null_equal=True), f"table {name} differs"

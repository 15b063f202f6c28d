"""Choose the tiles that get an fp32 master when the budget does not cover all of them.

An audit with ``scores=`` sums, tile by tile, what every score of the paper is made of (appendix E). Here a
score ranks the tiles, and a budget takes the first of them: exactly, in bytes of master payload. What else a
master costs (which tiles were chosen, temporaries) is not part of the budget.

A score says where updates are large, or lost, or point downhill. Lost is not important: at a tenth of the
masters, the paper wins back 0.6 of the gap with gradient times update (P), and 0.01 with lost updates (F).

A ninth score, R, is what a tile costs in a rehearsal: its share of the forecast gap, from an audit that was
asked (:meth:`halfulp.Audit.attribute`). Tiles depend on each other, so it is best taken in two rounds: half
the budget, another rehearsal with these masters (``e5m2:tiles(half.safetensors)``), and ``keep=`` that half
for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.errors import UsageError
from halfulp.kernels import SCORES, TILE, checked_tile, tiles_of
from halfulp.numbers.streams import Stream
from halfulp.text import tell
from halfulp.trace import Trace
from halfulp.writeback.mask import MASTER_BYTES, Mask, tile_sizes

__all__ = [
    "MASTER_BYTES", "RANDOM", "REHEARSED", "Mask", "allocate", "choose", "drawn", "tile_sizes",
    "whole_tensors",
]  # fmt: skip

Array = npt.NDArray[Any]

RANDOM = "random"
REHEARSED = "R"
"""The ninth score; use ``R:e5m2`` if several rehearsals were attributed."""


def allocate(
    trace: Trace | str | Path,
    budget: float | int,
    score: str = "P",
    *,
    params: Callable[[str, tuple[int, ...]], bool] | None = None,
    seed: int | None = None,
    keep: Mask | None = None,
) -> Mask:
    """Choose tiles by a score from a trace that was recorded with ``scores=``, within a budget.

    Tiles have the size that the scores were summed by. They are taken in decreasing order of the mean score
    of their coordinates; ties go by tensor name and then by tile, so the order of parameters has no effect.
    A tile that no longer fits is skipped.

    Args:
        trace: A trace recorded with ``scores=``, or its folder.
        budget: Bytes, or a share (a float up to 1.0) of the bytes that masters for all eligible tiles take.
        score: One of ``halfulp.kernels.SCORES`` (F how often frozen, L descent, C both, G gradient, U update,
            W weight, T gradient times weight, P gradient times update, all as magnitudes), ``R`` for the
            cost of a tile in an attributed rehearsal (``R:e5m2`` selects one), or ``random``.
        params: Selects the eligible tensors, ``(name, shape) -> bool``; by default those of two or more
            dimensions.
        seed: Seed of ``random``, for controls; 0 by default.
        keep: A mask whose tiles come first and count towards the budget.

    Returns:
        The mask, whose masters fit in the budget.

    Raises:
        UsageError: If the trace has no such scores or only a sample, no step of their window was audited, no
            tensor is eligible, or the budget buys no tile.

    >>> import halfulp as hu, tempfile, torch
    >>> model, run = torch.nn.Linear(64, 64), tempfile.mkdtemp() + "/run"
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with hu.Audit(optimizer, "e5m2", model=model, out=run, scores=("e5m2", 1, 1, 64)):
    ...     model(torch.ones(1, 64)).sum().backward()
    ...     optimizer.step()
    >>> hu.allocate(run, budget=0.25).payload_bytes
    4096
    """
    trace = trace if isinstance(trace, Trace) else Trace.open(trace)
    if seed is not None and score != RANDOM:
        raise UsageError(f"a seed goes with the score {RANDOM}; {score} draws nothing: leave it out.")
    sums = _sums(trace, score)
    eligible = params or (lambda _, shape: len(shape) >= 2)
    scored = {str(t["name"]): t for t in trace.tensors if t["name"] in sums}
    sizes = {name: int(t["numel"]) for name, t in scored.items() if eligible(name, tuple(t["shape"]))}
    if not sizes:
        raise UsageError("no tensor is eligible: none that was scored has two or more dimensions (params=).")
    means = _means(sums, sizes, score, seed or 0, trace.tile)
    return choose(means, sizes, budget, score, trace.tile, keep)


def _sums(trace: Trace, score: str) -> dict[str, Array]:
    """Return what a trace has summed for a score; say so if it is of a part of the window only."""
    kind, _, spec = str(score).partition(":")
    if kind != REHEARSED and (spec or kind not in (*SCORES, RANDOM)):
        known = ", ".join((*SCORES, REHEARSED, RANDOM))
        raise UsageError(f"unknown score {score!r}: expected one of {known}.")
    if trace.manifest["options"]["sample"]:
        raise UsageError(
            f"{trace.path} holds only a sample of tiles: record the run without sample= to rank them."
        )
    if kind == REHEARSED:
        return trace.attribution(spec or None)
    sums = trace.scores()
    missed = trace.missed_scores()
    if not any(value.any() for value in sums.values()):
        why = missed or "the scores are all zero: no gradient was seen"
        raise UsageError(f"{trace.path}: {why}. Record the run again with steps that it reaches.")
    if missed:
        tell(f"halfulp: {trace.path}: {missed}.")
    return sums


def _means(
    sums: Mapping[str, Array], sizes: Mapping[str, int], score: str, seed: int, tile: int
) -> dict[str, Array]:
    """Return the mean score of the coordinates of each tile."""
    if score == RANDOM:
        return _random(sizes, seed, tile)
    of = sums if score not in SCORES else {n: sums[n][:, SCORES.index(score)] for n in sizes}
    return {name: of[name] / tile_sizes(n, tile) for name, n in sizes.items()}


def choose(
    means: Mapping[str, Array],
    sizes: Mapping[str, int],
    budget: float | int,
    score: str,
    tile: int = TILE,
    keep: Mask | None = None,
) -> Mask:
    """Choose tiles as :func:`allocate` does, from the mean score of each tile and the sizes of tensors."""
    spend = _bytes(budget, MASTER_BYTES * sum(sizes.values()))
    if keep is not None:
        _check_kept(keep, sizes, tile, spend)
        means = {
            n: np.where(keep.tiles[n].numpy(), np.inf, m) if n in keep.tiles else m for n, m in means.items()
        }
    names = sorted(sizes)
    lengths = np.concatenate([tile_sizes(sizes[name], checked_tile(tile)) for name in names])
    least = MASTER_BYTES * int(lengths.min())
    if spend < least:
        raise UsageError(
            f"a budget of {budget!r} is {spend:,} bytes, less than any tile takes: masters for the smallest "
            f"take {least:,} bytes (tiles have {tile} weights). Give at least that."
        )
    ranks = np.concatenate([means[name] for name in names])
    chosen = _first_that_fit(np.argsort(-ranks, kind="stable"), MASTER_BYTES * lengths, spend)
    bounds = np.cumsum([tiles_of(sizes[name], tile) for name in names])[:-1]
    parts = dict(zip(names, np.split(chosen, bounds), strict=True))
    tiles = {name: torch.from_numpy(parts[name].copy()) for name in sizes}
    return Mask(tiles=tiles, sizes=dict(sizes), score=score, budget=spend, tile=tile)


def drawn(
    sizes: Mapping[str, int], budget: float | int, seed: int, tile: int = TILE, within: str | None = None
) -> Mask:
    """Choose random tiles, of all tensors or of one, as a control; the budget is a share of all, or bytes."""
    if within is not None and within not in sizes:
        raise UsageError(f"there is no tensor {within!r} to draw tiles of; there are: {', '.join(sizes)}.")
    spend = _bytes(budget, MASTER_BYTES * sum(sizes.values()))
    if within is not None and spend > MASTER_BYTES * sizes[within]:
        raise UsageError(
            f"a budget of {budget!r} is {spend:,} bytes, more than masters for all of {within!r} take: "
            f"{MASTER_BYTES * sizes[within]:,}. Give less, or draw from all tensors."
        )
    means = _random(sizes, seed, tile)
    if within is not None:
        means = {name: m if name == within else np.full_like(m, -1.0) for name, m in means.items()}
    mask = choose(means, sizes, spend, RANDOM, tile)
    return mask if within is None else replace(mask, score=f"{RANDOM} in {within}")


def whole_tensors(
    ranks: Mapping[str, float], sizes: Mapping[str, int], share: float, score: str, tile: int = TILE
) -> Mask:
    """Masters for whole tensors, from the highest rank down, until they are at least a share of all.

    The paper's first allocator: a tensor is taken whole or not at all, so the last one overshoots, and what
    is spent is more than what was nominal. For anti-selection, negate the ranks. Equal ranks go by name.
    Only tensors with a rank can be taken, of ``sizes``, of which the share is.
    """
    unknown = sorted(set(ranks) - set(sizes))
    if unknown or not 0 < share <= 1:
        raise UsageError(f"a share is above 0 and up to 1.0, of known tensors; not {share!r} and {unknown}.")
    wanted, taken = share * sum(sizes.values()), 0
    chosen: set[str] = set()
    for name in sorted(ranks, key=lambda n: (-ranks[n], n)):
        if taken >= wanted:
            break
        chosen.add(name)
        taken += sizes[name]
    if taken < wanted:
        raise UsageError(
            f"all {len(ranks)} tensors that may be taken are {taken:,} of {sum(sizes.values()):,} "
            f"coordinates, less than a share of {share!r}."
        )
    tiles = {n: torch.full((tiles_of(size, tile),), n in chosen, device="cpu") for n, size in sizes.items()}
    return Mask(tiles=tiles, sizes=dict(sizes), score=score, budget=MASTER_BYTES * taken, tile=tile)


def _random(sizes: Mapping[str, int], seed: int, tile: int) -> dict[str, Array]:
    """Return one random number per tile, from the tensor's own stream."""
    return {
        name: Stream(seed=seed, name=name, step=0).words(tiles_of(n, tile)).astype(np.float64)
        for name, n in sizes.items()
    }


def _check_kept(keep: Mask, sizes: Mapping[str, int], tile: int, spend: int) -> None:
    """Refuse to keep a mask of other tensors or tiles, or one that takes more than there is."""
    other = sorted(n for n, size in keep.sizes.items() if sizes.get(n) != size)
    if other or keep.tile != tile:
        raise UsageError(
            f"the mask to keep does not fit: it has tiles of {keep.tile} where these have {tile}"
            + (f", and {other[0]!r} is not eligible here or has another size." if other else ".")
        )
    if keep.payload_bytes > spend:
        raise UsageError(
            f"the mask to keep takes {keep.payload_bytes:,} bytes, more than the budget of {spend:,} for all."
        )


def _bytes(budget: float | int, blanket: int) -> int:
    """Return a budget in bytes."""
    share, whole = isinstance(budget, float | np.floating), isinstance(budget, int | np.integer)
    if isinstance(budget, bool) or not (share or whole) or not 0 < budget <= (1 if share else blanket):
        raise UsageError(
            f"a budget is a share above 0 and up to 1.0, or a whole number of bytes up to {blanket:,} "
            f"(masters for every eligible tile), not {budget!r}."
        )
    return int(round(float(budget) * blanket, 6)) if share else int(budget)


def _first_that_fit(order: Array, costs: Array, spend: int) -> Array:
    """Choose tiles in rank order, taking each one that still fits in the budget."""
    chosen = np.zeros(len(order), dtype=bool)
    running = np.cumsum(costs[order])
    whole = int(np.searchsorted(running, spend, side="right"))
    chosen[order[:whole]] = True
    left = spend - (int(running[whole - 1]) if whole else 0)
    for i in order[whole:]:
        if costs[i] <= left:
            chosen[i] = True
            left -= int(costs[i])
        if left < MASTER_BYTES:
            break
    return chosen

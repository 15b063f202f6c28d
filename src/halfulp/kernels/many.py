"""Set aside and write back many tensors in one call, by a table of addresses.

For a small tensor, preparing a :func:`halfulp.kernels.write_back` takes many times as long as running it. The
result for each tensor is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from halfulp.kernels import fallback, native
from halfulp.kernels.plan import Array, Parts, addresses, flat_of, plan_for
from halfulp.kernels.reference import MODES, WRITE_COUNTS, WRITE_SUMS, tiles_of
from halfulp.kernels.writing import Writing
from halfulp.numbers.grids import Grid

ASIDE_ROW, WRITE_ROW = native.columns("AsideRow"), native.columns("WriteRow")


def suits(grid: Grid) -> bool:
    """Return True if tensors on a grid can be written back so: scales that move with the data cannot."""
    return not plan_for(grid, torch.float32).scaled


class Many:
    """A set of contiguous float32 tensors on the CPU, on one grid.

    Args:
        grid: A grid for which :func:`suits` returns True.
        sizes: The number of weights of each tensor.
        sums: The interval, in tiles, at which sums are taken for each tensor; 0 for none.
    """

    def __init__(self, grid: Grid, sizes: Sequence[int], sums: Sequence[int]) -> None:
        self._plan = plan_for(grid, torch.float32)
        tiles = [tiles_of(size) for size in sizes]
        self._ends = [0, *np.cumsum(tiles).tolist()]
        self._sums = sums
        self._write, self._aside = (
            np.zeros((len(sizes), len(row)), dtype=np.int64) for row in (WRITE_ROW, ASIDE_ROW)
        )
        for table, row in ((self._write, WRITE_ROW), (self._aside, ASIDE_ROW)):
            table[:, row["size"]], table[:, row["start"]] = sizes, self._ends[:-1]
        self._write[:, WRITE_ROW["sums"]] = sums
        self._cached: dict[str, tuple[Sequence[torch.Tensor], Array]] = {}

    def _places(self, what: str, tensors: Sequence[torch.Tensor]) -> Array:
        """Return the addresses of tensors that stay where they are: a list given again is not read again."""
        if what not in self._cached or self._cached[what][0] is not tensors:
            self._cached[what] = tensors, addresses(tensors)
        return self._cached[what][1]

    def set_aside(self, values: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> bool:
        """Copy values to ``out``, all float32 or all bfloat16; return True if all values fit.

        The same list ``out`` must be the same tensors.
        """
        if out[0].dtype == torch.float32:
            torch._foreach_copy_(list(out), list(values))
            return True
        if native.library() is None:
            fits = [fallback.aside(x, y) for x, y in zip(values, out, strict=True)]
            return all(fits)
        self._aside[:, ASIDE_ROW["from"]] = addresses(values)
        self._aside[:, ASIDE_ROW["to"]] = self._places("aside", out)
        off = np.zeros(len(out), dtype=np.int64)
        call = native.call_of("aside", tensors=len(out), rows=self._aside, off=off)
        native.run("aside", self._ends[-1], call)
        return not off.any()

    def write_back(
        self,
        q: Sequence[torch.Tensor],
        z: Sequence[torch.Tensor],
        mode: str,
        keys: Array,
        *,
        moved: Sequence[torch.Tensor] | None = None,
        carry: Sequence[torch.Tensor] | None = None,
    ) -> Parts:
        """Write what a policy makes of proposals over them: see :func:`halfulp.kernels.write_back`.

        Args:
            q: What is stored, all of it float32 or all of it bfloat16.
            z: The proposals.
            mode: One of MODES.
            keys: A row for each tensor, the two words of its stream's key.
            moved: A bit for each weight that ever moved. The same list must be the same tensors.
            carry: What is added to the proposals, and takes what is not written; all of one type.

        Returns:
            Counts per tile and sums, of each tensor.
        """
        n, plan = self._ends[-1], self._plan
        if native.library() is None:
            none = [None] * len(q)
            each = [
                Writing(
                    plan=plan, shape=(old.numel(),), dtype=torch.float32, q=flat_of(old), z=flat_of(new),
                    out=flat_of(new), mode=MODES[mode], key=(int(k0), int(k1), 0), every=every,
                    moved=None if bits is None else bits.numpy(),
                    carry=None if rest is None else flat_of(rest), carry_in=rest is not None,
                )
                for old, new, (k0, k1), every, bits, rest in zip(
                    q, z, keys, self._sums, moved or none, carry or none, strict=True
                )
            ]  # fmt: skip
            for one in each:
                one()
            counts, totals = (
                np.concatenate(x) for x in zip(*((w.counts, w.totals) for w in each), strict=True)
            )
            return Parts(torch.from_numpy(counts), torch.from_numpy(totals), self._ends)
        counts, totals = np.zeros((n, len(WRITE_COUNTS)), dtype=np.int32), np.zeros((n, len(WRITE_SUMS)))
        cached = self._cached.get("aside")
        self._write[:, WRITE_ROW["q"]] = cached[1] if cached is not None and cached[0] is q else addresses(q)
        self._write[:, WRITE_ROW["moved"]] = 0 if moved is None else self._places("moved", moved)
        self._write[:, WRITE_ROW["z"]] = addresses(z)
        self._write[:, WRITE_ROW["carry"]] = 0 if carry is None else addresses(carry)
        self._write[:, WRITE_ROW["out"]] = self._write[:, WRITE_ROW["z"]]
        call = native.call_of(
            "write", **plan.numbers, mode=MODES[mode], carry_in=carry is not None, tensors=len(q),
            stored=native.STORED[q[0].dtype], proposed=native.FLOATS,
            carried=native.STORED[None if carry is None else carry[0].dtype], rows=self._write,
            keys=np.ascontiguousarray(keys), counts=counts, totals=totals,
        )  # fmt: skip
        native.run("write", n, call)
        return Parts(torch.from_numpy(counts), torch.from_numpy(totals), self._ends)

"""``CastAudit``: what a cast from main parameters leaves as it was.

Megatron, DeepSpeed, torchtitan and most hand-written mixed precision keep the weights that the optimizer
steps in float32 (*main* parameters), and after each step write a copy in bfloat16 or fp8 that the model
computes with (*stored*). Between the step and that cast everything is there that the event needs: what is
stored, q, and what is proposed to it, the main value z. So nothing is set aside. For every grid,

    frozen  <=>  Q(z) == q        by decoded value

with q what is stored, or Q(stored) on a grid that it is not on. That is
:func:`halfulp.kernels.write_back`, without the write: what the cast does, not a model of it.

A stored value that stays is not a lost update here, because the main value keeps it; the verdict says so.
What would be lost *without* the main parameters is what :class:`~halfulp.Audit` on their optimizer records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from halfulp import kernels
from halfulp.audit.copies import Copies
from halfulp.audit.hooks import StepHooks
from halfulp.audit.names import Naming, model_names
from halfulp.audit.ranks import rank, reduced
from halfulp.audit.recorder import Audit
from halfulp.audit.roles import Held
from halfulp.audit.rows import PER_GRID, SHARED, Row
from halfulp.audit.watched import Watched
from halfulp.errors import UsageError
from halfulp.grids import CONTAINERS, Grid
from halfulp.grids import grid as named
from halfulp.kernels import TILE, WRITE_COUNTS
from halfulp.text import tell
from halfulp.trace import Memory
from halfulp.writeback.sharding import local

CHUNK = 256 * TILE
"""Coordinates that are looked at in one go: the only memory beside a bit a weight."""
COUNTED = ("frozen", "endpoint", "never_moved")
"""What a cast tells of a grid."""
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float8_e5m2": "e5m2", "float8_e4m3fn": "e4m3"}


class CastAudit(Audit):
    """Count which stored values a cast from main parameters leaves as they were.

    ``main`` and ``stored``: modules, tensors by name, or lists of them, paired by name or, if either is a
    list, by place; names are those of ``stored``. ``grids``: by default the one of the stored dtype.
    ``stored_on``: the grid that the stored values are on, where their dtype does not tell (fp8 values in
    bfloat16 tensors). The other options are those of :class:`~halfulp.Audit`.

    A look is taken when a torch optimizer that holds main parameters (or the memory that they are views of)
    has stepped, which is before the cast. Where no torch optimizer steps them, say :meth:`look` there. On
    several ranks, main and stored tensors may be shards (DTensor), placed alike: every rank looks at its own,
    counts are summed, and rank 0 records.

    >>> model = torch.nn.Linear(8, 8).bfloat16()
    >>> main = [p.detach().float() for p in model.parameters()]
    >>> opt, memory = torch.optim.SGD(main, lr=1e-6), Memory()
    >>> with CastAudit(main, model, out=memory):
    ...     for m in main:
    ...         m.grad = torch.ones_like(m)
    ...     opt.step()
    ...     with torch.no_grad():
    ...         for m, p in zip(main, model.parameters(), strict=True):
    ...             _ = p.copy_(m)
    >>> memory.trace.frozen("bf16").shape
    (1,)
    """

    def __init__(
        self,
        main: Copies,
        stored: Copies,
        grids: str | Grid | torch.dtype | Iterable[str | Grid | torch.dtype] | None = None,
        *,
        stored_on: str | Grid | torch.dtype | None = None,
        out: str | Path | Memory | None = None,
        every: int = 1,
        never_moved: bool = True,
        exists: Literal["number", "raise"] = "number",
        resume: bool = False,
        first_step: int | None = None,
        part_steps: int = 500,
        part_seconds: float = 30.0,
        listeners: Iterable[Callable[[dict[str, Any]], None]] = (),
        describe: dict[str, Any] | None = None,
    ) -> None:
        self.pairs = paired(main, stored)
        dtypes = {_dtype(q) for _, q in self.pairs.values()}
        if grids is None and stored_on is None and len(dtypes) > 1:
            raise UsageError(f"stored tensors are of {', '.join(sorted(dtypes))}: say grids=.")
        usual = stored_on if stored_on is not None else SHORT.get(min(dtypes), min(dtypes))
        super().__init__(
            None, usual if grids is None else grids, out=out, every=every, never_moved=never_moved,
            exists=exists, resume=resume, first_step=first_step, part_steps=part_steps,
            part_seconds=part_seconds, listeners=listeners, describe={"cast": True, **(describe or {})},
        )  # fmt: skip
        self.home = None if stored_on is None else named(stored_on)
        self._hooks = StepHooks(_nothing, self._stepped_by)
        self._batching, self._untrained = False, True
        self._names = {m: name for name, (m, _) in self.pairs.items()}
        self._copies: dict[torch.Tensor, torch.Tensor] = dict(self.pairs.values())
        self._held: dict[int, Held] = {}
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._looks, self._moved_any = 0, False

    @property
    def bytes(self) -> int:
        """What is kept beside main and stored values: the bits of those that moved, and a scratch."""
        bits = [w.moved for w in self.watched.values() if w.moved is not None]
        return sum(x.numel() * x.element_size() for x in (*bits, *self._scratch.values()))

    def look(self, lr: float = math.nan) -> None:
        """Count now, with the main values new and the stored ones still old."""
        with self._hooks.uninterrupted():
            self._look(0, list(self._names), dict.fromkeys(self._names, lr))
            self._finish()

    def stop(self) -> None:
        """Remove the hooks and make everything durable."""
        super().stop()
        if self._looks and not self._moved_any:
            tell(
                f"halfulp: not one stored value differed from the cast of its main value, in {self._looks} "
                "looks. If the copies are written before the look, there is nothing to see: take it between "
                "the step and the cast (CastAudit.look)."
            )

    # ---- steps ----

    def _stepped_by(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of any optimizer: a look at the main parameters that it holds."""
        rates = {
            _memory(p): float(group.get("lr", math.nan))
            for group in optimizer.param_groups
            for p in group["params"]
        }
        at = {m: _memory(m) for m in self._names}
        mine = [m for m in self._names if at[m] in rates]
        if mine:
            self._look(id(optimizer), mine, {m: rates[at[m]] for m in mine})

    def _look(self, key: int, mine: list[torch.Tensor], rates: Mapping[torch.Tensor, float]) -> None:
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = Held({self._names[m]: m for m in mine})
            held.param_groups = [{"params": [m], "param_names": [self._names[m]]} for m in mine]
        for group in held.param_groups:
            group["lr"] = rates[group["params"][0]]
        if held in self._stepped:
            self._finish()
        if not self._stepped:
            self._commit_if_due()
        if self._due(self.step if self._stepped else self.step + 1):
            self._watch(held)
        self._after(held)

    def _new(self, naming: Naming, p: torch.Tensor, optimizer: torch.optim.Optimizer) -> Watched:
        made = super()._new(naming, p, optimizer)
        made.stored = self.home.name if self.home is not None else _grid_name(self._copies[p])
        made.copy = made.shown = None  # that there is one is what a cast is about
        return made

    def _described(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        beside = max(m.element_size() for m in self._names)
        told: dict[str, Any] = {"class": "cast", "defaults": {}, "policies": ["master"], "admits": []}
        return {**told, "policy_bytes_per_weight": float(beside)}

    def _record(self, optimizer: torch.optim.Optimizer) -> None:
        seen = self._of(optimizer)
        if not seen:
            return
        rows = reduced(seen, [self._counted(w, self._copies[w.tensor]) for w in seen])
        if rank() != 0:
            return
        frozen = rows[:, : -len(SHARED) : len(PER_GRID)]
        sizes = np.array([w.recorded for w in seen])
        self._looks, self._moved_any = (
            self._looks + 1,
            self._moved_any or bool((frozen < sizes[:, None]).any()),
        )
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._rows.append(Row(step=self.step, ids=[w.id for w in seen], rates=rates, numbers=rows))
        self._losses.setdefault(self.step, []).extend(float(x) for x in self._told)

    # ---- counting ----

    def _counted(self, w: Watched, stored: torch.Tensor) -> torch.Tensor:
        """The row of one tensor, or of the shard here; what a cast does not tell is not a number."""
        main, stored = local(w.tensor.detach()), local(stored.detach())
        n = main.numel()
        row = np.full(len(w.grids) * len(PER_GRID) + len(SHARED), np.nan)
        shared = np.zeros(len(SHARED))
        flat_main, flat_stored = main.reshape(-1), stored.reshape(-1)
        for k, g in enumerate(w.grids):
            moves = g.scaling is not None and g.scaling.moves
            total = np.zeros(len(WRITE_COUNTS), dtype=np.int64)
            for begin in range(0, n, max(n, 1) if moves else CHUNK):
                piece = slice(begin, n if moves else min(begin + CHUNK, n))
                shape = main.shape if moves else (-1,)
                z, s = flat_main[piece].view(shape), flat_stored[piece].view(shape)
                bits = None if w.moved is None else w.moved[k, begin // 8 : -(-(piece.stop) // 8)]
                total += self._cast(z, s, g, w.stored, bits)
                if k == 0:
                    shared[2:] += _squares(z, s)
            told = dict(zip(WRITE_COUNTS, total.tolist(), strict=True))
            if k == 0:
                shared[:2] = told["zero_proposal"], told["nonfinite"]
            for column in COUNTED:
                row[k * len(PER_GRID) + PER_GRID.index(column)] = told[column]
        row[-len(SHARED) :] = shared
        return torch.from_numpy(row).to(main.device)

    def _cast(
        self, z: torch.Tensor, stored: torch.Tensor, grid: Grid, on: str, bits: torch.Tensor | None
    ) -> np.ndarray[Any, Any]:
        """WRITE_COUNTS of one cast."""
        own = on == grid.name
        q = (
            stored
            if own and stored.dtype == torch.bfloat16 and z.dtype == torch.float32
            else stored.to(z.dtype)
        )
        if not own:
            q = grid.round(q)
        finite = torch.isfinite(q)
        if not bool(finite.all()):  # what was not finite before has no change that could be lost
            q, z = torch.where(finite, q, 0), torch.where(finite, z, torch.nan)
        out = self._scratch.get(z.dtype)
        if out is None or out.numel() < z.numel():
            out = self._scratch[z.dtype] = torch.empty(z.numel(), dtype=z.dtype, device=z.device)
        made = kernels.write_back(q, z, grid, out=out[: z.numel()].view(z.shape), moved=bits)
        return made.counts.sum(dim=0, dtype=torch.int64).cpu().numpy()


def paired(main: Copies, stored: Copies) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Main and stored tensors by the names of the stored ones, if they fit each other."""
    mains, copies = _listed(main), _listed(stored)
    by_place = not isinstance(main, torch.nn.Module | Mapping) or not isinstance(
        stored, torch.nn.Module | Mapping
    )
    if by_place and len(mains) == len(copies):
        names = (
            mains
            if isinstance(main, Mapping) and not isinstance(stored, torch.nn.Module | Mapping)
            else copies
        )
        found = dict(zip(names, zip(mains.values(), copies.values(), strict=True), strict=True))
    elif not by_place and mains.keys() == copies.keys():
        found = {name: (mains[name], copies[name]) for name in copies}
    else:
        extra = "" if by_place else f"; without a partner: {sorted(mains.keys() ^ copies.keys())[:3]}"
        raise UsageError(
            f"main and stored must pair up, by name or by place: they have {len(mains)} and {len(copies)} "
            f"tensors{extra}."
        )
    if not found:
        raise UsageError("nothing to audit: main and stored have no tensors.")
    # Pieces of a flat tensor that requires a gradient are no leaves; a tensor that is one keeps its identity.
    found = {name: (m if m.is_leaf else m.detach(), q) for name, (m, q) in found.items()}
    for name, (m, q) in found.items():
        fit = m.shape == q.shape and m.device == q.device and m.is_floating_point() and q.is_floating_point()
        if m.shape == q.shape and local(m).shape != local(q).shape:
            raise UsageError(
                f"{name!r}: main and stored must be sharded alike; here they hold {tuple(local(m).shape)} "
                f"and {tuple(local(q).shape)} of {tuple(m.shape)}."
            )
        if (
            not fit
            or _dtype(m) not in CONTAINERS
            or q.element_size() > m.element_size()
            or local(m).data_ptr() == local(q).data_ptr() != 0
        ):
            raise UsageError(
                f"{name!r}: main is {_dtype(m)} of {tuple(m.shape)} on {m.device}, stored {_dtype(q)} of "
                f"{tuple(q.shape)} on {q.device}. Expected two tensors of one shape on one device, the "
                "stored one of no wider floats."
            )
    return found


def _listed(held: Copies) -> dict[str, torch.Tensor]:
    if isinstance(held, torch.nn.Module):
        return {name: p for p, (name, _) in model_names(held).items()}
    if isinstance(held, Mapping):
        return {str(name): x for name, x in held.items()}
    return {str(i): x for i, x in enumerate(held)}


def _memory(x: torch.Tensor) -> int:
    """Where a tensor, or the shard of it here, lies; what is a view of it lies there as well."""
    return local(x.detach()).untyped_storage().data_ptr()


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _grid_name(x: torch.Tensor) -> str:
    return SHORT.get(_dtype(x), _dtype(x))


def _squares(z: torch.Tensor, stored: torch.Tensor) -> list[float]:
    """The sums of squares of stored values and of what is proposed to them, finite ones only."""
    q = stored.reshape(-1).to(torch.float64)
    d = z.reshape(-1).to(torch.float64) - q
    ok = torch.isfinite(d)
    if not bool(ok.all()):
        q, d = q[ok], d[ok]
    return [float(torch.dot(q, q)), float(torch.dot(d, d))]


def _nothing(_: torch.optim.Optimizer) -> None:
    """Before a step there is nothing to do."""

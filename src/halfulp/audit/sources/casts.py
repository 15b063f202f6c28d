"""Define ``CastAudit``, which counts the stored values that a cast from main parameters leaves unchanged.

Megatron, DeepSpeed, torchtitan and most hand-written mixed precision keep the weights that the optimizer
steps in float32 (*main* parameters), and after each step write a copy in bfloat16 or fp8 that the model
computes with (*stored*). Between the step and that cast, everything that defines the event exists: the stored
value q and the main value z proposed to it. So nothing needs to be copied. For every grid,

    frozen  <=>  Q(z) == q        by decoded value; by code, where scales move with the data

with q what is stored, or Q(stored) on a grid that it is not on: :func:`halfulp.kernels.write_back` without
the write. A stored value that stays is not a lost update here, because the main value keeps it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from halfulp import kernels
from halfulp.audit.arguments import Grids
from halfulp.audit.meter.counts import Meter
from halfulp.audit.meter.rows import PER_GRID, SHARED
from halfulp.audit.meter.tensor import Watched
from halfulp.audit.pipeline import Pipeline
from halfulp.audit.ranks import rank, reduced
from halfulp.audit.settings import Measure, Recording, grouped
from halfulp.audit.sources.names import Naming, given_names, model_names
from halfulp.audit.sources.states import Copies
from halfulp.audit.sources.step_hooks import StepHooks
from halfulp.errors import UsageError
from halfulp.kernels import TILE, WRITE_COUNTS
from halfulp.numbers.containers import CONTAINERS, SHORT
from halfulp.numbers.grids import Grid
from halfulp.numbers.grids import grid as named
from halfulp.text import tell
from halfulp.trace import Memory
from halfulp.writeback.rules import rate_of
from halfulp.writeback.sharding import local

CHUNK = 256 * TILE
"""Coordinates processed at a time: the only memory needed beside one bit per weight."""
COUNTED = ("frozen", "endpoint", "never_moved")
"""The counts that a cast reports for a grid."""
NAMES = {**SHORT, "float8_e5m2": "e5m2", "float8_e4m3fn": "e4m3"}
"""The grids of dtypes that copies are cast to."""


@dataclass(eq=False)
class _Group:
    """Main parameters that are examined together."""

    tensors: list[torch.Tensor]


class CastAudit:
    """Count which stored values a cast from main parameters leaves as they were.

    A look is taken when a torch optimizer that holds main parameters (or the memory that they are views of)
    has stepped, which is before the cast. Where no torch optimizer steps them, call :meth:`look` there. On
    several ranks, main and stored tensors may be shards (DTensor), placed alike: counts are summed, and
    rank 0 records.

    Args:
        main: The tensors that the optimizer steps: a module, tensors by name, or a list of them.
        stored: The tensors cast from them. Pairs match by name or, if either is a list, by position; these
            give the names.
        grids: The grids; by default that of the stored dtype.
        stored_on: The grid of the stored values, if their dtype does not determine it (fp8 values in
            bfloat16 tensors).
        out: A folder or a :class:`~halfulp.Memory`.
        every: Audit each n-th step.
        never_moved: Follow which stored values never changed.
        recording: Settings of the recording.
        options: Single fields of ``recording`` by name.

    Raises:
        UsageError: If main and stored tensors do not match, or an argument is not valid.

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
        grids: Grids | None = None,
        *,
        stored_on: str | Grid | torch.dtype | None = None,
        out: str | Path | Memory | None = None,
        every: int = 1,
        never_moved: bool = True,
        recording: Recording | None = None,
        **options: Any,
    ) -> None:
        measure, recording = grouped("CastAudit", Measure(never_moved=never_moved), recording, options)
        self.pairs = paired(main, stored)
        dtypes = {_dtype(q) for _, q in self.pairs.values()}
        if grids is None and stored_on is None and len(dtypes) > 1:
            raise UsageError(f"stored tensors are of {', '.join(sorted(dtypes))}: pass grids=.")
        usual = stored_on if stored_on is not None else _grid_name(next(iter(self.pairs.values()))[1])
        self.pipeline = Pipeline(
            usual if grids is None else grids,
            out,
            every=every,
            measure=measure,
            recording=replace(recording, describe={"cast": True, **(recording.describe or {})}),
            meter=Meter(phase=False, batching=False),
            untrained=True,
        )
        self.home = None if stored_on is None else named(stored_on).name
        self._hooks = StepHooks(_nothing, self._stepped_by)
        self._names = {m: name for name, (m, _) in self.pairs.items()}
        self._copies: dict[torch.Tensor, torch.Tensor] = dict(self.pairs.values())
        self._modules = _modules(stored, self.pairs)
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._stepped: list[_Group] = []
        self._losses: list[float] = []
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._looks, self._moved_any = 0, False
        self.seconds = 0.0
        """The time spent in this audit, in seconds."""

    @property
    def out(self) -> Path | None:
        """The folder of the trace."""
        return self.pipeline.sink.out

    @property
    def step(self) -> int:
        """The newest step."""
        return self.pipeline.sink.step

    @property
    def trouble(self) -> str | None:
        """The reason why the trace ends before the run, or None; the run itself continues."""
        return self.pipeline.sink.trouble

    @property
    def latest(self) -> dict[str, Any]:
        """A summary of the newest step; empty before the first."""
        return self.pipeline.latest

    @property
    def bytes(self) -> int:
        """The bytes kept beside main and stored values: the bits of values that moved, and scratch memory."""
        bits = [w.moved for w in self.pipeline.watched.values() if w.moved is not None]
        return sum(x.numel() * x.element_size() for x in (*bits, *self._scratch.values()))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Hook the steps of all optimizers.

        Unless :meth:`stop` is called, the end of the process stops the audit.

        Raises:
            UsageError: If the audit has already run.
        """
        if self._hooks.attached:
            raise UsageError("an audit can be started only once: make a new one.")
        if self.pipeline.open({"rehearse": None}):
            self.pipeline.check_gap()
        self._hooks.attach(None)
        self._hooks.at_exit(self.stop)
        return self

    def look(self, lr: float = math.nan) -> None:
        """Count now, while the main values are new and the stored ones still old.

        Args:
            lr: The learning rate, for the trace.
        """
        with self._hooks.uninterrupted():
            self._look((0,), dict.fromkeys(self._names, lr))
            self._finish()

    def log(self, loss: torch.Tensor | float) -> None:
        """Record the loss of the coming step; if there are several, their mean is recorded."""
        self._losses.append(float(loss))

    def commit(self) -> None:
        """Write what was recorded since the last part. If tensors are sharded, all ranks must call it."""
        self.pipeline.commit()

    def stop(self) -> None:
        """Remove the hooks and make everything durable."""
        forked = self._hooks.forked
        with self._hooks.uninterrupted() if not forked else contextlib.nullcontext():
            self._hooks.detach()
            if not forked:
                self._finish()
                self.pipeline.commit()
                self.pipeline.sink.close()
        if self._looks and not self._moved_any:
            tell(
                f"halfulp: not one stored value differed from the cast of its main value, in {self._looks} "
                "looks. If the copies are written before the look, there is nothing to see: take it between "
                "the step and the cast (CastAudit.look)."
            )

    # ---- steps ----

    def _stepped_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the main parameters that a stepping optimizer holds."""
        rates = {_memory(p): rate_of(group) for group in optimizer.param_groups for p in group["params"]}
        mine = {m: rates[at] for m in self._names if (at := _memory(m)) in rates}
        if mine:
            # ZeRO 3 steps one optimizer once for each of its sub-groups: together they are a step.
            self._look((id(optimizer), *map(id, mine)), mine)

    def _look(self, key: tuple[int, ...], rates: Mapping[torch.Tensor, float]) -> None:
        """Count the casts of some main parameters; ``key`` tells them from others of the same step."""
        pipeline, start = self.pipeline, time.perf_counter()
        group = self._groups.setdefault(key, _Group(list(rates)))
        if group in self._stepped:
            self._finish()
        if not self._stepped:
            pipeline.commit_if_due()
        if pipeline.due(self.step if self._stepped else self.step + 1):
            pipeline.watch(group, group.tensors, self._named, described=self._described)
        if not self._stepped:
            pipeline.advance()
        self._stepped.append(group)
        if pipeline.due(self.step):
            with torch.no_grad():
                self._record(pipeline.watchlist.of(group, group.tensors), rates)
        self._losses.clear()
        self.seconds += time.perf_counter() - start

    def _finish(self) -> None:
        self._stepped.clear()
        self.pipeline.finish()

    def _named(self, new: list[torch.Tensor]) -> dict[torch.Tensor, Naming]:
        given = {self._names[m]: m for m in new}
        named = given_names(given, self._modules, self.pipeline.watchlist.names())
        return {m: replace(n, stored=self.home or _grid_name(self._copies[m])) for m, n in named.items()}

    def _described(self) -> list[dict[str, Any]]:
        main_bytes = float(max(m.element_size() for m in self._names))
        cast: dict[str, Any] = {"class": "cast", "defaults": {}, "policies": ["master"], "admits": []}
        return [{**cast, "policy_bytes_per_weight": main_bytes}]

    def _record(self, seen: list[Watched], rates: Mapping[torch.Tensor, float]) -> None:
        if not seen:
            return
        rows = reduced(seen, [self._counted(w, self._copies[w.tensor]) for w in seen])
        if rank() != 0:
            return
        frozen = rows[:, : -len(SHARED) : len(PER_GRID)]
        sizes = np.array([w.recorded for w in seen])
        self._looks += 1
        self._moved_any = self._moved_any or bool((frozen < sizes[:, None]).any())
        self.pipeline.add(seen, [float(rates[w.tensor]) for w in seen], rows)
        self.pipeline.sink.add_loss(self._losses)

    # ---- counting ----

    def _counted(self, w: Watched, stored: torch.Tensor) -> torch.Tensor:
        """Return the row of one tensor, or of the shard here; what a cast does not tell is not a number."""
        main, stored = local(w.tensor.detach()), local(stored.detach())
        n = main.numel()
        row = np.full(len(w.grids) * len(PER_GRID) + len(SHARED), np.nan)
        shared = np.zeros(len(SHARED))
        flat_main, flat_stored = main.reshape(-1), stored.reshape(-1)
        for k, g in enumerate(w.grids):
            whole = g.scaling is not None and g.scaling.moves
            counts = np.zeros(len(WRITE_COUNTS), dtype=np.int64)
            for begin in range(0, n, max(n, 1) if whole else CHUNK):
                chunk = slice(begin, n if whole else min(begin + CHUNK, n))
                shape = main.shape if whole else (-1,)
                z, s = flat_main[chunk].view(shape), flat_stored[chunk].view(shape)
                bits = None if w.moved is None else w.moved[k, begin // 8 : -(-(chunk.stop) // 8)]
                counts += self._cast(z, s, g, w.stored, bits)
                if k == 0:
                    shared[2:] += _squares(z, s)
            counted = dict(zip(WRITE_COUNTS, counts.tolist(), strict=True))
            if k == 0:
                shared[:2] = counted["zero_proposal"], counted["nonfinite"]
            for column in COUNTED:
                row[k * len(PER_GRID) + PER_GRID.index(column)] = counted[column]
        row[-len(SHARED) :] = shared
        return torch.from_numpy(row).to(main.device)

    def _cast(
        self, z: torch.Tensor, stored: torch.Tensor, grid: Grid, on: str, bits: torch.Tensor | None
    ) -> np.ndarray[Any, Any]:
        """WRITE_COUNTS of one cast."""
        if on != grid.name:
            q = grid.round(stored.to(z.dtype))
        elif stored.dtype == torch.bfloat16 and z.dtype == torch.float32:
            q = stored
        else:
            q = stored.to(z.dtype)
        finite = torch.isfinite(q)
        if not bool(finite.all()):  # what was not finite before has no change that could be lost
            q, z = torch.where(finite, q, 0), torch.where(finite, z, torch.nan)
        out = self._scratch.get(z.dtype)
        if out is None or out.numel() < z.numel():
            out = self._scratch[z.dtype] = torch.empty(z.numel(), dtype=z.dtype, device=z.device)
        written = kernels.write_back(q, z, grid, out=out[: z.numel()].view(z.shape), moved=bits)
        return written.counts.sum(dim=0, dtype=torch.int64).cpu().numpy()


def paired(main: Copies, stored: Copies) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Pair main and stored tensors, under the names of the stored ones, if they fit each other."""
    mains, copies = _listed(main), _listed(stored)
    named = (torch.nn.Module, Mapping)
    extra = ""
    if isinstance(main, named) and isinstance(stored, named):
        fit = mains.keys() == copies.keys()
        extra = f"; without a partner: {sorted(mains.keys() ^ copies.keys())[:3]}"
    else:  # by place, where one of them is a list
        fit = len(mains) == len(copies)
        names = list(mains if isinstance(main, Mapping) and not isinstance(stored, named) else copies)
    if not fit:
        raise UsageError(
            f"main and stored must pair up, by name or by place: they have {len(mains)} and {len(copies)} "
            f"tensors{extra}."
        )
    if not copies:
        raise UsageError("nothing to audit: main and stored have no tensors.")
    if extra:
        pairs = {name: (mains[name], q) for name, q in copies.items()}
    else:
        pairs = dict(zip(names, zip(mains.values(), copies.values(), strict=True), strict=True))
    # Pieces of a flat tensor that requires a gradient are no leaves; a tensor that is one keeps its identity.
    pairs = {name: (m if m.is_leaf else m.detach(), q) for name, (m, q) in pairs.items()}
    for name, (m, q) in pairs.items():
        if m.shape == q.shape and local(m).shape != local(q).shape:
            raise UsageError(
                f"{name!r}: main and stored must be sharded alike; here they hold {tuple(local(m).shape)} "
                f"and {tuple(local(q).shape)} of {tuple(m.shape)}."
            )
        same_memory = local(m).data_ptr() == local(q).data_ptr() != 0
        floats = _dtype(m) in CONTAINERS and q.is_floating_point() and q.element_size() <= m.element_size()
        if not floats or same_memory or m.shape != q.shape or m.device != q.device:
            raise UsageError(
                f"{name!r}: main is {_dtype(m)} of {tuple(m.shape)} on {m.device}, stored {_dtype(q)} of "
                f"{tuple(q.shape)} on {q.device}. Expected two tensors of one shape on one device, the "
                "stored one of no wider floats."
            )
    return pairs


def _listed(copies: Copies) -> dict[str, torch.Tensor]:
    if isinstance(copies, torch.nn.Module):
        return {name: p for p, (name, _) in model_names(copies).items()}
    if isinstance(copies, Mapping):
        return {str(name): x for name, x in copies.items()}
    return {str(i): x for i, x in enumerate(copies)}


def _modules(
    stored: Copies, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
) -> dict[torch.Tensor, torch.nn.Module]:
    """Return the module that each main parameter's stored copy belongs to, where that is known."""
    owners = model_names(stored) if isinstance(stored, torch.nn.Module) else {}
    return {m: owners[q][1] for m, q in pairs.values() if q in owners}


def _memory(x: torch.Tensor) -> int:
    """Return where a tensor, or the shard of it here, lies; what is a view of it lies there as well."""
    return local(x.detach()).untyped_storage().data_ptr()


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _grid_name(x: torch.Tensor) -> str:
    return NAMES.get(_dtype(x), _dtype(x))


def _squares(z: torch.Tensor, stored: torch.Tensor) -> list[float]:
    """Return the sums of squares of stored values and of what is proposed to them, finite ones only."""
    q = stored.reshape(-1).to(torch.float64)
    d = z.reshape(-1).to(torch.float64) - q
    ok = torch.isfinite(d)
    if not bool(ok.all()):
        q, d = q[ok], d[ok]
    return [float(torch.dot(q, q)), float(torch.dot(d, d))]


def _nothing(_: torch.optim.Optimizer) -> None:
    """Before a step there is nothing to do."""

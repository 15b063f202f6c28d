"""``Audit``: watch an optimizer and record what every grid would do to its steps.

Before ``step()`` the weights are copied aside; after it their change is the emitted proposal d, and one kernel
pass evaluates every grid. The run is not touched: hooks read, nothing writes to parameters, gradients or random
states. On weights that are stored in low precision already (a bfloat16 model, or a ``WriteBack``), auditing the
grid they live on records the *realized* event.

Steps are counted as calls of ``step()``; one that ``GradScaler`` skips is no step, accumulated gradients are one.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import halfulp
from halfulp import kernels
from halfulp.audit.groups import GROUPS, Rules, group_of
from halfulp.audit.names import name_parameters
from halfulp.errors import UsageError
from halfulp.grids import Grid
from halfulp.grids import grid as named
from halfulp.kernels import TILE, tiles_of
from halfulp.streams import Stream
from halfulp.trace import COUNTS, FORMAT, TraceWriter
from halfulp.writeback.sharding import is_sharded, local, reduce_sum

FOLLOW_LIMIT = 20_000_000
"""Coordinates above which the expected never-moved share is not followed unless asked: it takes four bytes a
coordinate and grid."""


@dataclass
class Watched:
    """One tensor under audit."""

    id: int
    name: str
    group: str
    tensor: torch.Tensor
    grids: list[Grid]
    tiles: torch.Tensor | None
    before: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    moved: torch.Tensor | None = None
    stay: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    recorded: int = 0

    def values(self) -> torch.Tensor:
        """The weights that are audited: all of the local shard, or its sampled tiles."""
        x = local(self.tensor.detach())
        return x if self.tiles is None else sampled(x, self.tiles)


def sampled(x: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """The coordinates of chosen tiles, one after another; the last tile may be short."""
    flat = x.reshape(-1)
    index = (tiles[:, None] * TILE + torch.arange(TILE, device=flat.device)).reshape(-1)
    return flat[index[index < flat.numel()]]


class Audit:
    """Record a reference trace (or a realized one) while training runs.

    ``optimizers``: one or several, or None for every optimizer in the process. ``every``: audit each n-th step.
    ``sample``: audit this share of every tensor's tiles. ``decay``: also audit weight decay and gradient part apart.
    ``never_moved`` and ``expected_never_moved``: follow every coordinate (a bit, four bytes, per grid). ``keep``:
    keep all weights and proposals, so that any grid can be replayed later (small models). ``scores``: a grid and
    the steps (first, last) over which to sum allocation scores. ``groups``: your own rule (name, tensor) -> group.
    ``part_steps`` and ``part_seconds``: how much a crash may lose.

    >>> import tempfile
    >>> model = torch.nn.Linear(8, 8)
    >>> opt = torch.optim.SGD(model.parameters(), lr=1e-6)
    >>> folder = tempfile.mkdtemp() + "/run"
    >>> with Audit(opt, ["bf16", "fp16"], model=model, out=folder):
    ...     for _ in range(3):
    ...         _ = model(torch.ones(1, 8)).sum().backward()
    ...         opt.step()
    >>> halfulp.Trace.open(folder).frozen("bf16").shape
    (3,)
    """

    def __init__(
        self,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        grids: Iterable[str | Grid | torch.dtype],
        *,
        model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
        out: str | Path | None = None,
        every: int = 1,
        sample: float | None = None,
        decay: bool = False,
        never_moved: bool = True,
        expected_never_moved: bool | None = None,
        keep: bool = False,
        scores: tuple[str, int, int] | None = None,
        groups: Rules | None = None,
        params: Callable[[str, torch.Tensor], bool] | None = None,
        seed: int = 0,
        resume: bool = False,
        first_step: int = 1,
        part_steps: int = 500,
        part_seconds: float = 30.0,
        listeners: Iterable[Callable[[dict[str, Any]], None]] = (),
        describe: dict[str, Any] | None = None,
    ) -> None:
        self.grids = [named(g) for g in grids]
        if not self.grids:
            raise UsageError("an audit needs at least one grid, such as 'bf16'.")
        names = [g.name for g in self.grids]
        if len(set(names)) != len(names):
            raise UsageError(f"grids must differ, but {sorted({n for n in names if names.count(n) > 1})} repeat.")
        if every < 1 or first_step < 1 or part_steps < 1:
            raise UsageError("every, first_step and part_steps are at least 1.")
        if sample is not None and not 0 < sample <= 1:
            raise UsageError(f"sample is a share of the tiles, above 0 and at most 1, not {sample}.")
        if sample is not None and any(g.scaling is not None and g.scaling.moves for g in self.grids):
            raise UsageError("a sample of tiles cannot tell the step of a grid that moves with the data.")
        if optimizers is None:
            self.optimizers: list[torch.optim.Optimizer] | None = None
        else:
            self.optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self.models = [] if model is None else [model] if isinstance(model, torch.nn.Module) else list(model)
        self.every, self.sample, self.decay, self.keep = every, sample, decay, keep
        self.never_moved, self.expected = never_moved, expected_never_moved
        self.scores, self.rules, self.params, self.seed = scores, groups, params, seed
        self.out = None if out is None else Path(out)
        self.resume, self.part_steps, self.part_seconds = resume, part_steps, part_seconds
        self.listeners, self.describe = list(listeners), dict(describe or {})
        self.step = first_step - 1
        self.watched: dict[torch.Tensor, Watched] = {}
        self.latest: dict[str, Any] = {}
        self.seconds = 0.0
        self._rows: list[dict[str, Any]] = []
        self._kept: dict[str, list[torch.Tensor]] = {}
        self._writer: TraceWriter | None = None
        self._handles: list[Any] = []
        self._inside: list[torch.optim.Optimizer] = []
        self._losses: list[torch.Tensor | float] = []
        self._opened = 0.0
        self._skip_until = 0
        self._loaded: dict[str, torch.Tensor] = {}

    # ---- attaching ----

    def __enter__(self) -> Audit:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Hook the optimizers."""
        if self.optimizers is not None:
            trainable = [p for o in self.optimizers for g in o.param_groups for p in g["params"] if p.requires_grad]
            if not trainable:
                raise UsageError("nothing to audit: the optimizer has no trainable parameters.")
        self._opened = time.monotonic()
        if self.out is not None and _rank() == 0:
            self._writer = TraceWriter(self.out, self._manifest(), resume=self.resume)
            self._skip_until = self._writer.last_step
            if self._writer.count:
                self._loaded = self._writer.load_state()
                self.expected = self._writer.manifest["options"]["expected_never_moved"]
                if self.step > self._skip_until:
                    raise UsageError(
                        f"{self.out} ends at step {self._skip_until}, but this run goes on after step {self.step}: "
                        "the steps between would be missing. Resume from an earlier checkpoint."
                    )
        if self.optimizers is None:
            self._handles = [
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
            ]
        else:
            for o in self.optimizers:
                self._handles += [o.register_step_pre_hook(self._before), o.register_step_post_hook(self._after)]

    def stop(self) -> None:
        """Remove the hooks and make everything durable."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.commit()

    def log(self, loss: torch.Tensor | float) -> None:
        """Tell the audit the loss of the current step; the mean is recorded if it is told several times."""
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else float(loss))

    # ---- hooks ----

    def _before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._inside:
            return  # an optimizer that calls another one: the outer step is the step
        self._inside.append(optimizer)
        if not self._due(self.step + 1):
            return
        start = time.perf_counter()
        self._watch(optimizer)
        for w in self._of(optimizer):
            values = w.values()
            if w.before is None or w.before.shape != values.shape:
                w.before = torch.empty_like(values, memory_format=torch.contiguous_format)
            w.before.copy_(values)
        self.seconds += time.perf_counter() - start

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._inside or self._inside[-1] is not optimizer:
            return
        self._inside.pop()
        self.step += 1
        if not self._due(self.step):
            self._losses.clear()
            return
        start = time.perf_counter()
        with torch.no_grad():
            self._record(optimizer)
        if self._writer is not None or self.out is None or _world() > 1:
            late = time.monotonic() - self._opened > self.part_seconds and _world() == 1
            if len(self._rows) >= self.part_steps or late:
                self.commit()
        self.seconds += time.perf_counter() - start

    def _due(self, step: int) -> bool:
        return step > self._skip_until and (step - 1) % self.every == 0

    # ---- tensors ----

    def _of(self, optimizer: torch.optim.Optimizer) -> list[Watched]:
        return [self.watched[p] for g in optimizer.param_groups for p in g["params"] if p in self.watched]

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Take up parameters that were not seen before."""
        new = [p for g in optimizer.param_groups for p in g["params"] if p not in self.watched and p.requires_grad]
        if not new:
            return
        found = name_parameters(optimizer, self.models, search=not self.models)
        for p in new:
            name, module = found[p]
            if not p.is_floating_point() or (self.params is not None and not self.params(name, p)):
                continue
            taken = {w.name for w in self.watched.values()}
            if name in taken:
                name = f"{type(optimizer).__name__}{len(taken)}.{name}"
            rule = self.rules(name, p) if self.rules is not None else group_of(name, p, module)
            group = rule if rule in GROUPS or self.rules is not None else "other"
            self.watched[p] = self._new(name, group, p)
        if self.expected is None:
            total = sum(w.recorded for w in self.watched.values())
            self.expected = total <= FOLLOW_LIMIT
        for w in self.watched.values():
            self._follow(w)
        if self._writer is not None:
            self._writer.manifest["tensors"] = [self._inventory(w) for w in self.watched.values()]
            self._writer.manifest["optimizers"] = self._optimizers(optimizer)
            self._writer.manifest["options"]["expected_never_moved"] = bool(self.expected)
            self._writer.write_manifest()

    def _new(self, name: str, group: str, p: torch.Tensor) -> Watched:
        try:
            grids = [g.within(p.dtype) for g in self.grids]
        except UsageError as error:
            raise UsageError(f"parameter {name!r}: {error}") from None
        tiles = None
        total = tiles_of(local(p).numel())
        if self.sample is not None and self.sample < 1:
            wanted = max(1, round(total * self.sample))
            order = np.argsort(Stream(seed=self.seed, name=name, step=-2).words(total), kind="stable")
            tiles = torch.from_numpy(np.sort(order[:wanted])).to(p.device)
        w = Watched(len(self.watched), name, group, p, grids, tiles)
        w.recorded = p.numel() if tiles is None else w.values().numel()
        return w

    def _follow(self, w: Watched) -> None:
        """Make, or take from a resumed trace, what follows coordinates over steps."""
        n, g = w.values().numel(), len(self.grids)
        work = torch.float64 if w.tensor.dtype == torch.float64 else torch.float32
        if self.never_moved and w.moved is None and w.tensor.device.type == "cpu":
            w.moved = self._loaded.pop(f"{w.name}/moved", torch.zeros((g, (n + 7) // 8), dtype=torch.uint8))
        if self.expected and w.stay is None and w.tensor.device.type == "cpu":
            w.stay = self._loaded.pop(f"{w.name}/stay", torch.ones((g, n), dtype=work))
        if self.scores is not None and w.scores is None:
            w.scores = self._loaded.pop(
                f"{w.name}/scores", torch.zeros((tiles_of(n), len(kernels.SCORES)), dtype=torch.float64)
            )

    # ---- recording ----

    def _record(self, optimizer: torch.optim.Optimizer) -> None:
        rates = {p: group for group in optimizer.param_groups for p in group["params"]}
        ids, counts, phases, expected, shared, sums, extra, rate = [], [], [], [], [], [], [], []
        for w in self._of(optimizer):
            if w.tensor.grad is None or w.before is None:
                continue  # not part of this step
            after = w.values()
            a = kernels.audit(w.before, after, w.grids, after=True, moved=w.moved, stay=w.stay)
            parts = [x.sum(dim=0, dtype=torch.float64) for x in (a.counts, a.phase, a.expected, a.shared, a.sums)]
            if is_sharded(w.tensor):
                flat = reduce_sum(torch.cat([x.reshape(-1) for x in parts]), w.tensor)
                parts = [y.reshape(x.shape) for y, x in zip(flat.split([x.numel() for x in parts]), parts, strict=True)]
            c, ph, ex, sh, su = (x.cpu().numpy() for x in parts)
            ids.append(w.id)
            counts.append(c)
            phases.append(ph)
            expected.append(ex)
            shared.append(sh)
            sums.append(su)
            lr = float(rates[w.tensor].get("lr", float("nan")))
            rate.append(lr)
            extra.append(self._apart(w, after, lr, float(rates[w.tensor].get("weight_decay") or 0.0)))
            self._score(w, after)
            if self.keep:
                self._kept.setdefault(f"{w.name}/before", []).append(w.before.clone())
                self._kept.setdefault(f"{w.name}/after", []).append(after.clone())
        if not ids:
            return
        loss = self._loss()
        row = {
            "ids": np.array(ids), "counts": np.stack(counts), "phase": np.stack(phases),
            "expected": np.stack(expected), "shared": np.stack(shared), "sums": np.stack(sums),
            "lr": np.array(rate), "apart": np.stack(extra), "step": self.step, "loss": loss,
        }  # fmt: skip
        self._rows.append(row)
        self.latest = self._summary(row)
        for listener in self.listeners:
            listener(self.latest)

    def _apart(self, w: Watched, after: torch.Tensor, lr: float, decay: float) -> np.ndarray[Any, Any]:
        """Frozen counts of weight decay alone and of the rest alone, per grid; NaN where not asked for."""
        out = np.full((len(self.grids), 2), np.nan)
        if self.decay and w.before is not None:
            shrink = (-lr * decay) * w.before
            for j, d in enumerate((shrink, (after - w.before) - shrink)):
                found = kernels.audit(w.before, d, w.grids, phase=False)
                out[:, j] = found.counts[:, :, 0].sum(dim=0).cpu().numpy()
        return out

    def _score(self, w: Watched, after: torch.Tensor) -> None:
        if self.scores is None or w.scores is None or w.tensor.grad is None or w.tensor.dim() < 2:
            return
        grid, first, last = self.scores
        if first <= self.step <= last and w.before is not None:
            g = local(w.tensor.grad.detach())
            g = g if w.tiles is None else sampled(g, w.tiles)
            w.scores += kernels.score(w.before, g.to(w.before.dtype), after, grid, after=True).cpu()

    def _loss(self) -> float:
        if not self._losses:
            return float("nan")
        values = [float(x) for x in self._losses]
        self._losses.clear()
        return sum(values) / len(values)

    def _summary(self, row: dict[str, Any]) -> dict[str, Any]:
        """The newest step in few numbers, for listeners and live views."""
        by_id = {w.id: w for w in self.watched.values()}
        sizes = np.array([by_id[i].recorded for i in row["ids"]])
        frozen = row["counts"][:, :, 0]
        return {
            "step": row["step"],
            "loss": row["loss"],
            "lr": float(row["lr"][0]),
            "frozen": {g.name: float(frozen[:, k].sum() / sizes.sum()) for k, g in enumerate(self.grids)},
            "tensors": {
                by_id[i].name: {g.name: float(frozen[j, k] / sizes[j]) for k, g in enumerate(self.grids)}
                for j, i in enumerate(row["ids"])
            },
            "never_moved": {
                g.name: float(row["counts"][:, k, 5].sum() / sizes.sum()) for k, g in enumerate(self.grids)
            }
            if self.never_moved
            else {},
            "update_ratio": float(np.sqrt(row["sums"][:, 1].sum() / max(row["sums"][:, 0].sum(), 1e-300))),
            "nonfinite": int(row["shared"][:, 1].sum()),
        }

    # ---- the trace ----

    def commit(self) -> None:
        """Write what was recorded since the last part."""
        self._opened = time.monotonic()
        rows, self._rows = self._rows, []
        if not rows or self._writer is None:
            return
        state: dict[str, torch.Tensor] = {}
        for w in self.watched.values():
            for key in ("moved", "stay", "scores"):
                value = getattr(w, key)
                if value is not None:
                    state[f"{w.name}/{key}"] = value.clone()
        tables = self._tables(rows)
        meta = {"step": str(self.step), "format": str(FORMAT)}
        self._writer.commit(tables, {"tensors": state, "meta": meta}, self.step)
        if self._kept:
            self._save_kept()

    def _save_kept(self) -> None:
        from safetensors.torch import save_file

        assert self._writer is not None
        folder = self._writer.path / "kept"
        folder.mkdir(exist_ok=True)
        tensors = {k: torch.stack(v) for k, v in self._kept.items()}
        aside = folder / f".{self._writer.count - 1:06d}"
        save_file(tensors, aside)
        aside.rename(folder / f"{self._writer.count - 1:06d}.safetensors")
        self._kept.clear()

    def _tables(self, rows: list[dict[str, Any]]) -> dict[str, pl.DataFrame]:
        g = len(self.grids)
        step = np.concatenate([np.full(len(r["ids"]), r["step"]) for r in rows]).astype(np.int64)
        ids = np.concatenate([r["ids"] for r in rows]).astype(np.int32)
        counts = np.concatenate([r["counts"] for r in rows])
        grids = pl.DataFrame(
            {
                "step": np.repeat(step, g),
                "tensor": np.repeat(ids, g),
                "grid": np.tile(np.arange(g, dtype=np.int16), len(step)),
                **{name: counts[:, :, c].reshape(-1).astype(np.int64) for c, name in enumerate(COUNTS)},
                "phase": np.concatenate([r["phase"] for r in rows]).reshape(-1).astype(np.int64),
                "expected": np.concatenate([r["expected"] for r in rows]).reshape(-1),
                "frozen_decay": np.concatenate([r["apart"] for r in rows])[:, :, 0].reshape(-1),
                "frozen_gradient": np.concatenate([r["apart"] for r in rows])[:, :, 1].reshape(-1),
            }
        )
        shared, sums = (np.concatenate([r[k] for r in rows]) for k in ("shared", "sums"))
        tensors = pl.DataFrame(
            {
                "step": step,
                "tensor": ids,
                "zero_proposal": shared[:, 0].astype(np.int64),
                "nonfinite": shared[:, 1].astype(np.int64),
                "weight_sq": sums[:, 0],
                "proposal_sq": sums[:, 1],
                "lr": np.concatenate([r["lr"] for r in rows]),
            }
        )
        run = pl.DataFrame(
            {"step": np.array([r["step"] for r in rows]), "loss": np.array([r["loss"] for r in rows], dtype=np.float64)}
        )
        return {"grids": grids, "tensors": tensors, "run": run.unique("step", keep="last").sort("step")}

    def _manifest(self) -> dict[str, Any]:
        return {
            "kind": "halfulp.trace",
            "format": FORMAT,
            "halfulp": halfulp.__version__,
            "grids": [g.name for g in self.grids],
            "every": self.every,
            "options": {
                "sample": self.sample,
                "decay": self.decay,
                "never_moved": self.never_moved,
                "expected_never_moved": self.expected,
                "keep": self.keep,
                "scores": list(self.scores) if self.scores else None,
                "seed": self.seed,
            },
            "tensors": [],
            "optimizers": [],
            "environment": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
                "machine": f"{platform.system()} {platform.machine()}",
                "threads": torch.get_num_threads(),
            },
            "run": self.describe,
        }

    def _inventory(self, w: Watched) -> dict[str, Any]:
        return {
            "id": w.id,
            "name": w.name,
            "group": w.group,
            "shape": list(w.tensor.shape),
            "numel": w.tensor.numel(),
            "recorded": w.recorded,
            "dtype": str(w.tensor.dtype).removeprefix("torch."),
            "device": w.tensor.device.type,
        }

    def _optimizers(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        seen = self.optimizers or [optimizer]
        return [
            {"class": type(o).__name__, "defaults": {k: str(v) for k, v in o.defaults.items()}} for o in seen
        ]


def _rank() -> int:
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world() -> int:
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

"""``Audit``: watch an optimizer and record what every grid would do to its steps.

Before ``step()`` the weights are copied aside; after it their change is the emitted proposal d, and one
kernel pass evaluates every grid. The run is not touched: hooks read, nothing writes to parameters, gradients
or random states. On weights that are stored in low precision already (a bfloat16 model, or a ``WriteBack``),
auditing the grid they live on records the *realized* event.

A step is a call of ``step()``; one that ``GradScaler`` skips is no step, accumulated gradients are one.
A tensor is part of it if it had a gradient when ``step()`` was called or has one when it returns, or if its
values changed. Several optimizers share a step: it is over when one of them steps again. Of threads that are
in ``step()`` at once nothing tells which share steps, and the audit steps aside. On several ranks, rank 0
records; the counts of sharded tensors are summed over the ranks that share them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

import torch

from halfulp import kernels
from halfulp.audit import arguments, following, holdings
from halfulp.audit.attribution import Attributed
from halfulp.audit.batch import Batch
from halfulp.audit.hooks import StepHooks
from halfulp.audit.ranks import as_tensor, rank, reduced, taking_part, world
from halfulp.audit.rehearsal import Moved, Rehearsals, Rehearse, Spec
from halfulp.audit.rows import (
    PER_GRID,
    SHARED,
    Array,
    Row,
    leave_phases_out,
    numbers,
    numbers_on_device,
)
from halfulp.audit.shards import Shards
from halfulp.audit.summary import summary
from halfulp.audit.watched import Watched
from halfulp.audit.writing import Writing
from halfulp.errors import UsageError
from halfulp.grids import Grid
from halfulp.kernels.scoring import Scored, add_scores
from halfulp.measures.groups import Rules
from halfulp.text import tell
from halfulp.trace import Memory, TraceWriter
from halfulp.trace.resuming import Resumed
from halfulp.trace.scores import Scores
from halfulp.writeback.optimizer import WriteBack, decoupled


class Audit(Writing):
    """Record a reference trace (or a realized one) while training runs.

    ``optimizers``: one or several, or None for every optimizer in the process. ``every``: audit each n-th
    step. ``sample``: audit this share of every tensor's tiles. ``decay``: also audit decoupled weight decay
    and the rest apart. ``never_moved`` and ``expected_never_moved``: follow every coordinate (a bit per
    grid; four bytes per grid, which doubles the cost of an audit). ``keep``: keep all weights, so that any
    grid can be replayed later (small models). ``scores``: a grid and the steps (first, last) over which to
    sum allocation scores, and the size of the tiles that they are summed by, if not 768: the model's width
    makes a tile one row of an embedding. ``groups``: your own rule (name, tensor) -> group. ``params``: which
    tensors, (name, tensor) -> bool. ``unfit``: what to do with grids that a parameter's dtype cannot hold,
    ``raise`` or ``drop``. ``exists``: what to do where ``out`` holds a trace already, ``number`` the folder
    (``out-2``; it is said, and the attribute ``out`` tells) or ``raise``. ``resume`` goes on with a trace;
    ``first_step`` is the number of the first step that this process takes; by default 1, or what a resumed
    run's optimizer has counted, where it was loaded with its own state. ``part_steps`` and
    ``part_seconds``: how much a crash may lose. ``listeners`` are called with a summary of every audited
    step, which is ``latest`` as well. ``rehearse``: grids with policies (``"e4m3@128"``, ``"e4m3@128:sr"``),
    or a :class:`~halfulp.Rehearse`, whose runs are rehearsed on the proposals of this one, at every step also
    where ``every`` records fewer; :meth:`as_if`, :meth:`evaluate` and :meth:`save_as_if` show them.
    ``states`` follows the optimizer's moments as well (``"find"``: and modules among the variables of the
    frames that call ``step()`` that look like copies of what it holds), and ``also`` copies by name
    (``{"ema": ema_model}``; a module, tensors by name, or a list of them): :mod:`~halfulp.audit.roles`.

    The event is exact for the change that the optimizer made, after minus before in the parameter's own
    dtype. Where that is bfloat16, the optimizer's own rounding is part of the change.

    >>> import tempfile
    >>> from halfulp.trace import Trace
    >>> model = torch.nn.Linear(8, 8)
    >>> opt = torch.optim.SGD(model.parameters(), lr=1e-6)
    >>> folder = tempfile.mkdtemp() + "/run"
    >>> with Audit(opt, ["bf16", "fp16"], model=model, out=folder):
    ...     for _ in range(3):
    ...         _ = model(torch.ones(1, 8)).sum().backward()
    ...         opt.step()
    >>> Trace.open(folder).frozen("bf16").shape
    (3,)
    """

    def __init__(
        self,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        grids: str | Grid | torch.dtype | Iterable[str | Grid | torch.dtype],
        *,
        model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
        out: str | Path | Memory | None = None,
        every: int = 1,
        sample: float | None = None,
        decay: bool = False,
        never_moved: bool = True,
        expected_never_moved: bool = False,
        keep: bool = False,
        scores: Scores | tuple[str, int, int] | tuple[str, int, int, int] | None = None,
        groups: Rules | None = None,
        params: Callable[[str, torch.Tensor], bool] | None = None,
        rehearse: Rehearse | Spec | Iterable[Spec] | None = None,
        states: bool | Literal["find"] = False,
        also: Mapping[str, Any] | None = None,
        unfit: Literal["raise", "drop"] = "raise",
        exists: Literal["number", "raise"] = "number",
        seed: int = 0,
        resume: bool = False,
        first_step: int | None = None,
        part_steps: int = 500,
        part_seconds: float = 30.0,
        listeners: Iterable[Callable[[dict[str, Any]], None]] = (),
        describe: dict[str, Any] | None = None,
    ) -> None:
        self.grids = arguments.grids_of(grids)
        self.every, self.sample = arguments.count("every", every), arguments.share(sample)
        self.decay, self.keep = arguments.flag("decay", decay), arguments.flag("keep", keep)
        self.never_moved = arguments.flag("never_moved", never_moved)
        self.expected = arguments.flag("expected_never_moved", expected_never_moved)
        self.seed, self.resume = arguments.seed_of(seed), arguments.flag("resume", resume)
        self.part_steps = arguments.count("part_steps", part_steps)
        self.part_seconds = arguments.seconds("part_seconds", part_seconds)
        if sample is not None and any(g.scaling is not None and g.scaling.moves for g in self.grids):
            raise UsageError("a sample of tiles cannot tell the scale of a grid that moves with the data.")
        if keep and out is None:
            raise UsageError("keep=True writes weights into the trace: pass out=.")
        self.scores = None if scores is None else Scores.of(scores)
        if self.scores is not None:
            self.scores.check_sample(self.sample)
        asked = Rehearse.given(rehearse)
        if asked is not None and sample is not None:
            raise UsageError("rehearse= needs every weight: leave sample= out.")
        self.rehearsing = None if asked is None else Rehearsals(asked, self.seed)
        if unfit not in ("raise", "drop"):
            raise UsageError(f"unfit must be raise or drop, not {unfit!r}.")
        if exists not in ("number", "raise"):
            raise UsageError(f"exists must be number or raise, not {exists!r}.")
        self.optimizers, self.models = arguments.optimizers_of(optimizers), arguments.models_of(model)
        self.rules, self.params = arguments.called("groups", groups), arguments.called("params", params)
        self.out, self._memory = arguments.folder_of(out)
        self.unfit, self.exists = unfit, exists
        self.listeners = arguments.listeners_of(listeners)
        self.describe = arguments.by_name("describe", describe, "what the manifest says of the run, by name")
        self.step = 0 if first_step is None else arguments.count("first_step", first_step) - 1
        self._counts, self._first = first_step is None, None
        self.watched: dict[torch.Tensor, Watched] = {}
        self._left_out: set[torch.Tensor] = set()
        self._around, self._evaluated = [], []
        self._batches: list[Batch] = []
        self._lists = WeakKeyDictionary()
        self._newest: list[Row] = []
        self._newest_loss = math.nan
        self._summed: dict[str, Any] = {}
        self.seconds = 0.0
        self._rows: list[Row] = []
        self._losses: dict[int, list[float]] = {}
        self._told: list[torch.Tensor | float] = []
        self._kept: dict[str, list[torch.Tensor]] = {}
        self._writer: TraceWriter | Memory | None = None
        self._hooks = StepHooks(self._before, self._after, self._together)
        self._stepped: list[torch.optim.Optimizer] = []
        self._seen: list[torch.optim.Optimizer] = []
        self._holds: dict[torch.optim.Optimizer, dict[str, Any]] = {}
        self._gradients: holdings.Sizes = {}
        self._opened, self._writing = 0.0, 0.0
        self._skip_until = 0
        self._loaded: dict[str, torch.Tensor] = {}
        self._resumed: Resumed | None = None
        self._shards: Shards | None = None
        self._touched = 0
        """The last step of which a shard was part."""
        self._unwritten = 0
        """Steps that were due since the last part, the same on all ranks."""
        self._audited = False
        self._untrained = False
        """Whether tensors without gradients are followed as well: those of roles are."""
        self.announces = False
        """Whether to say on standard error, when the first step is over, what the optimizers hold."""
        self._batching = True
        """Whether small tensors are copied side by side."""
        self._phases = True
        self.roles: Any = None
        followed = arguments.states_of(states)
        copies = arguments.by_name("also", also, "copies by name, such as {'ema': ema_model}")
        if followed or copies:
            from halfulp.audit.roles import Roles  # which is made of audits

            self.roles = Roles(self, copies, bool(followed), find=followed == "find")
        self.attributed = Attributed()
        self.trouble: str | None = None
        """Why the trace ends before the run, if it does; the run itself goes on."""
        self.given_up = False
        """Whether threads stepped at once, or a tensor became another one, so that nothing is recorded or
        rehearsed any more."""

    # ---- attaching ----

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Hook the optimizers. If nobody calls :meth:`stop`, the end of the process does."""
        if self._opened:
            raise UsageError("an audit runs once: make another one.")
        if self.optimizers is not None:
            groups = [group for o in self.optimizers for group in o.param_groups]
            if not any(p.requires_grad for group in groups for p in group["params"]):
                raise UsageError("nothing to audit: the optimizer has no trainable parameters.")
        self._opened = time.monotonic()
        self._begin()
        self._hooks.attach(self.optimizers)
        self._hooks.at_exit(self.stop)
        return self

    def stop(self) -> None:
        """Remove the hooks and make everything durable; the trace is not a fork's to end."""
        if self._hooks.forked:
            self._hooks.detach()
            return
        with self._hooks.uninterrupted():
            self._hooks.detach()
            self._finish()
            if self.roles is not None:
                still = self.roles.stop()
                if still and self._writer is not None and self._rows:
                    self._writer.manifest["run"]["unchanged"] = still
                    self._written(self._writer.write_manifest)
            self.commit()
            if self._writer is not None:
                self._writer.close()

    def when_idle(self, action: Callable[[], None]) -> None:
        """Do something from a signal handler: now, or as soon as the audit is not in the middle of a step."""
        self._hooks.when_idle(action)

    def refused(self, error: BaseException) -> bool:
        """Whether an error that came out of a step is this audit's, and not the step's own."""
        return self._hooks.raised(error)

    @property
    def writes(self) -> bool:
        """Whether this process writes the trace: the first rank does, and none of its forks."""
        return self._writer is not None and not self._hooks.forked

    def discard_if_empty(self) -> bool:
        """Remove the trace's folder if nothing was recorded into it; one that says why is kept."""
        if self._writer is None or self._hooks.forked or self.trouble is not None:
            return False
        return self._writer.discard_if_empty()

    def log(self, loss: torch.Tensor | float, step: int | None = None) -> None:
        """Tell the audit the loss of the coming step; the mean is recorded if it is told several times.

        With ``step``, the loss of a step that was taken already, as long as the next one has not begun.
        """
        if isinstance(loss, torch.Tensor) and (loss.numel() != 1 or loss.is_complex()):
            kind = f"{str(loss.dtype).removeprefix('torch.')} tensor of shape {list(loss.shape)}"
            raise UsageError(f"log() takes a loss that is one real number, not a {kind}.")
        if step is None:  # a copy: the script may write to its own before the step
            self._told.append(loss.detach().clone() if isinstance(loss, torch.Tensor) else float(loss))
        elif any(row.step == step for row in self._rows):
            self._losses[step] = [float(loss)]

    # ---- steps ----

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        start = time.perf_counter()
        if self._counts:
            self._counts = False
            self._count_on(optimizer)
        if self._stepped and self._begins(optimizer):
            self._finish()
        if not self._stepped:
            self._commit_if_due()
        if isinstance(optimizer, WriteBack) and optimizer.moved_in_backward:
            self._give_up(
                "weights move inside the backward (in_backward()), before step() is called.",
                "What is lost there is in optimizer.events; or leave in_backward() out.",
            )
        coming = self.step if self._stepped else self.step + 1
        looks = self._due(coming) or self._rehearses(coming)
        here = self._watch(optimizer) if looks else []
        if self.roles is not None and self._resumes(coming):
            self.roles.before_skipped(self._watch(optimizer))
        if self.roles is not None and self._due(coming):
            self.roles.look_for(optimizer)
        if self.roles is not None and not self._stepped:
            self.roles.step_begins(coming, self._due(coming))
        if looks:
            here = self._unaltered(here)
            if optimizer in self._seen and optimizer not in self._holds and not self._untrained:
                self._gradients = holdings.gradients(optimizer)
            for batch in self._batches_of(here):
                batch.set_aside()
            for w in here:
                grad = w.tensor.grad
                w.asked, w.given = grad is not None, None if w.scores is None else grad
                if w.batch is None:
                    w.set_aside()
            if self.roles is not None and self._due(coming):
                self.roles.before(optimizer, here, coming)
        self.seconds += time.perf_counter() - start

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        start = time.perf_counter()
        if not self._stepped:
            self.step += 1
            self._unwritten += self._due(self.step)
            self._audited = self._audited or self._due(self.step)
        if self._first is None and not self._untrained:
            self._first = optimizer
            self._hold_count()
        self._stepped.append(optimizer)
        if self._due(self.step) or self._rehearses(self.step):
            with torch.no_grad():
                self._record(optimizer)
                self._look_up(optimizer)
                if self.roles is not None and self._due(self.step):
                    self.roles.after(optimizer)
        self._told.clear()
        if self.optimizers is not None and len(self._stepped) == len(self.optimizers):
            self._finish()
        self.seconds += time.perf_counter() - start

    def _begins(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the step at hand is over: for this optimizer, or for one of its tensors, which an optimizer
        that was made anew steps as well."""
        if optimizer in self._stepped:
            return True
        mine = set(self._params(optimizer))
        return any(not mine.isdisjoint(self._params(other)) for other in self._stepped)

    def _together(self) -> None:
        """A step begins in one thread while another thread is in one."""
        self._give_up(
            "a thread called step() while another was in its own, and steps in several threads at once "
            "cannot be told apart.",
            "Audit the optimizer of one thread: hu.Audit(optimizer, ...).",
        )

    def _give_up(self, why: str, advice: str) -> None:
        """Record nothing from here on; what was recorded so far is kept."""
        if self.given_up:
            return
        if self.trouble is None and self._shards is None:
            self._finish()
            self.commit()
        self.given_up = True
        if self.roles is not None:
            self.roles.give_up()
        if self.trouble is None:
            what = "the audit" if self.out is None else f"the trace {self.out}"
            self._step_aside(f"{what} was given up after step {self.step}: {why}", advice)

    def _due(self, step: int) -> bool:
        return step > self._skip_until and self._regular(step)

    def _resumes(self, step: int) -> bool:
        """Whether a step is only gone through again, and tensors may be taken up in it already: rehearsals do
        so where they go on, and ranks together."""
        return step <= self._skip_until and self.trouble is None and self.rehearsing is None and world() == 1

    def _regular(self, step: int) -> bool:
        """Whether a step is one of those that are audited, or was before a resumed trace ended."""
        if self.trouble is not None and (self.given_up or not self.listeners) and world() == 1:
            return False  # nobody would hear of it; ranks that share a tensor go on together
        return (step - 1) % self.every == 0

    def _rehearses(self, step: int) -> bool:
        """Whether a step is still to be rehearsed: several optimizers may share the newest."""
        if self.given_up and world() == 1:
            return False
        return self.rehearsing is not None and step > self.rehearsing.begun

    def _finish(self) -> None:
        """The step is over for all optimizers."""
        self._stepped.clear()
        if self.announces and self._holds:
            self.announces = False
            if rank() == 0:
                tell(f"halfulp: {holdings.words_of(self._holds.values())}")
        rows = [*takewhile(lambda r: r.step == self.step, reversed(self._rows))][::-1]
        if rows and (not self._newest or self._newest[0].step != self.step):
            self._newest, self._newest_loss = rows, self._loss(self.step)
            for listener in self.listeners:
                listener(self.latest)

    @property
    def latest(self) -> dict[str, Any]:
        """The newest step in few numbers; empty before the first."""
        if self._newest and self._summed.get("step") != self._newest[0].step:
            tensors = {w.id: w for w in self.watched.values()}
            grids = [g.name for g in self.grids]
            self._summed = summary(self._newest, self._newest_loss, tensors, grids, self.never_moved)
        return self._summed

    # ---- recording ----

    def _record(self, optimizer: torch.optim.Optimizer) -> None:
        seen = self._unaltered([w for w in self._of(optimizer) if w.before is not None])
        if self.given_up and world() == 1:
            return
        seen = taking_part(seen)
        if any(w.sharded for w in seen):
            self._touched = self.step
        if self.rehearsing is not None and self._rehearses(self.step):
            for batch in self._batches_of(seen):
                batch.look([w for w in seen if w.batch is batch])
            self._rehearse(seen, _by_tensor(optimizer))
        if not self._due(self.step):
            return
        first = rank() == 0
        seen = seen if first else [w for w in seen if w.sharded]
        found = self._rows_of(seen)
        if self.decay or self.keep:
            groups = _by_tensor(optimizer)
            for w, row in zip(seen, found, strict=True):
                self._look_closer(w, as_tensor(row), optimizer, groups[w.tensor])
        if self.scores is not None:
            self._score(self.scores, [w for w in seen if w.scores is not None])
        if not seen:
            return
        totals = reduced(seen, found)
        if not first:
            return
        if not self._phases:
            leave_phases_out(totals)
        rate: dict[int, float] = {}
        for group in optimizer.param_groups:
            rate.update(dict.fromkeys(map(id, group["params"]), float(group.get("lr", math.nan))))
        rates = [rate[id(w.tensor)] for w in seen]
        self._rows.append(Row(step=self.step, ids=[w.id for w in seen], rates=rates, numbers=totals))
        self._losses.setdefault(self.step, []).extend(float(x) for x in self._told)

    def _rows_of(self, seen: list[Watched]) -> Sequence[torch.Tensor | Array] | Array:
        """A row of numbers for every tensor."""
        together = self._batches_of(seen)
        if len(together) == 1 and together[0].members == seen:  # most models
            return together[0].audit(seen)
        found: dict[Watched, torch.Tensor | Array] = {}
        for batch in together:
            present = [w for w in seen if w.batch is batch]
            found.update(zip(present, batch.audit(present), strict=True))
        for w in seen:
            if w.batch is None:
                assert w.before is not None
                counted = following.audit(
                    w.before, w.values(), w.grids, moved=w.moved, stay=w.stay, phase=self._phases
                )
                on_cpu = counted.counts.device.type == "cpu"
                found[w] = numbers(counted)[0] if on_cpu else numbers_on_device(counted)
        return [found[w] for w in seen]

    def _rehearse(self, seen: list[Watched], groups: dict[torch.Tensor, dict[str, Any]]) -> None:
        assert self.rehearsing is not None
        moved, counts = self.rehearsing.follow(seen, groups, self.step)
        if not moved:
            return
        totals = reduced(moved, counts)
        if rank() == 0 and self._due(self.step):
            self.rehearsing.rows.append(Moved(step=self.step, ids=[w.id for w in moved], numbers=totals))

    def _look_closer(
        self, w: Watched, row: torch.Tensor, optimizer: torch.optim.Optimizer, group: dict[str, Any]
    ) -> None:
        """What is recorded of single tensors on request."""
        assert w.before is not None
        after = w.values()
        inner = optimizer.optimizer if isinstance(optimizer, WriteBack) else optimizer
        rate, decay = decoupled(inner, group) if self.decay else (0.0, 0.0)
        if decay:
            shrink = (-rate * decay) * w.before
            for j, d in (("frozen_decay", shrink), ("frozen_gradient", (after - w.before) - shrink)):
                alone = kernels.audit(w.before, d, w.grids, phase=False).counts[:, :, 0]
                row[PER_GRID.index(j) : -len(SHARED) : len(PER_GRID)] = alone.sum(dim=0, dtype=torch.float64)
        if self.keep and self._writer is not None and self.trouble is None:
            for what, value in (("before", w.before), ("after", after)):
                copy = value.clone(memory_format=torch.contiguous_format)
                self._kept.setdefault(f"{w.id}.{what}", []).append(copy)

    def _score(self, asked: Scores, seen: list[Watched]) -> None:
        """Add to the scores what this step says, where there was a gradient."""
        if asked.first <= self.step <= asked.last:
            scored = []
            for w in seen:
                gradient = w.gradient()
                if gradient is not None and w.before is not None and w.scores is not None:
                    scored.append(Scored(w.before, gradient, w.values(), w.scores))
            add_scores(scored, asked.grid, asked.tile)
        for w in seen:
            w.given = None


def _by_tensor(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    return {p: group for group in optimizer.param_groups for p in group["params"]}

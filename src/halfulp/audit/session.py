"""``Audit``: watch an optimizer and record what every grid would do to its steps.

Before ``step()`` the weights are copied aside; after it their change is the emitted proposal d, and one
kernel pass evaluates every grid. The run is not touched: hooks read, nothing writes to parameters, gradients
or random states. On several ranks, rank 0 records the counts of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import torch

from halfulp.audit import arguments
from halfulp.audit.arguments import Grids
from halfulp.audit.meter.tensor import Watched
from halfulp.audit.pipeline import Pipeline
from halfulp.audit.ranks import many, rank, world
from halfulp.audit.rehearsal.as_if import Evaluation, Losses, ModelAsIf, number
from halfulp.audit.rehearsal.attribution import Attributed, attribute
from halfulp.audit.rehearsal.rehearsals import Rehearsals
from halfulp.audit.rehearsal.specs import Rehearse, Spec
from halfulp.audit.settings import AUDITED, Listener, Measure, Recording, grouped
from halfulp.audit.sources.optimizer_steps import OptimizerSteps
from halfulp.audit.sources.step_hooks import StepHooks
from halfulp.audit.sources.tracked import TrackedStates
from halfulp.errors import UsageError
from halfulp.kernels import TILE
from halfulp.numbers.grids import Grid
from halfulp.trace import Memory, free_folder
from halfulp.trace.forecast import REAL
from halfulp.trace.schema import BOUNDS


class Audit:
    """Record a reference trace (or a realized one) while training runs.

    Args:
        optimizers: One or several, or None for every optimizer in the process.
        grids: One or several, such as ``"bf16"``. By default bf16, fp16, e5m2 and e4m3@128, as far as the
            parameters' dtype can hold them.
        model: The model or models that name the parameters.
        out: A folder or a :class:`~halfulp.Memory`; None records nothing, for listeners alone.
        every: Audit each n-th step.
        rehearse: Grids with policies (``"e4m3@128"``, ``"e4m3@128:sr"``), or a :class:`~halfulp.Rehearse`:
            runs to rehearse on the proposals of this one, at every step even if ``every`` records fewer.
            :meth:`as_if`, :meth:`evaluate` and :meth:`save_as_if` use them.
        states: Follow the optimizer's moments as well; with ``"find"``, also modules among the variables of
            the frames that call ``step()`` that look like copies of what it holds.
        also: Follow copies by name (``{"ema": ema_model}``: a module, tensors by name, or a list of them).
        measure: Settings of the measurement.
        recording: Settings of the recording.
        options: Single fields of these two by name, such as ``sample=0.1`` or ``resume=True``.

    Raises:
        UsageError: If an argument is not valid, or two arguments conflict.

    The event is exact for the change that the optimizer made, after minus before in the parameter's own
    dtype. Where weights are stored on a grid (a bfloat16 model, :class:`~halfulp.WriteBack`), its rounding is
    part of the change, and auditing that grid records what really happened.

    >>> import halfulp, tempfile
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

    With a rehearsal, the model is evaluated as if its weights were stored on the grid:

    >>> x = torch.ones(1, 8)
    >>> with Audit(opt, ["bf16"], model=model, rehearse=["e5m2"]) as audit:
    ...     model(x).sum().backward()
    ...     opt.step()
    ...     losses = audit.evaluate(lambda: model(x).detach().square().sum())
    ...     with audit.as_if("e5m2"):
    ...         on_grid = model.weight.detach().clone()
    >>> sorted(losses.losses["e5m2"])
    ['lower', 'point', 'upper']
    >>> bool((on_grid == halfulp.grid("e5m2").round(on_grid)).all())
    True
    >>> audit.step, sorted(audit.latest["tensors"])
    (1, ['bias', 'weight'])
    """

    def __init__(
        self,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        grids: Grids | None = None,
        *,
        model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
        out: str | Path | Memory | None = None,
        every: int = 1,
        rehearse: Rehearse | Spec | Iterable[Spec] | None = None,
        states: bool | Literal["find"] = False,
        also: Mapping[str, Any] | None = None,
        measure: Measure | None = None,
        recording: Recording | None = None,
        **options: Any,
    ) -> None:
        measure, recording = grouped("Audit", measure, recording, options)
        if grids is None:
            grids, measure = AUDITED, replace(measure, unfit="drop")
        specs = Rehearse.given(rehearse)
        if specs is not None and measure.sample is not None:
            raise UsageError("rehearse= needs every weight: leave sample= out.")
        self.rehearsing = None if specs is None else Rehearsals(specs, measure.seed)
        self.optimizers, self.models = arguments.optimizers_of(optimizers), arguments.models_of(model)
        self.pipeline = Pipeline(
            grids, out, every=every, measure=measure, recording=recording, rehearsing=self.rehearsing
        )
        self.attributed = Attributed()
        self.pipeline.sink.states.append(self.attributed.state)
        if isinstance(states, str):
            arguments.check("states", states, states == "find", "True, False or 'find'")
        else:
            arguments.flag("states", states)
        copies = arguments.by_name("also", also, "copies by name, such as {'ema': ema_model}")
        self.tracked: TrackedStates | None = None
        """The states tracked beside the weights; None if there are none."""
        if states or copies:
            self.tracked = TrackedStates(self.pipeline, copies, bool(states), find=states == "find")
            self.pipeline.roles = self.tracked.latest
        self._steps = OptimizerSteps(self.pipeline, self.optimizers, self.models, self.tracked)
        self._started = False

    # ---- what it knows ----

    @property
    def grids(self) -> list[Grid]:
        """The measured grids."""
        return self.pipeline.watchlist.grids

    @property
    def out(self) -> Path | None:
        """The folder of the trace, which may have been numbered."""
        return self.pipeline.sink.out

    @property
    def step(self) -> int:
        """The newest step of the run."""
        return self.pipeline.sink.step

    @property
    def watched(self) -> dict[torch.Tensor, Watched]:
        """The tensors under audit."""
        return self.pipeline.watched

    @property
    def listeners(self) -> list[Listener]:
        """The functions that are called with a summary of every audited step."""
        return self.pipeline.listeners

    @property
    def trouble(self) -> str | None:
        """The reason why the trace ends before the run, or None; the run itself continues."""
        return self.pipeline.sink.trouble

    @property
    def given_up(self) -> bool:
        """Return True once recording and rehearsing have stopped.

        The reason is that threads stepped concurrently, or that a tensor was replaced.
        """
        return self.pipeline.given_up

    @property
    def lost(self) -> bool:
        """True if the trace's folder was moved, removed or taken by another recording during the run."""
        return self.pipeline.sink.lost

    @property
    def seconds(self) -> float:
        """The time spent in this audit, in seconds."""
        return self._steps.seconds

    @property
    def writes(self) -> bool:
        """True if this process writes the trace: the first rank does, but not its forks."""
        return self.pipeline.sink.writer is not None and not self._steps.hooks.forked

    @property
    def latest(self) -> dict[str, Any]:
        """A summary of the newest step; empty before the first.

        ``roles`` holds the summaries of tracked states by their name in the trace, each as of its newest
        finished step: moments finish with the weights, copies when the next step begins.
        """
        return self.pipeline.latest

    # ---- attaching ----

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Hook the optimizers. Unless :meth:`stop` is called, the end of the process stops the audit.

        Returns:
            This audit.

        Raises:
            UsageError: If it has already run, there is nothing to audit, or the trace cannot be resumed.
        """
        self._open()
        return self._attached()

    def start_at_first_step(self) -> Self:
        """Hook the optimizers, and begin a new trace when one of them first steps.

        A script makes its own folders before it trains: none of ours is in its way until then, and the trace
        takes the first free one of ``out``, ``out-2``... if it may be numbered. A script that never steps
        leaves nothing behind.
        """
        sink = self.pipeline.sink
        if self._started or sink.recording.resume:
            return self.start()

        def begin() -> None:
            if sink.out is not None and sink.recording.exists == "number":
                sink.out = free_folder(sink.out)
            self.pipeline.open(self._options())

        self._started = True
        self._steps.opening = lambda: sink.begin(begin)
        return self._attached()

    def _attached(self) -> Self:
        self._steps.hooks.attach(self.optimizers)
        self._steps.hooks.at_exit(self._steps.stop)
        return self

    def start_unhooked(self) -> StepHooks:
        """Start, and return the hooks for the caller to call: torch accepts no new hooks in a step."""
        self._open()
        self._steps.hooks.at_exit(self._steps.stop)
        return self._steps.hooks

    def _open(self) -> None:
        if self._started:
            raise UsageError("an audit can be started only once: make a new one.")
        if self.optimizers is not None:
            params = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
            # Main tensors need not require gradients; ZeRO 3 has them in the optimizer during a step only.
            if params and all(isinstance(p, torch.nn.Parameter) and not p.requires_grad for p in params):
                raise UsageError("nothing to audit: the optimizer has no trainable parameters.")
        self._started = True
        sink = self.pipeline.sink
        if sink.recording.resume and self.rehearsing is not None and sink.memory is not None and many():
            raise UsageError(
                "rehearsals on several ranks cannot be resumed from memory, which is the first rank's. "
                "Pass a folder, out=, that all ranks see."
            )
        if self.pipeline.open(self._options()):
            self.attributed.take_up(sink.loaded)
            self.pipeline.check_gap()

    def _options(self) -> dict[str, Any]:
        """Return what the manifest says of rehearsals and tracked states."""
        stated: dict[str, Any] = {"rehearse": self.rehearsing and self.rehearsing.rehearse.to_json()}
        return stated if self.tracked is None else {**stated, "roles": self.tracked.to_json()}

    def stop(self) -> None:
        """Remove the hooks and make everything durable; in a forked process the trace is left open."""
        self._steps.stop()

    def commit(self) -> None:
        """Write what was recorded since the last part. If tensors are sharded, all ranks must call it."""
        self.pipeline.commit()

    def announce(self) -> None:
        """Report on standard error, after the first step, what the optimizers hold."""
        self._steps.notes.announces = True

    def when_idle(self, action: Callable[[], None]) -> None:
        """Call a function from a signal handler: now, or as soon as no step is being recorded."""
        self._steps.hooks.when_idle(action)

    def refused(self, error: BaseException) -> bool:
        """Return True if an error raised by a step came from this audit, not from the step itself."""
        return self._steps.hooks.raised(error)

    def discard_if_empty(self) -> bool:
        """Remove the trace's folder if nothing was recorded into it; one that says why is kept."""
        return not self._steps.hooks.forked and self.pipeline.sink.discard_if_empty()

    def log(self, loss: torch.Tensor | float, step: int | None = None) -> None:
        """Record a loss; if there are several for one step, their mean is recorded.

        Args:
            loss: One real number.
            step: The step of the loss: by default the coming one, or the last one if the next has not begun.

        Raises:
            UsageError: If a tensor is not one real number.
        """
        if isinstance(loss, torch.Tensor) and (loss.numel() != 1 or loss.is_complex()):
            kind = f"{str(loss.dtype).removeprefix('torch.')} tensor of shape {list(loss.shape)}"
            raise UsageError(f"log() takes a loss that is one real number, not a {kind}.")
        if step is None:  # a copy: the script may write to its own before the step
            self._steps.losses.append(
                loss.detach().clone() if isinstance(loss, torch.Tensor) else float(loss)
            )
        else:
            self.pipeline.sink.set_loss(step, float(loss))

    # ---- rehearsals ----

    @property
    def rehearsals(self) -> list[str]:
        """The specs that are rehearsed."""
        return [] if self.rehearsing is None else self.rehearsing.rehearse.names

    @property
    def bounds(self) -> list[str]:
        """The bounds of a rehearsal that are available; the lower one needs no stored state."""
        return [] if self.rehearsing is None else self.rehearsing.bounds

    @property
    def rehearsed(self) -> bool:
        """True if there are rehearsed weights."""
        return self.rehearsing is not None and bool(self.rehearsing.tensors)

    def _stage(self) -> ModelAsIf:
        if self.rehearsing is None:
            raise UsageError(
                "this audit rehearses nothing: pass rehearse=['e4m3@128', ...] when you make it."
            )
        if not self.rehearsing.tensors:  # before the first step, s = Q(w)
            for optimizer in self.optimizers or ():
                self._steps.watch(optimizer)
        if not self.rehearsing.tensors:
            raise UsageError(
                "nothing is rehearsed yet, as no step has moved a tensor to rehearse: call this after a step."
            )
        return ModelAsIf(self.rehearsing, self.models or self._steps.around)

    def as_if(self, spec: str, bound: str = "point") -> AbstractContextManager[None]:
        """Give the model a rehearsal's weights inside a with block, then restore its own bit by bit.

        Args:
            spec: The rehearsal, such as ``"e4m3@128:sr"``.
            bound: ``point``, ``upper`` or ``lower``.

        Returns:
            The context manager, which all ranks must enter. Optimizer steps are refused inside.

        Raises:
            UsageError: If there is no such rehearsal or bound, or another ``as_if`` is open.
        """
        return self._stage().as_if(spec, bound, self.step)

    def evaluate(
        self,
        evaluate: Callable[[], Any],
        *,
        specs: Sequence[str] | None = None,
        bounds: Sequence[str] | None = None,
        record: bool = True,
    ) -> Evaluation:
        """Evaluate the model, and every rehearsal and bound as if it were the model.

        Every evaluation sees the same random numbers, and the run continues as after one evaluation: the
        global generators of Python, NumPy and torch and the model's buffers are restored. Rewind your own
        generators yourself.

        Args:
            evaluate: Computes the loss of the model as it is: a number.
            specs: The rehearsals; all by default.
            bounds: The bounds of each; by default all that are available.
            record: Write the losses into the trace.

        Returns:
            The losses; only the model's own if nothing is rehearsed or the audit is disabled.

        Raises:
            UsageError: If there is no such rehearsal or bound.
        """
        alone = self.rehearsing is None or (self.given_up and world() == 1)
        if alone or (specs is not None and not specs):
            real, losses = number(evaluate()), Losses()
            begun = self.pipeline.sink.skip_until if self.rehearsing is None else self.rehearsing.begun
        else:
            stage = self._stage()
            begun = stage.rehearsals.begun
            chosen = [stage.rehearsals.index(s) for s in (self.rehearsals if specs is None else specs)]
            chosen_bounds = tuple(self.bounds if bounds is None else bounds)
            real, losses = stage.losses(evaluate, chosen, chosen_bounds, self.step)
        if record and rank() == 0 and self.step >= begun:  # before, it is there already
            rows = [(REAL, REAL, real)]
            for spec, each in losses.items():
                rows += [(self.rehearsals.index(spec), BOUNDS.index(b), loss) for b, loss in each.items()]
            self.pipeline.sink.add_evaluation(rows)
        return Evaluation(step=self.step, real=real, losses=losses)

    def save_as_if(self, spec: str, path: str | Path, bound: str = "point") -> None:
        """Write a rehearsal's weights under the model's names, as one safetensors file.

        Args:
            spec: The rehearsal.
            path: The file. It holds the entries of ``model.state_dict()``, or without a model the
                optimizers' parameters.
            bound: ``point``, ``upper`` or ``lower``.

        Raises:
            UsageError: If there is no such rehearsal or bound, or the audit has several models.
        """
        if len(self.models) > 1:
            raise UsageError("save_as_if is for one model; this audit was given several.")
        self._stage().save(spec, Path(path), bound, self.step, self.watched.values())

    def attribute(
        self,
        spec: str,
        loss: Callable[[], torch.Tensor],
        *,
        points: int = 4,
        bound: str = "point",
        tile: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Attribute the loss that a rehearsal costs to tiles, after a step. The run is not touched.

        Args:
            spec: The rehearsal.
            loss: Computes the loss of the model as it is, on the same data every time: a tensor, before
                ``backward()``.
            points: Number of gradients taken between the model's weights and the rehearsed ones.
            bound: ``point``, ``upper`` or ``lower``.
            tile: Coordinates per tile; by default as in ``scores=``, or 768.

        Returns:
            Every tile's share, by tensor. The trace holds the sum over calls, score R of
            :func:`halfulp.allocate`.

        Raises:
            UsageError: If there is no such rehearsal or bound, no step to keep it with, or the loss has no
                gradient.
        """
        stage, scored = self._stage(), self.pipeline.measure.scored
        stage.rehearsals.index(spec)
        if not self.pipeline.sink.rows:
            raise UsageError(
                "no step was recorded since the last commit(): call attribute() after a step, which keeps it."
            )
        usual = TILE if scored is None else scored.tile
        size = tile if tile is not None else self.attributed.tile or usual
        return attribute(
            stage, self.attributed, spec, loss, points=points, bound=bound, tile=size, step=self.step
        )

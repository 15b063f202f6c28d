"""How a study is declared: frozen data and four kinds of function.

A `Study` has *stages*; a stage enumerates *cells*; a cell is run by a pure function of its config
and of the records of stages sealed before it, and leaves one *record*. *Estimands* are numbers
computed from the records, by scientific unit; *gates* compare an estimand with a threshold fixed
in advance; *rules* turn gates into a label. Everything that is not a function is data, is printed
before anything runs, and is sealed.

Functions must be importable (a module's top level, or a study file's), because worker processes
and the validator find them by name: nothing is pickled. What a function gives back is JSON.

>>> def cells(config):
...     return [Cell(name=f"seed-{s}", config={"seed": s}) for s in range(config["seeds"])]
>>> def run(cell):
...     return {"heads": cell.config["seed"] % 2}
>>> def heads(records):
...     return {name: record["heads"] for name, record in records["toss"].items()}
>>> study = Study(
...     name="coin",
...     question="Does the coin land on both sides?",
...     units="one toss",
...     not_claimed=("that the coin is fair",),
...     scales={"smoke": {"seeds": 2}},
...     stages=(Stage(name="toss", kind="outcome", cells=cells, run=run),),
...     estimands=(Estimand(name="heads", what="1 for heads, by toss", compute=heads),),
...     gates=(Gate(name="both", estimand="heads", scope="mean", comparison="==", threshold=0.5),),
...     rules=(Rule(label="both sides", passed=("both",)), Rule(label="one side")),
... )
>>> [cell.name for cell in study.cells("smoke", "toss")]
['seed-0', 'seed-1']
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from halfulp.errors import UsageError
from halfulp.study.outcomes import Outcomes

Json = Any  # None, bool, int, float (finite), str, and lists and string-keyed dicts of them
Config = Mapping[str, Json]
Records = Mapping[str, Mapping[str, Mapping[str, Json]]]  # stage -> cell -> what the cell gave back
Values = Mapping[str, float | None]  # scientific unit -> number; None where it is not defined

SCALES = ("smoke", "small", "paper")
SCOPES = ("unit", "mean", "all")
COMPARISONS = ("<", "<=", "==", ">=", ">")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,119}")


class Running(Protocol):
    """What the function of a cell is given."""

    @property
    def name(self) -> str:
        """The cell's name."""

    @property
    def config(self) -> Config:
        """The cell's config."""

    def read(self, stage: str, cell: str) -> Mapping[str, Json]:
        """What a cell of a sealed stage gave back; only of the stages that this one declares."""

    def read_bytes(self, stage: str, cell: str, name: str) -> bytes:
        """A file that a cell of a sealed stage attached."""

    def attach(self, name: str, content: bytes) -> None:
        """Keep a file beside the record, which holds its digest."""

    def evidence(self, name: str) -> Outcomes:
        """Another study that this one declares as evidence: its records, files and values."""

    def data(self, name: str) -> Path:
        """A data set of the study, whose digest is the sealed one."""

    def save(self, state: bytes) -> None:
        """Replace the cell's checkpoint, so that an interrupted cell goes on from here."""

    def load(self) -> bytes | None:
        """The checkpoint, if the cell was interrupted."""

    def progress(self, done: float, total: float) -> None:
        """Say how far the cell is; never changes a record."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One unit of execution."""

    name: str
    config: Config = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("cell", self.name)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Cells that may run in any order; the whole stage is sealed before the next one starts."""

    name: str
    kind: Literal["reference", "prediction", "outcome"]
    cells: Callable[[Config], Iterable[Cell]]
    run: Callable[[Running], Mapping[str, Json]]
    reads: tuple[str, ...] = ()
    only_if: tuple[str, ...] = ()
    """Gates that must have passed, judged from the stages before this one. If one failed, the stage is
    recorded as not authorised and none of its cells runs."""
    clocks: bool = False
    """Whether records hold measured seconds or sizes: these are judged, and never replayed."""

    def __post_init__(self) -> None:
        check_name("stage", self.name)
        if self.kind not in ("reference", "prediction", "outcome"):
            raise UsageError(
                f"Stage {self.name}: kind is reference, prediction or outcome, not {self.kind!r}."
            )


@dataclass(frozen=True, kw_only=True)
class Estimand:
    """A number, by scientific unit, that is a function of the records alone.

    It is computed as ``compute(records, **args)``. Arguments are sealed, and what was sealed is what the
    function is given: JSON values as JSON gives them back (a tuple is a list), functions by their names. A
    `functools.partial` is taken apart; its arguments must have names.
    """

    name: str
    what: str
    compute: Callable[..., Values]
    args: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("estimand", self.name)
        if isinstance(self.compute, functools.partial):
            if self.compute.args:
                raise UsageError(f"Estimand {self.name}: give the arguments of a partial by name.")
            object.__setattr__(self, "args", {**self.compute.keywords, **self.args})
            object.__setattr__(self, "compute", self.compute.func)

    @classmethod
    def of(cls, compute: Callable[..., Values], name: str = "", **args: Json) -> Estimand:
        """What a function computes: called by its name unless another is given, described by its docstring.

        >>> def share_moved(records):
        ...     \"\"\"Share of weights that moved, by run.\"\"\"
        >>> Estimand.of(share_moved).name, Estimand.of(share_moved).what
        ('share-moved', 'share of weights that moved, by run')
        """
        said = (compute.__doc__ or "").partition("\n")[0].rstrip(".")
        called = name or compute.__name__.replace("_", "-")
        return cls(name=called, what=said[:1].lower() + said[1:], compute=compute, args=args)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A condition fixed before its outcome exists.

    ``scope="all"``: every unit must meet it; ``"mean"``: the mean over units must; ``"unit"``: one
    decision a unit, which rules name as ``gate[unit]``. A value that is missing or not finite
    never passes.
    """

    name: str
    estimand: str
    scope: Literal["unit", "mean", "all"]
    comparison: Literal["<", "<=", "==", ">=", ">"]
    threshold: float
    why: str = ""

    def __post_init__(self) -> None:
        check_name("gate", self.name)
        if self.scope not in SCOPES:
            raise UsageError(f"Gate {self.name}: scope is one of {', '.join(SCOPES)}, not {self.scope!r}.")
        if self.comparison not in COMPARISONS:
            known = " ".join(COMPARISONS)
            raise UsageError(f"Gate {self.name}: the comparison is one of {known}, not {self.comparison!r}.")
        if not math.isfinite(self.threshold):
            raise UsageError(f"Gate {self.name}: the threshold must be a finite number.")

    @classmethod
    def of(
        cls, name: str, condition: str, why: str = "", scope: Literal["unit", "mean", "all"] = "all"
    ) -> Gate:
        """A gate from the condition as one writes it.

        >>> gate = Gate.of("most-move", "share-moved >= 0.5", "a majority")
        >>> gate.estimand, gate.comparison, gate.threshold, gate.scope
        ('share-moved', '>=', 0.5, 'all')
        """
        try:
            estimand, comparison, threshold = condition.split()
            given: dict[str, Any] = {"comparison": comparison, "threshold": float(threshold)}
        except ValueError:
            raise UsageError(
                f"Gate {name}: a condition is an estimand, one of {' '.join(COMPARISONS)} and a number, not "
                f"{condition[:80]!a}."
            ) from None
        return cls(name=name, estimand=estimand, scope=scope, why=why, **given)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The label, when these gates passed and those failed. The first rule that fits decides.

    `not_run` names stages that were not authorised. A label may be a registered string, to the letter; `says`
    is then the sentence that a reader understands.
    """

    label: str
    passed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    not_run: tuple[str, ...] = ()
    says: str = ""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Another study, closed, that this one builds on; the user points at its folder when sealing.

    `records` are patterns (``*`` for anything) of ``stage/cell``, `attached` of ``stage/cell/file`` (their
    records come with them), `estimands` names: what is used is copied, checked, and all that cells and
    estimands see. `scale` is that of the study itself unless it is given. `after` names a stage that must be
    sealed before a cell may open it: predictions that are made without knowing an outcome which exists.
    """

    name: str
    study: str
    scale: str = ""
    records: tuple[str, ...] = ()
    attached: tuple[str, ...] = ()
    estimands: tuple[str, ...] = ()
    after: str = ""

    def __post_init__(self) -> None:
        check_name("evidence", self.name)
        check_name("study", self.study)
        if not self.records + self.attached + self.estimands:
            raise UsageError(f"Evidence {self.name} must say which records, files or estimands it uses.")
        if self.scale and self.scale not in SCALES:
            raise UsageError(
                f"Evidence {self.name}: a scale is one of {', '.join(SCALES)}, not {self.scale!r}."
            )


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of a report: strings, numbers or None."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A protocol: see the module's docstring.

    `scales` maps a scale's name to its config; `data` names the data sets that cells may open,
    `scale_data` those that one scale alone needs;
    `retries` is how often a run tries a cell that failed again by itself; `threads` is the number of
    threads of a worker process, part of the protocol because it may change a floating-point sum.
    `tables` and `figures` serve reports only and decide nothing.
    """

    name: str
    question: str
    units: str
    not_claimed: tuple[str, ...]
    scales: Mapping[str, Config]
    stages: tuple[Stage, ...]
    estimands: tuple[Estimand, ...]
    gates: tuple[Gate, ...]
    rules: tuple[Rule, ...]
    data: tuple[str, ...] = ()
    scale_data: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    retries: int = 0
    threads: int = 1
    tables: Mapping[str, Callable[[Records], Table]] = field(default_factory=dict)
    figures: Mapping[str, Callable[[Records], Any]] = field(default_factory=dict)  # a matplotlib figure
    evidence: tuple[Evidence, ...] = ()

    def __post_init__(self) -> None:
        check_name("study", self.name)
        if not self.scales or not self.stages or not self.estimands or not self.gates:
            raise UsageError(f"Study {self.name} needs at least one scale, stage, estimand and gate.")
        for scale in self.scales:
            if scale not in SCALES:
                raise UsageError(f"Study {self.name}: a scale is one of {', '.join(SCALES)}, not {scale!r}.")
        check_stages(f"Study {self.name}", self.stages)
        estimands = [estimand.name for estimand in self.estimands]
        check_decisions(f"Study {self.name}", estimands, self.gates, self.rules, self.stages)
        _once(f"Study {self.name}: evidence", [one.name.lower() for one in self.evidence])
        for one in self.evidence:
            check_opened(f"Evidence {one.name}", one.after, self.stages)
        if self.retries < 0 or self.threads < 1:
            raise UsageError(f"Study {self.name}: retries must be 0 or more and threads 1 or more.")

    def stage(self, name: str) -> Stage:
        """A stage by name."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise UsageError(f"Study {self.name} has no stage {name!r}; stages: {self._names(self.stages)}.")

    def config(self, scale: str) -> Config:
        """The config of a scale."""
        if scale not in self.scales:
            raise UsageError(f"Study {self.name} has no scale {scale!r}; scales: {', '.join(self.scales)}.")
        return self.scales[scale]

    def cells(self, scale: str, stage: str) -> list[Cell]:
        """The cells of a stage, in their declared order."""
        cells = list(self.stage(stage).cells(self.config(scale)))
        check_cells(stage, [cell.name for cell in cells])
        return cells

    @staticmethod
    def _names(things: Iterable[Any]) -> str:
        return ", ".join(thing.name for thing in things)


class Staged(Protocol):
    """What a declared and a sealed stage have in common."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def only_if(self) -> tuple[str, ...]: ...


def check_stages(what: str, stages: Sequence[Staged]) -> None:
    """Stages read earlier ones only, and no prediction comes after an outcome."""
    _once(f"{what}: stage", [stage.name.lower() for stage in stages])  # file systems may fold case
    before: list[str] = []
    outcome = ""
    for stage in stages:
        unknown = [name for name in stage.reads if name not in before]
        if unknown:
            raise UsageError(
                f"Stage {stage.name} reads {', '.join(unknown)}, which is not an earlier stage of the "
                f"study; earlier ones: {', '.join(before) or 'none'}."
            )
        if stage.kind == "outcome":
            outcome = stage.name
        elif stage.kind == "prediction" and outcome:
            raise UsageError(f"Prediction stage {stage.name} comes after outcome stage {outcome}.")
        before.append(stage.name)


def check_opened(what: str, after: str, stages: Sequence[Staged]) -> None:
    """Evidence is opened after a stage that there is, and no gate is judged before that."""
    if not after:
        return
    names = [stage.name for stage in stages]
    if after not in names:
        raise UsageError(f"{what} is opened after stage {after!r}; stages: {', '.join(names)}.")
    for stage in stages[: names.index(after) + 1]:
        if stage.only_if:
            raise UsageError(
                f"{what} is opened after stage {after}; no gate may decide on {stage.name} then."
            )


def check_cells(stage: str, cells: Sequence[str]) -> None:
    """A stage has cells, each under a name of its own."""
    if not cells:
        raise UsageError(f"Stage {stage} has no cells at this scale.")
    _once(f"Stage {stage}: cell", [cell.lower() for cell in cells])


def check_decisions(
    what: str,
    estimands: Sequence[str],
    gates: Sequence[Gate],
    rules: Sequence[Rule],
    stages: Sequence[Staged] = (),
) -> None:
    """Gates must name estimands that exist, rules gates that exist, and some rule must always fit."""
    _once(f"{what}: estimand", estimands)
    _once(f"{what}: gate", [gate.name for gate in gates])
    for gate in gates:
        if gate.estimand not in estimands:
            raise UsageError(f"Gate {gate.name}: there is no estimand {gate.estimand!r}.")
    scopes = {gate.name: gate.scope for gate in gates}
    named = [(f"The rule for {rule.label!r}", rule.passed + rule.failed) for rule in rules]
    for who, names in [*named, *((f"Stage {stage.name}", stage.only_if) for stage in stages)]:
        for used in names:
            name, _, unit = used.partition("[")
            if name not in scopes or bool(unit) != (scopes[name] == "unit"):
                raise UsageError(
                    f"{who} names gate {used!r}; gates: {', '.join(scopes)} "
                    "(a gate of scope unit is named with its unit, as in gate[unit])."
                )
    if stages and stages[0].only_if:
        raise UsageError(f"Stage {stages[0].name} is the first: no gate can be judged before it.")
    conditional: set[str] = set()
    for stage in stages:
        conditional |= {stage.name} if stage.only_if or conditional & set(stage.reads) else set()
    for rule in rules:
        unknown = sorted(set(rule.not_run) - conditional)
        if unknown:
            raise UsageError(
                f"The rule for {rule.label!r} asks whether stage {unknown[0]!r} was not run, but no gate "
                "decides on that."
            )
    if not rules or rules[-1].passed or rules[-1].failed or rules[-1].not_run:
        raise UsageError(f"{what}: the last rule must have no condition, so that a label exists.")


def check_name(kind: str, name: object) -> None:
    """Names become file names and text on pages; so they are plain, everywhere."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"The {kind} name {str(name)[:80]!a} is not plain: 1 to 120 letters, digits and ._=+- "
            "of ASCII, a letter or digit first."
        )


def _once(what: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise UsageError(f"{what} name used twice: {', '.join(twice[:5])}.")

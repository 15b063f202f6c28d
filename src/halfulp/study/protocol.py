"""Declare a study, as frozen data and four kinds of function.

A `Study` has *stages*; a stage enumerates *cells*; a cell is run by a pure function of its config
and of the records of stages sealed before it, and leaves one *record*. *Estimands* are numbers
computed from the records, by scientific unit; *gates* compare an estimand with a threshold fixed
in advance; *rules* turn gates into a label. Everything that is not a function is data, is printed
before anything runs, and is sealed.

Functions must be importable (a module's top level, or a study file's), because worker processes
and the validator find them by name: nothing is pickled. Functions return JSON values.

Estimands are given an `Outcomes`, a mapping ``records[stage][cell]`` to what the cell returned. A plain dict
of the same form works too where nothing else is needed, so an estimand can be computed from typed-in numbers.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from halfulp.errors import UsageError

Json = Any  # None, bool, int, float (finite), str, and lists and string-keyed dicts of them
Config = Mapping[str, Json]
Records = Mapping[str, Mapping[str, Mapping[str, Json]]]  # stage -> cell -> what the cell gave back
Values = Mapping[str, float | None]  # scientific unit -> number; None where it is not defined

Cells = Mapping[str, Mapping[str, Any]]
Kind = Literal["reference", "prediction", "outcome"]
Scope = Literal["unit", "mean", "all"]
Comparison = Literal["<", "<=", "==", ">=", ">"]

SCALES = ("smoke", "small", "medium", "paper")
KINDS: tuple[str, ...] = get_args(Kind)
SCOPES: tuple[str, ...] = get_args(Scope)
COMPARISONS: tuple[str, ...] = get_args(Comparison)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,119}")
_UNIT = re.compile(r"[A-Za-z0-9@][A-Za-z0-9@ .,:;_=+/*()%^-]{0,119}")


class NotRun(UsageError, LookupError):  # noqa: N818  # it is a fact about a study, not a mistake
    """Raised when the records of a stage are requested that was not authorised."""


def _no_files(stage: str, cell: str, name: str) -> bytes:
    raise UsageError(f"These records have no files: {name[:120]!a} of {stage[:120]!a}/{cell[:120]!a}.")


@dataclass(frozen=True, eq=False)
class Outcomes(Mapping[str, Cells]):
    """The records that a study's functions are given, with attached files and evidence.

    ``records.attached(stage, cell, name)`` is a file that a cell attached; ``records.evidence[name]`` is
    another, closed study, limited to what is declared: records, ``label`` and ``estimands`` by unit.

    A stage that was not authorised has no records. Looking it up raises `NotRun`, which leaves an estimand
    without values: nothing replaces what did not happen. ``"stage" in records`` tests for it without raising.
    """

    cells: Mapping[str, Cells]
    _: KW_ONLY
    attached: Callable[[str, str, str], bytes] = _no_files
    evidence: Mapping[str, Outcomes] = field(default_factory=dict)
    estimands: Mapping[str, Values] = field(default_factory=dict)
    label: str = ""
    not_run: Collection[str] = ()

    def __getitem__(self, stage: str) -> Cells:
        if stage in self.not_run:
            raise NotRun(f"Stage {stage} was not authorised, so it has no records.")
        if stage not in self.cells:
            known = ", ".join(self.cells) or "none"
            raise UsageError(f"There are no records of stage {stage[:120]!a} here; there are: {known}.")
        return self.cells[stage]

    def __contains__(self, stage: object) -> bool:
        return stage in self.cells

    def get(self, stage: str, default: Any = None) -> Any:
        """Return the outcomes of a stage, or ``default``."""
        return self.cells.get(stage, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)

    def of(self, stages: Collection[str]) -> Outcomes:
        """Return the outcomes of these stages alone."""
        cells = {stage: cells for stage, cells in self.cells.items() if stage in stages}
        return replace(self, cells=cells, not_run=set(self.not_run) & set(stages))


class Running(Protocol):
    """The interface through which a cell's function reads its input and saves its state."""

    @property
    def name(self) -> str:
        """The cell's name."""

    @property
    def config(self) -> Config:
        """The cell's config."""

    def read(self, stage: str, cell: str) -> Mapping[str, Json]:
        """Return what a cell of a sealed stage returned; this stage must declare that stage in `reads`."""

    def read_bytes(self, stage: str, cell: str, name: str) -> bytes:
        """Return a file that a cell of a sealed stage attached."""

    def attach(self, name: str, content: bytes) -> None:
        """Keep a file beside the record, which holds its digest."""

    def evidence(self, name: str) -> Outcomes:
        """Return another study that this one declares as evidence: its records, files and values."""

    def data(self, name: str) -> Path:
        """Return the file of a data set of the study, whose digest is the sealed one."""

    def save(self, state: bytes) -> None:
        """Replace the cell's checkpoint, so that an interrupted cell resumes from here."""

    def load(self) -> bytes | None:
        """Return the checkpoint if the cell was interrupted, else None."""

    def progress(self, done: float, total: float) -> None:
        """Report how far the cell is; never changes a record."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One unit of execution: a name and a config."""

    name: str
    config: Config = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("cell", self.name)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A set of cells that may run in any order; the whole stage is sealed before the next one starts.

    `only_if` names gates that must have passed, judged from the stages before this one; if one failed, the
    stage is recorded as not authorised and none of its cells runs. Set `clocks` if records hold measured
    seconds or sizes: such records are judged, but never replayed.
    """

    name: str
    kind: Kind
    cells: Callable[[Config], Iterable[Cell]]
    run: Callable[[Running], Mapping[str, Json]]
    reads: tuple[str, ...] = ()
    only_if: tuple[str, ...] = ()
    clocks: bool = False

    def __post_init__(self) -> None:
        check_name("stage", self.name)
        if self.kind not in KINDS:
            raise UsageError(
                f"Stage {self.name}: kind is reference, prediction or outcome, not {self.kind!r}."
            )


@dataclass(frozen=True)
class SealedStage:
    """A stage as it was sealed: its cells, without its functions."""

    name: str
    kind: str
    reads: tuple[str, ...]
    cells: Mapping[str, Config]
    only_if: tuple[str, ...] = ()
    clocks: bool = False


@dataclass(frozen=True, kw_only=True)
class Estimand:
    """A number, by scientific unit, that is a function of the records alone: ``compute(records, **args)``.

    Arguments are sealed, and the function is given the sealed form: values as they come back from JSON (a
    tuple becomes a list), and functions by name. A `functools.partial` is split into function and arguments.
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
        """Make an estimand of a function, described by its docstring and by default named after it.

        >>> def share_moved(records):
        ...     \"\"\"Share of weights that moved, by run.\"\"\"
        >>> Estimand.of(share_moved).name, Estimand.of(share_moved).what
        ('share-moved', 'share of weights that moved, by run')
        """
        what = (compute.__doc__ or "").partition("\n")[0].rstrip(".")
        name = name or compute.__name__.replace("_", "-")
        return cls(name=name, what=what[:1].lower() + what[1:], compute=compute, args=args)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A condition on an estimand, fixed before its outcome exists.

    With ``scope="all"`` every unit must meet it, with ``"mean"`` the mean over units must; ``"unit"``
    gives one decision per unit, which rules name ``gate[unit]``. A value that is missing or not finite
    never passes.
    """

    name: str
    estimand: str
    scope: Scope
    comparison: Comparison
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
    def of(cls, name: str, condition: str, why: str = "", scope: Scope = "all") -> Gate:
        """Make a gate from its condition as text.

        >>> gate = Gate.of("most-move", "share-moved >= 0.5", "a majority")
        >>> gate.estimand, gate.comparison, gate.threshold, gate.scope
        ('share-moved', '>=', 0.5, 'all')
        """
        try:
            estimand, comparison, threshold = condition.split()
            given: dict[str, Any] = {"comparison": comparison, "threshold": float(threshold)}
        except ValueError:
            known = f"an estimand, one of {' '.join(COMPARISONS)} and a number"
            raise UsageError(f"Gate {name}: a condition is {known}, not {condition[:80]!a}.") from None
        return cls(name=name, estimand=estimand, scope=scope, why=why, **given)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The label of a study when these gates passed and those failed. The first rule that fits decides.

    `not_run` names stages that must not have been authorised. A rule with `recovered` fits only if a record
    was made by hand, and never makes a scientific result. `says` explains the label to a reader.
    """

    label: str
    passed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    not_run: tuple[str, ...] = ()
    says: str = ""
    recovered: bool = False


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A closed study that this one builds on; the user gives its folder when sealing.

    `records` are patterns of ``stage/cell`` (``*`` for anything), `attached` of ``stage/cell/file`` (with
    their records), and `estimands` are names: only what these select is copied, checked and visible. `scale`
    is by default that of this study. `after` names a stage that must be sealed before a cell may open the
    evidence, so that predictions can be made without knowledge of an outcome that exists.
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
        if self.scale:
            check_scale(f"Evidence {self.name}", self.scale)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a report; its values are strings, numbers or None."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Study:
    """The declaration of a study: see the module's docstring.

    `scales` maps a scale's name to its config; `data` names the data sets that cells may open, `scale_data`
    those that one scale alone needs; `retries` is how often a run retries a failed cell by itself; `threads`
    is the number of threads of a worker process, sealed because it may change a floating-point sum. `tables`
    and `figures` (of matplotlib) serve reports only and decide nothing.
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
    figures: Mapping[str, Callable[[Records], Any]] = field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()

    def __post_init__(self) -> None:
        check_name("study", self.name)
        if not self.scales or not self.stages or not self.estimands or not self.gates:
            raise UsageError(f"Study {self.name} needs at least one scale, stage, estimand and gate.")
        for scale in self.scales:
            check_scale(f"Study {self.name}", scale)
        check_stages(f"Study {self.name}", self.stages)
        estimands = [estimand.name for estimand in self.estimands]
        check_decisions(f"Study {self.name}", estimands, self.gates, self.rules, self.stages)
        _once(f"Study {self.name}: evidence", [one.name.lower() for one in self.evidence])
        for one in self.evidence:
            check_opened(f"Evidence {one.name}", one.after, self.stages)
        if self.retries < 0 or self.threads < 1:
            raise UsageError(f"Study {self.name}: retries must be 0 or more and threads 1 or more.")

    def stage(self, name: str) -> Stage:
        """Return a stage by name."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        known = ", ".join(stage.name for stage in self.stages)
        raise UsageError(f"Study {self.name} has no stage {name!r}; stages: {known}.")

    def config(self, scale: str) -> Config:
        """Return the config of a scale."""
        if scale not in self.scales:
            raise UsageError(f"Study {self.name} has no scale {scale!r}; scales: {', '.join(self.scales)}.")
        return self.scales[scale]

    def cells(self, scale: str, stage: str) -> list[Cell]:
        """Return the cells of a stage, in their declared order."""
        cells = list(self.stage(stage).cells(self.config(scale)))
        check_cells(stage, [cell.name for cell in cells])
        return cells


Stages = Sequence[Stage] | Sequence[SealedStage]


def check_stages(what: str, stages: Stages) -> None:
    """Refuse stages that read later ones, and a prediction that comes after an outcome."""
    _once(f"{what}: stage", [stage.name.lower() for stage in stages])  # file systems may fold case
    before: list[str] = []
    outcome = ""
    for stage in stages:
        if unknown := [name for name in stage.reads if name not in before]:
            earlier = f"an earlier stage of the study; earlier ones: {', '.join(before) or 'none'}"
            raise UsageError(f"Stage {stage.name} reads {', '.join(unknown)}, which is not {earlier}.")
        if stage.kind == "outcome":
            outcome = stage.name
        elif stage.kind == "prediction" and outcome:
            raise UsageError(f"Prediction stage {stage.name} comes after outcome stage {outcome}.")
        before.append(stage.name)


def check_opened(what: str, after: str, stages: Stages) -> None:
    """Refuse evidence that opens after an unknown stage, or after a gate was judged."""
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
    """Refuse a stage without cells, or with two of one name."""
    if not cells:
        raise UsageError(f"Stage {stage} has no cells at this scale.")
    _once(f"Stage {stage}: cell", [cell.lower() for cell in cells])


def check_decisions(
    what: str, estimands: Sequence[str], gates: Sequence[Gate], rules: Sequence[Rule], stages: Stages = ()
) -> None:
    """Refuse gates of unknown estimands, rules of unknown gates, and rules of which none may fit."""
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
        if unknown := sorted(set(rule.not_run) - conditional):
            raise UsageError(
                f"The rule for {rule.label!r} asks whether stage {unknown[0]!r} was not run, but no gate "
                "decides on that."
            )
    if not rules or rules[-1].passed or rules[-1].failed or rules[-1].not_run or rules[-1].recovered:
        raise UsageError(f"{what}: the last rule must have no condition, so that a label exists.")


def check_scale(what: str, scale: str) -> None:
    """Raise UsageError if a scale does not exist."""
    if scale not in SCALES:
        raise UsageError(f"{what}: a scale is one of {', '.join(SCALES)}, not {scale!r}.")


def check_name(kind: str, name: object) -> None:
    """Refuse a name that is not plain: names become file names and text on pages."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"The {kind} name {str(name)[:80]!a} is not plain: 1 to 120 letters, digits and ._=+- "
            "of ASCII, a letter or digit first."
        )


def check_unit(estimand: str, unit: object) -> None:
    """Refuse a unit that is not plain: units become text on pages."""
    if not isinstance(unit, str) or not _UNIT.fullmatch(unit):
        raise UsageError(
            f"Estimand {estimand}: the unit {str(unit)[:80]!a} is not plain: 1 to 120 ASCII letters, digits, "
            "spaces and @.,:;_=+/*()%^-, a letter, digit or @ first."
        )


def _once(what: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise UsageError(f"{what} name used twice: {', '.join(twice[:5])}.")

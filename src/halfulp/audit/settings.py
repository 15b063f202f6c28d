"""The options of an audit in groups: what is measured, and how the trace is recorded.

They are checked when they are made: a trace states its options in its manifest, and one that states what no
audit may have could be recorded for days and never be opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from halfulp.audit import arguments
from halfulp.canonical import LARGEST
from halfulp.deprecation import ENDED
from halfulp.errors import UsageError
from halfulp.measures.groups import Rules
from halfulp.numbers.grids import Grid
from halfulp.text import meant
from halfulp.trace.scores import Scores

Listener = Callable[[dict[str, Any]], None]
AUDITED = ("bf16", "fp16", "e5m2", "e4m3@128")
"""The grids that are audited where nobody names any: of these, those that the parameters' dtype can hold."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Choose what an audit measures.

    Args:
        sample: Audit this share of every tensor's tiles; None audits all of them.
        decay: Also audit decoupled weight decay and the rest of the update apart.
        never_moved: Follow which coordinates never moved (one bit per weight and grid).
        expected_never_moved: Follow the probability of that under stochastic rounding (four bytes per weight
            and grid; doubles the cost of an audit).
        scores: A grid and the steps (first, last) over which to sum allocation scores, and the size of the
            tiles if not 768.
        params: Choose the tensors, (name, tensor) -> bool.
        groups: Your own rule (name, tensor) -> group.
        unfit: What to do with grids that a parameter's dtype cannot hold: ``raise``, or ``drop``, which says
            so if other parameters could have been audited on them.
        seed: Seed of the sample and of stochastic rehearsals.

    Raises:
        UsageError: If a value is not one that the option takes.

    >>> Measure(sample=0.1).to_json()["sample"]
    0.1
    """

    sample: float | None = None
    decay: bool = False
    never_moved: bool = True
    expected_never_moved: bool = False
    scores: Scores | tuple[str, int, int] | tuple[str, int, int, int] | None = None
    params: Callable[[str, torch.Tensor], bool] | None = None
    groups: Rules | None = None
    unfit: Literal["raise", "drop"] = "raise"
    seed: int = 0

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "sample", arguments.share("sample", self.sample))
        for name in ("decay", "never_moved", "expected_never_moved"):
            put(self, name, arguments.flag(name, getattr(self, name)))
        put(self, "scores", None if self.scores is None else Scores.of(self.scores))
        if self.scored is not None:
            self.scored.check_sample(self.sample)
        for name in ("params", "groups"):
            given = getattr(self, name)
            arguments.check(name, given, given is None or callable(given), "a function")
        if self.unfit not in ("raise", "drop"):
            raise UsageError(f"unfit must be raise or drop, not {self.unfit!r}.")
        put(self, "seed", arguments.seed_of(self.seed))

    @property
    def scored(self) -> Scores | None:
        """The scores as ``Scores``, or None."""
        return self.scores if isinstance(self.scores, Scores) else None

    def check_grids(self, grids: Sequence[Grid]) -> None:
        """Refuse grids that these options cannot measure."""
        if self.sample is not None and any(g.scaling is not None and g.scaling.moves for g in grids):
            raise UsageError(
                "sample= sees some tiles only, but this grid's scale follows whole tensors: leave it out."
            )

    def to_json(self) -> dict[str, Any]:
        """Return the settings as stated in the manifest of a trace."""
        return {
            "sample": self.sample,
            "decay": self.decay,
            "never_moved": self.never_moved,
            "expected_never_moved": self.expected_never_moved,
            "scores": None if self.scored is None else self.scored.to_json(),
            "seed": self.seed if abs(self.seed) <= LARGEST else str(self.seed),
        }


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Choose how an audit records its trace.

    Args:
        resume: Continue the existing trace.
        first_step: Number of the first step that this process takes. By default 1, or the count of a resumed
            run's optimizer if its state was loaded.
        exists: The action if ``out`` already holds a trace: ``number`` the folder (``out-2``; the audit
            reports it, and its attribute ``out`` has it) or ``raise``.
        part_steps: Most steps between parts; a crash may lose that many.
        part_seconds: Most seconds between parts.
        describe: Description of the run for the manifest, by name.
        listeners: Functions that are called with a summary of every audited step.

    Raises:
        UsageError: If a value is not one that the option takes.

    >>> Recording(part_steps=100, describe={"by": "me"}).part_steps
    100
    """

    resume: bool = False
    first_step: int | None = None
    exists: Literal["number", "raise"] = "number"
    part_steps: int = 500
    part_seconds: float = 30.0
    describe: dict[str, Any] | None = None
    listeners: Iterable[Listener] = ()

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "resume", arguments.flag("resume", self.resume))
        if self.first_step is not None:
            put(self, "first_step", arguments.count("first_step", self.first_step))
        if self.exists not in ("number", "raise"):
            raise UsageError(f"exists must be number or raise, not {self.exists!r}.")
        put(self, "part_steps", arguments.count("part_steps", self.part_steps))
        put(self, "part_seconds", arguments.seconds("part_seconds", self.part_seconds))
        described = "what the manifest says of the run, by name"
        put(self, "describe", arguments.by_name("describe", self.describe, described))
        put(self, "listeners", arguments.listeners_of(self.listeners))


def grouped(
    whose: str, measure: Measure | None, recording: Recording | None, options: dict[str, Any]
) -> tuple[Measure, Recording]:
    """Put options that were given one by one into their groups.

    Raises:
        UsageError: If a group is of another type, or an option is of neither.

    >>> grouped("Audit", Measure(), Recording(), {"sample": 0.5})[0].sample
    0.5
    """
    groups: list[Any] = []
    for kind, group in ((Measure, measure), (Recording, recording)):
        name = kind.__name__
        arguments.check(
            name.lower(), group, group is None or isinstance(group, kind), f"a halfulp.audit.{name}"
        )
        groups.append(kind() if group is None else group)
    known = [f.name for group in groups for f in fields(group)]
    for i, group in enumerate(groups):
        mine = {f.name: options[f.name] for f in fields(group) if f.name in options}
        groups[i] = replace(group, **mine)
        options = {name: value for name, value in options.items() if name not in mine}
    for name in options:
        raise UsageError(ENDED.get(name) or f"{whose} has no option {name!r}.{meant(name, known)}")
    return groups[0], groups[1]

"""A study at one scale, as data: what is shown before anything runs, and what is sealed.

`declare` turns a :class:`~halfulp.study.protocol.Study` into JSON: every cell with its config, every
estimand, gate and rule. `Protocol` reads that JSON back, strictly: a field too many or too few, or of
another kind, is refused. The engine, the workers and the validator take cells, gates and rules from what was
sealed and only the *functions* from code, so code that declares something else cannot move a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from halfulp import canonical
from halfulp.errors import CorruptionError, UsageError
from halfulp.study import shape
from halfulp.study.protocol import (
    Cell,
    Config,
    Estimand,
    Evidence,
    Gate,
    Json,
    Rule,
    Study,
    check_cells,
    check_decisions,
    check_opened,
    check_stages,
)

FORMAT = 1


def declare(study: Study, scale: str) -> dict[str, Json]:
    """Everything of a study that is not a function, at one scale."""
    return {
        "format": FORMAT,
        "study": study.name,
        "scale": scale,
        "config": study.config(scale),
        "question": study.question,
        "units": study.units,
        "not_claimed": list(study.not_claimed),
        "data": [*study.data, *study.scale_data.get(scale, ())],
        "retries": study.retries,
        "threads": study.threads,
        "stages": [
            {
                "name": stage.name,
                "kind": stage.kind,
                "reads": list(stage.reads),
                "run": _called(stage.run),
                "cells": [
                    {"name": cell.name, "config": cell.config} for cell in study.cells(scale, stage.name)
                ],
                **_given(only_if=list(stage.only_if), clocks=stage.clocks),
            }
            for stage in study.stages
        ],
        "estimands": [
            {"name": e.name, "what": e.what, "compute": _called(e.compute), **declared_args(e)}
            for e in study.estimands
        ],
        "gates": [asdict(gate) for gate in study.gates],
        "rules": [declared_rule(rule) for rule in study.rules],
        **_given(evidence=[declared_evidence(one, scale) for one in study.evidence]),
    }


def declared_rule(rule: Rule) -> dict[str, Json]:
    """A rule, as it is sealed."""
    gates = {"label": rule.label, "passed": list(rule.passed), "failed": list(rule.failed)}
    return gates | _given(not_run=list(rule.not_run), says=rule.says)


def declared_evidence(one: Evidence, scale: str) -> dict[str, Json]:
    """Evidence, as it is sealed."""
    made = asdict(one) | {"scale": one.scale or scale}
    after = made.pop("after")
    return made | _given(after=after)


def declared_args(estimand: Estimand) -> dict[str, Json]:
    """The arguments of an estimand, as they are sealed, if it has any."""
    return _given(args={key: sealed_argument(value) for key, value in estimand.args.items()})


def _given(**fields: Json) -> dict[str, Json]:
    """Fields that are left out where nothing is said: a study that needs none of them is as it was."""
    return {key: value for key, value in fields.items() if value}


def _called(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def sealed_argument(value: Json) -> Json:
    """An estimand's argument, as it is sealed: a function is called by its name."""
    return {"function": _called(value)} if callable(value) else value


@dataclass(frozen=True)
class SealedStage:
    """A stage without its function."""

    name: str
    kind: str
    reads: tuple[str, ...]
    cells: Mapping[str, Config]
    only_if: tuple[str, ...] = ()
    clocks: bool = False


class Protocol:
    """A declaration that was read back; `where` is named in errors."""

    def __init__(self, content: Any, where: str) -> None:
        if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
            raise CorruptionError(
                f"{where} has format {str(content['format'])[:40]!a}; this halfulp reads format {FORMAT}."
            )
        shape.check(content, shape.PROTOCOL, where)
        self.content: dict[str, Json] = content
        self.study: str = content["study"]
        self.scale: str = content["scale"]
        self.threads: int = content["threads"]
        self.retries: int = content["retries"]
        self.data: tuple[str, ...] = tuple(content["data"])
        self.estimands: tuple[str, ...] = tuple(e["name"] for e in content["estimands"])
        self.args: dict[str, dict[str, Json]] = {e["name"]: e.get("args", {}) for e in content["estimands"]}
        self.evidence: tuple[dict[str, Json], ...] = tuple(content.get("evidence", ()))
        self.stages = tuple(
            SealedStage(
                s["name"],
                s["kind"],
                tuple(s["reads"]),
                {c["name"]: c["config"] for c in s["cells"]},
                tuple(s.get("only_if", ())),
                s.get("clocks", False),
            )
            for s in content["stages"]
        )
        try:
            self.gates = tuple(Gate(**gate) for gate in content["gates"])
            self.rules = tuple(
                Rule(
                    label=r["label"],
                    passed=tuple(r["passed"]),
                    failed=tuple(r["failed"]),
                    not_run=tuple(r.get("not_run", ())),
                    says=r.get("says", ""),
                )
                for r in content["rules"]
            )
            check_stages("The study", self.stages)
            for stage in content["stages"]:
                check_cells(stage["name"], [cell["name"] for cell in stage["cells"]])
            check_decisions("The study", self.estimands, self.gates, self.rules, self.stages)
            for one in self.evidence:
                check_opened(f"Evidence {one['name']}", one.get("after", ""), self.stages)
        except UsageError as error:
            raise CorruptionError(f"{where} is not a protocol: {error}") from None
        if not self.stages or self.threads < 1 or self.retries < 0:
            raise CorruptionError(f"{where} is not a protocol: it has no stage, or no thread to run one.")

    @classmethod
    def of(cls, study: Study, scale: str) -> Protocol:
        """The protocol of a study as its code declares it now, in the form in which it would be read back."""
        content = canonical.dumps(declare(study, scale))
        return cls(canonical.loads(content, f"study {study.name}"), f"study {study.name}")

    @cached_property
    def bytes(self) -> bytes:
        """The canonical form."""
        return canonical.dumps(self.content)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical form."""
        return canonical.sha256(self.bytes)

    def stage(self, name: str) -> SealedStage:
        """A stage by name."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise UsageError(f"Study {self.study} has no stage {name!r}.")

    def before(self, name: str) -> tuple[SealedStage, ...]:
        """The stages that must be sealed before this one starts."""
        names = [stage.name for stage in self.stages]
        return self.stages[: names.index(self.stage(name).name)]

    def judged_from(self, estimand: str) -> tuple[str, ...]:
        """The stages whose records an estimand is given: all, or those before the first that it decides on.

        So a gate that decides whether a stage runs has one value, then and at the end.
        """
        gates = {gate.name for gate in self.gates if gate.estimand == estimand}
        for i, stage in enumerate(self.stages):
            if gates & {name.partition("[")[0] for name in stage.only_if}:
                return tuple(earlier.name for earlier in self.stages[:i])
        return tuple(stage.name for stage in self.stages)

    def cell(self, name: str) -> tuple[str, str]:
        """Stage and cell of ``stage/cell``, or of a cell's name that only one stage has."""
        stage, _, cell = name.rpartition("/")
        found = [s.name for s in self.stages if cell in s.cells and stage in ("", s.name)]
        if len(found) != 1:
            problem = "no" if not found else "more than one"
            raise UsageError(f"Study {self.study} has {problem} cell {name[:120]!a}; name it as stage/cell.")
        return found[0], cell

    def units(self) -> Iterator[tuple[str, str]]:
        """Every (stage, cell), in declared order."""
        for stage in self.stages:
            for cell in stage.cells:
                yield stage.name, cell

    def declared_cell(self, stage: str, cell: str) -> Cell:
        """A cell with its config."""
        return Cell(name=cell, config=self.stage(stage).cells[cell])


def changes(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """What differs between two JSON values, one line a place; list items are called by their names."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            below = f"{path}.{key}" if path else key
            if key not in old:
                yield f"{below}: added, {_short(new[key])}"
            elif key not in new:
                yield f"{below}: gone, was {_short(old[key])}"
            else:
                yield from changes(old[key], new[key], below)
    elif _named(old) and _named(new):
        yield from changes({i["name"]: i for i in old}, {i["name"]: i for i in new}, path)
    elif old != new or isinstance(old, bool) != isinstance(new, bool):
        yield f"{path}: was {_short(old)}, now {_short(new)}"


def _named(items: Any) -> bool:
    return (
        isinstance(items, list) and all(isinstance(i, Mapping) and "name" in i for i in items) and bool(items)
    )


def _short(value: Any) -> str:
    text = canonical.dumps(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."

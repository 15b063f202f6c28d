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
from halfulp.study.protocol import (
    COMPARISONS,
    SCALES,
    SCOPES,
    Cell,
    Config,
    Gate,
    Json,
    Rule,
    Study,
    check_name,
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
            }
            for stage in study.stages
        ],
        "estimands": [
            {"name": e.name, "what": e.what, "compute": _called(e.compute)} for e in study.estimands
        ],
        "gates": [asdict(gate) for gate in study.gates],
        "rules": [
            {"label": rule.label, "passed": list(rule.passed), "failed": list(rule.failed)}
            for rule in study.rules
        ],
    }


def _called(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


@dataclass(frozen=True)
class SealedStage:
    """A stage without its function."""

    name: str
    kind: str
    reads: tuple[str, ...]
    cells: Mapping[str, Config]


class Protocol:
    """A declaration that was read back; `where` is named in errors."""

    def __init__(self, content: Any, where: str) -> None:
        _check(content, _PROTOCOL, where)
        self.content: dict[str, Json] = content
        if content["format"] != FORMAT:
            raise CorruptionError(
                f"{where} has format {content['format']}; this halfulp reads format {FORMAT}."
            )
        self.study: str = content["study"]
        self.scale: str = content["scale"]
        self.threads: int = content["threads"]
        self.retries: int = content["retries"]
        self.data: tuple[str, ...] = tuple(content["data"])
        try:
            check_name("study", self.study)
            self.stages = tuple(
                SealedStage(
                    s["name"], s["kind"], tuple(s["reads"]), {c["name"]: c["config"] for c in s["cells"]}
                )
                for s in content["stages"]
            )
            for stage in self.stages:
                check_name("stage", stage.name)
                for cell in stage.cells:
                    check_name("cell", cell)
            self.gates = tuple(Gate(**gate) for gate in content["gates"])
            self.rules = tuple(
                Rule(label=r["label"], passed=tuple(r["passed"]), failed=tuple(r["failed"]))
                for r in content["rules"]
            )
        except UsageError as error:
            raise CorruptionError(f"{where} is not a protocol: {error}") from None
        self.estimands: tuple[str, ...] = tuple(e["name"] for e in content["estimands"])

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


# ---- the exact shape of protocol.json ---------------------------------------------------------------

_TEXTS = [str]
_PROTOCOL: dict[str, Any] = {
    "format": int, "study": str, "scale": SCALES, "config": dict, "question": str, "units": str,
    "not_claimed": _TEXTS, "data": _TEXTS, "retries": int, "threads": int,
    "stages": [{"name": str, "kind": ("reference", "prediction", "outcome"), "reads": _TEXTS, "run": str,
                "cells": [{"name": str, "config": dict}]}],
    "estimands": [{"name": str, "what": str, "compute": str}],
    "gates": [{"name": str, "estimand": str, "scope": SCOPES, "comparison": COMPARISONS, "threshold": float,
               "why": str}],
    "rules": [{"label": str, "passed": _TEXTS, "failed": _TEXTS}],
}  # fmt: skip


def _check(value: Any, shape: Any, where: str) -> None:
    if isinstance(shape, dict):
        if not isinstance(value, dict) or set(value) != set(shape):
            found = set(value) if isinstance(value, dict) else set()
            extra, lacking = sorted(found - set(shape)), sorted(set(shape) - found)
            raise CorruptionError(
                f"{where} has unknown fields {extra} and lacks {lacking}: not a protocol of this halfulp."
            )
        for key, below in shape.items():
            _check(value[key], below, f"{where}: {key}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise CorruptionError(f"{where} must be a list.")
        for item in value:
            _check(item, shape[0], where)
    elif isinstance(shape, tuple):
        if value not in shape:
            raise CorruptionError(f"{where} is {_short(value)}, not one of {', '.join(shape)}.")
    else:
        kinds = (int, float) if shape is float else (shape,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and shape is not bool):
            raise CorruptionError(f"{where} must be of kind {shape.__name__}, not {_short(value)}.")

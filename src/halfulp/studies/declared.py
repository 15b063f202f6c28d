"""What a study declares in words and numbers: a table beside its module.

``margin.toml`` beside ``margin.py`` holds the question, the scientific unit, what is not claimed, the gates
(``name``, ``when``, ``why`` and, unless it is ``all``, ``scope``), the rules that turn gates into a label,
the scales (``paper`` whole, the others by what they change of it), the measures of a decoder study that it
takes as estimands (``name``, ``what``, ``measure`` and its arguments), and what the paper prints
(:mod:`halfulp.studies.claims`). The module holds what is run and what is computed. Both are sealed: the table
belongs to its module (:mod:`halfulp.study.closure`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from halfulp.study.protocol import Config, Estimand, Gate, Json, Rule, Stage, Study


def table_of(module: str) -> dict[str, Json]:
    """The table beside a module, by the module's ``__file__``."""
    return tomllib.loads(Path(module).with_suffix(".toml").read_text(encoding="utf-8"))


class Runs(Protocol):
    """Where a decoder study has its runs from: a bundle."""

    @property
    def configs(self) -> dict[str, Config]: ...
    @property
    def stages(self) -> tuple[Stage, ...]: ...
    @property
    def data(self) -> dict[str, tuple[str, ...]]: ...
    def estimand(self, name: str, what: str, measure: str, **arguments: Any) -> Estimand: ...


def declared(
    module: str,
    runs: Runs | None = None,
    *,
    estimands: Iterable[Estimand] = (),
    shared: Config | None = None,
    **given: Any,
) -> Study:
    """The study of a module, called like it: what is given, and then its table; ``shared`` by all scales."""
    table = table_of(module)
    gates = (Gate.of(g["name"], g["when"], g.get("why", ""), g.get("scope", "all")) for g in table["gates"])
    rules: Iterable[dict[str, Any]] = (
        {key: tuple(value) if isinstance(value, list) else value for key, value in rule.items()}
        for rule in table["rules"]
    )
    if "scales" in table:
        whole = {**(shared or {}), **table["scales"]["paper"]}
        given["scales"] = {scale: {**whole, **changed} for scale, changed in table["scales"].items()}
    if runs is not None:
        given |= {"scales": runs.configs, "stages": runs.stages, "scale_data": runs.data}
        estimands = (*estimands, *(runs.estimand(**row) for row in table.get("estimands", ())))
    return Study(
        name=Path(module).stem.replace("_", "-"), question=table["question"], units=table["units"],
        not_claimed=tuple(table["not_claimed"]), estimands=tuple(estimands), gates=tuple(gates),
        rules=tuple(Rule(**rule) for rule in rules), **given,
    )  # fmt: skip

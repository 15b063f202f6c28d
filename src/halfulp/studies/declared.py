"""What a study declares in words and numbers: a table beside its module.

``margin.toml`` beside ``margin.py`` holds the question, the scientific unit, what is not claimed, the gates
(``name``, ``when``, ``why`` and, unless it is ``all``, ``scope``), the rules that turn gates into a label,
the scales (``paper`` whole, the others by what they change of it), the estimands, and what the paper prints
(:mod:`halfulp.studies.claims`). An estimand is a ``measure`` of a decoder study, or the name of a function of
the module, or that (``compute``) with arguments; ``name`` and ``what`` are the function's name and docstring
unless they are given. The module holds what is run and what is computed. Both are sealed: the table belongs
to its module (:mod:`halfulp.study.closure`).
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from halfulp.study.protocol import Config, Estimand, Gate, Json, Rule, Study

if TYPE_CHECKING:
    from halfulp.arms import Bundle


def table_of(module: str) -> dict[str, Json]:
    """The table beside a module, by the module's ``__file__``."""
    return tomllib.loads(Path(module).with_suffix(".toml").read_text(encoding="utf-8"))


def declared(
    name: str,
    runs: Bundle | None = None,
    *,
    estimands: Iterable[Estimand] = (),
    shared: Config | None = None,
    **given: Any,
) -> Study:
    """The study of a module, called like it: what is given, and then its table; ``shared`` by all scales."""
    module = sys.modules[name]
    table = table_of(str(module.__file__))
    gates = (Gate.of(g["name"], g["when"], g.get("why", ""), g.get("scope", "all")) for g in table["gates"])
    rules: Iterable[dict[str, Any]] = (
        {k: tuple(v) if isinstance(v, list) else v for k, v in rule.items()} for rule in table["rules"]
    )
    if "scales" in table:
        whole = {**(shared or {}), **table["scales"]["paper"]}
        given["scales"] = {scale: {**whole, **changed} for scale, changed in table["scales"].items()}
    if runs is not None:
        given |= {"scales": runs.configs, "stages": runs.stages, "scale_data": runs.data}
    make = partial(_computed, module) if runs is None else runs.estimand
    more = (make(**({"compute": row} if isinstance(row, str) else row)) for row in table.get("estimands", ()))
    return Study(
        name=name.rpartition(".")[2].replace("_", "-"), question=table["question"], units=table["units"],
        not_claimed=tuple(table["not_claimed"]), estimands=(*estimands, *more), gates=tuple(gates),
        rules=tuple(Rule(**rule) for rule in rules), **given,
    )  # fmt: skip


def _computed(module: ModuleType, compute: str, name: str = "", what: str = "", **args: Json) -> Estimand:
    made = Estimand.of(getattr(module, compute), name, **args)
    return replace(made, what=what) if what else made

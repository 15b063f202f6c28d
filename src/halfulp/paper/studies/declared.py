"""Declare a study of the paper in its module, in words, numbers and functions.

A module holds what is run and what is computed; then ``STUDY`` with the question, the scientific unit, what
is not claimed, the gates, the rules that turn gates into a label, and the scales (``paper`` whole, the others
by what they change of it); then ``CLAIMS``, what the paper prints (:mod:`halfulp.paper.studies.claims`).
Functions are passed as objects, never by their names in text, so that a search finds every use of one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from halfulp.study.protocol import Config, Estimand, Gate, Rule, Study

if TYPE_CHECKING:
    from halfulp.paper.arms import Bundle

gate = Gate.of
OURS = "the paper prints no number"
"""In the reason of a gate whose threshold is ours: result pages mark it."""


def rule(
    label: str, *passed: str, failed: tuple[str, ...] = (), not_run: tuple[str, ...] = (), says: str = "",
    recovered: bool = False,
) -> Rule:  # fmt: skip
    """Make the rule that gives a label where these gates passed."""
    return Rule(label=label, passed=passed, failed=failed, not_run=not_run, says=says, recovered=recovered)


def invalid(label: str, **says: str) -> tuple[Rule, ...]:
    """Make the rules that give one label where any of these gates failed; the texts say why."""
    return tuple(rule(label, failed=(name,), says=text) for name, text in says.items())


def scaled(paper: Config, **others: Config) -> dict[str, Config]:
    """Return the configs of all scales: the paper's, and what the others change of it."""
    return {**{name: {**paper, **changes} for name, changes in others.items()}, "paper": paper}


def declared(
    name: str,
    runs: Bundle | None = None,
    *,
    estimands: Iterable[Estimand] = (),
    own: Iterable[Estimand] = (),
    **given: Any,
) -> Study:
    """Make the study of a module, called like it.

    Args:
        name: The module's ``__name__``.
        runs: The runs of a decoder study, which give stages, scales and data.
        estimands: Those that studies of its kind share; they come first.
        own: Those of this study alone.
        given: Other fields of the study.
    """
    if runs is not None:
        given = {"scales": runs.configs, "stages": runs.stages, "scale_data": runs.data, **given}
    return Study(name=name.rpartition(".")[2].replace("_", "-"), estimands=(*estimands, *own), **given)

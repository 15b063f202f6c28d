"""The line that fixes the run at hand: for its framework, with its optimizer's class and arguments.

What is printed is made from the manifest of a trace, which others may have written, so nothing of it is
believed: names must be dotted identifiers, classes are looked up in a table, arguments must be numbers.

=================== =====================================================================================
who calls step()    where the fix goes
=================== =====================================================================================
transformers, trl   an argument of the trainer, or its ``optimizer`` before ``train()``
lightning           ``configure_optimizers()``
torchtune           an override of the recipe's configuration
torchtitan          the trainer's container of optimizers, before ``train()``
accelerate, fabric  where the optimizer is made, before it is prepared
a loop              where the optimizer is made
=================== =====================================================================================
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from halfulp.numbers.containers import SHORT
from halfulp.text import count
from halfulp.trace import Recorded
from halfulp.trace.stored_on import DTYPES, NEAREST
from halfulp.verdicts.held import part

IMPORT = "import halfulp as hu"
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
DEFAULTS: dict[str, dict[str, Any]] = {
    "AdamW": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "Adam": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0},
}
"""Optimizers that halfulp has in one pass, and the arguments that need not be written out."""
WRAPPED = {
    "torchtune": "self._optimizer = {}  # in the recipe, after _setup_optimizer()",
    "lightning": "optimizer = {}  # in configure_optimizers()",
    "accelerate": "{optimizer} = {}  # before accelerator.prepare()",
    "fabric": "{optimizer} = {}  # before fabric.setup()",
    "loop": "{optimizer} = {}",
}
TITAN = (
    "trainer.optimizers.optimizers[:] = [hu.WriteBack(o, {}, model=m) "
    "for o, m in zip(trainer.optimizers.optimizers, trainer.model_parts)]  # before trainer.train()"
)


@dataclass(frozen=True, kw_only=True)
class Fix:
    """The lines to paste and the memory that they cost."""

    framework: str
    code: tuple[str, ...]
    """Lines; ``...`` stands for arguments that are there already."""
    before: float | None
    """Bytes per weight, optimizer state and masters included, of the run as it is; None if not recorded."""
    after: float | None
    """The same with the fix."""
    float32: float | None
    """The same with float32 weights and states."""
    narrow_moments: bool
    """True if the fix can keep the moments in bfloat16."""

    @property
    def cost(self) -> str | None:
        """Return the bytes per weight before and after the fix in one line, or None if unknown."""
        if self.before is None or self.after is None:
            return None
        said = f"{self.before:.3g} -> {self.after:.3g} bytes per weight"
        if self.narrow_moments and self.after > self.before:
            said += f' ({self.before:.3g} with moments="bf16")'
        dearer = self.float32 is not None and self.float32 > self.after
        return f"{said}; or float32 weights with autocast ({self.float32:.3g})." if dearer else f"{said}."


@dataclass(frozen=True)
class Caller:
    """The code that steps an optimizer, as far as the manifest can be trusted."""

    framework: str
    trainer_class: str
    takes: tuple[str, ...]
    names: Mapping[str, str]
    whole: bool

    @classmethod
    def of(cls, trace: Recorded) -> Caller:
        """Read it from the manifest of a trace; a plain loop where nothing is said."""
        caller = part(trace.manifest["run"], "caller")
        framework, kind, takes = (caller.get(k) for k in ("framework", "class", "takes"))
        known = {*WRAPPED, "transformers", "trl", "torchtitan"}
        return cls(
            framework=str(framework) if str(framework) in known else "loop",
            trainer_class=kind if isinstance(kind, str) and kind.isidentifier() else "Trainer",
            takes=tuple(t for t in takes if isinstance(t, str)) if isinstance(takes, list) else (),
            names=_names(caller),
            whole=caller.get("whole") is True,
        )

    def name(self, what: str) -> str:
        """Return what the user's code calls it."""
        return self.names.get(what, what)


def fix_of(trace: Recorded, grid: str, *, stored: float) -> Fix | None:
    """Return the fix of a run whose updates are lost on a grid.

    Args:
        trace: The run.
        grid: The grid.
        stored: The share of its weights that is stored there now; if none is, the fix stores them there.

    Returns:
        The fix; None if the trace does not say which optimizer it was.
    """
    optimizers = list(trace.manifest.get("optimizers", ()))
    if not optimizers:
        return None
    there = [o for o in optimizers if not stored or _holds(o, grid)] or optimizers[:1]
    concerned = [o for o in there if _loses(o)] or there
    caller, first = Caller.of(trace), concerned[0]
    caller = replace(caller, names=_names(first) or caller.names)
    if first.get("policies"):
        halfulps = first.get("class") in (*DEFAULTS, "SGD", "Lion")
        kind, every = (first["class"], "select") if halfulps else ("WriteBack", "params")
        code: tuple[str, ...] = (f'hu.{kind}(..., policy="sr")  # in place of the policy "rne"',)
        if NEAREST not in first["policies"]:
            group = f'{{"params": [...], "grid": "{grid}"}}'
            code = (f"hu.{kind}(..., {every}=lambda name, p: True)  # what it left out: in a group {group}",)
        own = False
    else:
        alone = len(optimizers) == 1 and first.get("one_pass") is True and str(first.get("class")) in DEFAULTS
        given = arguments(trace, first) if alone and stored == 1 and grid == "bf16" else None
        mixed = any(len(part(part(o, "holds"), "parameters")) != 1 for o in concerned)
        narrow = ", params=lambda name, p: p.dtype.itemsize == 2" if 0 < stored < 1 and mixed else ""
        how = f'"{grid}", "sr"{narrow}'
        code, own = _code(caller, str(first.get("class")), how, given)
        code = _for_each(code, caller, concerned[1:], how)
    before, after, wide = _bytes(optimizers, trace) if stored else (None, None, None)
    return Fix(
        framework=caller.framework,
        code=code,
        before=before,
        after=before if NEAREST in first.get("policies", ()) else after,
        float32=wide,
        narrow_moments=own and caller.framework != "torchtune",
    )


def _names(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the user's names that an entry of a manifest has, those that are names."""
    names = part(entry, "names").items()
    return {str(k): v for k, v in names if isinstance(v, str) and len(v) < 100 and NAME.fullmatch(v)}


def _holds(optimizer: Mapping[str, Any], grid: str) -> bool:
    """Return True if an optimizer's weights are stored on a grid, at least in part."""
    held = [str(name).partition(" ")[0] for name in part(part(optimizer, "holds"), "parameters")]
    return not held or grid in [SHORT.get(name, name) for name in held]


def _loses(optimizer: Mapping[str, Any]) -> bool:
    """Return True if an optimizer steps weights that no policy keeps."""
    policies, held = optimizer.get("policies") or [NEAREST], part(part(optimizer, "holds"), "parameters")
    return NEAREST in policies or any(str(name) in DTYPES for name in held)


def _for_each(
    code: tuple[str, ...], caller: Caller, others: list[Mapping[str, Any]], how: str
) -> tuple[str, ...]:
    """Add the line of each further optimizer that has a name of its own, and a comment about the rest."""
    lines, taken = list(code), {caller.name("optimizer")}
    if caller.framework == "torchtitan":  # whose line is for all of them
        return code
    for other in others:
        theirs = replace(caller, names=_names(other))
        line = _code(theirs, str(other.get("class")), how, None)[0][-1]
        if theirs.name("optimizer") not in {*taken, "optimizer"} and line not in lines:
            lines.append(line)
            taken.add(theirs.name("optimizer"))
    rest = len(others) - (len(lines) - len(code))
    return (*lines, f"# the same for {count(rest, 'more optimizer')}") if rest else tuple(lines)


def _code(caller: Caller, kind: str, how: str, given: dict[str, Any] | None) -> tuple[tuple[str, ...], bool]:
    """Return the lines for a framework, and whether the optimizer is one of halfulp's own.

    Args:
        caller: Who steps the optimizer.
        kind: The optimizer's class.
        how: The arguments of a write-back.
        given: The arguments of halfulp's own optimizer, where it can take the place of this one.
    """
    framework, model = caller.framework, caller.name("model")
    written = {k: v for k, v in (given or {}).items() if v != DEFAULTS[kind].get(k)}
    own = f"hu.{kind}({{}}.named_parameters(), {_call(written)})"
    alike = given is not None and "weight_decay" in given and caller.whole
    if framework in ("transformers", "trl"):
        if alike and "model" in caller.names and "optimizers" in caller.takes:
            line = f"{caller.trainer_class}(..., optimizers=({own.format(model)}, None))"
            return (IMPORT, line), True
        if given is not None and "optimizer_cls_and_kwargs" in caller.takes:
            kept = ", ".join(f'"{k}": {number(v)}' for k, v in written.items() if k != "weight_decay")
            line = f"{caller.trainer_class}(..., optimizer_cls_and_kwargs=(hu.{kind}, {{{kept}}}))"
            return (IMPORT, line), True  # the trainer gives the decays
        trainer = caller.name("trainer")
        around = f"hu.WriteBack({trainer}.create_optimizer(), {how}, model={trainer}.model)"
        return (IMPORT, f"{trainer}.optimizer = {around}  # before {trainer}.train()"), False
    if framework == "torchtitan":
        return (IMPORT, TITAN.format(how)), False
    if framework == "torchtune" and given is not None:
        return (f"tune run ... optimizer._component_=halfulp.{kind}",), True
    fixed = {"lightning": ("optimizer", "self"), "torchtune": ("self._optimizer", "self._model")}
    optimizer, owner = fixed.get(framework, (caller.name("optimizer"), model))
    named = framework in fixed or "model" in caller.names
    if alike and named:
        return (IMPORT, WRAPPED[framework].format(own.format(owner), optimizer=optimizer)), True
    around = f"hu.WriteBack({optimizer}, {how}{f', model={owner}' if named else ''})"
    return (IMPORT, WRAPPED[framework].format(around, optimizer=optimizer)), False


def arguments(trace: Recorded, entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments that all groups of an optimizer share, its rate first.

    None if rates, betas or eps differ. Where only the decays differ, they are left out.
    """
    groups = entry.get("groups")
    groups = [g for g in groups if isinstance(g, Mapping)] if isinstance(groups, list) else []
    rate = rate_of(trace, entry)
    if not groups or rate is None:
        return None
    given: dict[str, Any] = {"lr": rate}
    for key in ("betas", "eps", "weight_decay"):
        values = {_value(g.get(key)) for g in groups}
        if len(values) == 1 and None not in values:
            given[key] = values.pop()
        elif key != "weight_decay":
            return None
    rates = {_value(g.get("initial_lr", g.get("lr"))) for g in groups}
    return given if len(rates) == 1 else None


def rate_of(trace: Recorded, entry: Mapping[str, Any]) -> float | None:
    """Return the rate that an optimizer was made with.

    It is the one that it has throughout, or the one that its schedule begins from, or its default; not 0,
    at which it does not train.
    """
    groups = entry.get("groups")
    group = groups[0] if isinstance(groups, list) and groups and isinstance(groups[0], Mapping) else {}
    seen = np.unique(trace.scan("tensors", "lr")["lr"]) if trace.recorded else np.array([])
    seen = seen[np.isfinite(seen) & (seen != 0)]
    constant = float(seen[0]) if len(seen) == 1 else None
    default = part(entry, "defaults").get("lr")
    for value in (_value(group.get("initial_lr")), constant, _value(default), _value(group.get("lr"))):
        if isinstance(value, float | int) and value:
            return value
    return None


def _value(text: object) -> Any:
    """Read a number, or a tuple of numbers, as a manifest has them; None for all else."""
    if not isinstance(text, str) or len(text) > 100:
        return None
    try:
        value = literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    each = value if isinstance(value, tuple) else (value,)
    fine = all(isinstance(x, int | float) and not isinstance(x, bool) and np.isfinite(x) for x in each)
    return value if fine and each else None


def number(value: Any) -> str:
    """Write a number, or a tuple of numbers or a grid's name, as people do.

    >>> number(0.0003), number((0.9, 0.95)), number(1.5e-05), number("fp16")
    ('3e-4', '(0.9, 0.95)', '1.5e-5', '"fp16"')
    """
    if isinstance(value, tuple):
        return f"({', '.join(map(number, value))}{',' * (len(value) == 1)})"
    if isinstance(value, float) and 0 < abs(value) < 0.001:
        return np.format_float_scientific(value, trim="-", exp_digits=1)
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _call(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={number(v)}" for k, v in given.items())


def _bytes(
    optimizers: list[Mapping[str, Any]], trace: Recorded
) -> tuple[float | None, float | None, float | None]:
    """Return bytes per weight as the run holds them; with states in float32; and with all in float32."""
    holds = [part(o, "holds") for o in optimizers]
    weights = [x for h in holds for x in _sizes(part(h, "parameters"))]
    states = [x for h in holds for sizes in part(h, "states").values() for x in _sizes(sizes)]
    if not (count := sum(n for _, n in weights)):
        return None, None, None
    stored = sum(size * n for size, n in weights)
    stored += sum(2 * t["recorded"] for t in trace.tensors if t.get("copy"))
    now = stored + sum(size * n for size, n in states)
    wide = sum(max(size, 4) * n for size, n in states)
    return now / count, (stored + wide) / count, 4 + wide / count


def _sizes(sizes: object) -> Iterator[tuple[float, int]]:
    """Yield bytes per value and number of values for each known dtype."""
    for name, n in sizes.items() if isinstance(sizes, Mapping) else ():
        dtype = getattr(torch, str(name).rpartition(" in ")[2], None)
        if isinstance(dtype, torch.dtype) and isinstance(n, int):
            yield dtype.itemsize, n

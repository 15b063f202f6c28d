"""Define ``require``, which checks a contract while an optimizer trains."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

import torch

from halfulp.audit.sources.step_hooks import StepHooks
from halfulp.contract.arrival import Arrival, Shadow, arrival
from halfulp.contract.breaches import FIX, Breach, Trained, breaches, copy_breaches, parameters
from halfulp.contract.requirements import Terms
from halfulp.errors import HalfulpError, UsageError
from halfulp.writeback.rules import rate_of
from halfulp.writeback.sharding import local

MOST = 5
"""Most breaches of one term that a message lists."""


class ContractError(HalfulpError):
    """Error raised when a term of a contract does not hold."""

    exit_code = 1


class ContractWarning(UserWarning):
    """Warning issued instead of the error by a contract with ``action="warn"``."""


class _Watched:
    """The state that a contract keeps for one optimizer."""

    def __init__(self) -> None:
        self.steps = 0
        self.due = True
        """True if the next step is to be checked: the first one, and the first after every load."""
        self.shadow: Shadow | None = None
        self.start: dict[str, torch.Tensor] = {}


class Contract:
    """A set of terms that is checked while optimizers step. Create one with :func:`require`.

    Attributes:
        terms: The terms that must hold.
        arrival: How much of the proposed change the last checked step wrote, if ``arrives=`` is set.
        checked: The number of steps checked so far.
        unmatched: Patterns of ``moving=`` that fit no parameter of any optimizer seen so far.
        unmeasured: Parameters that ``arrives=`` leaves out, because their gradients are sparse.
        failures: One message for each time that terms did not hold.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer] | None,
        terms: Terms,
        models: Sequence[torch.nn.Module] = (),
        also: Mapping[str, torch.nn.Module] | None = None,
        action: Literal["raise", "warn"] = "raise",
        fix: str = FIX,
    ) -> None:
        if action not in ("raise", "warn"):
            raise UsageError(f"action must be raise or warn, not {action!r}.")
        self.terms, self.action, self.models, self.also = terms, action, list(models), dict(also or {})
        self.arrival: Arrival | None = None
        self.checked = 0
        self.failures: list[str] = []
        self.unmatched = set(terms.moving)
        self.unmeasured: set[str] = set()
        self._fix, self._closed, self._moving_judged = fix, optimizers is not None, False
        self._warned: set[tuple[str, str]] = set()
        self._handles: list[Any] = []
        self._known: WeakKeyDictionary[torch.optim.Optimizer, _Watched] = WeakKeyDictionary()
        self._hooks = StepHooks(self._before, self._after)
        for optimizer in optimizers or ():
            self._watch(optimizer)
        for model in self.models:
            hook = model.register_load_state_dict_post_hook(lambda *_: self._loaded())  # type: ignore[no-untyped-call]  # torch's
            self._handles.append(hook)
        self._hooks.attach(optimizers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Stop checking and remove the hooks. Leaving a ``with`` block does the same."""
        self._hooks.detach()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __repr__(self) -> str:
        return f"<Contract: {self.summary()}>"

    def summary(self) -> str:
        """Say in one line what was checked, what came of it, and which terms were never judged.

        >>> require(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1), weights="float32")
        <Contract: no step was checked yet: weights=float32>
        """
        t, terms = self.terms, []
        terms += [f"{name}={value}" for name in ("weights", "states") if (value := getattr(t, name))]
        terms += [f"masters={t.masters}"] if t.masters else []
        if t.arrives is not None:
            a, share = self.arrival, ""
            if a is not None:
                error = f", standard error {a.error:.1%}" if a.error else ""
                share = f" ({a.share:.1%} at the last check{error})"
            terms.append(f"arrives={t.arrives:.4g}{share}")
        terms += [f"moving={', '.join(t.moving)}"] if self._moving_judged else []
        if not self.checked and not self.failures:
            outcome = "no step was checked yet"
        elif self.failures:
            outcome = f"did not hold, {len(self.failures)} times"
        else:
            outcome = f"held at {self.checked} checked step{'s' * (self.checked != 1)}"
        said = f"{outcome}: {', '.join(terms)}" if terms else outcome
        if t.moving and self.checked and not self._moving_judged:
            said += f"; moving was not judged, which takes more than {t.patience} steps (patience)"
        return f"{said}; {_unmeasured(self.unmeasured)}" if self.unmeasured else said

    def _watch(self, optimizer: torch.optim.Optimizer) -> _Watched:
        watched = self._known.get(optimizer)
        if watched is None:
            watched = self._known[optimizer] = _Watched()
            self._handles.append(optimizer.register_load_state_dict_post_hook(lambda *_: self._loaded()))
        return watched

    def _loaded(self) -> None:
        """Check the next step of every optimizer, because the loaded state may break a term."""
        for watched in self._known.values():
            watched.due = True

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        w = self._watch(optimizer)
        w.shadow = None
        w.due = w.due or w.steps % self.terms.every == 0
        if not w.due:
            return
        trained = parameters(optimizer, self.models)
        self._answer(optimizer, [*breaches(trained, self.terms), *copy_breaches(self.also, self.terms)])
        if self.terms.arrives is not None:
            w.shadow = Shadow(optimizer, trained)
            self._leave_out(w.shadow.left_out - self.unmeasured)
        for t in trained:
            fitting = [pattern for pattern in self.terms.moving if fnmatchcase(t.name, pattern)]
            self.unmatched.difference_update(fitting)
            if fitting and t.name not in w.start:
                w.start[t.name] = local(t.p.detach()).clone()

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        w = self._watch(optimizer)
        w.steps += 1
        if not w.due:
            return
        w.due = False
        self.checked += 1
        trained = parameters(optimizer, self.models)
        broken = list(breaches(trained, self.terms))
        if self.terms.arrives is not None:
            self.arrival = arrival(optimizer, trained, w.shadow)
            broken += self._missing(self.terms.arrives)
            # A step that proposes nothing, as at a rate of 0, shows nothing: check the next one instead.
            w.due = self.arrival is None and any(
                t.narrow and t.keeps == "nothing" and t.name not in self.unmeasured for t in trained
            )
        if w.steps > self.terms.patience:
            self._moving_judged = True
            broken += _stuck(trained, w)
        if self._closed and all(known.steps for known in self._known.values()):
            broken += self.unmatched_breaches([t.name for t in trained])
        w.shadow = None
        self._answer(optimizer, broken)

    def _leave_out(self, names: set[str]) -> None:
        self.unmeasured |= names
        if names:
            said = f"{_unmeasured(names)}; the other terms still apply."
            warnings.warn(said, ContractWarning, stacklevel=2)

    def _missing(self, least: float) -> list[Breach]:
        a = self.arrival
        if a is None or not a.below(least):
            return []
        shares = f"{a.least_share:.1%} of the proposed change was written; of all tensors' {a.share:.1%}"
        return [Breach("arrives", a.least, f"{shares}, where {least:.4g} is required", FIX)]

    def unmatched_breaches(self, names: Sequence[str] = ()) -> list[Breach]:
        """Return a breach for each pattern of ``moving=`` that fits no parameter: it would always hold."""
        there = f"; there are {', '.join(names[:3])}{', ...' * (len(names) > 3)}" if names else ""
        fix = "correct the pattern; names are those of model=, otherwise places such as '0.3'"
        return [
            Breach("moving", repr(pattern), f"no trained parameter has such a name{there}", fix)
            for pattern in sorted(self.unmatched)
        ]

    def _answer(self, optimizer: torch.optim.Optimizer, broken: list[Breach]) -> None:
        if not broken:
            return
        self.failures.append(self._text(optimizer, broken))
        if self.action == "raise":
            raise ContractError(self.failures[-1])
        news = [b for b in broken if (b.term, b.where) not in self._warned]
        self._warned.update((b.term, b.where) for b in news)
        if news:
            warnings.warn(self._text(optimizer, news), ContractWarning, stacklevel=2)

    def _text(self, optimizer: torch.optim.Optimizer, broken: list[Breach]) -> str:
        lines = [f"the precision contract of {type(optimizer).__name__} does not hold:"]
        by_term: dict[str, list[Breach]] = {}
        for b in broken:
            by_term.setdefault(b.term, []).append(b)
        for term, those in by_term.items():
            lines += [f"  {term}: {b.where}: {b.found}" for b in those[:MOST]]
            if len(those) > MOST:
                lines.append(f"  {term}: and {len(those) - MOST} more")
            fix, rate = those[0].fix.replace(FIX, self._fix), _rate(optimizer)
            for key in ("lr=", '"lr": '):
                fix = fix.replace(f"{key}...", f"{key}{rate}")
            lines.append(f"  Fix: {fix}.")
        return "\n".join(lines)


def require(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    model: torch.nn.Module | None = None,
    also: Mapping[str, torch.nn.Module] | None = None,
    action: Literal["raise", "warn"] = "raise",
    **terms: Any,
) -> Contract:
    """Require that updates are not lost, now and after every resume.

    The terms are checked at the first step that is observed, at the first one after every
    ``load_state_dict`` of the optimizer or the model, and every ``every`` steps.

    Args:
        optimizer: One or several torch optimizers, or a ``WriteBack``.
        model: The model that names the parameters; loading a state into it triggers a check.
        also: Copies of the model by name, such as ``{"ema": ema_model}``; ``states`` applies to them as well.
        action: ``"raise"`` a :class:`ContractError`, or ``"warn"`` once about each breach.
        **terms: The terms that must hold, see :class:`Terms`: ``weights="float32"``, ``states="float32"``,
            ``masters=True``, ``arrives=0.99``, ``moving="*norm*"``, ``every=100``, ``patience=100``.

    Returns:
        The contract; ``release()`` ends it.

    Raises:
        UsageError: If an argument or a term is not valid.
        ContractError: From ``step()``, when a term does not hold.

    >>> model = torch.nn.Linear(4, 4).bfloat16()
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    >>> contract = require(optimizer, model=model, weights="float32")
    >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    >>> optimizer.step()
    Traceback (most recent call last):
    ...
    halfulp.contract.contract.ContractError: the precision contract of AdamW does not hold:
      weights: weight: updated in bfloat16...
    """
    several = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    for one in several:
        if not isinstance(one, torch.optim.Optimizer):
            raise UsageError(f"require() takes torch optimizers, not {type(one).__name__}.")
    if not several:
        raise UsageError("require() takes at least one torch optimizer: this list is empty.")
    if model is not None and not isinstance(model, torch.nn.Module):
        raise UsageError(f"model must be a torch module, not {type(model).__name__}.")
    copies: Any = {} if also is None else also  # whatever a caller gave
    modules = copies.values() if isinstance(copies, Mapping) else (None,)
    if not all(isinstance(copy, torch.nn.Module) for copy in modules):
        raise UsageError(f"also maps names to torch modules, such as {{'ema': ema_model}}, not {also!r:.60}.")
    return Contract(several, Terms.of(terms), [] if model is None else [model], also, action)


def _stuck(trained: list[Trained], w: _Watched) -> list[Breach]:
    """Find parameters that have gradients but still equal their values at the start of the contract."""
    return [
        Breach("moving", t.name, f"not changed in {w.steps} steps", FIX)
        for t in trained
        if t.name in w.start
        and t.p.grad is not None
        and bool(local(t.p.grad).any())
        and torch.equal(w.start[t.name], local(t.p.detach()))
    ]


def _unmeasured(names: set[str]) -> str:
    """Say which parameters ``arrives=`` leaves out."""
    others = f" and {len(names) - 1} more" * (len(names) > 1)
    return f"arrives was not measured for {min(names)}{others}, whose gradient is sparse"


def _rate(optimizer: torch.optim.Optimizer) -> str:
    """Return the learning rate before any schedule, if all groups have the same; else dots."""
    rates = {rate_of({"lr": g.get("initial_lr", g.get("lr"))}) for g in optimizer.param_groups}
    return repr(rates.pop()) if len(rates) == 1 and not any(map(math.isnan, rates)) else "..."

"""Specify what to rehearse: a grid and a policy by name, the bounds to keep, and the pull."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from halfulp.audit.arguments import is_number, listed
from halfulp.errors import UsageError
from halfulp.kernels import rehearse as kernel
from halfulp.kernels.reference import MODES
from halfulp.kernels.rehearse import Rule
from halfulp.numbers.grids import Grid
from halfulp.numbers.grids import grid as named
from halfulp.writeback.mask import Mask
from halfulp.writeback.policies import Kernel, Nearest, Policy, policy
from halfulp.writeback.policies.eco import step_of_moment

FOLLOWED = ("point", "upper")
"""The bounds for which codes are kept."""
PULL = 30.0
"""The factor of the largest rate that was the default once; studies that were sealed with it pass it."""
LONGEST = 1000  # of a name in a manifest
Pull = float | Callable[[str, int, float, float], float]
"""A number c, for k = min(1, c x largest rate so far), or a rule (tensor, step, rate, largest rate) -> k."""
Spec = str | tuple[str | Grid, str | Policy] | tuple[str, str | Grid, str | Policy]
NO_BACK = (0.0, 0.0)


def root_of_peak(tensor: str, step: int, rate: float, largest: float) -> float:
    """Return the default pull, .8 times the square root of the largest rate so far.

    A pull proportional to the rate (:data:`PULL`) is too strong at high rates and too weak at low ones.

    >>> f"{root_of_peak('weight', 1, 1e-4, 1e-3):.4f}"
    '0.0253'
    """
    return 0.8 * math.sqrt(largest)


_TILES = re.compile(r"tiles\((.+)\)")


@dataclass(frozen=True)
class Rehearsal:
    """A grid and a policy, by the name that they go by."""

    name: str
    grid: Grid
    policy: Policy

    @classmethod
    def of(cls, given: Spec) -> Rehearsal:
        """Create a rehearsal from a spec.

        Args:
            given: ``GRID`` or ``GRID:POLICY``, a tuple (grid, policy), or a tuple (own name, grid, policy).

        Raises:
            UsageError: If the spec is not valid.

        >>> Rehearsal.of("e4m3@128:sr").policy.name
        'sr'
        """
        parts: Any = given
        if isinstance(parts, str):
            text, _, how = parts.partition(":")
            how = how.strip() or "rne"
            file = _TILES.fullmatch(how)
            own, grid = "", named(text.strip())
            chosen = policy(how) if file is None else Mask.load(file[1]).policy()
            how = how if file is not None else chosen.name + how[len(how.partition("(")[0]) :]
        elif isinstance(parts, tuple) and len(parts) in (2, 3):
            own, grid, chosen = (parts[0] if len(parts) == 3 else ""), named(parts[-2]), policy(parts[-1])
            if not isinstance(own, str) or len(own) > LONGEST:
                raise UsageError(
                    f"rehearsal {given!r:.200}: a name of its own is text of at most {LONGEST} characters."
                )
            how = chosen.spec
        else:
            raise UsageError(f"a rehearsal is 'GRID' or 'GRID:POLICY', such as 'e4m3@128:sr', not {given!r}.")
        if chosen.kernel is None or chosen.kernel.keeps not in KEEPS:
            raise UsageError(
                f"rehearsal {given!r}: policy {chosen.name!r} cannot be replayed on the proposals of another "
                "run. Those that can: rne, sr, deadzone-sr, kahan, master, eco, tiles(mask file)."
            )
        name = grid.name if isinstance(chosen, Nearest) else f"{grid.name}:{how}"
        return cls(own or name, grid, chosen)

    @property
    def kernel(self) -> Kernel:
        """The kernel that implements the policy."""
        assert self.policy.kernel is not None
        return self.policy.kernel

    def rule(self, dtype: torch.dtype) -> Rule:
        """Return the rule for the kernel, for weights of a dtype."""
        return Rule(self.grid.within(dtype), MODES[self.kernel.mode], KEEPS[self.kernel.keeps])

    def back(self, group: Mapping[str, Any]) -> tuple[float, float]:
        """ECO's factors: with b the decay of the first moment, what is pending becomes b P + (1 - b) e.

        P and e are in the units of this step's proposals; :func:`moment_units` takes what is kept to them and
        back, so that a schedule, the bias correction and the denominator have their part.
        """
        if self.kernel.keeps != "error":
            return NO_BACK
        b = float(group["betas"][0] if "betas" in group else group["momentum"])
        exact = self.kernel.decay_exact
        decay = 1.0 - float(group["lr"]) * float(group["weight_decay"]) if exact else 1.0
        return b, (1.0 - b) * decay


@contextmanager
def moment_units(kept: torch.Tensor, group: dict[str, Any], moments: dict[str, Any]) -> Iterator[None]:
    """Have what is pending in the units of this step's proposals, inside a with block.

    What ECO brings back it keeps as X, in those of the first moment. With u = lr / (c D) the proposal gains
    P = u X, and X becomes (b P + (1 - b) e) / u; where that is not finite (at a rate of zero), X decays as
    the moment does.
    """
    unit = step_of_moment(group, moments)
    if isinstance(unit, torch.Tensor):
        unit = unit.reshape(-1).to(kept.dtype)
    decayed = kept * float(group["betas"][0] if "betas" in group else group["momentum"])
    kept.mul_(unit)
    yield
    kept.div_(unit)
    torch.where(kept.isfinite(), kept, decayed, out=kept)


KEEPS = {
    "nothing": kernel.NOTHING, "carry": kernel.CARRY, "error": kernel.PENDING, "master": kernel.MASTER,
}  # fmt: skip


@dataclass(frozen=True)
class Rehearse:
    """Choose what ``Audit(rehearse=)`` rehearses, and how.

    Args:
        specs: Grids with policies, such as ``"e4m3@128:sr"``.
        pull: A factor of the largest rate so far, or a rule: (tensor, step, rate, largest rate so far) -> k.
            The default is :func:`root_of_peak`.
        bounds: Those that are kept, of ``point`` and ``upper``.
        params: Which tensors, (name, tensor) -> bool; by default those of two or more dimensions. The others
            are the reference's own.

    Raises:
        UsageError: If a spec is none, or repeats, or its policy cannot be rehearsed.

    >>> Rehearse(["e4m3@128", "e5m2:sr"]).names
    ['e4m3@128', 'e5m2:sr']
    """

    specs: Spec | Sequence[Spec]
    pull: Pull = root_of_peak
    bounds: Sequence[str] = FOLLOWED
    params: Callable[[str, torch.Tensor], bool] | None = None
    each: list[Rehearsal] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        given = _specs(self.specs)
        object.__setattr__(self, "each", [Rehearsal.of(s) for s in given])
        object.__setattr__(self, "bounds", tuple(listed("bounds", self.bounds, ", ".join(FOLLOWED))))
        if not self.each or len(set(self.names)) != len(self.names):
            raise UsageError(f"rehearse= takes specs that differ, at least one; not {given!r}.")
        if (
            not self.bounds
            or not set(self.bounds) <= set(FOLLOWED)
            or len(set(self.bounds)) < len(self.bounds)
        ):
            raise UsageError(f"bounds= takes some of {', '.join(FOLLOWED)}, not {self.bounds!r}.")
        if not callable(self.pull):
            if not (is_number(self.pull) and math.isfinite(self.pull) and self.pull >= 0):
                raise UsageError(f"pull= takes a number of at least 0, or a function, not {self.pull!r}.")
            object.__setattr__(self, "pull", float(self.pull))

    @classmethod
    def given(cls, what: Rehearse | Spec | Iterable[Spec] | None) -> Rehearse | None:
        """Build a ``Rehearse`` from what was passed to an audit; None if nothing was."""
        if what is None or isinstance(what, cls):
            return what
        return cls(_specs(what))

    @property
    def names(self) -> list[str]:
        """Return the name of each rehearsal."""
        return [r.name for r in self.each]

    @property
    def needs_rate(self) -> bool:
        """Return True if the pull is made of the optimizer's learning rate."""
        return self.pull is root_of_peak or (not callable(self.pull) and self.pull > 0)

    def to_json(self) -> dict[str, Any]:
        """Return what the manifest says."""
        exact = {"feedback": "moment"} if any(r.kernel.keeps == "error" for r in self.each) else {}
        pull = self.pull if not callable(self.pull) else getattr(self.pull, "__qualname__", "a function")
        return {
            "specs": self.names,
            "grids": [r.grid.name for r in self.each],
            "policies": [r.policy.spec for r in self.each],
            "bounds": list(self.bounds),
            "pull": pull,
            **exact,
        }


def _specs(given: Any) -> list[Spec]:
    """Return a list of specs; a tuple that ends with a policy is one spec, other iterables are several."""
    if isinstance(given, str) or (isinstance(given, tuple) and given and _is_policy(given[-1])):
        return [given]
    return listed("rehearse", given, "specs such as 'e4m3@128:sr', or a halfulp.Rehearse")


def _is_policy(given: Any) -> bool:
    try:
        policy(given)
    except UsageError:
        return False
    return True

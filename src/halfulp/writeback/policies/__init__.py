"""Define the policies, which turn a proposed value into the next stored one.

A policy sees one tensor at a time: the stored values ``q``, the values ``z`` that the optimizer proposes, and
a dictionary of tensors that the policy keeps. ``before`` may change the values that the optimizer moves;
``after`` writes the next stored values over ``z`` and returns the kernel's counts. Rounding, counting and
carrying happen in one kernel call, so a policy is a few lines.

========== ===================================================================== =================
policy     the next stored value                                                 bytes per weight
========== ===================================================================== =================
rne        Q(z), nearest even: loses every proposal below half a gap             0
sr         a neighbour of z, at random, right on average                         0
deadzone-sr Q(z), but stochastic where that would lose a non-zero proposal        0
eco        Q(z); the error goes into the optimizer's first moment                0
kahan      Q(z + c); the error c is kept                                         4 (2 in bfloat16)
master     Q(master); the optimizer moves an fp32 master                         4
remainder16 as master, stored as its bits beyond the bfloat16 weight              2
remainder8 the same with 8 of those 16 bits, rounded stochastically               1
TileMaster as master, for chosen tiles only; nearest elsewhere                   4 x chosen share
dqt        stochastic on integers whose scale is the old maximum                  0
========== ===================================================================== =================
"""

from __future__ import annotations

import re
from typing import Any

from halfulp.errors import UsageError
from halfulp.numbers.spellings import policy_name, why_no_policy
from halfulp.writeback.policies.dqt import DQT
from halfulp.writeback.policies.eco import ECO
from halfulp.writeback.policies.kahan import Kahan
from halfulp.writeback.policies.master import Master
from halfulp.writeback.policies.nearest import Nearest
from halfulp.writeback.policies.policy import Kernel, Policy, State, Step
from halfulp.writeback.policies.remainder import Remainder8, Remainder16
from halfulp.writeback.policies.stochastic import DeadzoneStochastic, Stochastic
from halfulp.writeback.policies.tile_master import TileMaster

__all__ = [
    "DQT", "ECO", "POLICIES", "DeadzoneStochastic", "Kahan", "Kernel", "Master", "Nearest", "Policy",
    "Remainder8", "Remainder16", "State", "Step", "Stochastic", "TileMaster", "parsed", "policy",
]  # fmt: skip

POLICIES: dict[str, type[Policy]] = {
    kind.name: kind
    for kind in (Nearest, Stochastic, DeadzoneStochastic, ECO, Kahan, Master, Remainder16, Remainder8, DQT)
}
"""The policies that a name says all of. A new one has its file and its line here."""
KINDS: dict[str, type[Policy]] = {**POLICIES, TileMaster.name: TileMaster}

_SPEC = re.compile(r"([A-Za-z0-9_-]+)(?:\(([^()]*)\))?")


def policy(spec: str | Policy) -> Policy:
    """Return a policy by its name, with or without options.

    Args:
        spec: A name such as ``kahan`` or ``master(start_from=raw)``, or a policy, which is returned as it is.

    Returns:
        The policy.

    Raises:
        UsageError: If there is no such policy or option.

    >>> policy("master").spec
    'master(start_from=code)'
    >>> policy("master(start_from=raw)")
    Master(start_from='raw')
    """
    if isinstance(spec, Policy):
        return spec
    if not isinstance(spec, str):
        raise UsageError(
            f"a policy is a name such as 'kahan', or one such as halfulp.writeback.Kahan(), not {spec!r}."
        )
    kind, options = parsed(spec)
    if kind is TileMaster:
        raise UsageError(f"policy {spec!r} needs to know its tiles: pass halfulp.TileMaster(mask).")
    return kind(**options)


def parsed(spec: str) -> tuple[type[Policy], dict[str, Any]]:
    """Return the kind of a policy, and the options that its printed form names."""
    match = _SPEC.fullmatch(spec)
    kind = KINDS.get(policy_name(match[1])) if match is not None else None
    if match is None or kind is None:
        why = why_no_policy(spec if match is None else match[1], POLICIES)
        raise UsageError(f"{why} Expected one of {', '.join(POLICIES)}, or halfulp.TileMaster(mask).")
    allowed, options = kind.options(), {}
    for part in filter(None, (match[2] or "").split(",")):
        name, _, text = part.partition("=")
        if text not in allowed.get(name, {}):
            known = "; ".join(f"{n}={' or '.join(values)}" for n, values in allowed.items()) or "none"
            raise UsageError(f"policy {spec!r}: {part!r} is not an option of {match[1]}. Options: {known}.")
        options[name] = allowed[name][text]
    return kind, options

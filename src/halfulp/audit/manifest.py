"""What a trace says about the run that it is of."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

import halfulp
from halfulp.errors import UsageError
from halfulp.grids import Grid
from halfulp.grids import grid as named
from halfulp.trace import FORMAT
from halfulp.writeback.optimizer import WriteBack
from halfulp.writeback.policies import POLICIES, Policy


def begun(grids: Iterable[Grid], every: int, options: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a trace before its first step; tensors and optimizers come with that."""
    made = {
        "kind": "halfulp.trace",
        "format": FORMAT,
        "halfulp": halfulp.__version__,
        "grids": [g.name for g in grids],
        "every": every,
        "options": options,
        "tensors": [],
        "optimizers": [],
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "machine": f"{platform.system()} {platform.machine()}",
            "threads": torch.get_num_threads(),
        },
        "run": run,
    }
    return {key: _encodable(value) for key, value in made.items()}


def _encodable(value: Any) -> Any:
    """The same with text that UTF-8 can hold: arguments that are no text come as halves of surrogates."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [_encodable(v) for v in value]
    if isinstance(value, dict):
        return {_encodable(k): _encodable(v) for k, v in value.items()}
    return value


def described(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer by its class, its defaults, and what its parameter groups really have."""
    wraps: dict[str, Any] = {}
    if isinstance(optimizer, WriteBack):
        wraps["wraps"] = type(optimizer.optimizer).__name__
        wraps["policies"] = sorted({slot.policy.spec for slot in optimizer.slots})
        wraps["policy_bytes_per_weight"] = optimizer.bytes().per_parameter()["policy"]
    defaults = {str(k): str(v) for k, v in optimizer.defaults.items()}
    groups = [
        {str(k): str(v) for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    inner = optimizer.optimizer if isinstance(optimizer, WriteBack) else optimizer
    made = {
        "class": type(optimizer).__name__,
        **wraps,
        "admits": [name for name, kind in POLICIES.items() if _admits(kind(), inner)],
        "defaults": defaults,
        "groups": groups,
    }
    return {key: _encodable(value) for key, value in made.items()}


def _admits(policy: Policy, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a write-back with this policy would take the optimizer: by the policy's own check."""
    try:
        for group in optimizer.param_groups:
            policy.check(named("bf16"), optimizer, group)  # a float grid: dqt's own rule is not one
    except UsageError:
        return False
    return True

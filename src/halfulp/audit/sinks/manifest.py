"""Describe the run in the manifest of its trace."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from halfulp.errors import UsageError
from halfulp.numbers.grids import Grid
from halfulp.numbers.grids import grid as named
from halfulp.trace import FORMAT
from halfulp.version import __version__
from halfulp.writeback.choosing import oddity
from halfulp.writeback.optimizer import WriteBack
from halfulp.writeback.policies import POLICIES
from halfulp.writeback.rules import rule_of


def begun(grids: Iterable[Grid], every: int, options: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of a trace before its first step; tensors and optimizers come with that."""
    manifest = {
        "kind": "halfulp.trace",
        "format": FORMAT,
        "halfulp": __version__,
        "lost": "code",
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
    return dict(_encodable(manifest))


def _encodable(value: Any) -> Any:
    """Make text encodable as UTF-8: arguments that are not valid text arrive with lone surrogates."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return _escaped(value)
    return value


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [_escaped(v) for v in value]
    if isinstance(value, dict):
        return {_escaped(k): _escaped(v) for k, v in value.items()}
    return value


def described(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer by its class, its defaults, and what its parameter groups really have."""
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
    entry = {
        "class": type(optimizer).__name__,
        **wraps,
        "one_pass": one_pass(inner),
        "defaults": defaults,
        "groups": groups,
    }
    return dict(_encodable(entry))


def one_pass(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if halfulp's own optimizer of the same name makes the same step."""
    rule = rule_of(optimizer)
    free = {"fused": True, "foreach": None}  # which halfulp's own has in its own way
    return rule is not None and all(
        rule.why_not_fused({**group, **free}, optimizer.defaults) is None
        and bool(group.get("decoupled_weight_decay", rule.decoupled)) is rule.decoupled
        and all(p.is_contiguous() for p in group["params"] if oddity(p) is None)
        for group in optimizer.param_groups
    )


def admitting(optimizer: torch.optim.Optimizer) -> list[str]:
    """List the policies with which a write-back would accept the optimizer, by their own checks."""
    admitted, grid = [], named("bf16")  # a float grid: dqt's own rule is not one
    for name, kind in POLICIES.items():
        try:
            for group in optimizer.param_groups:
                kind().check(grid, optimizer, group)
        except UsageError:
            continue
        admitted.append(name)
    return admitted

"""Copy the whole state of a run, in memory or to a file, so that the run can continue from it bit for bit.

A state is what ``state_dict()`` of model and optimizer (and of the run itself, where it has one) give, and
the states of the generators that code without one of its own draws from. In a file it is safetensors:
tensors, and the tree that they hang in as JSON. No pickle.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfulp import files, tensors
from halfulp.errors import CorruptionError, UsageError

KEY = "halfulp.run"
Tree = Any


def taken(run: Any, **more: Tree) -> dict[str, Tree]:
    """Copy the state of a run, and further values with it."""
    state: dict[str, Tree] = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        **more,
    }
    if hasattr(run, "state_dict"):
        state["run"] = run.state_dict()
    return {**deepcopy(state), "random": generators()}


def put_back(run: Any, state: Mapping[str, Tree]) -> None:
    """Load a state into a new run, and into the global random generators."""
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(deepcopy(state["optimizer"]))
    if "run" in state:
        run.load_state_dict(deepcopy(state["run"]))
    put_generators(state["random"])


def generators() -> Tree:
    """Return the states of Python's, NumPy's and torch's global generators."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002  # others use it
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if used else [],
    }


def put_generators(state: Tree) -> None:
    """Set the global generators to states that :func:`generators` gave."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002  # others use it
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


# ---- a file ---------------------------------------------------------------------------------------


def save(state: Mapping[str, Tree], path: Path) -> None:
    """Write a state to a file, whole or not at all."""
    stored: dict[str, torch.Tensor] = {}
    tree = json.dumps(_hung(dict(state), stored))
    files.put(path, tensors.content({k: t.contiguous() for k, t in stored.items()}, {KEY: tree}))


def load(path: Path) -> dict[str, Tree]:
    """Read a state that :func:`save` wrote."""
    stored, metadata = tensors.read(path, follow=True)
    try:
        tree = _taken_down(json.loads(metadata[KEY]), stored)
    except (KeyError, TypeError, ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise CorruptionError(f"{path} is a safetensors file, but not the state of a run.")
    return tree


def _hung(x: Tree, stored: dict[str, torch.Tensor]) -> Tree:
    """Replace tensors by their names in ``held``, and what JSON does not know by a marked list."""
    if isinstance(x, torch.Tensor):
        stored[name := str(len(stored))] = x.detach().cpu()
        return {"tensor": name, "device": str(x.device)}
    if isinstance(x, Mapping):
        return {"mapping": [[_hung(k, stored), _hung(v, stored)] for k, v in x.items()]}
    if isinstance(x, tuple | list):
        return {type(x).__name__: [_hung(v, stored) for v in x]}
    if isinstance(x, np.generic):
        return x.item()
    if x is None or isinstance(x, bool | int | float | str):
        return x
    raise UsageError(
        f"a run's state has a {type(x).__name__}: expected tensors, numbers, text and lists of them."
    )


def _taken_down(x: Tree, stored: Mapping[str, torch.Tensor]) -> Tree:
    if not isinstance(x, dict):
        return x
    if "tensor" in x:
        return stored[x["tensor"]].to(x["device"])
    if "mapping" in x:
        return {_taken_down(k, stored): _taken_down(v, stored) for k, v in x["mapping"]}
    kind, values = next(iter(x.items()))
    items = [_taken_down(v, stored) for v in values]
    return tuple(items) if kind == "tuple" else items

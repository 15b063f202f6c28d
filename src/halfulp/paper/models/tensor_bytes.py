"""Bytes of tensors, counted by storage: at the peak of one update, and of what outlives it.

A count depends neither on the machine, its allocator nor on what else runs there, as a resident set does.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfulp.paper.models.training import Training
from halfulp.writeback import WriteBack


class _TensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Count the bytes of tensors from when an operation makes them to when they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.now = self.most = 0
        self.known: dict[int, int] = {}

    def see(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, if it is not counted yet."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        self.known[key] = storage.nbytes()
        self.now += self.known[key]
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now -= self.known.pop(key, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it makes."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return out


def counted(training: Training) -> int:
    """Count the bytes of tensors at the peak of one update, weights and states among them."""
    tensors = _TensorBytes()
    for tensor in (*training.model.parameters(), *_states(training.optimizer), *_policy(training.optimizer)):
        tensors.see(tensor)
    with tensors:
        training.step()
    return tensors.most


def kept(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of tensors that outlive an update, each storage once, and of a policy's."""
    policy = _policy(optimizer)
    return {
        "persistent_bytes": _bytes([*model.parameters(), *_states(optimizer), *policy]),
        "policy_bytes": _bytes(policy),
    }


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    inner = optimizer.optimizer if isinstance(optimizer, WriteBack) else optimizer
    return [t for state in inner.state.values() for t in state.values() if isinstance(t, torch.Tensor)]


def _policy(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    slots = optimizer.slots if isinstance(optimizer, WriteBack) else ()
    return [t for slot in slots for t in slot.state.values()]


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in tensors}.values())

"""Call the wrapped optimizer's step as a part of a write-back's, in one call or in several.

torch wraps every ``step()`` with hooks: global hooks, then the optimizer's own. The write-back's ``step()``
is wrapped, too. So global hooks fire there, once per step, however the weights move; the hooks of the wrapped
optimizer fire here, before its first call and after its last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


def replaced_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """Return the ``step()`` that somebody put in the place of an optimizer's own.

    A scheduler's does not count: all it adds is a note that there was a step.
    """
    step = optimizer.__dict__.get("step")
    return None if getattr(step, "_wrapped_by_lr_sched", False) else step


class Calls:
    """The calls that make one step of an optimizer.

    Args:
        optimizer: The wrapped optimizer.
        count: The number of calls, each with a part of the parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
        self.optimizer, self._left, self._begun = optimizer, count, False
        step = type(optimizer).step
        hooked = getattr(step, "hooked", False)  # torch has wrapped it
        self._step: Callable[..., Any] = getattr(step, "__wrapped__", step) if hooked else step
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def __call__(self, *arguments: Any) -> Any:
        """Make the next call; return what the optimizer's step returns."""
        self._left -= 1
        replaced = replaced_step(self.optimizer)
        if replaced is not None:  # it calls hooks as it likes
            return replaced(*arguments)
        if not self._begun:
            self._begun = True
            self._given = self._before((self.optimizer, *arguments), {})
        args, options = self._given
        with torch.autograd.profiler.record_function(f"Optimizer.step#{type(self.optimizer).__name__}.step"):
            own = partial(self._step, *args, **options)
            result = own() if arguments else _with_late_momentum(self.optimizer, own)
        if not self._left:
            for hook in list(getattr(self.optimizer, "_optimizer_step_post_hooks", {}).values()):
                hook(self.optimizer, args, options)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask
        return result

    def _before(
        self, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Call the optimizer's own hooks, which may change the arguments."""
        for hook in list(getattr(self.optimizer, "_optimizer_step_pre_hooks", {}).values()):
            changed = hook(self.optimizer, args, options)
            if changed is None:
                continue
            if not isinstance(changed, tuple) or len(changed) != 2:
                raise RuntimeError(
                    f"a step hook must return None or a tuple of (new_args, new_kwargs), but got {changed}."
                )
            args, options = changed
        return args, options


def _with_late_momentum(optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
    """Call an optimizer's own step, in two parts where torch's fused SGD needs them.

    It fails (torch 2.13) where some tensors of a group have a momentum and others, at their first gradient,
    have none: those are stepped first, by themselves.
    """
    fresh: set[torch.nn.Parameter] = set()
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else []:
        if group.get("fused") and group["momentum"]:
            stepped = [p for p in group["params"] if p.grad is not None]
            first = [p for p in stepped if optimizer.state.get(p, {}).get("momentum_buffer") is None]
            fresh.update(first if len(first) < len(stepped) else [])
    if not fresh:
        return step()
    for hidden in ([p for g in optimizer.param_groups for p in g["params"] if p not in fresh], fresh):
        with without_gradients(hidden):
            step()
    return None


@contextmanager
def without_gradients(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Hide gradients, so that an optimizer leaves these parameters alone; then put them back."""
    hidden = [(p, p.grad) for p in parameters if p.grad is not None]
    try:
        for p, _ in hidden:
            p.grad = None
        yield
    finally:
        for p, grad in hidden:
            p.grad = grad

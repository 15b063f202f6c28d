"""Wait for an optimizer's first step in every Python process under ``halfulp audit --run``.

This folder is prepended to ``PYTHONPATH``, so every interpreter imports this file when it starts, whatever
started it. It costs nothing in a process that never imports torch, and two hooks in one that never steps an
optimizer: halfulp itself is imported at the first step. A ``sitecustomize`` that would otherwise have been
imported is run as well.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_other() -> None:
    """Run the ``sitecustomize`` that this one shadows."""
    elsewhere = [p for p in sys.path if os.path.abspath(p or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class _AfterTorch:
    """Find torch as it would be found, and act when it is imported.

    Many libraries ask only whether it could be imported.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name != "torch":
            return None
        others = (f for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        spec: Any = next((s for f in others if (s := f.find_spec(name, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return spec
        plain = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            plain(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _hook()

        spec.loader.exec_module = exec_module
        return spec


def _hook() -> None:
    """Hooks around every step that import halfulp when they are needed."""
    from torch._compile import _disable_dynamo
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def enter(optimizer: Any, *_: object) -> None:
        from halfulp.audit.script import children

        children.enter(optimizer)

    def leave(optimizer: Any, *_: object) -> None:
        from halfulp.audit.script import children

        children.leave(optimizer)

    register_optimizer_step_pre_hook(_disable_dynamo(enter))
    register_optimizer_step_post_hook(_disable_dynamo(leave))


_run_the_other()
if "HALFULP_AUDIT" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())

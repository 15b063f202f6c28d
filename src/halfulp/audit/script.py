"""Run somebody's training script, unmodified, under an audit.

The script runs as ``__main__`` with its own arguments. torch's global optimizer hooks see every step; the
loss is what ``backward`` was called on, before a ``GradScaler`` scaled it. Nothing in the script's arithmetic
or random states is touched.
"""

from __future__ import annotations

import builtins
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from halfulp.audit.recorder import Audit
from halfulp.errors import HalfulpError, UsageError


class _Losses:
    """Notes the value of every scalar that ``backward`` is called on."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit
        self.backward, self.scale = torch.Tensor.backward, torch.amp.GradScaler.scale

    def __enter__(self) -> None:
        audit, plain_backward, plain_scale = self.audit, self.backward, self.scale

        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if tensor.numel() == 1:
                audit.log(getattr(tensor, "_halfulp_unscaled", tensor))
            plain_backward(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]  # torch's

        def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            scaled = plain_scale(scaler, outputs)
            if isinstance(scaled, torch.Tensor) and scaled is not outputs:
                scaled._halfulp_unscaled = outputs.detach()  # type: ignore[attr-defined]  # a note of ours
            return scaled

        torch.Tensor.backward = backward  # type: ignore[assignment, method-assign]  # put back on exit
        torch.amp.GradScaler.scale = scale  # type: ignore[assignment, method-assign]  # put back on exit

    def __exit__(self, *_: object) -> None:
        torch.Tensor.backward = self.backward  # type: ignore[method-assign]  # what was there
        torch.amp.GradScaler.scale = self.scale  # type: ignore[method-assign]  # what was there


_ENDED: list[ModuleType] = []
"""Scripts that have run. What they made lives until the process ends, as it would without an audit: torch
hangs where a data-parallel model goes away while its gloo threads still need the interpreter."""


def _run_as_main(script: Path) -> None:
    main, ours = ModuleType("__main__"), sys.modules["__main__"]
    main.__file__ = str(script)
    main.__dict__["__builtins__"] = builtins
    _ENDED.append(main)
    sys.modules["__main__"] = main
    try:
        code = compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
        exec(code, main.__dict__)  # noqa: S102  # running the user's script is what this is for
    finally:
        sys.modules["__main__"] = ours


def run_script(script: Path, args: Sequence[str], audit: Audit) -> int:
    """Run a script under an audit; its exit code. A crash is shown and keeps the trace."""
    if not script.is_file():
        raise UsageError(f"no script at {script}.")
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *args]
    script = script.absolute()  # as Python has it in __file__ and in tracebacks
    sys.path[0] = str(script.resolve().parent)
    code = 0
    try:
        with audit, _Losses(audit):
            try:
                _run_as_main(script)
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
                if isinstance(stop.code, str):
                    print(stop.code, file=sys.stderr)
            except KeyboardInterrupt:
                print("halfulp: interrupted; the trace keeps what was recorded.", file=sys.stderr)
                code = 130
            except HalfulpError:
                raise  # the audit's own: a clear line of its own
            except Exception:
                kind, error, where = sys.exc_info()
                while where is not None and where.tb_frame.f_code.co_filename != str(script):
                    where = where.tb_next  # leave the frames of this runner out
                traceback.print_exception(kind, error, where)
                kept = "the trace keeps what was recorded" if audit.step else "no step was recorded"
                print(f"halfulp: the script failed; {kept}.", file=sys.stderr)
                code = 1
    finally:
        sys.argv, sys.path[:] = argv, path
        empty = audit.discard_if_empty()
    if audit.step == 0 and code == 0:
        raise UsageError(
            f"{script} never called an optimizer's step() in this process, so there was nothing to audit. It "
            "may train in processes of its own, or change weights itself (p.data) without a torch optimizer."
        )
    if empty and code == 0:
        raise UsageError(f"nothing to audit: the optimizers in {script} have no trainable parameters.")
    return code

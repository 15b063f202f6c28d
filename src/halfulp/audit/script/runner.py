"""Run somebody's training script or module, unmodified, under an audit.

It runs as ``__main__`` with its own arguments, as ``python script.py`` or ``python -m module`` would run it.
torch's global optimizer hooks see every step; the loss is what ``backward`` was called on, before a
``GradScaler`` scaled it. Nothing in the script's arithmetic or random states is touched. Its own evaluation
is taken as if, where it is named (:mod:`halfulp.audit.script.own_evaluation`); :func:`save_rehearsed` writes
the rehearsed weights beside the trace when it has ended.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib.util
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from halfulp.audit.script.endings import Termination, wait_for_threads
from halfulp.audit.script.own_evaluation import DECORATOR, OwnEvaluation
from halfulp.audit.session import Audit
from halfulp.errors import HalfulpError, UsageError
from halfulp.text import tell


class Losses:
    """Notes the value of every real scalar that ``backward`` is called on."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit
        self.backward, self.scale = torch.Tensor.backward, torch.amp.GradScaler.scale

    def __enter__(self) -> None:
        audit, plain_backward, plain_scale = self.audit, self.backward, self.scale

        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if _is_loss(tensor):
                audit.log(getattr(tensor, "_halfulp_unscaled", tensor))
            plain_backward(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]  # torch's

        def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            scaled = plain_scale(scaler, outputs)
            if isinstance(scaled, torch.Tensor) and scaled is not outputs and _is_loss(outputs):
                scaled._halfulp_unscaled = outputs.detach().clone()  # type: ignore[attr-defined]  # a note of ours
            return scaled

        torch.Tensor.backward = backward  # type: ignore[assignment, method-assign]  # put back on exit
        torch.amp.GradScaler.scale = scale  # type: ignore[assignment, method-assign]  # put back on exit

    def __exit__(self, *_: object) -> None:
        torch.Tensor.backward = self.backward  # type: ignore[method-assign]  # what was there
        torch.amp.GradScaler.scale = self.scale  # type: ignore[method-assign]  # what was there


def _is_loss(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and tensor.is_floating_point()


_ENDED: list[ModuleType] = []
"""Main modules that have run. They live until the process ends, as without an audit: torch hangs if a
data-parallel model is freed while its gloo threads still need the interpreter."""


def _script(path: Path, own: OwnEvaluation | None) -> tuple[CodeType, dict[str, Any]]:
    """Return the code of a script and the globals that ``python path`` sets for it."""
    sys.argv[0] = str(path)
    path = path.absolute()  # as Python has it in __file__ and in tracebacks
    sys.path[0] = str(path.resolve().parent)
    content = path.read_bytes()
    plain = functools.partial(compile, mode="exec", dont_inherit=True)
    return (plain if own is None else own.compiled)(content, str(path)), {"__file__": str(path)}


def _module(name: str, own: OwnEvaluation | None) -> tuple[CodeType, dict[str, Any]]:
    """Return the code of a module or package and the globals that ``python -m name`` sets for it."""
    sys.argv[0], sys.path[0] = "-m", os.getcwd()
    try:
        spec = importlib.util.find_spec(name)  # imports the packages that it is in
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that its packages need
        spec = None
    except (ImportError, ValueError):
        if not name.startswith("."):
            raise
        spec = None  # relative to nothing
    loader = None if spec is None else spec.loader
    code = getattr(loader, "get_code", lambda _: None)(name)
    if spec is None or code is None:
        raise UsageError(
            f"no module named {name} to run: neither in this folder nor installed, where `python -m` looks."
        )
    if own is not None:
        source = getattr(loader, "get_source", lambda _: None)(name)
        if source is None:
            raise UsageError(f"--evaluate {own.name}: the module {name} has no source to find it in.")
        code = own.compiled(source, str(spec.origin))
    sys.argv[0] = str(spec.origin)
    names = {"__file__": spec.origin, "__cached__": spec.cached, "__loader__": spec.loader, "__spec__": spec}
    return code, {**names, "__package__": spec.parent}


def _prepared(script: Path | None, module: str, own: OwnEvaluation | None) -> tuple[CodeType, ModuleType]:
    """Return the code to run and its module.

    The module stays ``__main__`` until the process ends, because exit handlers and pickles look for it there.
    """
    code, names = _module(module, own) if script is None else _script(script, own)
    main = ModuleType("__main__")
    main.__dict__.update(names, __builtins__=builtins, **({} if own is None else {DECORATOR: own}))
    _ENDED.append(main)
    sys.modules["__main__"] = main
    return code, main


def run_script(
    script: Path | None,
    args: Sequence[str],
    audit: Audit,
    farewell: Callable[[], None],
    module: str = "",
    own: OwnEvaluation | None = None,
    within: AbstractContextManager[object] | None = None,
) -> int:
    """Run a script, or a module, under an audit; its exit code. A crash is shown and keeps the trace.

    ``own``: the function with which the script evaluates its model. ``within``: entered around the script, so
    that its hooks come after those of the audit. A negative code is the signal by which
    this process should end. SIGTERM ends it here, after ``farewell``. A fork of this process that comes to
    its end here says nothing of the audit.
    """
    if script is not None and not script.is_file():
        raise UsageError(f"no script at {script}.")
    argv, path = sys.argv, list(sys.path)
    sys.argv = ["", *args]
    code, left = 0, False
    if own is not None:
        own.audit = audit
    audit.announce()
    process, threads = os.getpid(), set(threading.enumerate())
    try:
        with Termination(audit, farewell), _audited(audit), Losses(audit), within or nullcontext():
            main: ModuleType | None = None
            try:
                compiled, main = _prepared(script, module, own)
                exec(compiled, main.__dict__)  # noqa: S102  # running the user's script is what this is for
            except SystemExit as stop:
                left = True
                code = stop.code & 0xFF if isinstance(stop.code, int) else 0 if stop.code is None else 1
                if stop.code is not None and not isinstance(stop.code, int):
                    tell(str(stop.code))
            except KeyboardInterrupt:
                if os.getpid() == process:
                    tell("halfulp: interrupted; the trace keeps what was recorded.")
                code = -signal.SIGINT
            except Exception as error:
                refused = audit.refused(error) or (own is not None and own.refused is error)
                if isinstance(error, HalfulpError) and (main is None or refused):
                    raise  # the audit's own, not the script's: a clear line
                _show_error()
                kept = "the trace keeps what was recorded" if audit.step else "no step was recorded"
                if os.getpid() == process:
                    tell(f"halfulp: the script failed; {kept}.")
                code = 1
            wait_for_threads(threads)
    finally:
        sys.argv, sys.path[:] = argv, path
        if own is not None:
            own.put_back()
        empty = audit.discard_if_empty()
    if code == 0 and os.getpid() == process:
        _say_if_nothing(module or str(script), audit, empty, left)
        if own is not None and not own.calls and not left:
            never = f"{module or script} never called {own.name}() after a step"
            tell(f"halfulp: {never}, so no loss was recorded.")
    return code


@contextmanager
def _audited(audit: Audit) -> Iterator[None]:
    audit.start_at_first_step()
    try:
        yield
    finally:
        audit.stop()


def save_rehearsed(audit: Audit) -> Path | None:
    """Write what every rehearsal ended with, under the model's names, beside the trace: the folder.

    One file a rehearsal and bound, ``as_if/e4m3@128.point.safetensors``. What cannot be written is said.
    """
    if audit.out is None or not audit.writes or not audit.rehearsed or audit.given_up:
        return None
    folder = audit.out / "as_if"
    try:
        for spec in audit.rehearsals:
            for bound in audit.bounds:
                audit.save_as_if(spec, folder / f"{file_name(spec)}.{bound}.safetensors", bound)
    except (HalfulpError, OSError) as error:
        tell(f"halfulp: the rehearsed weights could not be written: {error}")
        return None
    return folder


def file_name(spec: str) -> str:
    """Return a rehearsal's name as a part of a file's: different for different ones.

    >>> file_name("e4m3@128:sr"), file_name("int8/row")
    ('e4m3@128-sr', 'int8-row-0a20179a')
    """
    safe = re.sub(r"[^A-Za-z0-9@._-]", "-", spec.replace(":", "-", 1))
    if safe == spec.replace(":", "-", 1):
        return safe
    return f"{safe[:80]}-{hashlib.sha256(spec.encode()).hexdigest()[:8]}"


def _show_error() -> None:
    """Print the script's own traceback, without the frames of this runner."""
    kind, error, where = sys.exc_info()
    while where is not None and where.tb_frame.f_code.co_filename == __file__:
        where = where.tb_next
    traceback.print_exception(kind, error, where)


def _say_if_nothing(name: str, audit: Audit, empty: bool, left: bool) -> None:
    """Why nothing was recorded. Not an error of a script that ends itself (``--help``) before any step."""
    if audit.step == 0:
        why = (
            f"{name} never called an optimizer's step() in this process, so there was nothing to audit. It "
            "may train in processes of its own (then: halfulp audit --run python ...), or change weights "
            "itself (p.data) without a torch optimizer."
        )
    elif empty and audit.watched:
        why = (
            f"nothing to audit: {name} called step() {audit.step} times, but no weight had a gradient or "
            "changed there. Weights may be changed elsewhere, such as in hooks of backward."
        )
    elif empty:
        why = f"nothing to audit: the optimizers in {name} have no trainable parameters of real numbers."
    else:
        return
    if not left:
        raise UsageError(why)
    tell(f"halfulp: {why}")

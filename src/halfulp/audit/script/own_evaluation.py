"""The evaluation that a script has already, taken *as if* as well whenever the script calls it.

``halfulp audit --rehearse e4m3@128 --evaluate estimate_loss train.py``: the script is not changed, but the
function of that name gets a decorator when its file is compiled. A call of it gives the script what it always
gave; then it is called again for every rehearsal and bound, silently, and its losses go into the trace. The
random numbers that the script draws afterwards are those that it would have drawn. A function of a package,
``transformers.Trainer.evaluate``, is decorated where it is, until the script has ended.

A function that cannot be called twice in a row, or that trains, is left alone from then on, and it is said.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from halfulp.audit.session import Audit
from halfulp.errors import UsageError
from halfulp.text import shown, tell

DECORATOR = "__halfulp_evaluated__"


@dataclass(eq=False)
class OwnEvaluation:
    """A function of a script, ``NAME`` or ``Class.name``, and which of its results is the loss.

    >>> OwnEvaluation.of("estimate_loss:val").key
    'val'
    """

    name: str
    key: str = ""
    audit: Audit | None = None
    bounds: tuple[str, ...] | None = None
    """The rehearsal bounds for which it is evaluated as if; all by default."""
    calls: int = 0
    """Number of times the script called it after a step."""
    trouble: str | None = None
    """Why as-if evaluation stopped, if it did."""
    again_seconds: float = 0.0
    """Processor time of the as-if calls."""
    refused: UsageError | None = field(default=None, repr=False)
    """The error raised because the function returns no loss."""
    _restore: Callable[[], None] | None = field(default=None, repr=False)
    _inside: bool = field(default=False, repr=False)
    _at: int = field(default=0, repr=False)
    """The step of the newest call."""
    _told: bool = field(default=False, repr=False)

    @classmethod
    def of(cls, text: str) -> OwnEvaluation:
        """Parse ``FUNCTION`` or ``FUNCTION:KEY``.

        Raises:
            UsageError: If the text has neither form.
        """
        name, _, key = text.strip().partition(":")
        if not name or not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(
                f"--evaluate takes a function of the script, such as evaluate or Trainer.evaluate, and which "
                f"of its results is the loss where there are several, evaluate:val; not {text!r}."
            )
        return cls(name, key)

    def compiled(self, source: bytes | str, file: str) -> CodeType:
        """Compile a script with the evaluation function decorated."""
        tree = ast.parse(source, file)
        found = [node for name, node in _functions(tree) if name == self.name]
        if not found and not self._decorated_in_package():
            known = ", ".join(name for name, _ in _functions(tree)) or "none"
            raise UsageError(
                f"--evaluate {self.name}: {shown(file, 200)} has no such function; it has "
                f"{shown(known, 400)}. A function of a package needs its whole path, such as "
                "transformers.Trainer.evaluate:eval_loss. For one in another file, name a function of the "
                "script that calls it."
            )
        for node in found:
            at = node.decorator_list[0] if node.decorator_list else node
            mark = ast.Name(id=DECORATOR, ctx=ast.Load())
            node.decorator_list.insert(0, ast.copy_location(mark, at))  # around all others
        return compile(tree, file, "exec", dont_inherit=True)

    def _decorated_in_package(self) -> bool:
        """Decorate ``package.Class.name`` where it is; False if there is no such thing."""
        *parts, last = self.name.split(".")
        if not parts or importlib.util.find_spec(parts[0]) is None:
            return False
        holder: Any = importlib.import_module(parts[0])
        for i, part in enumerate(parts[1:], start=2):
            if not hasattr(holder, part):
                with contextlib.suppress(ImportError):
                    importlib.import_module(".".join(parts[:i]))
            holder = getattr(holder, part, None)
        function = getattr(holder, last, None)
        if not callable(function):
            return False
        setattr(holder, last, self(function))
        self._restore = functools.partial(setattr, holder, last, function)
        return True

    def put_back(self) -> None:
        """Leave the packages as they were."""
        if self._restore is not None:
            self._restore()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate the evaluation function of the script."""

        @functools.wraps(function)
        def evaluated(*args: Any, **kwargs: Any) -> Any:
            if self._inside or self.audit is None:  # it calls itself
                return function(*args, **kwargs)
            self._inside = True
            try:
                return self._evaluated(self.audit, functools.partial(function, *args, **kwargs))
            finally:
                self._inside = False

        return evaluated

    def _evaluated(self, audit: Audit, function: Callable[[], Any]) -> Any:
        if audit.step == 0:  # nothing is known of the model yet
            result = function()
            self.number(result)
            return result
        self.calls += 1
        if audit.step == self._at and not self._told:
            self._told = True
            tell(f"halfulp: {self.name}() was called twice at step {audit.step}: of those the last counts.")
        self._at = audit.step
        results: list[Any] = []

        def loss() -> float:
            if not results:
                results.append(function())
                return self.number(results[0])
            began = time.process_time()
            with _silent():
                loss = self.number(function())
            self.again_seconds += time.process_time() - began
            return loss

        try:
            specs: list[str] | None = None if audit.rehearsed and not self.trouble else []
            audit.evaluate(loss, specs=specs, bounds=self.bounds)
        except Exception as error:
            if not results:
                raise  # the script's own
            if self._fault(results[0]) is not None:
                raise  # that it gives no loss is known from the first call on
            self.trouble = f"{type(error).__name__}: {error}"
            tell(
                f"halfulp: {self.name}() could not be called again as if ({shown(self.trouble, 300)}). The "
                "run goes on; no losses of rehearsals are recorded from here on."
            )
            audit.evaluate(lambda: self.number(results[0]), specs=[])
        return results[0]

    # ---- which number ----

    def number(self, result: Any) -> float:
        """Return the loss from the result of the function."""
        fault = self._fault(result)
        if fault is not None:
            self.refused = UsageError(f"--evaluate {self.name}{self.key and ':'}{self.key}: {fault}")
            raise self.refused
        return float(self._chosen(result))

    def _chosen(self, result: Any) -> Any:
        if not self.key:
            return result
        if isinstance(result, dict):
            return result[self.key]
        if isinstance(result, list | tuple) and self.key.isdigit():
            return result[int(self.key)]
        return getattr(result, self.key)

    def _fault(self, result: Any) -> str | None:
        try:
            float(self._chosen(result))
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError):
            pass
        else:
            return None
        kind = type(result).__name__
        if isinstance(result, dict):
            kind = f"a dictionary of {', '.join(shown(str(k), 40) for k in list(result)[:20])}"
        elif isinstance(result, list | tuple):
            kind = f"{len(result)} values, which count from 0"
        else:
            kind = "nothing" if result is None else f"a {kind}"
        return f"the function gives {kind}, and none of it by that name is a number. Say {self.name}:KEY."


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function of a file by its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        inner = f"{prefix}{node.name}." if isinstance(node, ast.FunctionDef | ast.ClassDef) else prefix
        yield from _functions(node, inner)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield

"""The evaluation that a script has already, taken *as if* as well whenever the script calls it.

``halfulp audit --rehearse e4m3@128 --evaluate estimate_loss train.py``: the script is not changed, but the
function of that name gets a decorator when its file is compiled. A call of it gives the script what it always
gave; then it is called again for every rehearsal and bound, and its losses go into the trace. Those calls are
made apart (:mod:`halfulp.audit.script.apart`): their variables, files and output are not the script's. The
random numbers that the script draws afterwards are those that it would have drawn. A function of a package,
``transformers.Trainer.evaluate``, is decorated where it is, until the script has ended.

Where a function prints its loss and returns nothing, ``test:test_loss`` names the variable that holds it:
what its variables are when it ends is noted. A function that cannot be called twice in a row, or that trains,
is left alone from then on, and it is said. A pilot limits what as-if calls may take (``most``, ``at``).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from halfulp.audit.rehearsal.as_if import RandomState
from halfulp.audit.script.apart import LONGER, PATIENCE, ApartError, can_fork, in_fork, in_place
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
    most: float = math.inf
    """Share of the processor time without them that as-if calls may take; the last evaluation always may."""
    at: int | None = None
    """The only step at which it is evaluated as if, if there is one."""
    calls: int = 0
    """Number of times the script called it after a step."""
    trouble: str | None = None
    """Why as-if evaluation stopped, if it did."""
    again_seconds: float = 0.0
    """Processor time of the as-if calls."""
    forked_seconds: float = 0.0
    """The part of it that was spent in forked processes."""
    refused: UsageError | None = field(default=None, repr=False)
    """The error raised because the function returns no loss."""
    inside: bool = field(default=False, repr=False)
    """True while the script evaluates."""
    _restore: Callable[[], None] | None = field(default=None, repr=False)
    _at: int = field(default=0, repr=False)
    """The step of the newest call."""
    _told: bool = field(default=False, repr=False)
    _variable: Any = field(default=None, repr=False)
    """The variable by the name of the key, when the function last ended."""
    _round: float | None = field(default=None, repr=False)
    """Processor time of the newest as-if calls."""
    _lasts: float = field(default=0.0, repr=False)
    """Seconds that the longest call of the script took."""
    _put_off: tuple[functools.partial[Any], RandomState, Any] | None = field(default=None, repr=False)
    """The newest evaluation, its generators and its result, if it was not repeated as if."""

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
        matches = [node for name, node in _functions(tree) if name == self.name]
        if not matches and not self._decorated_in_package():
            known = ", ".join(name for name, _ in _functions(tree)) or "none"
            raise UsageError(
                f"--evaluate {self.name}: {shown(file, 200)} has no such function; it has "
                f"{shown(known, 400)}. A function of a package needs its whole path, such as "
                "transformers.Trainer.evaluate:eval_loss. For one in another file, name a function of the "
                "script that calls it."
            )
        for node in matches:
            at = node.decorator_list[0] if node.decorator_list else node
            mark = ast.Name(id=DECORATOR, ctx=ast.Load())
            node.decorator_list.insert(0, ast.copy_location(mark, at))  # around all others
            if self.key:
                _note_variables(node)
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
            if self.inside or self.audit is None:  # it calls itself
                return function(*args, **kwargs)
            self.inside = True
            try:
                return self._evaluated(self.audit, functools.partial(function, *args, **kwargs))
            finally:
                self.inside = False

        return evaluated

    def note(self, variables: dict[str, Any]) -> None:
        """Note the function's own variables as it ends."""
        self._variable = variables.get(self.key)

    def _evaluated(self, audit: Audit, function: functools.partial[Any]) -> Any:
        if audit.step == 0:  # nothing is known of the model yet
            result = function()
            self.number(result)
            return result
        self.calls += 1
        if audit.step == self._at and not self._told:
            self._told = True
            tell(f"halfulp: {self.name}() was called twice at step {audit.step}: of those the last counts.")
        self._at = audit.step
        drawn = RandomState()
        if self._wanted(audit):
            self._put_off = None
            return self._repeated(audit, function, [])
        result = self._timed(function)
        self._put_off = function, drawn, result
        loss = self.number(result)
        audit.evaluate(lambda: loss, specs=[])
        return result

    def _timed(self, function: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            return function()
        finally:
            self._lasts = max(self._lasts, time.perf_counter() - began)

    def _wanted(self, audit: Audit) -> bool:
        """Return whether this evaluation is repeated as if: the first is, and what ``most`` allows."""
        if self.at is not None:
            return audit.step == self.at
        if self._round is None:
            return True
        alone = time.process_time() + self.forked_seconds - self.again_seconds
        return self.again_seconds + self._round <= self.most * alone

    @contextlib.contextmanager
    def until_the_end(self) -> Iterator[None]:
        """Repeat the script's last evaluation as if when it has ended, unless that was done at the time."""
        yield
        kept, self._put_off = self._put_off, None
        if kept is None or self.audit is None or self.audit.step != self._at or self.at is not None:
            return
        function, drawn, result = kept
        now, self.inside = RandomState(), True
        drawn.put_back()
        try:
            self._repeated(self.audit, function, [result])
        finally:
            self.inside = False
            now.put_back()

    def _again(self, function: functools.partial[Any]) -> float:
        """Return the loss of a call apart from the script."""
        if can_fork():
            limit = PATIENCE + LONGER * self._lasts
            loss, seconds = in_fork(lambda: self.number(function()), limit)
            self.forked_seconds += seconds
        else:
            loss, seconds = in_place(function, self.number)
        self.again_seconds += seconds
        return loss

    def _repeated(self, audit: Audit, function: functools.partial[Any], results: list[Any]) -> Any:
        """Evaluate, unless the result is known, and again as if for every rehearsal; return the result."""
        before, first = self.again_seconds, True

        def loss() -> float:
            nonlocal first
            if first:
                first = False
                if not results:
                    results.append(self._timed(function))
                return self.number(results[0])
            return self._again(function)

        try:
            specs: list[str] | None = None if audit.rehearsed and not self.trouble else []
            audit.evaluate(loss, specs=specs, bounds=self.bounds)
        except Exception as error:
            if not results:
                raise  # the script's own
            if self._fault(results[0]) is not None:
                raise  # that it gives no loss is known from the first call on
            text = str(error)
            self.trouble = text if isinstance(error, ApartError) else f"{type(error).__name__}: {text}"
            tell(
                f"halfulp: {self.name}() could not be called again as if ({shown(self.trouble, 300)}). The "
                "run goes on; no losses of rehearsals are recorded from here on."
            )
            audit.evaluate(lambda: self.number(results[0]), specs=[])
        self._round = self.again_seconds - before
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
        if isinstance(result, dict) and self.key in result:
            return result[self.key]
        if isinstance(result, list | tuple) and self.key.isdigit():
            return result[int(self.key)]
        return getattr(result, self.key, self._variable)

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
        what = "no number" if not self.key else "no number by that name, nor is a variable of its one"
        return (
            f"the function gives {kind}, which is {what}. Say {self.name}:KEY: a key of its result, or, "
            "where it only prints the loss, the variable that holds it."
        )


def _note_variables(node: ast.FunctionDef) -> None:
    """Have a function note its variables when it ends."""
    docstring = ast.get_docstring(node, clean=False) is not None
    noted = ast.parse(f"{DECORATOR}.note(locals())").body
    inner = ast.Try(body=node.body[docstring:] or [ast.Pass()], handlers=[], orelse=[], finalbody=noted)
    node.body = [*node.body[:docstring], inner]
    for new in (inner, *(part for each in noted for part in ast.walk(each))):
        if isinstance(new, ast.expr | ast.stmt):
            ast.copy_location(new, node)


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function of a file by its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        inner = f"{prefix}{node.name}." if isinstance(node, ast.FunctionDef | ast.ClassDef) else prefix
        yield from _functions(node, inner)

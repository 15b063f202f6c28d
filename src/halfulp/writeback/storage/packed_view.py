"""Packed weights outside their module's forward: read from the codes, and written to them.

A packed parameter is a shell there, which has no memory for values. What is done to it all the same is
answered where torch dispatches, by the schema of each operator and not by a list of them: the codes are
decoded, the operator runs on the values, and if its schema says that it writes to them, the values become
codes again. Values off the grid are refused, and nothing changes: rounding them is a decision, which
``grid.round`` states.

- A closed parameter has another class, so that torch shows it every function that it is given to. While such
  a function runs, a mode sees each operator below autograd and exchanges the shell for a :class:`PackedView`.
  So gradients reach the parameter itself, and functions about it (``requires_grad_``, hooks) do, too.
- A :class:`PackedView` is what ``p.data``, ``p.detach()``, ``p[0]`` or ``p.T`` give: no values but the way to
  them. One that is kept shows what the weight holds now, as a view does.
- What takes the memory's address is refused, in C++ as well (:mod:`halfulp.writeback.storage.unbacked`).

While its module runs, a weight has values, and an open parameter counts writes to them, through ``p.data`` as
well, which in torch does not count them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import get_default_nowrap_functions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from halfulp.contexts import within
from halfulp.errors import UsageError
from halfulp.writeback.storage.unbacked import ADDRESSES, Unbacked, is_view, refuse_memory, written

if TYPE_CHECKING:
    from halfulp.writeback.storage.packed import PackedWeight

DATA: Any = torch.Tensor.data
SET_DATA = DATA.__set__
ABOUT = frozenset({
    "__delete__", "__get__", "__set__", "dim", "element_size", "is_floating_point", "nelement", "numel",
    "size", "untyped_storage",
})  # fmt: skip
"""Functions that need neither values nor strides of a parameter, unless they give a view of it."""


class PackedView(Unbacked):
    """A tensor that shows all of a packed weight, or a view of it."""

    of: PackedWeight
    path: Callable[[torch.Tensor], torch.Tensor]
    """The function that makes this view from the weight's values."""

    @classmethod
    def make(cls, of: PackedWeight, path: Callable[[torch.Tensor], torch.Tensor]) -> PackedView:
        """Make the view that ``path`` shows of a packed weight."""
        view: PackedView = torch._C._disabled_torch_function_impl(cls._shown, (), (of, path), {})
        view.of, view.path = of, path
        return view

    @classmethod
    def _shown(cls, of: PackedWeight, path: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        shown = path(torch.empty(of.p.shape, dtype=of.p.dtype, device="meta"))
        return cls.like(shown, shown.dtype, of.p.device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == SET_DATA:
            raise UsageError(f"set {args[0].of.name!r} itself, p.data = values, and not a view of it.")
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_view(func) and isinstance(args[0], cls):
            return _viewed(func, args[0], args[1:], kwargs)
        return _computed(func, args, kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's has options
        return repr(self.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch's

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = memo.setdefault(id(self), self.detach().clone())
        return copied


def _viewed(func: Any, view: PackedView, args: Any, kwargs: Any) -> Any:
    """Return a view of a view, or several, each of which finds its place again."""

    def path(values: torch.Tensor) -> Any:
        return func(view.path(values), *args, **kwargs)

    shown = path(torch.empty(view.of.p.shape, dtype=view.of.p.dtype, device="meta"))
    if isinstance(shown, torch.Tensor):
        return PackedView.make(view.of, path)
    each = [partial(lambda i, values: path(values)[i], i) for i in range(len(shown))]
    return [PackedView.make(view.of, one) for one in each]


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on the values, and keep those that it writes."""
    weights: dict[int, tuple[PackedWeight, torch.Tensor]] = {}
    given: dict[int, tuple[PackedView, torch.Tensor]] = {}

    def decoded(view: PackedView) -> torch.Tensor:
        of = view.of
        if id(of) not in weights:
            weights[id(of)] = of, of.values()
        if id(view) not in given:
            given[id(view)] = view, view.path(weights[id(of)][1])
        return given[id(view)][1]

    real_args, real_kwargs = tree_map_only(PackedView, decoded, (args, kwargs))
    changing = [v for v in written(func, args, kwargs) if isinstance(v, PackedView)]
    laid_out = [_layout(given[id(v)][1]) for v in changing]
    result = func(*real_args, **real_kwargs)
    for view, before in zip(changing, laid_out, strict=True):
        if _layout(given[id(view)][1]) != before:
            raise UsageError(
                f"{func} would give the packed weight {view.of.name!r} another shape, layout or memory. "
                "Make a new model and optimizer for it."
            )
    for of, values in (weights[key] for key in {id(view.of): None for view in changing}):
        of.keep(values)
    back = {id(real): view for view, real in given.values()}
    return tree_map_only(torch.Tensor, lambda x: back.get(id(x), x), result)


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.untyped_storage().data_ptr()


# ---- the parameter ----------------------------------------------------------------------------------


class _Decoding(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Gives operators a view of each closed parameter instead of its shell."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views: dict[int, PackedView] = {}

        def exchanged(p: Any) -> Any:
            if not is_closed(p):
                return p
            if id(p) not in views:
                views[id(p)] = PackedView.make(p.packed, _whole)
            return views[id(p)]

        args, kwargs = tree_map_only(torch.Tensor, exchanged, (args, kwargs or {}))
        result = func(*args, **kwargs)
        back = {id(view): view.of.p for view in views.values()}
        return tree_map_only(torch.Tensor, lambda x: back.get(id(x), x), result)


def _whole(values: torch.Tensor) -> torch.Tensor:
    return values


def _answered(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what a function of torch's does to closed parameters."""
    name = getattr(func, "__name__", "")
    if func == SET_DATA:
        return args[0].packed.assign(args[1])
    if name in ABOUT:
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor) or func in get_default_nowrap_functions():
            return result
    if name in ADDRESSES:
        return 0
    refuse_memory(func)
    closed = {id(p): p for p in tree_leaves((args, kwargs)) if is_closed(p)}.values()
    detached = saved_tensors_hooks(torch.Tensor.detach, _whole)
    contexts = [*(p.packed.place.laid_out() for p in closed), detached, _Decoding()]  # type: ignore[no-untyped-call]  # torch's
    return within(contexts, partial(func, *args, **kwargs))


class ClosedParameter:
    """A parameter whose values are codes; mixed into the parameter's own class by :func:`closed`."""

    packed: PackedWeight
    kind: type
    """The parameter's own class."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Not ``with DisableTorchFunctionSubclass()``: an interrupt on its way out would leave it disabled.
        return torch._C._disabled_torch_function_impl(partial(_answered, func), types, args, kwargs or {})

    def set_(self, *_: Any, **__: Any) -> None:
        """Refuse other memory; torch does not show this one to ``__torch_function__``."""
        raise UsageError(
            f"packed weight {self.packed.name!r} has no memory to exchange: set p.data = values."
        )

    def __repr__(self, **_: Any) -> str:
        return repr(self._plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a parameter of its own class, with values."""
        if id(self) not in memo:
            memo[id(self)] = self._plain()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> Any:
        return self.kind(self.packed.values(), requires_grad=self.packed.p.requires_grad)


def is_closed(x: Any) -> bool:
    """Return True for a parameter that has no values at present."""
    return isinstance(x, ClosedParameter)


@cache
def closed(kind: type) -> type:
    """Return a class of parameters like ``kind`` that are closed."""
    return type(f"Packed{kind.__name__}", (ClosedParameter, kind), {"__module__": __name__, "kind": kind})


@cache
def opened(kind: type) -> type:
    """Return a class like ``kind`` whose ``data`` counts writes as the parameter does."""
    data = property(lambda p: p.detach(), SET_DATA)
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "data": data})

"""Provide tensors that show values without memory: native weights, and packed ones outside a forward.

Operations that torch dispatches are answered from the codes. Functions that take the address of the memory
cannot be answered, and torch would give them the null pointer, which ends the process at the first access. So
:class:`Unbacked` refuses those functions by name where torch lets a subclass see the call, and makes torch
refuse the address elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch

from halfulp.errors import UsageError

MEMORY = frozenset({
    "__array__", "__dlpack__", "apply_", "map2_", "map_", "numpy", "share_memory_", "storage", "tolist",
})  # fmt: skip
"""Functions of tensors that take their memory's address, and would read or write there."""
ADDRESSES = frozenset({"const_data_ptr", "data_ptr", "mutable_data_ptr"})


class Unbacked(torch.Tensor):
    """A tensor without memory; a subclass defines how operations are answered (``__torch_dispatch__``)."""

    @classmethod
    def like(cls, x: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Any:
        """Make one that has the sizes and strides of x."""
        shown = torch.Tensor._make_wrapper_subclass(
            cls, x.shape, strides=x.stride(), storage_offset=x.storage_offset(), dtype=dtype, layout=x.layout,
            device=device, requires_grad=False,
        )  # fmt: skip
        forbid_address(shown)
        return shown

    @cached_property
    def nowhere(self) -> torch.UntypedStorage:
        """A storage with a size but no memory; compilers and FSDP2 use it to detect sharing."""
        return torch.empty_strided(self.shape, self.stride(), device="meta").untyped_storage()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.untyped_storage:
            return args[0].nowhere
        if getattr(func, "__name__", "") in ADDRESSES:
            return 0
        refuse_memory(func)
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})


def forbid_address(x: torch.Tensor) -> None:
    """Make torch raise a RuntimeError when something would write to this tensor's memory."""
    torch._C._set_throw_on_mutable_data_ptr(x)


def refuse_memory(func: Any) -> None:
    """Refuse a function that takes the address of memory."""
    name = getattr(func, "__name__", "")
    if name in MEMORY:
        raise UsageError(
            f"{name}() needs a tensor's memory, and this weight has none: its values are decoded from codes "
            "when they are read. Copy them first: w.detach() + 0 is a plain tensor."
        )


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operator writes to, by its schema, including those in lists."""
    for i, declared in enumerate(func._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(declared.name)
            yield from value if isinstance(value, list | tuple) else [value]


def is_view(func: Any) -> bool:
    """Return True if, by its schema, an operator returns views of its first argument."""
    declared = func._schema.arguments[0].alias_info if func._schema.arguments else None
    gives = [r.alias_info for r in func._schema.returns]
    return declared is not None and not declared.is_write and any(alias is not None for alias in gives)

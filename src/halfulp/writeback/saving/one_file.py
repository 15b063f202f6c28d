"""Save a write-back's state to one safetensors file, atomically and with a digest over all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfulp import files, tensors
from halfulp.documents import whole
from halfulp.errors import CorruptionError, TamperingError, UsageError, VersionError
from halfulp.writeback.saving.state_dict import KEY, READ, VERSION, gathered
from halfulp.writeback.sharding import is_sharded

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack


def save(wb: WriteBack, path: str | Path) -> None:
    """Write the state of a write-back to one safetensors file with its digest.

    The file is written under another name and then renamed, so it is never incomplete.

    Args:
        wb: The write-back.
        path: The file to write; an existing one is replaced.

    Raises:
        UsageError: If the state is sharded, or contains a value that such a file cannot hold.

    >>> import halfulp as hu
    >>> import tempfile, pathlib
    >>> model = torch.nn.Linear(4, 4)
    >>> opt = hu.WriteBack(torch.optim.SGD(model.parameters()), "bf16", "kahan", model=model)
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.safetensors"
    >>> save(opt, path)
    >>> load(opt, path)
    """
    if any(is_sharded(slot.p) for slot in wb.slots):
        raise UsageError("a sharded state cannot be saved to one file: use torch.distributed.checkpoint.")
    saved = gathered(wb)
    more = sorted(set(saved) - {"state", "param_groups"})
    more += [k for k, entry in saved["state"].items() if not isinstance(entry, dict)]
    if more:
        raise UsageError(f"a safetensors file cannot hold {more} of this optimizer's state: use torch.save.")
    arrays, plain = {}, {}
    for k, entry in saved["state"].items():
        for name, value in entry.items():
            if isinstance(value, torch.Tensor):
                arrays[f"{k}/{name}"] = value
            else:
                plain[f"{k}/{name}"] = value
    groups = [{k: _number(v) for k, v in g.items()} for g in saved["param_groups"]]
    try:
        text = json.dumps({"format": VERSION, "state": plain, "param_groups": groups})
    except (TypeError, ValueError) as error:
        raise UsageError(f"this optimizer's state has something that JSON cannot hold: {error}.") from None
    files.put(Path(path), tensors.content(arrays, {KEY: text}))


def _number(value: Any) -> Any:
    """Convert a rate that is a tensor to a number; :func:`_like` converts it back."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def load(wb: WriteBack, path: str | Path) -> None:
    """Load a state that :func:`save` wrote.

    Args:
        wb: A write-back made like the saved one, around the model with its saved weights.
        path: The file to read.

    Raises:
        CorruptionError: If it is not such a file, or is incomplete.
        TamperingError: If its digest was removed, or does not match its content.
        UsageError: If it is of another grid, policy, storage, model, seed or kind of optimizer.
        VersionError: If another version of halfulp wrote it.
    """
    arrays, metadata = tensors.read(Path(path), follow=True)
    foreign = f"{path} is a safetensors file, but not a state that halfulp.writeback.save wrote."
    try:
        meta = json.loads(metadata[KEY])  # with NaN and infinity, which a rate may be
        version = meta.get("format", 1)
    except (AttributeError, KeyError, RecursionError, ValueError):
        raise CorruptionError(foreign) from None
    if not whole(version) or version not in READ:
        raise VersionError(
            f"{path} is a write-back state of format {version!r}; this halfulp reads "
            f"{' and '.join(map(str, READ))}. Use the halfulp that saved it."
        )
    if (tensors.DIGEST in metadata) != (version >= 2):
        raise TamperingError(
            f"{path} is a write-back state of format {version}: its digest was removed or added."
        )
    state: dict[int, dict[str, Any]] = {}
    try:
        for key, value in [*meta["state"].items(), *arrays.items()]:
            k, _, name = key.partition("/")
            state.setdefault(int(k), {})[name] = value
        own = [*wb.param_groups, *({} for _ in meta["param_groups"])]
        groups = [
            {k: _like(v, mine.get(k)) for k, v in g.items()}
            for g, mine in zip(meta["param_groups"], own, strict=False)
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CorruptionError(foreign) from None
    wb._load({"state": state, "param_groups": groups})


def _like(value: Any, mine: Any) -> Any:
    """Convert a value to a type that JSON lacks, as in this optimizer: a tuple or a tensor rate."""
    if isinstance(mine, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(mine, torch.Tensor) and isinstance(value, int | float):
        return torch.full_like(mine, value)
    return value

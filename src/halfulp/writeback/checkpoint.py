"""Everything a write-back needs to go on exactly where it stopped.

The state dictionary has torch's own form, ``state`` by parameter number and ``param_groups``, so
``torch.save``, ``torch.distributed.checkpoint`` and trainers take it as it is. A write-back's tensors are
entries ``halfulp.*`` of a parameter's state; what they belong to (version, seed, step, and the name, grid
and policy of every managed parameter) is a line of JSON in the first group.

The line has a digest over itself and over every tensor of the state, ours and the optimizer's, so that a bit
that flipped on some disk is not trained on with. Rates and other settings of groups are the user's to change
and are not part of it. Shards are not either: no rank has the whole; a state that was saved or is loaded in
shards is checked by type and shape alone.

``save`` and ``load`` keep the same in one safetensors file, written aside and renamed, whose digest covers
all of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfulp import files, kernels, tensors
from halfulp.documents import Fields, listed, parsed, whole
from halfulp.errors import CorruptionError, HalfulpError, TamperingError, UsageError, VersionError
from halfulp.writeback.choosing import check_group
from halfulp.writeback.consistency import check_consistent
from halfulp.writeback.native import NativeCodes
from halfulp.writeback.policies import TileMaster
from halfulp.writeback.sharding import is_sharded, local, wrap_like
from halfulp.writeback.shards import from_rows, to_rows
from halfulp.writeback.storage import Codes
from halfulp.writeback.tiles import put_tiles, take_tiles

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack
    from halfulp.writeback.slot import Slot

VERSION, READ = 2, (1, 2)
PREFIX = "halfulp."
KEY = "halfulp"
OURS = ("grid", "policy")
"""What a group may tell a write-back: objects, for which the identity has names."""


def identity(wb: WriteBack, slots: Sequence[Slot]) -> dict[str, Any]:
    """What the tensors of a state belong to; ``storage`` is one word, or one for each parameter."""
    kinds = {str(number(wb, s)): s.storage for s in slots}
    return {
        "version": VERSION,
        "seed": wb.seed,
        "step": wb.steps,
        "storage": kinds if len(set(kinds.values())) != 1 else next(iter(kinds.values())),
        "parameters": {
            str(number(wb, s)): [s.name, s.grid.name, s.policy.spec, list(s.p.shape)] for s in slots
        },
    }


def number(wb: WriteBack, slot: Slot) -> int:
    """torch's number of a parameter: its place in the groups, counted through."""
    i, j = slot.place
    return sum(len(g["params"]) for g in wb.param_groups[:i]) + j


def state_dict(wb: WriteBack) -> dict[str, Any]:
    """The wrapped optimizer's state dictionary with the write-back's entries, and their digest."""
    made = _state(wb)
    keys = [k for g in made["param_groups"] for k in g["params"]]
    by_number = {i: made["state"].get(k, {}) for i, k in enumerate(keys)}
    line = identity(wb, wb.slots)
    line["sha256"] = digest(line, by_number)
    made["param_groups"][0][KEY] = json.dumps(line, sort_keys=True)
    return made


def digest(line: dict[str, Any], by_number: dict[int, dict[str, Any]]) -> str | None:
    """SHA-256 over what a state says of itself and its tensors; None if some are shards, or not dense.

    Tensors are taken by their parameter's number and their name, as they lie in memory, from any device: what
    ``torch.save`` and ``torch.distributed.checkpoint`` give back is the same.
    """
    found = sorted((t for n, entry in by_number.items() for t in _tensors(entry, str(n))), key=lambda t: t[0])
    if any(is_sharded(t) or t.layout != torch.strided for _, t in found):
        return None
    told = {k: v for k, v in line.items() if k != "sha256"}  # a seed may be beyond canonical JSON
    running = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for name, t in found:
        running.update(f"\0{name}\0{t.dtype}\0{list(t.shape)}\0".encode("utf-8", "backslashreplace"))
        running.update(tensors.raw(t))
    return running.hexdigest()


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a state, wherever they are in it, with their places."""
    if isinstance(value, torch.Tensor):
        yield name, value
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list | tuple) else items:
        yield from _tensors(inner, f"{name}/{key}")


def _state(wb: WriteBack) -> dict[str, Any]:
    wb._pass_on_groups()
    base = wb.optimizer.state_dict()
    if "param_groups" not in base:
        raise UsageError(
            f"{type(wb.optimizer).__name__}.state_dict() has no 'param_groups', only {sorted(base)}: such a "
            "state has no place for what a write-back keeps. Save opt.optimizer.state_dict() and "
            "[slot.kept_tensors() for slot in opt.slots] yourself."
        )
    state = {k: dict(v) for k, v in base.get("state", {}).items()}
    for slot in wb.slots:
        kept = slot.kept_tensors()
        if "moved" in kept and is_sharded(slot.p):  # bits do not shard; whole bytes do
            kept["moved"] = unpacked(kept["moved"], local(slot.p))
        if isinstance(slot.policy, TileMaster) and is_sharded(slot.p):  # nor do the masters of some tiles
            kept["master"] = _spread(slot, kept["master"])
        if slot.codes is not None and is_sharded(slot.p):
            kept.update(to_rows(slot.codes, kept, slot.p))
        entry = state.setdefault(number(wb, slot), {})
        entry.update(
            {
                PREFIX + k: v if k == "tiles" or is_sharded(v) else wrap_like(v, slot.p)
                for k, v in kept.items()
            }
        )
    groups = [{k: v for k, v in g.items() if k not in OURS} for g in base["param_groups"]]
    groups[0][KEY] = json.dumps({**identity(wb, wb.slots), "sha256": None}, sort_keys=True)
    return {**base, "state": state, "param_groups": groups}  # some optimizers have more


def _spread(slot: Slot, master: torch.Tensor) -> torch.Tensor:
    """Masters of a shard's tiles where they belong in the shard, zeros elsewhere."""
    assert isinstance(slot.policy, TileMaster)
    whole = torch.zeros(local(slot.p).shape, dtype=master.dtype, device=master.device)
    put_tiles(whole, slot.state["tiles"], master, slot.policy.tile, slot.policy.offset)
    return whole


def unpacked(bits: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> shifts) & 1).reshape(-1)[: like.numel()].reshape(like.shape)


def packed(flags: torch.Tensor) -> torch.Tensor:
    flat = torch.nn.functional.pad(flags.reshape(-1).to(torch.uint8), (0, -flags.numel() % 8)).reshape(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(dim=1, dtype=torch.uint8)


def load_state_dict(wb: WriteBack, saved: dict[str, Any]) -> None:
    """Check everything, then take it up; on an error nothing has changed."""
    try:
        groups = [dict(g) for g in saved["param_groups"]]
        keys = [k for g in groups for k in g["params"]]  # numbers, or names from torch.distributed.checkpoint
        state = {k: dict(entry) for k, entry in saved["state"].items()}
        if not all(isinstance(k, int | str) for k in keys):
            raise TypeError("a parameter is a number or a name")
        line = groups[0].pop(KEY, None)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise CorruptionError(
            "not an optimizer state: expected a dictionary with 'state' and 'param_groups'."
        ) from None
    theirs = _parsed(line)
    late = _late(wb, theirs)
    slots = [*wb.slots, *(slot for slot, _ in late)]
    _check_identity(identity(wb, slots), theirs)
    kept = {
        k: {n.removeprefix(PREFIX): entry.pop(n) for n in list(entry) if str(n).startswith(PREFIX)}
        for k, entry in state.items()
    }
    by_number = {i: kept.get(k, {}) for i, k in enumerate(keys)}
    taken = [(slot, _checked(slot, by_number.get(number(wb, slot), {}))) for slot in slots]
    _check_digest(theirs, {i: saved["state"].get(k, {}) for i, k in enumerate(keys)})
    for slot, values in taken:
        _check_values(slot, values)
    own = [{k: g[k] for k in OURS if k in g} for g in wb.param_groups]
    rest = {k: v for k, v in saved.items() if k not in ("state", "param_groups")}
    plain = {"state": {k: entry for k, entry in state.items() if entry}, "param_groups": groups, **rest}
    try:
        for group in groups:
            check_group(group)
        for group in groups[: len(wb.param_groups)]:
            _check_settings(wb, group)
        for slot in slots:
            slot.policy.check(slot.grid, wb.optimizer, groups[slot.place[0]])
        wb.optimizer.load_state_dict(plain)
        if late:  # again with their stand-ins, which do not round moments to the parameter's type
            wb._commit(late, project=False)
            wb.optimizer.load_state_dict(plain)
    except HalfulpError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        name = type(wb.optimizer).__name__
        raise UsageError(f"the wrapped {name} does not take this state: {error}.") from None
    for mine, loaded, kept_here in zip(wb.param_groups, wb.optimizer.param_groups, own, strict=True):
        loaded.update(kept_here)
        mine.update({k: v for k, v in loaded.items() if k != "params"})
    wb._pass_on_groups()
    wb.steps = theirs["step"]
    for slot, values in taken:
        _take(slot, values)


def _check_settings(wb: WriteBack, group: dict[str, Any]) -> None:
    """Refuse a group without a rate, or another number that the next step would ask for."""
    numbers = {k: v for k, v in getattr(wb.optimizer, "defaults", {}).items() if not isinstance(v, bool)}
    for key in (k for k, v in numbers.items() if isinstance(v, int | float | tuple) and k not in group):
        raise CorruptionError(
            f"a group of the saved state has no {key}, which {type(wb.optimizer).__name__} needs: it is of "
            "another optimizer, or damaged."
        )


def _late(wb: WriteBack, theirs: dict[str, Any]) -> list[tuple[Slot, torch.Tensor]]:
    """What the state manages and is frozen here: it was trained when the state was saved."""
    numbers = {id(p): n for n, p in enumerate(p for g in wb.param_groups for p in g["params"])}
    return wb._prepared(wb._plan_frozen(lambda _, p, _grid: numbers[id(p)] in theirs["parameters"]))


def _parsed(line: Any) -> dict[str, Any]:
    if line is None:
        raise UsageError(
            "this optimizer state was not saved by a WriteBack. To start a write-back from it, load it into "
            "the wrapped optimizer (opt.optimizer.load_state_dict) and let WriteBack project the weights."
        )
    try:
        return _read_line(line)
    except (TamperingError, VersionError):
        raise
    except CorruptionError as error:
        raise CorruptionError(
            f"the write-back part of this optimizer state cannot be read: {error}"
        ) from None


def _read_line(line: Any) -> dict[str, Any]:
    if not isinstance(line, str):
        raise CorruptionError(f"it is a {type(line).__name__}, not a line of JSON.")
    found = Fields(parsed(line, "it", "a JSON object", exact=True), "it")
    version = found.values.get("version")
    if not whole(version) or version not in READ:
        raise VersionError(
            f"this write-back state has version {version!r}; this halfulp reads version "
            f"{' and '.join(map(str, READ))}. Use the halfulp that saved it."
        )
    if ("sha256" in found.values) != (version >= 2):
        raise TamperingError(f"this write-back state has version {version}: its digest was removed or added.")
    found.whole("step")
    parameters = found.within("parameters")
    for key in parameters.values:
        parameters.take(key, "a name, grid, policy and shape", _is_parameter)
    if not all(key.isdecimal() and len(key) < 10 for key in parameters.values):
        raise CorruptionError("its parameters are not by number.")
    return {
        **found.values,
        "parameters": {int(k): v for k, v in parameters.values.items()},
        "told": found.values,
    }


def _is_parameter(value: Any) -> bool:
    named = listed(value, object, 4) and len(value) == 4 and listed(value[:3], str, 3)
    return named and listed(value[3], int, 64)


def _check_digest(theirs: dict[str, Any], by_number: dict[int, dict[str, Any]]) -> None:
    """Hold the state against its digest, if it has one and is whole here."""
    if theirs.get("sha256") is None:
        return
    found = digest(theirs["told"], by_number)
    if found is not None and found != theirs["sha256"]:
        raise TamperingError(
            "this optimizer state is not what was saved: its SHA-256 differs from the one that it states. "
            "A tensor or the step was changed, or the file was damaged; load another checkpoint. Or it is "
            "not all of it: torch.distributed.checkpoint loads only what is there before, and an optimizer "
            "that has not stepped has no moments. Its get_state_dict and set_state_dict see to that."
        )


def _check_identity(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    if mine["seed"] != theirs.get("seed"):
        raise UsageError(f"this state has seed {theirs.get('seed')!r}, this WriteBack {mine['seed']!r}.")
    for k in sorted({*map(int, mine["parameters"]), *theirs["parameters"]}):
        a, b = mine["parameters"].get(str(k)), theirs["parameters"].get(k)
        if a is None or b is None:
            where = "the state" if a is None else "this WriteBack"
            raise UsageError(
                f"parameter {k} is managed only in {where}: {a or b}. If it was frozen when the state was "
                "saved, make the WriteBack while it is frozen, and train it after loading. States of "
                "version 0.1 hold matrices alone: params=lambda name, p: p.dim() >= 2."
            )
        stored = [
            s.get(str(k)) if isinstance(s, dict) else s for s in (mine["storage"], theirs.get("storage"))
        ]
        if stored[0] != stored[1]:
            raise UsageError(
                f"parameter {k} ({a[0]!r}): the state has storage {stored[1]!r}, this WriteBack "
                f"{stored[0]!r}. Give storage= as it was when the state was saved."
            )
        for what, x, y in zip(("name", "grid", "policy", "shape"), a, b, strict=True):
            if x != y:
                raise UsageError(
                    f"parameter {k} ({a[0]!r}): the state has {what} {y!r}, this WriteBack {x!r}."
                )


def _checked(slot: Slot, saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A parameter's saved tensors, local and of the expected kind."""
    mine = {k: v for k, v in slot.kept_tensors().items() if k not in slot.resting}
    mine.update({k: v for k, v in slot.rested().items() if k in saved})  # saved while others were evaluated
    if set(saved) != set(mine):
        raise CorruptionError(
            f"parameter {slot.name!r}: the state keeps {sorted(saved)}, this WriteBack keeps {sorted(mine)}."
        )
    out = {}
    for key, have in mine.items():
        if not isinstance(saved[key], torch.Tensor):
            raise CorruptionError(
                f"parameter {slot.name!r}: saved {key} is a {type(saved[key]).__name__}, not a tensor."
            )
        value = local(saved[key]).detach()
        if key == "moved" and is_sharded(slot.p):
            value = packed(value)
        if slot.codes is not None and is_sharded(slot.p):
            value = from_rows(slot.codes, key, value)
        if key == "master" and isinstance(slot.policy, TileMaster) and is_sharded(slot.p):
            value = take_tiles(value, slot.state["tiles"], 0, slot.policy.tile, slot.policy.offset)
        if value.dtype != have.dtype or value.shape != have.shape:
            raise CorruptionError(
                f"parameter {slot.name!r}: saved {key} is {tuple(value.shape)} of {value.dtype}, expected "
                f"{tuple(have.shape)} of {have.dtype}."
            )
        out[key] = value.to(have.device)
        if key == "tiles" and not torch.equal(out[key], have):
            raise UsageError(
                f"parameter {slot.name!r}: the state has masters for other tiles than this mask chooses."
            )
    return out


def _check_values(slot: Slot, out: dict[str, torch.Tensor]) -> None:
    """What is stored must be on the grid, and what a policy keeps must belong to it."""
    q = _values(slot, out, "codes", "steps")
    if "resting" in out:
        q = _values(slot, out, "resting", "resting_steps")
    check_consistent(slot, {k: out[k] for k in slot.state}, q)


def _values(slot: Slot, tensors: dict[str, torch.Tensor], key: str, scales: str) -> torch.Tensor:
    """What is stored by a state, or beside it in the model, in the type that policies work in; checked."""
    if slot.codes is None or isinstance(slot.codes, NativeCodes):
        p = (
            tensors.get(key, local(slot.p.detach()))
            if slot.codes is None
            else slot.codes.get(tensors.get(key))
        )
        _check_on_grid(slot, p)
        return p if slot.storage == "container" else p.float()
    try:
        return replace(slot.codes, packed=tensors[key], scales=tensors.get(scales)).get()
    except HalfulpError as error:
        raise CorruptionError(f"parameter {slot.name!r}: {error}") from None


def _check_on_grid(slot: Slot, p: torch.Tensor) -> None:
    """The model's weights must be those that were saved with the state: on the grid, at least."""
    if slot.grid.scaling is not None and slot.grid.scaling.moves:
        return  # any tensor is on some grid of this kind
    q = kernels.round(p, slot.grid)
    off = int((q != p).sum())
    if off:
        raise UsageError(
            f"parameter {slot.name!r} is not on grid {slot.grid.name}: {off} of {p.numel()} values are off "
            "it. Load the model's weights that were saved with this state first."
        )


def _take(slot: Slot, tensors: dict[str, torch.Tensor]) -> None:
    slot.resting = {key: value.clone() for key, value in tensors.items() if key.startswith("resting")}
    for key, value in tensors.items():
        if key in slot.resting:
            continue
        if key == "moved":
            slot.moved = value.clone()
        elif key == "codes":
            assert isinstance(slot.codes, Codes)
            slot.codes.packed = value.clone()
        elif key == "steps":
            assert isinstance(slot.codes, Codes)
            slot.codes.scales = value.clone()
        else:
            slot.state[key] = value.clone()
    slot.events = None
    slot.note_written()  # the weights belong to it: they were held against it


# ---- one file ---------------------------------------------------------------------------------------


def save(wb: WriteBack, path: str | Path) -> None:
    """Write the state to one safetensors file with its digest: aside first, then renamed, so never half."""
    if any(is_sharded(slot.p) for slot in wb.slots):
        raise UsageError("one file does not hold a sharded state: use torch.distributed.checkpoint.")
    saved = _state(wb)
    more = sorted(set(saved) - {"state", "param_groups"})
    if more:
        raise UsageError(f"one file does not hold {more} of this optimizer's state: use torch.save.")
    held, plain = {}, {}
    for k, entry in saved["state"].items():
        for name, value in entry.items():
            if isinstance(value, torch.Tensor):
                held[f"{k}/{name}"] = value
            else:
                plain[f"{k}/{name}"] = value
    groups = [{k: _number(v) for k, v in g.items()} for g in saved["param_groups"]]
    try:
        text = json.dumps({"format": VERSION, "state": plain, "param_groups": groups})
    except (TypeError, ValueError) as error:
        raise UsageError(f"this optimizer's state has something that JSON cannot hold: {error}.") from None
    files.put(Path(path), tensors.content(held, {KEY: text}))


def _number(value: Any) -> Any:
    """A rate that is a tensor, as a number; :func:`_like` makes it a tensor again."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def load(wb: WriteBack, path: str | Path) -> None:
    """Take up a state that :func:`save` wrote."""
    held, metadata = tensors.read(Path(path), follow=True)
    if KEY not in metadata:
        raise CorruptionError(f"{path} is a safetensors file, but not a write-back state.")
    meta = _parsed_file(metadata[KEY], path)
    version = meta.get("format", 1)
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
        for key, value in [*meta["state"].items(), *held.items()]:
            k, _, name = key.partition("/")
            state.setdefault(int(k), {})[name] = value
        own = [*wb.param_groups, *({} for _ in meta["param_groups"])]
        groups = [
            {k: _like(v, mine.get(k)) for k, v in g.items()}
            for g, mine in zip(meta["param_groups"], own, strict=False)
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CorruptionError(f"{path} is a safetensors file, but not a write-back state.") from None
    wb._load({"state": state, "param_groups": groups})


def _parsed_file(text: str, path: str | Path) -> dict[str, Any]:
    try:
        meta = json.loads(text)  # with NaN and infinity, which a rate may be
    except (ValueError, RecursionError):
        meta = None
    if not isinstance(meta, dict):
        raise CorruptionError(f"{path} is a safetensors file, but not a write-back state.")
    return meta


def _like(value: Any, mine: Any) -> Any:
    """What JSON has no type for, as this optimizer has it: tuples and rates that are tensors."""
    if isinstance(mine, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(mine, torch.Tensor) and isinstance(value, int | float):
        return torch.full_like(mine, value)
    return value

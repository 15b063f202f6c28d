"""Save and load everything that a write-back needs to continue exactly where it stopped.

The state dictionary has torch's own form, ``state`` by parameter number and ``param_groups``, so
``torch.save``, ``torch.distributed.checkpoint`` and trainers take it as it is. A write-back's tensors are
entries ``halfulp.*`` of a parameter's state; what they belong to (version, seed, step, and the name, grid
and policy of every managed parameter) is a line of JSON in the first group.

The line has a digest over itself and over every tensor of the state, ours and the optimizer's, so that
training does not continue with a bit that flipped on disk. Learning rates and other settings of groups are
not part of it, because users may change them. Neither are shards, because no rank has the whole: a state that
was saved or is loaded in shards is checked by type and shape alone.

:mod:`halfulp.writeback.saving.one_file` stores the same state in one safetensors file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from halfulp import kernels, tensors
from halfulp.documents import Fields, listed, parsed, whole
from halfulp.errors import CorruptionError, HalfulpError, TamperingError, UsageError, VersionError
from halfulp.writeback import moments_kept
from halfulp.writeback.saving import takeover
from halfulp.writeback.sharding import is_sharded, local, wrap_like
from halfulp.writeback.sharding.packed_shard import from_rows, to_rows
from halfulp.writeback.storage.native_weight import NativeCodes
from halfulp.writeback.storage.packed import Codes, pack_bits, unpack_bits

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack
    from halfulp.writeback.slot import Slot

VERSION, READ = 2, (1, 2)
PREFIX = "halfulp."
KEY = "halfulp"
OURS = ("grid", "policy")
"""The group options of a write-back. Their values are objects; the identity stores their names instead."""


def identity(wb: WriteBack, slots: Sequence[Slot]) -> dict[str, Any]:
    """Describe what the tensors of a state belong to; ``storage`` is one word, or one per parameter."""
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
    """Return torch's number of a parameter: its position in all groups."""
    i, j = slot.place
    return sum(len(g["params"]) for g in wb.param_groups[:i]) + j


def state_dict(wb: WriteBack) -> dict[str, Any]:
    """Return the wrapped optimizer's state dictionary with the write-back's entries and their digest."""
    state = gathered(wb)
    keys = [k for g in state["param_groups"] for k in g["params"]]
    line = identity(wb, wb.slots)
    by_number = {i: state["state"].get(k, {}) for i, k in enumerate(keys)}
    line["sha256"] = digest(line, _others(state["state"], keys) | by_number)
    state["param_groups"][0][KEY] = json.dumps(line, sort_keys=True)
    return state


def _others(state: dict[Any, Any], keys: Sequence[Any]) -> dict[Any, Any]:
    """Return the entries that are of no parameter; MADGRAD counts its steps in one."""
    numbers = set(keys)
    return {k: value for k, value in state.items() if k not in numbers and not isinstance(value, dict)}


def digest(line: dict[str, Any], by_number: dict[Any, Any]) -> str | None:
    """Compute the SHA-256 of a state's metadata and tensors; None if some are shards, or not dense.

    Tensors are ordered by their parameter's number and their name, and read as they lie in memory, from any
    device, so a state has the same digest after ``torch.save`` and ``torch.distributed.checkpoint``.
    """
    ordered = sorted(
        (t for n, entry in by_number.items() for t in _tensors(entry, str(n))), key=lambda t: t[0]
    )
    if any(is_sharded(t) or t.layout != torch.strided for _, t in ordered):
        return None
    rest = {k: v for k, v in line.items() if k != "sha256"}  # a seed may be beyond canonical JSON
    running = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    for name, t in ordered:
        running.update(f"\0{name}\0{t.dtype}\0{list(t.shape)}\0".encode("utf-8", "backslashreplace"))
        running.update(tensors.raw(t))
    return running.hexdigest()


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a state, wherever they are in it, with their positions."""
    if isinstance(value, torch.Tensor):
        yield name, value
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list | tuple) else items:
        yield from _tensors(inner, f"{name}/{key}")


def gathered(wb: WriteBack) -> dict[str, Any]:
    """Return the wrapped optimizer's state dictionary with the write-back's entries, without a digest."""
    wb._pass_on_groups()
    ids = {id(p) for g in wb.optimizer.param_groups for p in g["params"]}
    for p, entry in list(wb.optimizer.state.items()):
        if id(p) not in ids and isinstance(entry, dict) and not entry:
            del wb.optimizer.state[p]  # made when somebody looked at opt.state[p]
    base = wb.optimizer.state_dict()
    if "param_groups" not in base:
        raise UsageError(
            f"{type(wb.optimizer).__name__}.state_dict() has no 'param_groups', only {sorted(base)}: such a "
            "state has no place for what a write-back keeps. Save opt.optimizer.state_dict() and "
            "[slot.kept_tensors() for slot in opt.slots] yourself."
        )
    state = {k: dict(v) if isinstance(v, dict) else v for k, v in base.get("state", {}).items()}
    for slot in wb.slots:
        kept = slot.kept_tensors()
        if is_sharded(slot.p):
            if "moved" in kept:  # bits do not shard; whole bytes do
                here = local(slot.p)
                kept["moved"] = unpack_bits(kept["moved"], 1, here.numel()).reshape(here.shape)
            kept.update(slot.policy.to_shards(slot.state, local(slot.p)))
            if slot.codes is not None:
                kept.update(to_rows(slot.codes, kept, slot.p))
        entry = state.setdefault(number(wb, slot), {})
        for k, v in kept.items():
            entry[PREFIX + k] = v if k in slot.policy.fixed or is_sharded(v) else wrap_like(v, slot.p)
    groups = [{k: v for k, v in g.items() if k not in OURS} for g in base["param_groups"]]
    groups[0][KEY] = json.dumps({**identity(wb, wb.slots), "sha256": None}, sort_keys=True)
    return {**base, "state": state, "param_groups": groups}  # some optimizers have more


_CURES = {
    "name": "The state is of another model, or the parameters were given in another order or form: make the "
    "WriteBack as it was made for the run (model.parameters() or named_parameters(), groups, model=).",
    "grid": "Make the WriteBack with the grid of the state.",
    "policy": "Make the WriteBack with the policy of the state.",
    "shape": "The state is of another model.",
}


def _no_state(given: Any) -> str:
    """Say what was given in place of an optimizer state, and what to give."""
    expected = "not an optimizer state: expected a dictionary with 'state' and 'param_groups'"
    if not isinstance(given, dict):
        return f"{expected}, found {type(given).__name__}. Give what optimizer.state_dict() returned."
    inner = [k for k, v in given.items() if isinstance(v, dict) and "param_groups" in v]
    if inner:
        return f"{expected}. It is inside this checkpoint: load its {inner[0]!r}."
    keys = ", ".join(repr(k) for k in list(given)[:3])
    return f"{expected}, found {f'the keys {keys}' if keys else 'an empty one'}. Is it the model's state?"


def load_state_dict(wb: WriteBack, saved: dict[str, Any]) -> None:
    """Check everything, then take it up; on an error nothing has changed."""
    try:
        groups = [dict(g) for g in saved["param_groups"]]
        keys = [k for g in groups for k in g["params"]]  # numbers, or names from torch.distributed.checkpoint
        others = _others(saved["state"], keys)
        state = {k: dict(entry) for k, entry in saved["state"].items() if k not in others}
        if not all(isinstance(k, int | str) for k in keys):
            raise TypeError("a parameter is a number or a name")
        text = groups[0].pop(KEY, None)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise CorruptionError(_no_state(saved)) from None
    if text is None:
        _refuse_emptied(wb, state)
        _take_over(wb, saved, groups, {i: state.get(k, {}) for i, k in enumerate(keys)})
        return
    line = _parsed(text)
    unfrozen = _unfrozen(wb, line)
    slots = [*wb.slots, *(slot for slot, _ in unfrozen)]
    _check_identity(identity(wb, slots), line)
    kept = {
        k: {n.removeprefix(PREFIX): entry.pop(n) for n in list(entry) if str(n).startswith(PREFIX)}
        for k, entry in state.items()
    }
    by_number = {i: kept.get(k, {}) for i, k in enumerate(keys)}
    checked = [(slot, _local_tensors(slot, by_number.get(number(wb, slot), {}))) for slot in slots]
    _check_digest(line, others | {i: saved["state"].get(k, {}) for i, k in enumerate(keys)})
    for slot, values in checked:
        _check_values(slot, values)
    rest = {k: entry for k, entry in state.items() if entry}
    _load_inner(wb, {**saved, "state": rest | others, "param_groups": groups}, unfrozen)
    wb.steps = line["step"]
    for slot, values in checked:
        _adopt(slot, values)


def _refuse_emptied(wb: WriteBack, state: dict[Any, dict[str, Any]]) -> None:
    """Refuse entries that are all empty where the optimizer has moments: flattened forms drop them."""
    kept = (entry for entry in wb.optimizer.state.values() if isinstance(entry, dict))
    if state and not any(state.values()) and any(kept):
        raise UsageError(
            "this optimizer state has an entry for each parameter and nothing in it: the moments are lost. "
            "torch makes such a state of a flattened one (flatten_optimizer_state_dict=True, as torchtitan "
            "does). Load that one by optimizer.load_state_dict(halfulp.writeback.unflattened(state, "
            "optimizer, model))."
        )


def _take_over(
    wb: WriteBack, saved: dict[str, Any], groups: list[dict[str, Any]], by_number: dict[int, dict[str, Any]]
) -> None:
    """Load the state of an optimizer without a write-back: :mod:`halfulp.writeback.saving.takeover`."""
    if any(str(name).startswith(PREFIX) for entry in by_number.values() for name in entry):
        raise CorruptionError(
            f"this optimizer state has entries of a write-back ({PREFIX}*), but not the line that says what "
            f"they belong to ({KEY!r} in its first group): load it as it was saved."
        )
    fitted = takeover.fitted(wb, groups, by_number)
    begin = takeover.starts(wb)
    _load_inner(wb, {**saved, "param_groups": fitted})
    takeover.begin(wb, begin)


def _load_inner(
    wb: WriteBack, plain: dict[str, Any], unfrozen: Sequence[tuple[Slot, torch.Tensor]] = ()
) -> None:
    """Load a copy of a state into the wrapped optimizer, which goes on with its tensors.

    The caller's dictionary stays as it was. ``late`` are parameters that are managed from now on.
    """
    plain, groups = copied(plain), plain["param_groups"]
    if wb.moments != torch.int8:
        plain["state"] = moments_kept.widened(plain["state"])
    own = [{k: g[k] for k in OURS if k in g} for g in wb.param_groups]
    try:
        for group in groups:
            wb._check_group(group)
        for group in groups[: len(wb.param_groups)]:
            _check_settings(wb, group)
        for slot in (*wb.slots, *(slot for slot, _ in unfrozen)):
            slot.policy.check(slot.grid, wb.optimizer, groups[slot.place[0]])
        wb.optimizer.load_state_dict(plain)
        if unfrozen:  # again with their stand-ins, which do not round moments to the parameter's type
            wb._commit(list(unfrozen), project=False)
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


def copied(value: Any) -> Any:
    """Return a copy of a state with copies of all its tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return type(value)(map(copied, value)) if type(value) in (list, tuple, set) else value


def _check_settings(wb: WriteBack, group: dict[str, Any]) -> None:
    """Refuse a group without a rate, or another number that the next step would ask for."""
    numbers = {k: v for k, v in getattr(wb.optimizer, "defaults", {}).items() if not isinstance(v, bool)}
    for key in (k for k, v in numbers.items() if isinstance(v, int | float | tuple) and k not in group):
        raise CorruptionError(
            f"a group of the saved state has no {key}, which {type(wb.optimizer).__name__} needs: it is of "
            "another optimizer, or damaged."
        )


def _unfrozen(wb: WriteBack, theirs: dict[str, Any]) -> list[tuple[Slot, torch.Tensor]]:
    """Return slots for parameters that the state manages but that are frozen here.

    They were trained when the state was saved.
    """
    numbers = {id(p): n for n, p in enumerate(p for g in wb.param_groups for p in g["params"])}
    return wb._prepared(wb._plan_frozen(lambda _, p, _grid: numbers[id(p)] in theirs["parameters"]))


def _parsed(line: Any) -> dict[str, Any]:
    """Return the metadata of a saved state, with parameters by number, and as it was written."""
    unread = "the write-back part of this optimizer state"
    if not isinstance(line, str):
        raise CorruptionError(f"{unread} is a {type(line).__name__}, not a line of JSON.")
    fields = Fields(parsed(line, unread, "a JSON object", exact=True), unread)
    version = fields.values.get("version")
    if not whole(version) or version not in READ:
        raise VersionError(
            f"this write-back state has version {version!r}; this halfulp reads version "
            f"{' and '.join(map(str, READ))}. Use the halfulp that saved it."
        )
    if ("sha256" in fields.values) != (version >= 2):
        raise TamperingError(f"this write-back state has version {version}: its digest was removed or added.")
    fields.whole("step")
    parameters = fields.within("parameters")
    for key in parameters.values:
        parameters.take(key, "a name, grid, policy and shape", _is_parameter)
    if not all(key.isdecimal() and len(key) < 10 for key in parameters.values):
        raise CorruptionError(f"the parameters of {unread} are not by number.")
    numbered = {int(k): v for k, v in parameters.values.items()}
    return {**fields.values, "parameters": numbered, "written": fields.values}


def _is_parameter(value: Any) -> bool:
    named = listed(value, object, 4) and len(value) == 4 and listed(value[:3], str, 3)
    return named and listed(value[3], int, 64)


def _check_digest(theirs: dict[str, Any], by_number: dict[Any, Any]) -> None:
    """Check the state against its digest, if it has one and is not sharded."""
    if theirs.get("sha256") is None:
        return
    sha256 = digest(theirs["written"], by_number)
    if sha256 is not None and sha256 != theirs["sha256"]:
        raise TamperingError(
            "this optimizer state is not what was saved: its SHA-256 differs from the one that it states. "
            "A tensor or the step was changed, or the file was damaged; load another checkpoint. A state "
            "that was kept in memory goes on changing with the optimizer that it came from: keep "
            "copy.deepcopy(opt.state_dict()). Or it is "
            "not all of it: torch.distributed.checkpoint loads only what is there before, and an optimizer "
            "that has not stepped has no moments. Its get_state_dict and set_state_dict see to that."
        )


def _check_identity(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    if mine["seed"] != theirs.get("seed"):
        raise UsageError(
            f"this state has seed {theirs.get('seed')!r}, this WriteBack {mine['seed']!r}. Make the "
            "WriteBack with the seed of the state."
        )
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
            if x != y and (what != "name" or x.rpartition("#")[0] != y):  # older states do not number names
                raise UsageError(
                    f"parameter {k} ({a[0]!r}): the state has {what} {y!r}, this WriteBack {x!r}. "
                    + _CURES[what]
                )


def _local_tensors(slot: Slot, saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return a parameter's saved tensors, local and of the expected kind."""
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
        if is_sharded(slot.p):
            value = pack_bits(value, 1) if key == "moved" else value
            value = value if slot.codes is None else from_rows(slot.codes, key, value)
            value = slot.policy.from_shards(key, value, slot.state) if key in slot.state else value
        if value.dtype != have.dtype or value.shape != have.shape:
            raise CorruptionError(
                f"parameter {slot.name!r}: saved {key} is {tuple(value.shape)} of {value.dtype}, expected "
                f"{tuple(have.shape)} of {have.dtype}."
            )
        out[key] = value.to(have.device)
        if key in slot.policy.fixed and not torch.equal(out[key], have):
            raise UsageError(
                f"parameter {slot.name!r}: the state has other {key} than this policy chooses "
                f"({slot.policy.words})."
            )
    return out


def _check_values(slot: Slot, out: dict[str, torch.Tensor]) -> None:
    """Check that stored values are on the grid and that the policy's state belongs to them."""
    q = _values(slot, out, "codes", "steps")
    if "resting" in out:
        q = _values(slot, out, "resting", "resting_steps")
    slot.check_state({k: out[k] for k in slot.state}, q)


def _values(slot: Slot, tensors: dict[str, torch.Tensor], key: str, scales: str) -> torch.Tensor:
    """Return what a state stores, or the model beside it, in the type that policies work in; check it."""
    if slot.codes is None or isinstance(slot.codes, NativeCodes):
        saved = tensors.get(key)
        here = local(slot.p.detach()) if slot.codes is None else slot.codes.get(saved)
        p = here if saved is None or slot.codes is not None else saved
        _check_on_grid(slot, p)
        return p if slot.storage == "container" else p.float()
    try:
        return replace(slot.codes, packed=tensors[key], scales=tensors.get(scales)).get()
    except HalfulpError as error:
        raise CorruptionError(f"parameter {slot.name!r}: {error}") from None


def _check_on_grid(slot: Slot, p: torch.Tensor) -> None:
    """Check that the model's weights can be those saved with the state: they must be on the grid."""
    if slot.grid.scaling is not None and slot.grid.scaling.moves:
        return  # any tensor is on some grid of this kind
    q = kernels.round(p, slot.grid)
    off = int((q != p).sum())
    if off:
        raise UsageError(
            f"parameter {slot.name!r} is not on grid {slot.grid.name}: {off} of {p.numel()} values are off "
            "it. Load the model's weights that were saved with this state first."
        )


def _adopt(slot: Slot, tensors: dict[str, torch.Tensor]) -> None:
    """Keep copies of checked tensors as the slot's own."""
    fresh = {key: value.clone() for key, value in tensors.items()}
    slot.resting = {key: fresh.pop(key) for key in tensors if key.startswith("resting")}
    slot.moved = fresh.pop("moved", slot.moved)
    if isinstance(slot.codes, Codes):
        slot.codes.packed, slot.codes.scales = fresh.pop("codes"), fresh.pop("steps", None)
    slot.state.update(fresh)
    slot.noted = None
    slot.note_written()  # the weights belong to it: they were held against it

"""Train an arm; what it leaves.

A record keeps counts, not fractions: how many coordinates of each group every update left unchanged, by
grid. They are exact, and any scope is a sum of groups. For a float32 run the count is the forecast,
Q(Q(w) + d) == Q(w); for a write-back it is what happened. At evaluations: held-out loss, coordinates that
never moved, and how many codes sit at the ends of the range, below the smallest normal number, and at zero.
Two digests say that arms are matched: ``initial`` of the weights as drawn, ``start`` of those that training
begins from (after a projection, the codes). Of rehearsals: the counts of the point forecast, and at
evaluations the held-out losses of all bounds.

What is long is attached: ``grids.safetensors`` and ``groups.safetensors`` hold every count and sum of the
audit by update and group (symmetric, uniform phase, norms, never moved and its expectation, occupancy),
``contexts.safetensors`` the held-out loss of every context at every evaluation, ``rehearsals.safetensors``
the counts of rehearsals at every bound, and ``masks.safetensors`` the masks that the run made of its scores.

A cell saves itself every ``save_every`` updates, counts included, and goes on from there to the same record.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_tensors
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfulp import kernels
from halfulp.allocation.masks import Mask
from halfulp.audit.meter.rows import SHARED
from halfulp.audit.rehearsal.specs import PULL, Rehearse, Spec
from halfulp.audit.session import Audit
from halfulp.measures.groups import group_of
from halfulp.paper.arms import records
from halfulp.paper.arms.arm import Arm
from halfulp.paper.arms.mask_recipes import PACKED, Ranked, Silent, described, pack, read_named, read_packed
from halfulp.paper.models.decoder import Decoder
from halfulp.paper.models.training import Training, adamw, project, sequences, starts
from halfulp.paper.tokens import open_corpus
from halfulp.paper.values import finite
from halfulp.study import Running
from halfulp.trace import Columns, Memory, Recorded
from halfulp.trace.schema import BOUNDS
from halfulp.writeback import Dispatch, WriteBack, WriteBackOptions, native
from halfulp.writeback.policies import parsed
from halfulp.writeback.storage import dispatch
from halfulp.writeback.storage.native_weight import plain

Json = Any

OCCUPANCY = ("endpoint", "subnormal", "zero_code")


def run(running: Running) -> dict[str, Json]:
    """Train an arm, from its checkpoint if it has one, and return its record."""
    arm = Arm.from_json(running.config)
    recipe = arm.recipe
    train, held_out = open_corpus(running.data, arm.corpus, arm.model.vocabulary)
    model = Decoder(arm.model, seed=arm.seed, device=device(arm.device))
    record: dict[str, Json] = {
        "seed": arm.seed, "grid": arm.grid, "policy": arm.policy or "fp32", "projected": arm.projected,
        "updates": recipe.updates, "warmup": recipe.schedule.warmup, "initial": digest(model),
        "coordinates": _sizes(model), "frozen": {}, "most_endpoint": 0, "evaluations": [],
    }  # fmt: skip
    optimizer = _optimizer(running, arm, model)
    if arm.mask:
        assert isinstance(optimizer, WriteBack)
        record["master_bytes"] = sum(slot.state["master"].nbytes for slot in optimizer.slots)
    record["start"] = digest(model)
    training = Training(model, optimizer, train, recipe, held_out=held_out)
    if arm.replay:
        record |= {"stream": arm.stream_seed, "schedule": asdict(recipe.schedule), "replayed": []}
    memory, contexts, silent = Memory(), [], _silent(arm, model)
    saved = running.load()
    if saved is not None:
        record, kept = training.load(saved)
        contexts = [kept.pop("contexts")] if "contexts" in kept else []
        memory = Memory.loaded(silent.load(kept))
    rehearse = rehearsals(running, arm)
    with attention(arm.attention), audited(arm, training, memory, list(rehearse.values())) as audit:
        named = {} if audit is None else dict(zip(rehearse, audit.rehearsals, strict=True))
        if arm.replay and saved is None:
            record["replayed"].append(_replayed(running, arm, training))
        while not training.done:
            with silent.watching(training.update + 1), _evidence(arm, training, record):
                training.step()
            if arm.attribute is not None and audit is not None and training.update in _moments(arm):
                record.setdefault("attributed", []).append(_attribute(audit, training, arm, named))
            if isinstance(optimizer, WriteBack):
                ends = sum(row.endpoint for row in optimizer.events.rows)
                record["most_endpoint"] = max(record["most_endpoint"], ends)
            if recipe.evaluates(training.update):
                evaluation, apart = _evaluation(training)
                if audit is not None and rehearse:
                    evaluation["rehearsed"] = _rehearsed(audit, training, named)
                record["evaluations"].append(evaluation)
                contexts.append(torch.from_numpy(apart)[None])
            if training.update % arm.save_every == 0:
                if audit is not None:
                    audit.commit()
                more = {"contexts": torch.cat(contexts)} if contexts else {}
                running.save(training.save(record, {**memory.save(), **more, **silent.save()}))
            running.progress(training.update, recipe.updates)
    if arm.replay:
        record["replayed"].append(_replayed(running, arm, training))
    if "dispatch" in record:
        running.attach("dispatch.json", json.dumps(record["dispatch"], sort_keys=True).encode())
    if contexts and arm.tables:
        running.attach("contexts.safetensors", save_tensors({"loss": torch.cat(contexts)}))
    if arm.watched:
        _count(running, arm, record, memory.trace, named)
        _score(running, arm, record, memory.trace, named, silent.shares)
    return record


def _score(
    running: Running, arm: Arm, record: dict[str, Json], trace: Recorded, named: Mapping[str, str],
    silent: Mapping[str, float],
) -> None:  # fmt: skip
    """Attach the masks that are made of sums by tile."""
    if arm.make is None:
        return
    record["sizes"] = sizes = {t["name"]: t["numel"] for t in trace.tensors}
    specs = () if arm.attribute is None else tuple(arm.attribute["of"])

    def attributed(rehearsal: int) -> Mapping[str, Any]:
        return trace.attribution(named[specs[rehearsal]])

    masks = Ranked(sizes, arm.tile, trace.scores, attributed, silent).masks(arm.make)
    running.attach(PACKED, pack(masks))
    parts = {t["name"]: _part(t["name"], t["group"]) for t in trace.tensors}
    record["masks"] = described(masks, parts, {} if arm.masks is None else read_packed(running, arm.masks))
    record["masks"] |= {"silent": dict(silent)} if silent else {}


def _count(
    running: Running, arm: Arm, record: dict[str, Json], trace: Recorded, named: Mapping[str, str]
) -> None:
    """Record the audit's counts that measures need, and attach all counts if the arm keeps tables."""
    counted = trace.scan("grids")
    kept = counted.select(
        *(n for n in counted.columns if n not in ("frozen_decay", "frozen_gradient", *kernels.ARRIVED))
    )
    grids = _by_group(trace, kept, grid=trace.grids)
    tables = {"grids": grids}
    own = [] if arm.grid is None else [(e["update"], e) for e in record["evaluations"]]
    record["frozen"] = _counted(grids, "grid", dict.fromkeys(trace.grids, own))
    if named:
        table = _by_group(trace, trace.scan("rehearsals"), rehearsal=list(named), bound=BOUNDS)
        tables["rehearsals"] = table
        each = {spec: [(e["update"], e["rehearsed"][spec]) for e in record["evaluations"]] for spec in named}
        record["rehearsed"] = _counted(table.take(table["bound"] == "point"), "rehearsal", each)
    if arm.tables:
        tables["groups"] = _by_group(trace, trace.scan("tensors", "step", "tensor", *SHARED))
    for name, table in tables.items() if arm.tables else ():
        running.attach(f"{name}.safetensors", records.pack(table))


def _optimizer(running: Running, arm: Arm, model: Decoder) -> torch.optim.Optimizer:
    return optimizer_of(arm, model, read_named(running, arm.mask) if arm.mask else None)


def optimizer_of(arm: Arm, model: Decoder, mask: Mask | None) -> torch.optim.Optimizer:
    """Build the optimizer of a model: AdamW, or a write-back around it, from the arm's first codes."""
    if arm.projected:
        project(model, arm.projected)
    if arm.storage == "native":
        native(model, arm.grid or "")
    plain_adamw = adamw(model, arm.recipe)
    if arm.grid is None:
        return plain_adamw
    kind, options = parsed(arm.policy or "")
    policy = mask.policy(**options) if mask is not None else kind(**options)
    return WriteBack(
        plain_adamw, arm.grid, policy, model=model, seed=arm.stream_seed, project=arm.projection,
        storage=arm.storage, options=WriteBackOptions(telemetry=False),
    )  # fmt: skip


@contextlib.contextmanager
def _evidence(arm: Arm, training: Training, record: dict[str, Json]) -> Iterator[None]:
    """Record which products of a native arm's first and last update ran natively, and which should have."""
    update = training.update + 1
    if arm.storage != "native" or update not in (1, arm.recipe.updates):
        yield
        return
    with Dispatch() as seen:
        yield
    read = () if arm.model.tied else ("transformer.wte.weight", "transformer.wpe.weight")
    parts = -(-arm.recipe.batch // (arm.recipe.micro or arm.recipe.batch))
    expected = dispatch.expected(parts * dispatch.products(training.model, read))
    products = {"update": update, "calls": seen.calls, "kernels": seen.kernels, "shapes": seen.shapes}
    record.setdefault("dispatch", []).append({**products, "expected": expected})


def _replayed(running: Running, arm: Arm, training: Training) -> dict[str, Json]:
    """Return the held-out loss here, and that of a model which is made anew from this state's bytes."""
    saved = training.save()
    model = Decoder(arm.model, seed=arm.seed + 1, device=training.device)
    again = Training(
        model, _optimizer(running, arm, model), training.tokens, arm.recipe, held_out=training.held_out
    )
    again.load(saved)
    here, there = (finite(each.evaluate()) for each in (training, again))
    same = digest(training.model) == digest(model)
    return {"update": training.update, "loss": here, "again": there, "same_weights": same}


def _sizes(model: Decoder) -> dict[str, int]:
    """Return the number of coordinates of the matrices, by group."""
    sizes: dict[str, int] = {}
    for name, p in model.named_parameters():
        if p.dim() >= 2:
            group = group_of(name, p)
            sizes[group] = sizes.get(group, 0) + p.numel()
    return sizes


def rehearsals(running: Running, arm: Arm) -> dict[str, Spec]:
    """Return the rehearsals of an arm under its own names; masks are those that an earlier stage attached."""
    specs: dict[str, Spec] = {}
    for spec in arm.rehearse:
        grid, _, how = spec.partition(":")
        name = how.removeprefix("tiles(").removesuffix(")")
        if name == how:
            specs[spec] = spec
        else:
            assert arm.masks is not None
            specs[spec] = (spec, grid, read_named(running, {**arm.masks, "name": name}).policy())
    return specs


def _silent(arm: Arm, model: Decoder) -> Silent:
    """Collect what recipes for whole tensors need, if there are any."""
    if arm.scores is None or not any("whole" in recipe for recipe in (arm.make or {}).values()):
        return Silent({}, "", 0)
    return Silent({n: p for n, p in model.named_parameters() if p.dim() >= 2}, *arm.scores)


def _part(name: str, group: str) -> str:
    """Return the group of a tensor; of embeddings, which one it is."""
    return name.split(".")[-2] if group == "embedding" else group


def audited(
    arm: Arm, training: Training, memory: Memory, rehearse: Sequence[Spec]
) -> contextlib.AbstractContextManager[Audit | None]:
    """Return every event of the matrices on the watched grids, kept in memory, from where the run is."""
    if not arm.watched:
        return contextlib.nullcontext()
    scores = None if arm.scores is None else (arm.scores[0], 1, arm.scores[1], arm.tile)
    return Audit(
        training.optimizer, arm.watched, model=training.model, out=memory, scores=scores,
        params=lambda name, p: p.dim() >= 2,
        expected_never_moved=arm.grid is None and training.device.type == "cpu",
        resume=True, first_step=training.update + 1, seed=arm.stream_seed,
        rehearse=Rehearse(rehearse, pull=PULL) if rehearse else None,  # as sealed
    )  # fmt: skip


def _rehearsed(audit: Audit, training: Training, named: Mapping[str, str]) -> dict[str, Json]:
    """Return the held-out loss of every rehearsal, by rehearsal and bound."""
    by_rehearsal: dict[str, Json] = {}
    for spec, name in named.items():
        losses: dict[str, float | None] = {}
        for bound in BOUNDS:
            with audit.as_if(name, bound=bound):
                losses[bound] = finite(training.evaluate())
        by_rehearsal[spec] = {"loss": losses}
    return by_rehearsal


def _moments(arm: Arm) -> list[int]:
    assert arm.attribute is not None
    moments, updates = arm.attribute["moments"], arm.recipe.updates
    return [round(updates * (i + 1) / moments) for i in range(moments)]


def _attribute(audit: Audit, training: Training, arm: Arm, named: Mapping[str, str]) -> dict[str, Json]:
    """Attribute the gaps of rehearsals on training text; return what the shares sum to, beside those gaps."""
    assert arm.attribute is not None
    recipe, texts = training.recipe, range(arm.attribute["batches"])
    step = training.update * len(texts)
    begins = [
        starts(recipe.seed, "attribution", step + i, recipe.batch, len(training.tokens) - recipe.context)
        for i in texts
    ]
    batches = [sequences(training.tokens, b, recipe.context, training.device) for b in begins]

    def loss() -> torch.Tensor:
        each = [training.model.loss(x, y) for x, y in batches]
        return torch.stack(each).mean()

    attributed: dict[str, Json] = {"update": training.update, "sum": {}, "gap": {}}
    for spec in arm.attribute["of"]:
        name = named[spec]
        shares = audit.attribute(name, loss, points=arm.attribute["points"], tile=arm.tile)
        attributed["sum"][spec] = math.fsum(float(s.sum()) for s in shares.values())
        with torch.no_grad():
            here = float(loss())
            with audit.as_if(name):
                attributed["gap"][spec] = float(loss()) - here
    return attributed


def attention(kind: str) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which attention is computed as asked."""
    return sdpa_kernel(SDPBackend.MATH) if kind == "math" else contextlib.nullcontext()


def device(wanted: str) -> torch.device:
    """Return the device that the arm asks for."""
    if wanted != "auto" or not torch.cuda.is_available():
        return torch.device("cpu" if wanted == "auto" else wanted)
    return torch.device("cuda")


def _evaluation(training: Training) -> tuple[dict[str, Json], np.ndarray[Any, Any]]:
    loss, apart = training.evaluate_contexts()
    evaluation: dict[str, Json] = {"update": training.update, "loss": finite(loss)}
    if isinstance(training.optimizer, WriteBack):
        total = torch.zeros(len(kernels.AUDIT_COUNTS), dtype=torch.int64)
        for slot in training.optimizer.slots:
            q = slot.values()
            seen = kernels.audit(q, torch.zeros_like(q), [slot.grid], phase=False)
            total += seen.counts[:, 0].sum(dim=0, dtype=torch.int64).cpu()
        named = dict(zip(kernels.AUDIT_COUNTS, total.tolist(), strict=True))
        evaluation["occupancy"] = {kind: named[kind] for kind in OCCUPANCY}
    return evaluation, apart


def _counted(
    table: Columns, key: str, evaluations: Mapping[str, Sequence[tuple[int, dict[str, Json]]]]
) -> dict[str, dict[str, list[int]]]:
    """By name and group: coordinates that every update left unchanged. Evaluations, of these names and
    updates, get how many never moved.
    """
    frozen: dict[str, dict[str, list[int]]] = {name: {} for name in evaluations}
    for name, group in dict.fromkeys(table.select(key, "group").rows()):
        rows = table.take((table[key] == name) & (table["group"] == group))
        frozen[name][group] = rows["frozen"].tolist()
        never = dict(rows.select("step", "never_moved").rows())
        for update, evaluation in evaluations[name]:
            evaluation.setdefault("never_moved", {})[group] = never[update]
    return frozen


def _by_group(trace: Recorded, table: Columns, **named: Sequence[str]) -> Columns:
    """Sum columns over the tensors of a group, in their order: threads may not decide a sum.

    The numbers of more keys are replaced by their names.
    """
    listed = np.array(sorted({t["group"] for t in trace.tensors}), dtype=object)
    group_of_tensor = np.full(len(trace.manifest["tensors"]), -1)
    for t in trace.tensors:
        group_of_tensor[t["id"]] = listed.tolist().index(t["group"])
    rows = Columns({**dict(table), "group": group_of_tensor[table["tensor"]]})
    keys = (*named, "group", "step")
    rows = rows.take(rows["group"] >= 0).sort(*keys, "tensor")
    new = np.ones(len(rows), dtype=bool)
    new[1:] = np.any([rows[key][1:] != rows[key][:-1] for key in keys], axis=0)
    first = np.flatnonzero(new)
    names = {**{key: np.array(each, dtype=object) for key, each in named.items()}, "group": listed}
    return Columns(
        {
            **{key: names[key][rows[key][first]] if key in names else rows[key][first] for key in keys},
            **{n: np.add.reduceat(rows[n], first) for n in rows.columns if n not in (*keys, "tensor")},
        }
    )


def digest(model: Decoder) -> str:
    """Return the SHA-256 of the names and float32 bytes of all parameters."""
    hashed = hashlib.sha256()
    for name, p in model.named_parameters():
        hashed.update(name.encode())
        hashed.update(plain(p.detach()).cpu().contiguous().numpy().data)
    return hashed.hexdigest()

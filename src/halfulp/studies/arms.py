"""One arm of a decoder study, as a cell runs it, and how its record is read.

An arm is a model from a seed, a corpus, a recipe and what happens after every optimizer step: nothing
(a float32 reference, whose proposals may be audited for several grids) or a write-back to a grid under a
policy. The cell's config says all of it in JSON, so it is printed, sealed and replayed; :func:`declare`
makes it and :func:`run` runs it, in a worker or anywhere else.

A record keeps counts, not fractions: how many coordinates of each group every update left unchanged, by
grid. They are exact, and any scope is a sum of groups: ``core`` is attention and mlp, ``all-2d`` every
tensor that is stored on the grid. For a reference the count is the forecast, Q(Q(w) + d) == Q(w); for a
write-back it is what happened. At evaluations: held-out loss, coordinates that never moved, and how many
codes sit at the ends of the range, below the smallest normal number, and at zero.

Two digests say that arms are matched: ``initial`` of the weights as drawn, ``start`` of those that
training begins from (after a projection, the codes).

A float32 arm may also sum allocation scores over its first updates, tile by tile (``scores``), and a
write-back may give fp32 masters to the tiles that an earlier, sealed stage chose (``mask``).

A cell saves itself every ``save_every`` updates, counts included, and goes on from there to the same
record.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import halfulp as hu
from halfulp import kernels
from halfulp.audit.groups import CORE, group_of
from halfulp.data import tokens
from halfulp.errors import UsageError
from halfulp.models.decoder import Config, Decoder
from halfulp.models.training import Recipe, Schedule, Tokens, Training, adamw, project
from halfulp.study import Running
from halfulp.study.protocol import Records, Values
from halfulp.writeback import TileMaster

Json = Any
Record = Mapping[str, Json]
Counts = dict[str, int]

PLAYS = {"kind": "characters", "train": "tinyshakespeare.txt"}
PROSE = {"kind": "bytes", "train": "se_prose_train.txt.gz", "held_out": "se_prose_val.txt.gz"}
WEB = {"kind": "bin", "train": "openwebtext/train.bin", "held_out": "openwebtext/val.bin"}
"""Corpora, as :func:`open_corpus` takes them."""

OCCUPANCY = ("endpoint", "subnormal", "zero_code")
SCORED = ("F", "P")
"""How often frozen, and gradient times update: the scores that are summed where an arm asks for scores."""
COLUMNS = [kernels.SCORES.index(score) for score in SCORED]


def declare(
    *,
    seed: int,
    model: Config,
    recipe: Recipe,
    corpus: Mapping[str, str],
    grid: str | None = None,
    policy: str | None = None,
    stream_seed: int = 0,
    projected: str | None = None,
    audit: Sequence[str] = (),
    scores: tuple[str, int] | None = None,
    mask: Mapping[str, str] | None = None,
    device: str = "cpu",
    save_every: int = 200,
) -> dict[str, Json]:
    """The config of an arm.

    ``grid`` and ``policy``: the write-back; neither for float32. ``projected``: the grid to which a
    float32 arm is rounded once, before it starts. ``audit``: grids to forecast. ``scores``: a grid and
    the last update to sum scores over. ``mask``: the stage, cell and name of the tiles that ``tile-master``
    protects. ``corpus``: see :func:`open_corpus`. ``device``: cpu, or auto for a GPU where there is one.
    """
    if (grid is None) != (policy is None):
        raise UsageError("a write-back needs both a grid and a policy.")
    if (mask is not None) != (policy == TileMaster.name) or (scores is not None and policy is not None):
        raise UsageError("a mask is for the policy tile-master, and scores are of a float32 arm.")
    made = {
        "seed": seed, "model": asdict(model), "recipe": recipe.to_json(), "corpus": dict(corpus),
        "grid": grid, "policy": policy, "stream_seed": stream_seed, "projected": projected,
        "audit": list(audit), "device": device, "save_every": save_every,
    }  # fmt: skip
    if scores is not None:
        made["scores"] = list(scores)
    if mask is not None:
        made["mask"] = dict(mask)
    return made


def scale(
    model: Config,
    corpus: Mapping[str, str],
    *,
    updates: int,
    warmup: int,
    horizon: int,
    device: str = "cpu",
    save_every: int = 100,
    **recipe: Any,
) -> dict[str, Json]:
    """What all arms at a scale of a study share, under the paper's schedule; :func:`at_scale` reads it."""
    schedule = Schedule(peak=6e-4, floor=6e-5, warmup=warmup, horizon=horizon)
    made = Recipe(schedule=schedule, seed=0, updates=updates, context=model.context, **recipe)
    return {
        "model": asdict(model), "recipe": made.to_json(), "corpus": dict(corpus), "device": device,
        "save_every": save_every,
    }  # fmt: skip


def at_scale(
    shared: Mapping[str, Json], seed: int, *, updates: int | None = None, **how: Any
) -> dict[str, Json]:
    """The config of an arm at a :func:`scale`, from its seed and what :func:`declare` takes."""
    own = {"seed": seed, "updates": updates or shared["recipe"]["updates"]}
    return declare(
        seed=seed,
        model=Config(**shared["model"]),
        recipe=Recipe.from_json({**shared["recipe"], **own}),
        corpus=shared["corpus"],
        device=shared["device"],
        save_every=shared["save_every"],
        **how,
    )


def open_corpus(running: Running, corpus: Mapping[str, str], vocabulary: int) -> tuple[Tokens, Tokens]:
    """Training and held-out tokens.

    ``kind``: ``characters`` of the text ``train``, whose last tenth is held out; ``bytes`` of the texts
    ``train`` and ``held_out``; ``bin`` for token files.
    """
    kind, train = corpus["kind"], running.data(corpus["train"])
    if kind == "characters":
        found, alphabet = tokens.characters(tokens.read_text(train))
        if len(alphabet) > vocabulary:
            raise UsageError(f"{train} has {len(alphabet)} characters, the model knows {vocabulary}.")
        cut = int(len(found) * 0.9)  # as nanoGPT cuts it
        return found[:cut], found[cut:]
    held_out = running.data(corpus["held_out"])
    if kind == "bytes":
        return tokens.raw_bytes(tokens.read_raw(train)), tokens.raw_bytes(tokens.read_raw(held_out))
    if kind == "bin":
        return tokens.open_bin(train), tokens.open_bin(held_out)
    raise UsageError(f"a corpus is characters, bytes or bin, not {kind!r}.")


# ---- running ----------------------------------------------------------------------------------------


def run(running: Running) -> dict[str, Json]:
    """Train an arm; its record."""
    config, recipe = running.config, Recipe.from_json(running.config["recipe"])
    shape = Config(**config["model"])
    train, held_out = open_corpus(running, config["corpus"], shape.vocabulary)
    model = Decoder(shape, seed=config["seed"], device=_device(config["device"]))
    sizes = _grouped({name: p.numel() for name, p in _matrices(model).items()})
    watched = [config["grid"]] if config["policy"] else config["audit"]
    record: dict[str, Json] = {
        "seed": config["seed"], "grid": config["grid"], "policy": config["policy"] or "fp32",
        "projected": config["projected"], "updates": recipe.updates, "coordinates": sizes,
        "initial": digest(model), "frozen": {g: {group: [] for group in sizes} for g in watched},
        "most_endpoint": 0, "evaluations": [],
    }  # fmt: skip
    if config["projected"]:
        project(model, config["projected"])
    optimizer: torch.optim.Optimizer = adamw(model, recipe)
    if config["policy"]:
        policy = _tile_master(running, model) if "mask" in config else config["policy"]
        optimizer = hu.WriteBack(optimizer, config["grid"], policy, model=model, seed=config["stream_seed"])
        if "mask" in config:
            record["master_bytes"] = sum(slot.state["master"].nbytes for slot in optimizer.slots)
    record["start"] = digest(model)
    training = Training(model, optimizer, train, recipe, held_out=held_out)
    saved = running.load()
    if saved is not None:
        record = training.load(saved)
    scores = _Scores(model, config.get("scores"), record.get("scores"))
    with _audit(training, config["audit"], record):
        while not training.done:
            with scores.of(training):
                training.step()
            if isinstance(optimizer, hu.WriteBack):
                _note_events(optimizer, record)
            if recipe.evaluates(training.update):
                record["evaluations"].append(_evaluation(training))
            if training.update % config["save_every"] == 0:
                scores.note(record)
                running.save(training.save(record))
            running.progress(training.update, recipe.updates)
    scores.note(record)
    return record


def _device(wanted: str) -> torch.device:
    if wanted != "auto" or not torch.cuda.is_available():
        return torch.device("cpu" if wanted == "auto" else wanted)
    torch.use_deterministic_algorithms(True, warn_only=True)  # a worker's process is the cell's own
    return torch.device("cuda")


def _matrices(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.dim() >= 2}


def _audit(
    training: Training, grids: Sequence[str], record: dict[str, Json]
) -> contextlib.AbstractContextManager[object]:
    """Forecast grids from the optimizer's proposals, into the record."""
    if not grids:
        return contextlib.nullcontext()
    matrices = _matrices(training.model)

    def note(summary: dict[str, Any]) -> None:
        for grid in grids:
            # A share of n coordinates, times n, is within an ulp of the whole number that was counted.
            found = {n: round(summary["tensors"][n][grid] * p.numel()) for n, p in matrices.items()}
            _append(record["frozen"][grid], found)

    return hu.Audit(
        training.optimizer, grids, model=training.model, params=lambda name, p: p.dim() >= 2,
        never_moved=False, expected_never_moved=False, listeners=[note],
    )  # fmt: skip


class _Scores:
    """Sums of the allocation scores in SCORED, by tensor and tile, over the first updates of a run: those
    of an audit with ``scores=``, in a record, from which an interrupted cell takes them up again."""

    def __init__(self, model: Decoder, over: tuple[str, int] | None, saved: Json) -> None:
        self.matrices, (self.grid, self.last) = _matrices(model), over or ("", 0)
        self.sums = {
            name: np.array([saved[score][name] for score in SCORED])
            if saved
            else np.zeros((len(SCORED), kernels.tiles_of(p.numel())))
            for name, p in self.matrices.items()
        }

    @contextlib.contextmanager
    def of(self, training: Training) -> Iterator[None]:
        """Add those of the update that is made inside, if it is among the first."""
        if training.update >= self.last:
            yield
            return
        before = {name: p.clone() for name, p in self.matrices.items()}
        yield
        for name, p in training.model.named_parameters():
            if name in before and p.grad is not None:
                found = kernels.score(before[name], p.grad, self.matrices[name], self.grid, after=True)
                self.sums[name] += found.cpu().numpy()[:, COLUMNS].T

    def note(self, record: dict[str, Json]) -> None:
        """Put the sums, and the sizes of tensors, into a record, if any were asked for."""
        if self.last:
            record["sizes"] = {name: p.numel() for name, p in self.matrices.items()}
            record["scores"] = {
                score: {name: sums[i].tolist() for name, sums in self.sums.items()}
                for i, score in enumerate(SCORED)
            }


def _tile_master(running: Running, model: Decoder) -> TileMaster:
    """Masters for the tiles that a sealed stage chose: indices, by tensor."""
    at = running.config["mask"]
    chosen = running.read(at["stage"], at["cell"])["masks"][at["name"]]
    mask = {}
    for name, p in _matrices(model).items():
        mask[name] = torch.zeros(kernels.tiles_of(p.numel()), dtype=torch.bool)
        mask[name][chosen[name]] = True
    return TileMaster(mask)


def _append(series: dict[str, list[int]], by_tensor: Counts) -> None:
    for group, total in _grouped(by_tensor).items():
        series[group].append(total)


def _grouped(by_tensor: Counts) -> Counts:
    out: Counts = {}
    for name, count in by_tensor.items():
        out[_group(name)] = out.get(_group(name), 0) + count
    return out


@functools.cache
def _group(name: str) -> str:
    return group_of(name, torch.empty(0, 0))


def _note_events(optimizer: hu.WriteBack, record: dict[str, Json]) -> None:
    rows = optimizer.events.rows
    (series,) = record["frozen"].values()
    _append(series, {row.name: row.frozen for row in rows})
    record["most_endpoint"] = max(record["most_endpoint"], sum(row.endpoint for row in rows))


def _evaluation(training: Training) -> dict[str, Json]:
    loss = training.evaluate()
    found: dict[str, Json] = {"update": training.update, "loss": loss if math.isfinite(loss) else None}
    optimizer = training.optimizer
    if isinstance(optimizer, hu.WriteBack):
        rows = optimizer.events.rows
        found["never_moved"] = _grouped({row.name: row.never_moved or 0 for row in rows})
        total = torch.zeros(len(kernels.AUDIT_COUNTS), dtype=torch.int64)
        for slot in optimizer.slots:
            q = slot.p.detach()
            seen = kernels.audit(q, torch.zeros_like(q), [slot.grid], phase=False)
            total += seen.counts[:, 0].sum(dim=0, dtype=torch.int64).cpu()
        named = dict(zip(kernels.AUDIT_COUNTS, total.tolist(), strict=True))
        found["occupancy"] = {kind: named[kind] for kind in OCCUPANCY}
    return found


def digest(model: Decoder) -> str:
    """SHA-256 over the names and float32 bytes of all parameters."""
    hashed = hashlib.sha256()
    for name, p in model.named_parameters():
        hashed.update(name.encode())
        hashed.update(p.detach().cpu().contiguous().numpy().data)
    return hashed.hexdigest()


# ---- reading records --------------------------------------------------------------------------------


def by_cell(stage: str, value: Callable[..., float | None], *more: Any) -> Callable[[Records], Values]:
    """An estimand whose units are the cells of a stage: ``value(records, cell, *more)`` of each."""

    @functools.wraps(value)  # a protocol shows the name
    def compute(records: Records) -> dict[str, float | None]:
        return {cell: value(records, cell, *more) for cell in records[stage]}

    return compute


def groups_of(record: Record, scope: str) -> list[str]:
    """The groups that a scope is the union of."""
    known = sorted(record["coordinates"])
    return known if scope == "all-2d" else [g for g in known if g in (CORE if scope == "core" else (scope,))]


def frozen(record: Record, grid: str, scope: str) -> npt.NDArray[np.float64]:
    """The share of a scope's coordinates that every update leaves unchanged, weighted by coordinates."""
    groups = groups_of(record, scope)
    counts = np.sum([record["frozen"][grid][g] for g in groups], axis=0)
    return np.asarray(counts / sum(record["coordinates"][g] for g in groups), dtype=np.float64)


def never_moved(record: Record, scope: str) -> float:
    """The share of a scope's coordinates that no update has moved, at the last evaluation."""
    groups, last = groups_of(record, scope), record["evaluations"][-1]["never_moved"]
    return float(sum(last[g] for g in groups) / sum(record["coordinates"][g] for g in groups))


def losses(record: Record) -> dict[int, float | None]:
    """Held-out loss by update."""
    return {e["update"]: e["loss"] for e in record["evaluations"]}


def final_loss(record: Record) -> float | None:
    """The held-out loss after the last update."""
    return losses(record).get(record["updates"])

"""Every reader of a file that may come from anywhere, each with a whole file of today or of a release before.

Digests stop nearly all damage at the door, so what is behind the door is tried by itself: mutants *sealed
again* carry the digest that belongs to them, as those of somebody would who changes a file on purpose.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mutations
import torch
from fixtures.make_format_1 import GRIDS, make, model, train, written_back
from paper.test_training import begun
from study.samples import NEXT, SMALL, quick_identity, run, study_file
from test_fuzz import mutant_of_state

import halfulp as hu
from halfulp import canonical
from halfulp import tensors as files_of_tensors
from halfulp.audit.sinks import shard_state as shards
from halfulp.checkpoints import Change
from halfulp.paper.arms import mask_recipes
from halfulp.study import publish
from halfulp.study.validate import validate
from halfulp.writeback import load

FIXTURES = Path(__file__).parent.parent / "fixtures"
OPTIONS: dict[str, Any] = {"scores": ("e4m3", 1, 4), "expected_never_moved": True}
OPTIONS |= {"rehearse": ["e5m2", "bf16:kahan"], "part_steps": 2}

Mutate = Callable[[bytes, random.Random], bytes]


@dataclass
class Reader:
    """What is read, where, and how: of a folder one file is damaged at a time."""

    name: str
    place: Path
    read: Callable[[Path], Any]
    mutate: Mutate = mutations.bytewise
    often: int = 1  # how many times as many as of the slowest
    keeps: bool = False  # what it takes stays in it: afterwards the whole file is read again


# ---- damage ----


def tensors(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file: its bytes, its header, or the text in its metadata."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    texts = [k for k, v in header.get("__metadata__", {}).items() if v.startswith(("{", "["))]
    how = rng.random()
    if how < 0.5:
        return mutations.bytewise(content, rng)
    if how < 0.75 or not texts:
        header = mutations.edit(header, rng)
    else:
        key = rng.choice(texts)
        header["__metadata__"][key] = json.dumps(mutations.edit(json.loads(header["__metadata__"][key]), rng))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def documents_of(content: bytes, rng: random.Random) -> bytes:
    """JSON by its structure, or anything by its bytes."""
    try:
        return mutations.edit_text(content, rng) if rng.random() < 0.6 else mutations.bytewise(content, rng)
    except (ValueError, IndexError):  # not JSON, or a lone value
        return mutations.bytewise(content, rng)


def sealed_tensors(content: bytes, rng: random.Random) -> bytes:
    """As :func:`tensors`, and the digest is right again where there can be one."""
    mutant = tensors(content, rng)
    with contextlib.suppress(ValueError, TypeError, AttributeError, LookupError, RecursionError):
        length = int.from_bytes(mutant[:8], "little")
        header, rest = json.loads(mutant[8 : 8 + length]), mutant[8 + length :]
        said = header.pop("__metadata__")
        said.pop(files_of_tensors.DIGEST, None)
        digested = {**header, "__metadata__": said} if said else header
        digest = hashlib.sha256(canonical.dumps(digested) + rest).hexdigest()
        header["__metadata__"] = {**said, files_of_tensors.DIGEST: digest}
        text = json.dumps(header).encode()
        mutant = len(text).to_bytes(8, "little") + text + rest
    return mutant


def dictionaries(content: bytes, rng: random.Random) -> bytes:
    """What ``torch.save`` wrote of a write-back: a tensor or the line of halfulp's is another."""
    saved = torch.load(io.BytesIO(content), weights_only=True)
    out = io.BytesIO()
    torch.save({"opt": mutant_of_state(saved["opt"], rng)}, out)
    return out.getvalue()


# ---- reading ----


def every_number(path: Path) -> Any:
    trace = hu.Trace.open(path)
    return (
        [trace.frozen(grid).sum() for grid in trace.grids],
        trace.table().to_polars(),
        hu.verdict(trace).lines,
    )


def everything(path: Path) -> Any:
    """What a trace with rehearsals says too."""
    trace = hu.Trace.open(path)
    forecasts = [trace.forecast(spec) for spec in trace.rehearsals]
    return every_number(path), [(f.frozen(), f.losses) for f in forecasts]


def resumed(path: Path) -> Any:
    """An audit that goes on, in a copy."""
    copied = path.with_name("goes-on")
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(path, copied)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with hu.Audit(optimizer, GRIDS, model=net, out=copied, resume=True, **OPTIONS) as audit:
        train(net, optimizer, 1, audit)


def archive(path: Path) -> Any:
    with publish.unpacked(path) as folder:
        return validate(folder, code=False)


def loads(case: str, saved: Path) -> tuple[hu.WriteBack, Callable[[Path], Any]]:
    """A write-back that mutants are loaded into."""
    opt, net = written_back(case)
    net.load_state_dict(torch.load(saved, weights_only=True)["model"])
    return opt, lambda path: load(opt, path)


# ---- all of them ----


def audited(out: Path, steps: int, grids: Sequence[str], **options: Any) -> None:
    """A trace of a short training, with an evaluation at its end."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with hu.Audit(optimizer, grids, model=net, out=out, **options) as audit:
        train(net, optimizer, steps, audit)
        audit.evaluate(lambda: sum(float(p.detach().sum()) for p in net.parameters()))


def made_today(today: Path) -> None:
    """One file of each kind, written here and now."""
    make(today)
    audited(today / "rehearsed", 5, GRIDS, **OPTIONS)
    quick_identity()
    first = study_file(today, SMALL)
    run(first, today / "study", "smoke")
    run(first, today / "first", "small")
    run(study_file(today, NEXT, "next.py"), today / "next", evidence={"first": today / "first"})
    publish.export(today / "study", today / "study.zip")
    weights = {"w": torch.zeros(300, dtype=torch.bfloat16)}
    sync = hu.Sync(weights)
    weights["w"][::7] = 1.0
    sync.take().save(today / "change.safetensors")
    (today / "grid.txt").write_text("e4m3@128")
    (today / "document.json").write_bytes(canonical.dumps({"a": [1, 2.5, None, {"b": "c" * 20}], "d": True}))
    said = {shards.TRACE: "0" * 32, shards.PLACES: json.dumps({"0": [0, 16]})}
    state = {"0.moved.bits": torch.zeros(2, 2, dtype=torch.uint8), "0.sum": torch.zeros(2, 16)}
    (today / "shard.safetensors").write_bytes(b"".join(files_of_tensors.content(state, said)))
    training = begun()
    training.step()
    training.step()
    (today / "training.safetensors").write_bytes(training.save({"note": 1}, {"kept": torch.ones(3)}))
    mask = hu.Mask.load(today / "mask.safetensors")
    (today / "masks.safetensors").write_bytes(mask_recipes.pack({"one": mask, "two": mask}))
    sharded = today / "sharded"
    sharded.mkdir()
    shutil.copy(today / "rne.safetensors", sharded / "model-1-of-1.safetensors")
    held = [p.name for p in files_of_tensors.places(sharded / "model-1-of-1.safetensors")]
    index = {"metadata": {}, "weight_map": dict.fromkeys(held, "model-1-of-1.safetensors")}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))


def readers(folder: Path) -> list[Reader]:
    """One of each format, written here and now, and those of earlier releases."""
    today = folder / "today"
    today.mkdir()
    made_today(today)
    _, load_kahan = loads("kahan", today / "kahan.pt")
    kahan, _ = loads("kahan", today / "kahan.pt")
    _, load_old = loads("kahan", FIXTURES / "format_1" / "kahan.pt")
    run_of_a_decoder = begun()

    def load_dictionary(path: Path) -> None:
        kahan.load_state_dict(torch.load(path, weights_only=True)["opt"])

    def studied(path: Path) -> Any:
        return validate(path, code=False)

    old = {n: FIXTURES / f"format_{n}" / "trace" for n in (1, 2, 3)}
    checkpoint, change, mask = (today / f"{n}.safetensors" for n in ("kahan", "change", "mask"))
    return [
        Reader("a trace", today / "trace", every_number, documents_of),
        Reader("a trace of format 1", old[1], every_number, documents_of),
        Reader("a trace of format 2", old[2], every_number, documents_of),
        Reader("a trace of format 3", old[3], every_number, documents_of),
        Reader("a trace with rehearsals", today / "rehearsed", everything, documents_of),
        Reader("a trace that an audit resumes", today / "rehearsed", resumed, documents_of),
        Reader("a rank's shards", today / "shard.safetensors", _shard, tensors, 5),
        Reader("a rank's shards, sealed again", today / "shard.safetensors", _shard, sealed_tensors, 5),
        Reader("a mask", mask, hu.Mask.load, tensors, 5),
        Reader("a mask, sealed again", mask, hu.Mask.load, sealed_tensors, 5),
        Reader("a mask of format 1", FIXTURES / "format_1" / mask.name, hu.Mask.load, tensors, 5),
        Reader("masks of a study's run", today / "masks.safetensors", _masks, sealed_tensors, 5),
        Reader("a checkpoint of a write-back", checkpoint, load_kahan, tensors, 2, True),
        Reader("a checkpoint of a write-back, sealed again", checkpoint, load_kahan, sealed_tensors, 2, True),
        Reader(
            "a checkpoint of format 1", FIXTURES / "format_1" / checkpoint.name, load_old, tensors, 2, True
        ),
        Reader("a state_dict of a write-back", today / "kahan.pt", load_dictionary, dictionaries, 1, True),
        Reader("a change", change, Change.load, tensors, 5),
        Reader("a change, sealed again", change, Change.load, sealed_tensors, 5),
        Reader("a study's folder", today / "study", studied, documents_of),
        Reader("a study with evidence", today / "next", studied, documents_of),
        Reader("a study's archive", today / "study.zip", archive),
        Reader(
            "a decoder's training state",
            today / "training.safetensors",
            lambda path: run_of_a_decoder.load(path.read_bytes()),
            tensors,
            keeps=True,
        ),
        Reader("anybody's checkpoint", today / "rne.safetensors", lambda p: hu.check(p, lr=1e-3), tensors, 2),
        Reader(
            "anybody's checkpoint in shards", today / "sharded", lambda p: hu.check(p, lr=1e-3), documents_of
        ),
        Reader("a canonical document", today / "document.json", _document, documents_of, 20),
        Reader("a grid's name", today / "grid.txt", _grid, mutations.bytewise, 20),
    ]


def _document(path: Path) -> Any:
    return canonical.loads(path.read_bytes(), path)


def _grid(path: Path) -> Any:
    return hu.grid(path.read_bytes().decode("utf-8", "replace"))


def _shard(path: Path) -> Any:
    return shards._read(path, "0" * 32)


def _masks(path: Path) -> Any:
    return mask_recipes.unpacked(path.read_bytes(), str(path))

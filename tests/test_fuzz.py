"""Every reader against damaged files: an error of halfulp's own, or exactly the answers of the original.

Mutants are functions of fixed seeds (:mod:`mutations`). Where a format has no digest (format 1) some damage
cannot be seen; there it is held that nothing but errors of halfulp's own comes out. docs/reference/files.md
says which.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutations
import pytest
import torch
from fixtures.make_format_1 import GRIDS, answers, model, train, written_back

import halfulp as hu
from halfulp.writeback import load, save

FIRST = Path(__file__).parent / "fixtures" / "format_1"


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace, a mask and checkpoints of today."""
    folder = tmp_path_factory.mktemp("second")
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    options: dict[str, Any] = {"scores": ("e4m3", 1, 4), "expected_never_moved": True}
    options |= {"rehearse": ["e5m2", "bf16:kahan"]}
    with hu.Audit(optimizer, GRIDS, model=net, out=folder / "trace", part_steps=2, **options) as audit:
        train(net, optimizer, 5, audit)
        audit.evaluate(lambda: sum(float(p.detach().sum()) for p in net.parameters()))
    hu.allocate(folder / "trace", 0.75).save(folder / "mask.safetensors")
    for case in ("kahan", "sr-packed"):
        opt, net = written_back(case)
        train(net, opt, 3)
        save(opt, folder / f"{case}.safetensors")
        torch.save({"opt": opt.state_dict(), "model": net.state_dict()}, folder / f"{case}.pt")
    return folder


def outcome(read: Callable[[], Any]) -> Any:
    """What reading gives, or the error that it is refused with; any other error is the test's failure."""
    try:
        return read()
    except hu.HalfulpError as error:
        return error


class Tally:
    """Holds every outcome against the original's answers."""

    def __init__(self, expected: Any, strict: bool = True) -> None:
        self.expected, self.strict = expected, strict
        self.counts: Counter[str] = Counter()

    def add(self, which: str, found: Any) -> None:
        refused = isinstance(found, hu.HalfulpError)
        self.counts[type(found).__name__ if refused else "same" if found == self.expected else "other"] += 1
        assert refused or not self.strict or found == self.expected, which

    def check(self, most_accepted: float) -> None:
        total = self.counts.total()
        assert self.counts["same"] + self.counts["other"] <= most_accepted * total, self.counts


# ---- traces ------------------------------------------------------------------------------------------


def every_answer(folder: Path) -> Any:
    """All that a trace says: its numbers, its words, what it lists."""
    trace = hu.Trace.open(folder)
    said = [trace.forecast(spec) for spec in trace.rehearsals]
    forecasts = [
        (f.frozen().tolist(), f.never_moved(bound="upper").tolist(), list(f.losses.rows())) for f in said
    ]
    told = (answers(trace), hu.verdict(trace).lines, trace.grids, trace.tensors, trace.manifest["options"])
    return *told, forecasts


def damaged_files(folder: Path, count: int, seed: int, tally: Tally, read: Callable[[Path], Any]) -> None:
    """Bytes of single files of a folder changed, one mutant after the other, and put back."""
    listed = sorted(p for p in folder.rglob("*") if p.is_file())
    for which, (file, content) in mutations.each(count, seed, lambda rng: _damaged(listed, rng)):
        original = file.read_bytes()
        file.write_bytes(content)
        tally.add(f"{which} {file.relative_to(folder)}", outcome(lambda: read(folder)))
        file.write_bytes(original)


def _damaged(listed: list[Path], rng: random.Random) -> tuple[Path, bytes]:
    json_ones = [file for file in listed if file.suffix == ".json"]
    if rng.random() < 0.5:
        file = rng.choice(json_ones)
        content = file.read_bytes()
        return file, (mutations.edit_text if rng.random() < 0.6 else mutations.bytewise)(content, rng)
    file = rng.choice(listed)
    return file, mutations.bytewise(file.read_bytes(), rng)


def test_traces(second: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(second / "trace", tmp_path / "trace"))
    tally = Tally(every_answer(folder))
    damaged_files(folder, 1500, 1, tally, every_answer)
    tally.check(0.1)  # of which spaces between the words of a document
    assert every_answer(folder) == tally.expected


def test_traces_of_format_1(tmp_path: Path) -> None:
    """Tables have digests there, the manifest has none: a plausible one is believed."""
    folder = Path(shutil.copytree(FIRST / "trace", tmp_path / "trace"))
    tally = Tally(every_answer(folder), strict=False)
    damaged_files(folder, 600, 2, tally, every_answer)
    tally.check(0.25)
    for table in folder.rglob("*.parquet"):  # and no table or state is ever believed
        content = table.read_bytes()
        for which, mutant in mutations.each(20, 3, lambda rng, c=content: mutations.bytewise(c, rng)):
            table.write_bytes(mutant)
            assert mutant == content or isinstance(
                outcome(lambda: every_answer(folder)), hu.CorruptionError
            ), which
        table.write_bytes(content)


@pytest.mark.parametrize("version", [1, 2])
def test_files_of_a_trace_swapped_copied_and_removed(second: Path, tmp_path: Path, version: int) -> None:
    origin = FIRST / "trace" if version == 1 else second / "trace"
    tally = Tally(every_answer(origin))
    for i in range(120):
        folder = Path(shutil.copytree(origin, tmp_path / "trace"))
        done = mutations.rearrange(folder, random.Random(f"4/{i}"))
        if version == 2 or "digests.json" not in done:  # a part of format 1 has nothing but its digests
            tally.add(done, outcome(lambda f=folder: every_answer(f)))
        shutil.rmtree(folder)
    tally.check(0.2)  # a file swapped with itself, or with its like


# ---- masks and checkpoints ---------------------------------------------------------------------------


def read_mask(path: Path) -> Any:
    mask = hu.Mask.load(path)
    return {n: t.tolist() for n, t in mask.tiles.items()}, mask.sizes, mask.score, mask.budget


def mutant_of_tensors(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file with its bytes changed, or its header, or the JSON text in its metadata."""
    length = int.from_bytes(content[:8], "little")
    if rng.random() < 0.5:
        return mutations.bytewise(content, rng)
    header = json.loads(content[8 : 8 + length])
    if rng.random() < 0.5:
        header = mutations.edit(header, rng)
    else:
        meta = header["__metadata__"]
        key = rng.choice([k for k in meta if meta[k].startswith("{")])
        meta[key] = json.dumps(mutations.edit(json.loads(meta[key]), rng))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


@pytest.mark.parametrize("version", [1, 2])
def test_masks(second: Path, tmp_path: Path, version: int) -> None:
    file = (FIRST if version == 1 else second) / "mask.safetensors"
    content = file.read_bytes()
    tally = Tally(read_mask(file), strict=version == 2)
    for which, mutant in mutations.each(1500, 5, lambda rng: mutant_of_tensors(content, rng)):
        (tmp_path / "mask").write_bytes(mutant)
        tally.add(which, outcome(lambda: read_mask(tmp_path / "mask")))
    tally.check(0.1 if version == 2 else 0.3)


class States:
    """A write-back to load mutants into, and what it holds."""

    def __init__(self, case: str, folder: Path) -> None:
        self.saved = torch.load(folder / f"{case}.pt", weights_only=True)
        self.opt, self.net = written_back(case)
        self.net.load_state_dict(self.saved["model"], strict=False)

    def held(self) -> Any:
        """Everything that a load may change."""
        state = self.opt.state_dict()
        line = json.loads(state["param_groups"][0]["halfulp"])
        tensors = {
            (k, name): v.tolist() if isinstance(v, torch.Tensor) else v
            for k, entry in state["state"].items()
            for name, v in entry.items()
        }
        return (
            line["step"],
            repr(tensors),
            {k: v for k, v in state["param_groups"][0].items() if k != "halfulp"},
        )

    def from_file(self, path: Path) -> Any:
        load(self.opt, path)
        return self.held()

    def from_dictionary(self, state: Any) -> Any:
        self.opt.load_state_dict(state)
        return self.held()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", ["kahan", "sr-packed"])
def test_files_of_checkpoints(second: Path, tmp_path: Path, case: str, version: int) -> None:
    folder = FIRST if version == 1 else second
    states = States(case, folder)
    content = (folder / f"{case}.safetensors").read_bytes()
    tally = Tally(states.from_file(folder / f"{case}.safetensors"), strict=version == 2)
    for which, mutant in mutations.each(1000, 6, lambda rng: mutant_of_tensors(content, rng)):
        (tmp_path / "state").write_bytes(mutant)
        tally.add(which, outcome(lambda: states.from_file(tmp_path / "state")))
    tally.check(0.1 if version == 2 else 0.8)


def mutant_of_state(state: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A state with a tensor changed by a bit, dropped, swapped or made strange, or its line edited."""
    made = copy.deepcopy(state)
    numbers = [k for k, entry in made["state"].items() if entry]
    entry = made["state"][rng.choice(numbers)]
    name, other = rng.choice(sorted(entry)), made["state"][rng.choice(numbers)]
    how = rng.randrange(8)
    if how <= 2 and entry[name].numel():
        raw = entry[name].clone().reshape(-1).view(torch.uint8)
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        entry[name] = raw.view(entry[name].dtype).reshape(entry[name].shape)
    elif how == 3:
        del entry[name]
    elif how == 4:
        entry[name], other[name] = other.get(name, entry[name]), entry[name]
    elif how == 5:
        entry[name] = rng.choice(
            [None, 3, "x", [], torch.ones(2), entry[name].double(), entry[name].reshape(-1)[:1]]
        )
    else:
        group = made["param_groups"][0]
        edit = mutations.edit_text if how == 6 else mutations.bytewise
        group["halfulp"] = edit(group["halfulp"].encode(), rng).decode("utf-8", "replace")
    return made


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", ["kahan", "sr-packed"])
def test_dictionaries_of_checkpoints(second: Path, case: str, version: int) -> None:
    states = States(case, FIRST if version == 1 else second)
    tally = Tally(states.from_dictionary(states.saved["opt"]), strict=version == 2)
    for which, mutant in mutations.each(1000, 7, lambda rng: mutant_of_state(states.saved["opt"], rng)):
        tally.add(which, outcome(lambda m=mutant: states.from_dictionary(m)))
    tally.check(0.1 if version == 2 else 0.8)

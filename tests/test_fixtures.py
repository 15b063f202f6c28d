"""Files of every released format open, say what they said, and can be gone on with.

``tests/fixtures/format_N`` was written by the release that wrote format N, by the script beside it. A new
format gets a folder of its own when it is released; none is ever written again.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from fixtures.make_format_1 import CASES, answers, model, train, written_back

import halfulp as hu
from halfulp import trace
from halfulp.study import declaration, publish
from halfulp.study.validate import validate
from halfulp.trace import schema
from halfulp.writeback import load, mask
from halfulp.writeback.saving import state_dict as checkpoint

HERE = Path(__file__).parent / "fixtures"
FORMATS = sorted(int(p.name.removeprefix("format_")) for p in HERE.glob("format_*"))
every_format = pytest.mark.parametrize(
    "folder", [HERE / f"format_{n}" for n in FORMATS], ids=lambda p: p.name
)
studies = [HERE / f"format_{n}" for n in FORMATS if (HERE / f"format_{n}" / "study").is_dir()]


def test_every_format_that_is_read_has_its_files() -> None:
    """All but the newest, which every other test writes; and none says of itself that it is another."""
    assert set(FORMATS) >= set(schema.READ) - {trace.FORMAT}
    assert set(FORMATS) >= set(mask.READ) - {mask.FORMAT}
    assert set(FORMATS) >= set(checkpoint.READ) - {checkpoint.VERSION}
    for n in FORMATS:
        assert json.loads((HERE / f"format_{n}" / "trace" / "manifest.json").read_text())["format"] == n


def test_the_reference_lists_the_formats() -> None:
    """The table in docs/reference/files.md has what this release writes and what it reads."""
    page = (Path(__file__).parent.parent / "docs" / "reference" / "files.md").read_text()
    listed = {
        m[1]: (int(m[2]), m[3]) for m in re.finditer(r"^\| (.+?) \| (\d+) \| ([\d, ]+?) \|", page, re.M)
    }
    for what, writes, reads in (
        ("a trace", trace.FORMAT, schema.READ),
        ("a mask", mask.FORMAT, mask.READ),
        ("a checkpoint of a write-back", checkpoint.VERSION, checkpoint.READ),
        ("a study", declaration.FORMAT, (declaration.FORMAT,)),
    ):
        assert listed[what] == (writes, ", ".join(map(str, reads))), what


@every_format
def test_a_trace_says_what_it_said(folder: Path) -> None:
    found = hu.Trace.open(folder / "trace")
    assert answers(found) == json.loads((folder / "answers.json").read_text())
    assert hu.verdict(found).lines


@every_format
def test_a_trace_of_an_older_format_is_read_and_not_gone_on_with(folder: Path, tmp_path: Path) -> None:
    """The refusal leaves every byte as it was."""
    copy = Path(shutil.copytree(folder / "trace", tmp_path / "trace"))
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with (
        pytest.raises(hu.UsageError, match="read as before; record what follows into another folder"),
        hu.Audit(optimizer, ["bf16", "e4m3@128"], model=net, out=copy, resume=True),
    ):
        pass
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    assert hu.Trace.open(copy).steps.tolist() == hu.Trace.open(folder / "trace").steps.tolist()


@every_format
def test_a_mask_is_what_the_trace_gives(folder: Path) -> None:
    kept, same = hu.Mask.load(folder / "mask.safetensors"), hu.allocate(folder / "trace", 0.75)
    assert (kept.sizes, kept.score, kept.budget) == (same.sizes, same.score, same.budget)
    assert kept.tiles.keys() == same.tiles.keys()
    assert all(torch.equal(kept.tiles[name], same.tiles[name]) for name in same.tiles)


@every_format
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_gone_on_with(folder: Path, case: str) -> None:
    """From its file and from its dictionary: the same weights after another step."""
    ends = []
    for how in ("file", "dictionary"):
        opt, net = written_back(case)
        saved = torch.load(folder / f"{case}.pt", weights_only=True)
        net.load_state_dict(saved["model"], strict=CASES[case][2] != "packed")
        if how == "file":
            load(opt, folder / f"{case}.safetensors")
        else:
            opt.load_state_dict(saved["opt"])
        assert opt.steps == 3
        train(net, opt, 1)
        ends.append(net.state_dict())
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("name", ["study", "study.zip"])
@pytest.mark.parametrize("folder", studies, ids=lambda p: p.name)
def test_a_study_and_its_archive_validate(folder: Path, name: str) -> None:
    """By what they carry; that the code has changed since is said, and is no failure."""
    if name.endswith(".zip"):
        with publish.unpacked(folder / name) as unpacked:
            assert validate(unpacked).exit_code == 0
    else:
        assert validate(folder / name).exit_code == 0

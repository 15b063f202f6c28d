"""Files of earlier releases still open, and go on where they may; folders may have any name."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from fixtures.make_format_1 import CASES, answers, train, written_back
from format_traces import FIRST, SECOND, record

import halfulp as hu
from halfulp import tensors
from halfulp.errors import TamperingError
from halfulp.report.gather import gather
from halfulp.writeback import load, save


def test_a_trace_of_format_1() -> None:
    """Its numbers are those that the release that wrote it gave."""
    trace = hu.Trace.open(FIRST / "trace")
    assert answers(trace) == json.loads((FIRST / "answers.json").read_text())


@pytest.mark.parametrize("version", [1, 2, 4])
def test_weights_that_an_earlier_release_kept_are_checked_and_not_read(version: int, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIRST.with_name(f"format_{version}") / "trace", tmp_path / "trace"))
    assert hu.Trace.open(folder).manifest["options"]["keep"]
    kept = folder / "parts/000001/kept.safetensors"
    kept.write_bytes(kept.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(TamperingError, match=r"kept\.safetensors is not what was written"):
        hu.Trace.open(folder)
    assert hu.Trace.open(folder, verify=False).steps.tolist() == [1, 2, 3, 4, 5]


def test_a_mask_of_format_1() -> None:
    mask = hu.Mask.load(FIRST / "mask.safetensors")
    same = hu.allocate(FIRST / "trace", 0.75)
    assert (mask.sizes, mask.score, mask.budget) == (same.sizes, same.score, same.budget)
    assert all(torch.equal(mask.tiles[name], same.tiles[name]) for name in same.tiles)


def loaded(case: str, how: str) -> tuple[hu.WriteBack, torch.nn.Module]:
    """A write-back that took up the state of a case, from a file or a dictionary."""
    opt, net = written_back(case)
    saved = torch.load(FIRST / f"{case}.pt", weights_only=True)
    net.load_state_dict(saved["model"], strict=CASES[case][2] != "packed")
    if how == "file":
        load(opt, FIRST / f"{case}.safetensors")
    else:
        opt.load_state_dict(saved["opt"])
    return opt, net


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_of_version_1(case: str) -> None:
    """A file and a dictionary give the same state, and training goes on with it."""
    (one, net), (other, _) = loaded(case, "file"), loaded(case, "dictionary")
    a, b = one.state_dict(), other.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert one.steps == 3
    for number, entry in a["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, b["state"][number][name]), (number, name)
    assert json.loads(a["param_groups"][0]["halfulp"])["version"] == 2
    train(net, one, 1)


def test_a_trace_of_format_2() -> None:
    trace = hu.Trace.open(SECOND / "trace")
    assert answers(trace) == json.loads((SECOND / "answers.json").read_text())
    assert trace.rehearsals == []


@pytest.mark.parametrize("version", [1, 2])
def test_an_older_trace_is_read_and_not_gone_on_with(version: int, tmp_path: Path) -> None:
    """It stays as it is, to the byte."""
    folder = Path(shutil.copytree(FIRST.with_name(f"format_{version}") / "trace", tmp_path / "trace"))
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with pytest.raises(hu.UsageError, match=f"it has trace format {version}, and recordings go on in"):
        record(folder, 7, resume=True)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


def test_one_bit_in_a_checkpoint(tmp_path: Path) -> None:
    """In every tensor, ours and the optimizer's, of a file and of a dictionary."""
    opt, net = written_back("kahan")
    train(net, opt, 2)
    save(opt, tmp_path / "state")
    state = copy.deepcopy(opt.state_dict())
    content = (tmp_path / "state").read_bytes()
    for number, entry in state["state"].items():
        for name, value in entry.items():
            damaged = copy.deepcopy(state)
            damaged["state"][number][name].reshape(-1).view(torch.uint8)[-1] ^= 0x40
            with pytest.raises(TamperingError, match="not what was saved"):
                opt.load_state_dict(damaged)
            at = content.index(bytes(tensors.raw(value)))
            end = at + tensors.raw(value).nbytes - 1
            (tmp_path / "state").write_bytes(
                content[:end] + bytes([content[end] ^ 0x40]) + content[end + 1 :]
            )
            with pytest.raises(TamperingError, match="not what was written"):
                load(opt, tmp_path / "state")
    line = json.loads(state["param_groups"][0]["halfulp"])
    state["param_groups"][0]["halfulp"] = json.dumps({**line, "step": 7})
    with pytest.raises(TamperingError, match="the step was changed"):
        opt.load_state_dict(state)
    state["param_groups"][0]["halfulp"] = json.dumps(line)
    state["param_groups"][0]["lr"] = 0.5  # a setting is the user's to change
    opt.load_state_dict(state)
    assert opt.param_groups[0]["lr"] == 0.5


def test_a_folder_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    """What is written there can be read there, and taken up again."""
    folder = tmp_path / os.fsdecode(b"n\xff")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system has no such names")
    record(folder / "second", 3)
    shutil.copytree(FIRST / "trace", folder / "first")
    for name, steps in (("second", 3), ("first", 5)):
        assert len(set(hu.Trace.open(folder / name).table()["step"])) == steps
    record(folder / "second", 7, resume=True)
    assert hu.Trace.open(folder / "second").steps.tolist() == list(range(1, 8))
    assert hu.verdict(hu.Trace.open(folder / "second")).lines


@pytest.mark.parametrize(("name", "other"), [("run[1]", "run1"), ("a*b", "a-b"), ("~", "x"), ("lr=0.1", "x")])
def test_a_folder_whose_name_means_something_else(
    name: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patterns, the user's own folder and Hive's columns: what is read there is what was written there."""
    monkeypatch.chdir(tmp_path)
    here, beside = Path(name), Path(other)
    try:
        here.mkdir()
    except OSError:
        pytest.skip("this file system has no such names")
    for folder, rate in ((beside, 1.0), (here, 1e-3)):
        shutil.copytree(FIRST / "trace", folder / "first")
        record(folder / "second", 3, lr=rate)
    plain = record(tmp_path / "plain", 3)
    found = hu.Trace.open(here / "second")
    assert found.table().equals(hu.Trace.open(plain).table())
    assert not found.table().equals(hu.Trace.open(beside / "second").table())
    assert hu.verdict(found).lines == hu.verdict(hu.Trace.open(plain)).lines
    assert gather(found).findings() == gather(hu.Trace.open(plain)).findings()
    record(here / "second", 7, resume=True)
    assert hu.Trace.open(here / "second").steps.tolist() == list(range(1, 8))

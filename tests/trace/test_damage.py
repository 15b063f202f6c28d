"""Damaged traces: every damage is noticed, and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_reference import made

import halfulp as hu
from halfulp.documents import DIGEST, sealed
from halfulp.errors import TamperingError, VersionError
from halfulp.trace.resuming import Resumed

GRIDS = ["bf16", "e4m3@128"]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def garbage(file: Path) -> None:
    file.write_bytes(b"\x00\xffnot json")


def changed(key: str, value: Any) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        manifest = json.loads(file.read_text())
        if value is None:
            del manifest[key]
        else:
            manifest[key] = value
        file.write_text(json.dumps(manifest))

    return change


DAMAGE: dict[str, tuple[str, Callable[[Path], Any], type[hu.HalfulpError], str]] = {
    "truncated table": ("parts/000001/tables.safetensors", truncate, TamperingError, "not what was"),
    "empty table": ("parts/000001/tables.safetensors", lambda f: f.write_bytes(b""), TamperingError, "0"),
    "flipped bit": ("parts/000002/tables.safetensors", flip, TamperingError, "SHA-256 differs"),
    "flipped bit of the state": ("state/000003.safetensors", flip, TamperingError, "SHA-256"),
    "missing table": ("parts/000001/tables.safetensors", Path.unlink, hu.CorruptionError, "is missing"),
    "missing state": ("state/000003.safetensors", Path.unlink, hu.CorruptionError, "is missing"),
    "missing document": ("parts/000001/part.json", Path.unlink, hu.CorruptionError, "is missing"),
    "garbage document": ("parts/000001/part.json", garbage, hu.CorruptionError, "not the document of a part"),
    "a list for a document": (
        "parts/000001/part.json", lambda f: f.write_text("[]"), hu.CorruptionError, "not the document of a p",
    ),
    "an empty document": (
        "parts/000001/part.json", lambda f: f.write_text("{}"), hu.CorruptionError, "it has no kind",
    ),
    "an edited document": (
        "parts/000001/part.json", changed("last_step", 5), TamperingError, "is not what was written",
    ),
    "missing manifest": ("manifest.json", Path.unlink, hu.CorruptionError, "is not a trace"),
    "garbage manifest": ("manifest.json", garbage, hu.CorruptionError, "not the manifest of a trace"),
    "truncated manifest": ("manifest.json", truncate, hu.CorruptionError, "not the manifest of a trace"),
    "a list for a manifest": (
        "manifest.json", lambda f: f.write_text("[1, 2]"), hu.CorruptionError, "not the manifest of a trace",
    ),
    "deeply nested manifest": (
        "manifest.json", lambda f: f.write_text("[" * 10**5), hu.CorruptionError, "not the manifest of a tr",
    ),
    "another kind": ("manifest.json", changed("kind", "tensorboard"), hu.CorruptionError, "'tensorboard'"),
    "no tensors": ("manifest.json", changed("tensors", None), hu.CorruptionError, "it has no tensors"),
    "newer format": ("manifest.json", changed("format", 6), VersionError, "has trace format 6"),
    "older format": ("manifest.json", changed("format", 1), TamperingError, "format 1 does not"),
    "swapped grids": (
        "manifest.json", changed("grids", GRIDS[::-1]), TamperingError, "is not what was written",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_noticed_and_named(copied: Path, what: str) -> None:
    """The right kind of error, with the file that is damaged in its text and an exit code of 3."""
    name, damage, kind, said = DAMAGE[what]
    damage(copied / name)
    with pytest.raises(hu.HalfulpError, match=said) as caught:
        hu.Trace.open(copied)
    assert type(caught.value) is kind
    assert caught.value.exit_code == 3
    named = copied if what == "missing manifest" else copied / name
    assert str(named) in str(caught.value)


def test_a_missing_part_is_noticed(copied: Path) -> None:
    shutil.rmtree(copied / "parts" / "000001")
    with pytest.raises(TamperingError, match="part 000001 is missing; the next one found is 000002"):
        hu.Trace.open(copied)


def test_a_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for place, said in (
        (tmp_path, r"expected a folder with a manifest\.json"),
        (tmp_path / "nowhere", "there is no such folder"),
        (tmp_path / "notes.txt", "it is a file"),
    ):
        with pytest.raises(hu.CorruptionError, match=f"is not a trace: {said}"):
            hu.Trace.open(place)


def test_a_folder_of_traces_and_a_manifest_are_told_from_a_trace(tmp_path: Path) -> None:
    """The two things that people give in place of a trace's folder."""
    (tmp_path / "runs" / "one").mkdir(parents=True)
    manifest = tmp_path / "runs" / "one" / "manifest.json"
    manifest.write_text("{}")
    with pytest.raises(
        hu.CorruptionError, match=r"a folder with traces in it\. Give one of them, such as .*one\."
    ):
        hu.Trace.open(tmp_path / "runs")
    with pytest.raises(hu.CorruptionError, match=r"it is a file\. Give its folder, .*one\."):
        hu.Trace.open(manifest)


def test_a_damaged_trace_is_not_gone_on_with(copied: Path) -> None:
    flip(copied / "state" / "000003.safetensors")
    model = made("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"scores": ("e4m3", 1, 5), "resume": True}
    with pytest.raises(TamperingError, match=r"000003\.safetensors"):
        hu.Audit(
            optimizer, GRIDS, model=model, out=copied, **{"expected_never_moved": True, **options}
        ).start()


def test_files_of_ranks_that_are_missing_are_named(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Resumed, "shards", (4, [0, 1]))
    with pytest.raises(
        hu.UsageError, match=r"2 of 2 files are missing in .*shards, such as 000000004\.0\.safe"
    ):
        Resumed.of(hu.Trace.open(copied))


@pytest.mark.parametrize(
    ("key", "change", "said"),
    [
        ("tensors", lambda v: [*v, v[0] | {"id": 1}], "share a name or an id"),
        ("grids", lambda v: v * 2, "at least one known grid, none of them twice"),
    ],
)
def test_a_manifest_that_repeats_itself(
    copied: Path, key: str, change: Callable[[Any], Any], said: str
) -> None:
    path = copied / "manifest.json"
    found = json.loads(path.read_text())
    del found[DIGEST]
    path.write_bytes(sealed({**found, key: change(found[key])}))
    with pytest.raises(hu.CorruptionError, match=said):
        hu.Trace.open(copied)


def test_reading_without_verifying(copied: Path) -> None:
    """The numbers of an intact table can be had although another file is damaged; of that one, none."""
    flip(copied / "state" / "000003.safetensors")
    trace = hu.Trace.open(copied, verify=False)
    assert len(trace.frozen("bf16", "all", of="weights")) == 7
    flip(copied / "parts" / "000002" / "tables.safetensors")
    with pytest.raises(TamperingError, match=r"tables\.safetensors is not what was written"):
        hu.Trace.open(copied, verify=False).update_ratio()
    with pytest.raises(TamperingError, match=r"000003\.safetensors is not what was written"):
        trace.scores()


# ---- names are inert -------------------------------------------------------------------------------------

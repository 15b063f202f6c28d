"""Corpora of the hub as token files: what is written, resumed, refused; from a small copy in their format."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
from forks import killed
from typer.testing import CliRunner

from halfulp import data, files
from halfulp.cli import app
from halfulp.data import bpe, prepare
from halfulp.errors import CorruptionError, TamperingError, UsageError
from halfulp.paper.arms.arm import WEB
from halfulp.paper.tokens import open_corpus
from halfulp.study import provenance

SHARDS = [["held out", "one", "two é"], ["out as well", "<|endoftext|>"], ["the last", "", "three"]]
END = 256


def written() -> dict[str, list[int]]:
    """The tokens that have to come out: bytes, and an end after each document."""
    tokens: dict[str, list[int]] = {"train": [], "val": []}
    for shard in SHARDS:
        for row, text in enumerate(shard):
            tokens["train" if row else "val"] += [number_of(byte) for byte in text.encode()] + [END]
    return tokens


def number_of(byte: int) -> int:
    return sorted(bpe.byte_symbols()).index(bpe.byte_symbols()[byte])


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of three shards; GPT-2's encoding has bytes alone."""
    names = {symbol: i for i, symbol in enumerate(sorted(bpe.byte_symbols()))}
    small = bpe.Gpt2Bpe({**names, "<|endoftext|>": END}, [])
    monkeypatch.setattr(bpe.Gpt2Bpe, "published", lambda: small)
    for under in ("plain_text", "20231101.en"):
        (tmp_path / "copy" / under).mkdir(parents=True)
    put_shards(tmp_path / "copy" / "plain_text", SHARDS)
    put_shards(tmp_path / "copy" / "20231101.en", SHARDS[:1])
    (tmp_path / "copy" / "20231101.en").rename(tmp_path / "20231101.en")
    return tmp_path / "copy"


def put_shards(folder: Path, shards: list[list[str]]) -> None:
    for i, texts in enumerate(shards):
        path = folder / f"train-{i:05}-of-{len(shards):05}.parquet"
        polars.DataFrame({"id": list(map(str, range(len(texts)))), "text": texts}).write_parquet(path)


def make(folder: Path, source: Path | str, **options: Any) -> Any:
    return prepare.prepare("openwebtext", folder, str(source), **{"say": lambda _: None, **options})


def tokens_in(folder: Path) -> dict[str, list[int]]:
    return {
        split: np.fromfile(folder / "openwebtext" / f"{split}.bin", dtype="<u2").tolist()
        for split in prepare.SPLITS
    }


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "openwebtext").iterdir())


def test_a_copy_becomes_token_files_that_studies_read(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = make(tmp_path, copy)
    assert left_in(tmp_path) == ["prepared.json", "train.bin", "val.bin"]
    assert tokens_in(tmp_path) == written()
    monkeypatch.setenv(data.FOLDER, str(tmp_path))
    sealed = provenance.hash_data(("openwebtext/train.bin", "openwebtext/val.bin"), None)
    assert {name.partition("/")[2]: one["sha256"] for name, one in sealed.items()} == digests
    train, held_out = open_corpus(lambda name: provenance.locate(name, None), WEB, 50304)
    assert {"train": train.tolist(), "val": held_out.tolist()} == written()
    with pytest.raises(UsageError, match="another encoding than the model's: expected tokens below 256"):
        open_corpus(lambda name: provenance.locate(name, None), WEB, 256)
    assert make(tmp_path, copy / "gone") == digests  # nothing is asked for again
    (tmp_path / "openwebtext" / "val.bin").write_bytes(b"\0\0")
    with pytest.raises(TamperingError, match="are not those that were made"):
        make(tmp_path, copy)


def test_killed_before_any_operation_on_the_disk_it_goes_on(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by kill -9, at each of them in turn."""
    whole = make(tmp_path / "whole", copy)
    made = prepare.encoder("openwebtext", "gpt2")
    known = {path.name: prepare.encoded(path, made) for path in (copy / "plain_text").iterdir()}
    monkeypatch.setattr(prepare, "encoded", lambda path, writes: known[path.name])  # polars cannot be forked
    for operation in range(1, 1000):
        folder = tmp_path / str(operation)
        if not killed(lambda event, to=folder: make(to, copy), operation):
            break
        assert make(folder, copy) == whole
        assert tokens_in(folder) == written()
        assert left_in(folder) == left_in(tmp_path / "whole")
    assert operation > 30


def test_a_shard_that_fails_costs_that_shard_alone(copy: Path, tmp_path: Path) -> None:
    second = copy / "plain_text" / "train-00001-of-00003.parquet"
    content = second.read_bytes()
    said: list[str] = []
    second.unlink()
    with pytest.raises(UsageError, match="has 2 files"):
        make(tmp_path, copy)
    second.write_bytes(content[:-1] + b"?")
    with pytest.raises(CorruptionError, match="not a Parquet file with a column text"):
        make(tmp_path, copy)
    with (tmp_path / "openwebtext" / "train.bin.part").open("ab") as part:
        part.write(b"half a sha")
    second.write_bytes(content)
    with (tmp_path / "openwebtext" / "prepared.json").open() as file:
        assert ["tokens" in shard for shard in json.load(file)["shards"]] == [True, False, False]
    make(tmp_path, copy, say=said.append)
    assert said[0].startswith("2 of 3 shards of Skylion007/openwebtext to read")
    assert tokens_in(tmp_path) == written()


def test_what_is_long_or_large_is_asked_for(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, value in (("ASKED_BYTES", 10), ("ASKED_SECONDS", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(prepare, limit, value)
            with pytest.raises(UsageError, match=r"3 of 3 shards .* minutes on one core .*--yes begins"):
                make(tmp_path, copy)
    monkeypatch.setattr(prepare, "ASKED_BYTES", 10)
    make(tmp_path, copy, yes=True)
    assert tokens_in(tmp_path) == written()


def test_a_shard_of_other_columns_and_files_of_others_are_refused(copy: Path, tmp_path: Path) -> None:
    first = copy / "plain_text" / "train-00000-of-00003.parquet"
    polars.DataFrame({"body": ["a"]}).write_parquet(first)
    with pytest.raises(CorruptionError, match="column text"):
        make(tmp_path, copy)
    polars.DataFrame({"text": ["a", None]}).write_parquet(first)
    with pytest.raises(CorruptionError, match="that are no text"):
        make(tmp_path, copy)
    mine = tmp_path / "mine" / "openwebtext" / "train.bin"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"\0\0")
    with pytest.raises(UsageError, match="was not made here, and is not replaced"):
        make(tmp_path / "mine", copy)
    with pytest.raises(UsageError, match="no corpus 'c4' to prepare"):
        prepare.prepare("c4", tmp_path)


def test_wikipedia_is_written_with_a_tokenizer_that_is_named(copy: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    with pytest.raises(UsageError, match="Wikipedia needs --tokenizer"):
        prepare.prepare("wikipedia", tmp_path, str(tmp_path))
    pieces = {"<unk>": 0, "<s>": 1, "</s>": 2, "one": 3, "two": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(pieces, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(tmp_path / "tokenizer.json"))
    given: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer.json"), "say": lambda _: None}
    prepare.prepare("wikipedia", tmp_path, str(tmp_path), **given)
    found = np.fromfile(tmp_path / "wikipedia" / "train.bin", dtype="<u2").tolist()
    assert found == [3, 2, 4, 0, 2]
    with pytest.raises(UsageError, match="holds wikipedia in tokens of"):
        prepare.prepare("wikipedia", tmp_path, str(tmp_path), tokenizer="gpt2")
    del pieces["</s>"]
    tokenizers.Tokenizer(tokenizers.models.WordLevel(pieces, unk_token="<unk>")).save(given["tokenizer"])
    with pytest.raises(UsageError, match="to end a document"):
        prepare.prepare("wikipedia", tmp_path / "other", str(tmp_path), **given)


# ---- the hub, as far as it can be had here --------------------------------------------------------------


class Hub(SimpleHTTPRequestHandler):
    """Answers as the hub does: the newest commit, the tree with digests, and files."""

    copy: Path
    broken = ""

    def do_GET(self) -> None:  # the name that http.server calls
        repository = "datasets/Skylion007/openwebtext"
        if self.path == f"/api/{repository}/revision/main":
            return self.answer(json.dumps({"sha": "c0ffee"}).encode())
        if self.path == f"/api/{repository}/tree/c0ffee?recursive=true":
            return self.answer(json.dumps([self.listed(path) for path in self.copy.rglob("*")]).encode())
        path = self.copy / self.path.removeprefix(f"/{repository}/resolve/c0ffee/")
        return self.answer(path.read_bytes()[: 100 if path.name == self.broken else None])

    def listed(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.copy).as_posix()
        if path.is_dir():
            return {"type": "directory", "oid": "0", "size": 0, "path": name}
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        size = path.stat().st_size
        large = {"oid": digest, "size": size, "pointerSize": 134}
        return {"type": "file", "oid": "1", "size": size, "path": name, "lfs": large}

    def answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(copy: Path) -> Iterator[str]:
    handler = type("OfThisCopy", (Hub,), {"copy": copy})
    server = HTTPServer(("127.0.0.1", 0), functools.partial(handler))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_shards_are_downloaded_verified_and_removed(
    hub: str, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "README.md").write_text("not a shard")
    monkeypatch.setattr(Hub, "broken", "train-00001-of-00003.parquet")
    with pytest.raises(TamperingError, match="not the listed shard"):
        make(tmp_path, hub)
    assert left_in(tmp_path) == ["prepared.json", "train.bin.part", "val.bin.part"]
    monkeypatch.setattr(Hub, "broken", "")
    make(tmp_path, hub)
    assert tokens_in(tmp_path) == written()
    assert json.loads((tmp_path / "openwebtext" / "prepared.json").read_text())["revision"] == "c0ffee"
    with pytest.raises(UsageError, match="could not be listed at http"):
        make(tmp_path / "other", f"{hub}/nothing")


def test_the_command(copy: Path, tmp_path: Path) -> None:
    asked = ["data", "prepare", "openwebtext", "--source", str(copy), "--to", str(tmp_path / "to")]
    planned = CliRunner().invoke(app, [*asked, "--plan"])
    assert "3 of 3 shards" in planned.output
    assert not (tmp_path / "to").exists()
    made: Any = CliRunner().invoke(app, asked)
    assert made.exit_code == 0
    digest = files.sha256(tmp_path / "to" / "openwebtext" / "train.bin")
    assert digest in made.output

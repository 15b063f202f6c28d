"""The prose corpus from its sources: prose out of XHTML, pieces learned, resumed builds, digests."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data import small_corpus
from data.small_corpus import archive
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from halfulp import data
from halfulp.cli import app
from halfulp.data import bpe, prose
from halfulp.errors import TamperingError, UsageError


def test_prose_is_what_is_read() -> None:
    pages = {
        "titlepage": "<h1>Title</h1>",
        "preface-1": "<p>Before.</p>",
        "epigraph": "<blockquote><p>So it is.</p><cite>Somebody</cite></blockquote>",
        "chapter-1": (
            "<section><h2>I</h2>\n\t<p>\u201cYes,\u201d said <i>he</i>\u2060\u2014and\n went\u200a\u2026"
            '<a epub:type="noteref" href="x">1</a></p><p>One<br/>\n\ttwo \u2e3a</p>'
            "<table><tr><td>9</td></tr></table></section>"
        ),
        "endnotes": "<p>1. A note.</p>",
    }
    expected = 'So it is.\n\nI\n\n"Yes," said he--and went ...\n\nOne\ntwo ----\n'
    assert prose.prose(io.BytesIO(archive(pages))) == expected.encode()


@given(st.text("ab cé\n'", max_size=60))
def test_pieces_are_those_of_the_library(text: str) -> None:
    """Learned from any text, by hand and by `tokenizers`: the same file, byte for byte."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    how = tokenizers.trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(text.splitlines(keepends=True), how)
    words, places = prose.cut(text)
    counts = dict(zip(words, np.bincount(places, minlength=len(words)).tolist(), strict=True))
    learned = bpe.learn(counts, 270)
    assert prose.described(*learned).decode() == made.to_str(pretty=True)
    ours = [t for line in text.splitlines(keepends=True) for t in bpe.Gpt2Bpe(*learned).encode(line)]
    assert ours == [t for line in text.splitlines(keepends=True) for t in made.encode(line).ids]


@pytest.mark.skipif("HALFULP_DATA" not in os.environ, reason="HALFULP_DATA is not set")
def test_the_held_out_tokens_are_the_published_ones() -> None:
    if any(data.located(data.DATASETS[name]) is None for name in prose.names()):
        pytest.skip("the prose corpus is not in HALFULP_DATA")
    model = json.loads(data.find(prose.PIECES).read_text())["model"]
    encoding = bpe.Gpt2Bpe(model["vocab"], [(a, b) for a, b in model["merges"]])
    assert prose.described(encoding.encoder, list(encoding.ranks)) == data.find(prose.PIECES).read_bytes()
    text = prose._text(data.find(prose.text_of("val")).parent, "val").decode()
    words, places = prose.cut(text)
    each = [encoding.encode(word) for word in words]
    tokens = np.array([t for place in places.tolist() for t in each[place]], dtype="<u2")
    assert hashlib.sha256(tokens.tobytes()).hexdigest() == data.DIGESTS[prose.tokens_of("val")]
    ends = [len(piece.encode()) for piece in text.split(prose.MARK)]
    assert ends == [book.bytes for book in prose.books() if book.split == "val"]


# ---- building a small corpus ----------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A mirror with two books, and a folder for the corpus."""
    pytest.importorskip("tokenizers")
    return small_corpus.small(tmp_path, monkeypatch), tmp_path / "corpus"


def test_a_build_ends_with_the_listed_files(small: tuple[Path, Path]) -> None:
    mirror, folder = small
    said: list[str] = []
    assert prose.plan(folder).startswith("2 of 2 books to download, about 10 MB")
    made = prose.build(folder, str(mirror), said.append)
    assert [path.name for path in made] == prose.names()
    assert prose.missing(folder) == []
    assert sorted(path.name for path in folder.iterdir()) == sorted(prose.names())
    before = {path: path.stat().st_mtime_ns for path in made}
    assert prose.build(folder, str(mirror / "gone"), said.append) == made  # nothing is asked for again
    assert {path: path.stat().st_mtime_ns for path in made} == before
    (folder / prose.tokens_of("val")).unlink()
    assert prose.build(folder, str(mirror / "gone"), said.append) == made


def test_an_interrupted_build_goes_on(small: tuple[Path, Path]) -> None:
    mirror, folder = small
    second = mirror / "books" / "two" / "archive" / "c0ffee.tar.gz"
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"archive of Two could not be taken .*were read are kept"):
        prose.build(folder, str(mirror), lambda _: None)
    assert prose.plan(folder).startswith("1 of 2 books")
    (mirror / "books" / "one" / "archive" / "c0ffee.tar.gz").unlink()
    second.write_bytes(archive({"chapter-1": "<p>It was another.</p>"}))
    with pytest.raises(TamperingError, match="prose of Two"):
        prose.build(folder, str(mirror), lambda _: None)
    second.write_bytes(whole)
    assert len(prose.build(folder, mirror.as_uri(), lambda _: None)) == len(prose.names())


def test_another_zlib_costs_the_compressed_texts_alone(
    small: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, folder = small
    said: list[str] = []
    monkeypatch.setattr(prose, "compressed", lambda content: b"other" + content)
    made = prose.build(folder, str(mirror), said.append)
    assert {path.name for path in made} == set(prose.names()) - set(map(prose.text_of, prose.SPLITS))
    assert sum("this machine's zlib" in line for line in said) == 2


def test_the_command(small: tuple[Path, Path]) -> None:
    mirror, folder = small
    asked = ["data", "build", "prose", "--mirror", str(mirror), "--to", str(folder)]
    planned = CliRunner().invoke(app, [*asked, "--plan"])
    assert "2 of 2 books" in planned.output
    assert not folder.exists()
    built: Any = CliRunner().invoke(app, asked)
    assert built.exit_code == 0
    assert str(folder / prose.PIECES) in built.output
    refused = CliRunner().invoke(app, ["data", "build", "verse"]).exception
    assert isinstance(refused, UsageError)

"""A small prose corpus to be built: a mirror with two books, and a list of what has to come out."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from halfulp import data
from halfulp.data import DataSet, prose

PAGE = """<?xml version="1.0" encoding="utf-8"?>
<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops"><body>{}</body></html>"""
PACKAGE = """<?xml version="1.0"?><package xmlns="http://www.idpf.org/2007/opf"><manifest>{}</manifest>
<spine>{}</spine></package>"""


def archive(pages: dict[str, str]) -> bytes:
    """A repository's archive with these pages, in this order."""
    items = "".join(f'<item id="{name}" href="text/{name}.xhtml"/>' for name in pages)
    spine = "".join(f'<itemref idref="{name}"/>' for name in pages)
    inside = {"content.opf": PACKAGE.format(items, spine)}
    inside |= {f"text/{name}.xhtml": PAGE.format(body) for name, body in pages.items()}
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name, content in inside.items():
            entry = tarfile.TarInfo(f"book-0123/src/epub/{name}")
            entry.size = len(content.encode())
            tar.addfile(entry, io.BytesIO(content.encode()))
    return made.getvalue()


PAGES = {"one": "<p>It was the best of times.</p>", "two": "<p>It was the worst of times.</p>"}


def small(place: Path, patch: pytest.MonkeyPatch) -> Path:
    """Make a mirror with two books, whose corpus is the one that is known; it was made another way."""
    import tokenizers

    mirror, listed, texts = place / "mirror", [], []
    for split, (name, body) in zip(prose.SPLITS, PAGES.items(), strict=True):
        text = body.removeprefix("<p>").removesuffix("</p>") + "\n"
        texts.append(text)
        held = mirror / "books" / name / "archive"
        held.mkdir(parents=True)
        (held / "c0ffee.tar.gz").write_bytes(archive({"chapter-1": body}))
        listed.append(
            {"split": split, "repo": f"books/{name}", "title": name.title(), "commit": "c0ffee",
             "bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        )  # fmt: skip
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    how = tokenizers.trainers.BpeTrainer(vocab_size=260, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([texts[0]], how)
    contents = {prose.BOOKS: json.dumps(listed).encode(), prose.PIECES: made.to_str(pretty=True).encode()}
    for split, text in zip(prose.SPLITS, texts, strict=True):
        contents[prose.text_of(split)] = prose.compressed(text.encode())
        contents[prose.tokens_of(split)] = np.array(made.encode(text).ids, dtype="<u2").tobytes()
    known = {name: known_as(name, content) for name, content in contents.items()}
    patch.setattr(data, "DATASETS", MappingProxyType(known))
    patch.setattr(prose, "listed", lambda: contents[prose.BOOKS])
    patch.setattr(prose, "COUNT", 260)
    return mirror


def known_as(name: str, content: bytes) -> DataSet:
    digest = hashlib.sha256(content).hexdigest()
    return DataSet(name=name, bytes=len(content), sha256=digest, url=None, origin="a test", licence="none")

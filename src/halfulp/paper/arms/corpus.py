"""The texts that arms are trained on, as tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from halfulp.errors import UsageError
from halfulp.paper import tokens
from halfulp.paper.models.training import Tokens

LOOKED_AT = 1 << 20
"""So many tokens show what encoding a file has; the largest files have 9 billion."""


def open_corpus(
    file: Callable[[str], Path], corpus: Mapping[str, str], vocabulary: int
) -> tuple[Tokens, Tokens]:
    """Training and held-out tokens; ``file`` finds a data set by its name.

    ``kind``: ``characters`` of the text ``train``, whose last tenth is held out; ``bytes`` of the texts
    ``train`` and ``held_out``; ``bin`` for token files.
    """
    kind, train = corpus["kind"], file(corpus["train"])
    if kind == "characters":
        found, alphabet = tokens.characters(tokens.read_text(train))
        if len(alphabet) > vocabulary:
            raise UsageError(f"{train} has {len(alphabet)} characters, the model knows {vocabulary}.")
        cut = int(len(found) * 0.9)  # as nanoGPT cuts it
        return found[:cut], found[cut:]
    held_out = file(corpus["held_out"])
    if kind == "bytes":
        return tokens.raw_bytes(tokens.read_raw(train)), tokens.raw_bytes(tokens.read_raw(held_out))
    if kind == "bin":
        opened = tokens.open_bin(train), tokens.open_bin(held_out)
        for path, found in zip((train, held_out), opened, strict=True):
            if (largest := int(found[:LOOKED_AT].max())) >= vocabulary:
                raise UsageError(
                    f"{path} is in another encoding than the model's: expected tokens below {vocabulary:,}, "
                    f"found {largest:,}. Prepare it with the tokenizer that the study's page names."
                )
        return opened
    raise UsageError(f"a corpus is characters, bytes or bin, not {kind!r}.")


def files_of(corpus: Mapping[str, str]) -> tuple[str, ...]:
    """Return the data sets that a corpus needs."""
    return tuple(corpus[part] for part in ("train", "held_out") if part in corpus)

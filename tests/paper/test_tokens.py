"""Tokens: known values, round trips, and files in nanoGPT's layout."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfulp import data
from halfulp.data.bpe import Gpt2Bpe, byte_symbols, word_pattern
from halfulp.errors import CorruptionError
from halfulp.paper import tokens

HERE = "HALFULP_DATA" in os.environ
needs_data = pytest.mark.skipif(not HERE, reason="HALFULP_DATA is not set")


@pytest.fixture(scope="module")
def bpe() -> Gpt2Bpe:
    return Gpt2Bpe.published()


# Token ids as OpenAI's tiktoken and Hugging Face's documentation of GPT-2 give them.
KNOWN = {
    "hello world": [31373, 995],
    "Hello world": [15496, 995],
    " Hello world": [18435, 995],
    "Hello, world!": [15496, 11, 995, 0],
    "The quick brown fox jumps over the lazy dog": [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290],
    "": [],
}


@needs_data
@pytest.mark.parametrize("text", KNOWN)
def test_known_sentences(bpe: Gpt2Bpe, text: str) -> None:
    assert bpe.encode(text) == KNOWN[text]
    assert bpe.decode(KNOWN[text]) == text


@needs_data
def test_shakespeare_has_the_published_number_of_tokens(bpe: Gpt2Bpe) -> None:
    """nanoGPT's data/shakespeare and data/shakespeare_char state these counts."""
    text = tokens.read(data.find("tinyshakespeare.txt")).decode()
    cut = int(len(text) * 0.9)
    train, held_out = bpe.encode(text[:cut]), bpe.encode(text[cut:])
    assert (len(train), len(held_out)) == (301_966, 36_059)
    assert bpe.decode(train) == text[:cut]
    letters, alphabet = tokens.characters(text)
    assert (len(letters[:cut]), len(letters[cut:]), len(alphabet)) == (1_003_854, 111_540, 65)
    assert "".join(alphabet[i] for i in letters[:100]) == text[:100]


@needs_data
@given(text=st.text())
def test_any_text_comes_back(bpe: Gpt2Bpe, text: str) -> None:
    assert bpe.decode(bpe.encode(text)) == text


@needs_data
def test_against_tokenizers(bpe: Gpt2Bpe) -> None:
    """The Rust implementation, on every kind of blank, letter and number that Unicode has."""
    other = pytest.importorskip("tokenizers").ByteLevelBPETokenizer(
        str(data.find("gpt2_bpe/encoder.json")), str(data.find("gpt2_bpe/vocab.bpe"))
    )
    drawn = np.random.default_rng(0)
    odd = [*range(9, 14), *range(0x1C, 0x20), 0x85, 0xA0, 0xB2, 0xBD, 0x2160, 0x3007, 0x4E00, 0x5F, 0x27]
    ranges = [(32, 127), (0x100, 0x3100), (0x4E00, 0x4F00), (0x1F300, 0x1F700)]
    for _ in range(2000):
        kinds = drawn.integers(0, len(ranges) + 1, drawn.integers(1, 30))
        text = "".join(
            chr(drawn.choice(odd) if kind == len(ranges) else drawn.integers(*ranges[kind])) for kind in kinds
        )
        assert bpe.encode(text) == other.encode(text).ids, ascii(text)


def test_words_are_cut_as_gpt2_cuts_them() -> None:
    """Endings, digits apart from letters, the blank before a word, trailing blanks; no underscore."""
    cut = word_pattern().findall("I've 3x two_words   end  \n")
    assert cut == ["I", "'ve", " 3", "x", " two", "_", "words", "  ", " end", "  \n"]
    # U+4E00 is a letter whose value is one, U+00BD a number that is no digit, U+001C blank to Python only.
    assert word_pattern().findall("a\u4e00\u00bd1\x1c b") == ["a\u4e00", "\u00bd1", "\x1c", " b"]


def test_pairs_are_joined_in_the_order_they_were_learned() -> None:
    """The earliest pair first, all its places from the left; not the longest piece."""
    pieces = ["a", "b", "c", "Ġ", "bc", "ab", "abab", "aa"]
    small = Gpt2Bpe({p: i for i, p in enumerate(pieces)}, [("b", "c"), ("a", "b"), ("ab", "ab"), ("a", "a")])
    texts = {
        "abc": ["a", "bc"],
        "abab": ["abab"],
        "ababab": ["abab", "ab"],
        "aaa": ["aa", "a"],
        " ab": ["Ġ", "ab"],
    }
    for text, expected in texts.items():
        assert [pieces[i] for i in small.encode(text)] == expected
        assert small.decode(small.encode(text)) == text


def test_every_byte_has_its_own_printable_symbol() -> None:
    symbols = byte_symbols()
    assert len(set(symbols)) == 256
    assert all(s.isprintable() and not s.isspace() for s in symbols)
    assert symbols[ord("A")] == "A"
    assert symbols[ord(" ")] == "Ġ"


# ---- files --------------------------------------------------------------------------------------------


def test_bin_is_two_bytes_a_token(tmp_path: Path) -> None:
    """The layout that nanoGPT writes with ``np.array(ids, dtype=np.uint16).tofile``."""
    path = tmp_path / "train.bin"
    np.array([0, 1, 50256, 65535], dtype=np.uint16).tofile(path)
    assert path.read_bytes() == bytes.fromhex("0000010050c4ffff")
    opened = tokens.open_bin(path)
    assert isinstance(opened, np.memmap)
    assert opened.tolist() == [0, 1, 50256, 65535]


@pytest.mark.parametrize("content", [b"", b"abc"])
def test_not_a_token_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(content)
    with pytest.raises(CorruptionError, match="not a token file"):
        tokens.open_bin(path)

"""Streams: the published generator, addressed by name and index, and by nothing else."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same

import halfulp as hu
from halfulp import kernels
from halfulp.kernels import native
from halfulp.numbers.streams import MAX_ELEMENTS, ROUNDS, key_of, threefry2x32

# Random123's kat_vectors: rounds, counter, key, result
VECTORS = """
20 00000000 00000000 00000000 00000000 6b200159 99ba4efe
20 ffffffff ffffffff ffffffff ffffffff 1cb996fc bb002be7
20 243f6a88 85a308d3 13198a2e 03707344 c4923a9c 483df7a0
13 00000000 00000000 00000000 00000000 9d1c5ec6 8bd50731
13 ffffffff ffffffff ffffffff ffffffff fd36d048 2d17272c
13 243f6a88 85a308d3 13198a2e 03707344 ba3e4725 f27d669e
"""
OFFSETS = [0, 1, 15, 16, 31, 32, 37, 767, 768, 2**31 - 5, 2**32 - 9, 2**33 + 17, 2**40 + 31, 2**58 - 4000]


def words_of_kernel(stream: hu.Stream, n: int, level: int = 0) -> np.ndarray:
    words = np.zeros(n, dtype=np.uint32)
    call = native.call_of(
        "words", key=stream.key, is_short=stream.bits == 16, level=level, size=n, offset=stream.offset,
        out=words,
    )  # fmt: skip
    native.run("words", kernels.tiles_of(n), call)
    return words


@pytest.mark.parametrize("vector", VECTORS.strip().splitlines())
def test_threefry_known_answers(vector: str) -> None:
    """Threefry-2x32 gives the published words for the published keys and counters."""
    rounds, *words = vector.split()
    c0, c1, k0, k1, *expected = (int(w, 16) for w in words)
    got = threefry2x32((k0, k1), (c0, c1), int(rounds))
    assert [int(w[0]) for w in got] == expected


@pytest.mark.parametrize("offset", OFFSETS)
def test_kernel_words_are_stream_words(offset: int) -> None:
    """The kernels draw Stream.words at any offset, aligned or not, beyond 2**32 or not, in both lengths."""
    for bits in (32, 16):
        stream = hu.Stream(seed=5, name="layer.0", step=9, offset=offset, bits=bits)
        assert_same(words_of_kernel(stream, 1000), stream.words(1000))
        for level in (1, 2, 33, 63):
            assert_same(words_of_kernel(stream, 50, level), stream.words(50, level))


@given(
    st.integers(-(2**70), 2**70), st.text(max_size=20), st.integers(0, 2**58 - 3000), st.integers(1, 900),
    st.integers(0, 1500),
)  # fmt: skip
def test_words_are_a_function_of_the_index(seed: int, name: str, offset: int, n: int, skip: int) -> None:
    """A shard of a stream has the words of the whole at its global indices."""
    whole = hu.Stream(seed=seed, name=name, step=1, offset=offset)
    part = whole.at(skip)
    assert part.offset == offset + skip
    assert_same(part.words(n), whole.words(skip + n)[skip:])
    assert_same(words_of_kernel(part, n), part.words(n))
    chosen = np.random.default_rng(n).permutation(n)
    assert_same(part.words_of(chosen), part.words(n)[chosen])


@given(st.lists(st.integers(0, 4000), max_size=6), st.sampled_from(["bf16", "e4m3", "int8@100", "fp16"]))
def test_rounding_does_not_depend_on_chunks(cuts: list[int], name: str) -> None:
    """A tensor rounded in pieces, each with the stream at its offset, is the tensor rounded whole."""
    x = torch.from_numpy(np.random.default_rng(3).standard_normal(4000).astype(np.float32) * 0.05)
    stream = hu.Stream(seed=1, name="w", step=4, offset=2**33 + 5)
    g = hu.grid(name)
    bounds = [0, *sorted(cuts), 4000]
    pieces = [g.round(x[a:b], stream.at(a)) for a, b in pairwise(bounds)]
    assert_same(torch.cat(pieces), g.round(x, stream))


def test_rounding_does_not_depend_on_the_order_of_tensors() -> None:
    """Tensors visited in any order get the same bits."""
    rng = np.random.default_rng(2)
    tensors = {f"t{i}": torch.from_numpy(rng.standard_normal(500 + i).astype(np.float32)) for i in range(8)}

    def visit(names: list[str]) -> dict[str, torch.Tensor]:
        return {n: hu.grid("e5m2").round(tensors[n], hu.Stream(seed=0, name=n, step=2)) for n in names}

    first = visit(list(tensors))
    for _ in range(3):
        again = visit([str(n) for n in rng.permutation(list(tensors))])
        for name, value in first.items():
            assert_same(again[name], value)


def test_rounding_does_not_depend_on_threads(threads: None) -> None:
    """One thread or two: the same bits, for a tensor large enough to be split."""
    x = torch.from_numpy(np.random.default_rng(4).standard_normal(500_001).astype(np.float32))
    stream = hu.Stream(seed=8, name="big", step=0, offset=3)
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        results += [hu.grid(n).round(x, stream) for n in ("e4m3", "bf16", "mxfp4")]
    for one, two in zip(results[:3], results[3:], strict=True):
        assert_same(two, one)


def test_other_names_steps_and_seeds_are_other_streams() -> None:
    """No two of 600 streams share a word in their first eight; a key depends on every field."""
    streams = [
        hu.Stream(seed=seed, name=name, step=step)
        for seed in (0, 1, -1, 2**40) for step in range(10)
        for name in ("", "w", "w1", "1w", "w\0", "ß", "layer.1.weight", "layer.11.weight", "0", "1", "\ud800",
                     "W", "w 1", "a\0b", "b\0a")
    ]  # fmt: skip
    assert len({s.key for s in streams}) == len(streams) == 600
    words = np.stack([s.words(8) for s in streams])
    assert len(np.unique(words)) == words.size


PINNED = "a7c41ac0 0b3d4950 923f1e92 d9b381e6"
PINNED_DIGEST = "f8ed364cdbc42bd3f46dff7b0a5c942648b16da5fe41c073d033c82c344f99ad"


def golden() -> tuple[str, str]:
    """The first words of a stream, and a digest over levels, offsets, names and steps."""
    stream = hu.Stream(seed=2026, name="transformer.wte.weight", step=7)
    digest = hashlib.sha256()
    for level in range(3):
        digest.update(stream.at(2**32 - 40).words(100, level).astype("<u4").tobytes())
    for other in (hu.Stream(seed=-1, name="é", step=0), hu.Stream(seed=2**64, name="", step=10**9)):
        digest.update(other.words(100).astype("<u4").tobytes())
    return " ".join(f"{int(w):08x}" for w in stream.words(4)), digest.hexdigest()


def test_streams_never_change() -> None:
    """The words of a stream are part of the format of every run: these are pinned."""
    assert golden() == (PINNED, PINNED_DIGEST)


@pytest.mark.parametrize("hash_seed", ["0", "4242"])
def test_streams_do_not_depend_on_the_hash_seed(hash_seed: str) -> None:
    """Another interpreter with another PYTHONHASHSEED has the same stream."""
    code = "import test_streams; print(*test_streams.golden())"
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout.split() == [*PINNED.split(), PINNED_DIGEST]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"seed": 0.5}, "seed"), ({"seed": True}, "seed"), ({"step": "3"}, "step"), ({"name": 7}, "name"),
        ({"offset": -1}, "offset"), ({"offset": MAX_ELEMENTS}, "offset"), ({"offset": None}, "offset"),
    ],
)  # fmt: skip
def test_bad_fields_are_named(fields: dict[str, object], said: str) -> None:
    """A stream with a meaningless field is refused, and the field named."""
    with pytest.raises(hu.UsageError, match=said):
        hu.Stream(**{"seed": 0, "name": "w", **fields})  # type: ignore[arg-type]


def test_levels_and_ends() -> None:
    """A level outside [0, 64) and an element outside [0, 2**58) are refused."""
    stream = hu.Stream(seed=0, name="w", offset=MAX_ELEMENTS - 2)
    for level in (-1, 64):
        with pytest.raises(hu.UsageError, match="level"):
            stream.words(1, level)
    assert hu.grid("e4m3").round(torch.ones(2), stream).tolist() == [1.0, 1.0]
    with pytest.raises(hu.UsageError, match="too many"):
        hu.grid("e4m3").round(torch.ones(3), stream)


@pytest.mark.parametrize(("rounds", "holds"), [(8, False), (ROUNDS[16], True)])
def test_every_bit_of_the_counter_moves_every_bit_of_the_words(rounds: int, holds: bool) -> None:
    """Half of the time: five standard errors of 2**15 draws, over 64 bits in and 64 out."""
    n, key = 1 << 15, key_of(3, "w", 5, 16)
    counter = (np.arange(n, dtype=np.uint32) * np.uint32(2654435761), np.zeros(n, np.uint32))
    words = threefry2x32(key, counter, rounds)
    worst = 0.0
    for bit in range(64):
        flip = (np.uint32(1 << bit if bit < 32 else 0), np.uint32(1 << (bit - 32) if bit >= 32 else 0))
        others = threefry2x32(key, (counter[0] ^ flip[0], counter[1] ^ flip[1]), rounds)
        for word, other in zip(words, others, strict=True):
            flips = np.unpackbits((word ^ other).view(np.uint8).reshape(n, 4), axis=1).sum(axis=0)
            worst = max(worst, float(np.abs(flips - n / 2).max()) / (n / 4) ** 0.5)
    assert (worst < 5) == holds, worst

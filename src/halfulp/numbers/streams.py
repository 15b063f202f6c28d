"""Random bits as a function, not as a state.

A stream is a function of a seed, a tensor's *name*, a step and the *global* index of an
element; of nothing else. So it cannot depend on the order in which tensors are visited,
on hash seeds, threads, workers, chunks, shards, or on where a run was resumed.

How: SHA-256 of (seed, name, step) gives a 64-bit key; Threefry-2x32 with 20 rounds
(Salmon et al., SC 2011) turns key and counter into two 32-bit words. Element ``i`` owns
word ``(i >> 4) & 1`` of block ``16 * (i >> 5) + (i & 15)``: within 32 consecutive
elements, the first sixteen take the first word of sixteen blocks and the others the second,
which lets a vector unit do sixteen blocks at once without a shuffle.

The *short* stream (``bits=16``) has digits of 16 bits, four to a block, for twice the speed where a digit
decides: element ``i`` owns half ``(i >> 4) & 1`` of word ``(i >> 5) & 1`` of block
``16 * (i >> 6) + (i & 15)``, and its digit is the complement of that half, so that to round a bfloat16 up
is to carry. Its Threefry has 13 rounds instead of the 20 that its authors recommend: from 11 on, every bit of
the counter that is flipped flips every bit of the result half of the time, as far as 2**18 draws tell.

An element can be asked for more than one word (``level`` 0, 1, 2...). Together they are the
binary digits of a uniform number U in [0, 1); stochastic rounding goes up when U is less than
the fraction of the gap, and reads further words only while the digits so far are equal. That
makes its probabilities exact instead of exact to 2**-32.

Why not the framework's generator? It is a state: it depends on everything drawn before,
and a sharded tensor draws something else than the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.errors import UsageError

Words = npt.NDArray[np.uint32]

ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
PARITY = 0x1BD11BDA
MAX_ELEMENTS = 2**58  # the six bits of the counter above that belong to the level
MAX_LEVELS = 64
ROUNDS = {32: 20, 16: 13}
"""Number of Threefry rounds, by the bits of a stream's digits."""


def threefry2x32(key: tuple[int, int], counter: tuple[Any, Any], rounds: int = 20) -> tuple[Words, Words]:
    """Compute Threefry-2x32 elementwise: two words from two words of key and two of counter.

    >>> [hex(int(w[0])) for w in threefry2x32((0, 0), (0, 0))]
    ['0x6b200159', '0x99ba4efe']
    """
    ks = [np.uint32(key[0]), np.uint32(key[1]), np.uint32(key[0] ^ key[1] ^ PARITY)]
    x0, x1 = (np.atleast_1d(np.asarray(c, dtype=np.uint32)) for c in counter)
    x0, x1 = x0 + ks[0], x1 + ks[1]
    for r in range(rounds):
        x0 = x0 + x1
        turn = np.uint32(ROTATIONS[r % 8])
        x1 = ((x1 << turn) | (x1 >> (np.uint32(32) - turn))) ^ x0
        if r % 4 == 3:
            s = r // 4 + 1
            x0 = x0 + ks[s % 3]
            x1 = x1 + ks[(s + 1) % 3] + np.uint32(s)
    return x0, x1


def key_of(seed: int, name: str, step: int, bits: int = 32) -> tuple[int, int]:
    """Return the 64-bit Threefry key of a stream, as two words."""
    k0, k1 = keys_of(seed, [name_bytes(name)], step, bits)[0].tolist()
    return k0, k1


def name_bytes(name: str) -> bytes:
    """Encode a tensor's name for making keys."""
    return name.encode("utf-8", "surrogatepass")


def keys_of(seed: int, names: Sequence[bytes], step: int, bits: int = 32) -> Words:
    """Return :func:`key_of` for many names in UTF-8, one row each."""
    begins = b"halfulp.stream.%d\0%d\0%d\0" % (1 if bits == 32 else 2, seed, step)
    digests = b"".join([hashlib.sha256(begins + name).digest() for name in names])
    return np.frombuffer(digests, dtype="<u4").reshape(-1, 8)[:, :2].astype(np.uint32)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Random words for the elements of one named tensor at one step.

    Args:
        seed: Seed of the run.
        name: Name of the tensor.
        step: Step of the run.
        offset: Global index of the first element, for a shard of a tensor.
        bits: Bits per digit: 32, or 16 for the short stream.

    Raises:
        UsageError: If an argument has the wrong type or is out of range.

    >>> whole = Stream(seed=0, name="wte", step=3)
    >>> bool((whole.words(100)[60:] == whole.at(60).words(40)).all())
    True
    """

    seed: int
    name: str
    step: int = 0
    offset: int = 0
    bits: int = 32

    def __post_init__(self) -> None:
        for field in ("seed", "step", "offset"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise UsageError(f"Stream({field}=...) takes an integer, not {value!r}.")
        if not isinstance(self.name, str):
            raise UsageError(f"Stream(name=...) takes a string, not {self.name!r}.")
        if self.bits not in (16, 32):
            raise UsageError(f"Stream(bits=...) must be 32 or 16, not {self.bits!r}.")
        if not 0 <= self.offset < MAX_ELEMENTS:
            raise UsageError(f"Stream(offset=...) must lie in [0, 2**58), not {self.offset}.")

    @property
    def key(self) -> tuple[int, int]:
        """The 64-bit Threefry key, as two words."""
        return key_of(self.seed, self.name, self.step, self.bits)

    def at(self, offset: int) -> Stream:
        """Return the same stream, advanced by ``offset`` elements."""
        return replace(self, offset=self.offset + offset)

    def words(self, n: int, level: int = 0) -> Words:
        """Return the words of the next ``n`` elements (digits of 16 bits in the short stream).

        Args:
            n: Number of elements.
            level: Which word of each element: 0 for the first.
        """
        return self.words_of(np.arange(n, dtype=np.uint64), level)

    def words_of(self, index: npt.NDArray[Any], level: int = 0) -> Words:
        """Return the words of chosen elements.

        Args:
            index: Indices of the elements, counted from the offset.
            level: Which word of each element: 0 for the first.

        Raises:
            UsageError: If the level is out of range.
        """
        if not 0 <= level < MAX_LEVELS:
            raise UsageError(f"a level lies in [0, {MAX_LEVELS}), not {level}.")
        i = index.astype(np.uint64) + np.uint64(self.offset)
        short = np.uint64(self.bits == 16)
        block = (i >> (np.uint64(5) + short)) * np.uint64(16) + (i & np.uint64(15))
        low = (block & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        high = (block >> np.uint64(32)).astype(np.uint32) | np.uint32(level << 26)
        first, second = threefry2x32(self.key, (low, high), ROUNDS[self.bits])
        word = np.where((i >> (np.uint64(4) + short)) & np.uint64(1) == 1, second, first)
        if self.bits == 32:
            return word
        half = (np.uint32(16) * ((i >> np.uint64(4)) & np.uint64(1))).astype(np.uint32)
        return np.asarray(~(word >> half) & np.uint32(0xFFFF))

// What write-backs share of a tile: its draws, its counts and its sums.
#pragma once

#include "draws.h"
#include "sums.h"

namespace HALFULP_TARGET {

enum Mode { NEAREST, STOCHASTIC, DEADZONE };

// The draws of a tile, made some at a time: a shard may begin anywhere, draws at multiples of 64.
struct Draws {
    Key key;
    bool is_short;
    uint64_t start;
    int shift, ready;
    alignas(64) uint32_t words[TILE + 64 + MOST_DRAWN];

    INLINE void begin(Key k, bool s, uint64_t first) {
        key = k, is_short = s, shift = (int)(first & 63), start = first - shift, ready = 0;
    }
    // The words of elements i .. i + W - 1 of the tile.
    INLINE const uint32_t* at(int i) {
        while (ready < shift + i + W) ready += draw(is_short, key, start + ready, words + ready);
        return words + shift + i;
    }
    // Those of elements i .. i + 63.
    INLINE const uint32_t* block(int i) {
        at(i + 64 - W);
        return words + shift + i;
    }
};

// work(i, a, b) for the tiles [a, b) of tensor i that are among [t0, t1) of those of all tensors, one after the other.
template <class Row, class Work>
INLINE void over_tensors(const Row* rows, int64_t tensors, int64_t t0, int64_t t1, Work work, int64_t tile = TILE) {
    for (int64_t i = 0; i < tensors; i++) {
        const int64_t start = rows[i].start, n = (rows[i].size + tile - 1) / tile;
        if (start + n > t0 && start < t1) work(i, t0 > start ? t0 - start : 0, t1 - start < n ? t1 - start : n);
    }
}

// How much of a tile is worked on when n are in use: vectors of every width are whole.
INLINE int filled(int n) { return (n + 63) & ~63; }

// A tile of an array: where it lies or, if it is short, a copy that is filled up with zeros.
struct Part {
    alignas(64) char copy[TILE * 8];
    char* real;
    int64_t bytes;

    INLINE char* begin(const void* of, int64_t first, int size, int n) { return of_bytes((char*)of + first * size, (int64_t)n * size, (int64_t)filled(n) * size, n); }
    INLINE char* of_bytes(char* of, int64_t used, int64_t room, int n) {
        real = of, bytes = used;
        if (n == TILE) return real;
        memcpy(copy, real, used);
        memset(copy + used, 0, room - used);
        return copy;
    }
    INLINE void end(const char* used) {
        if (used == copy) memcpy(real, copy, bytes);
    }
};

INLINE int in_tile(int64_t size, int64_t t) { return (int)(size - t * TILE < TILE ? size - t * TILE : TILE); }

// What is counted of a tile on the way: a bit for each value that changed, or was to.
struct Tally {
    uint64_t changed[TILE / 64], proposed[TILE / 64];
    int ends, bad;
};

// Add the bits of what changed to those of what ever has; return how many have.
inline int add_moved(const uint64_t* changed, int n, uint8_t* moved) {
    uint64_t ever[TILE / 64] = {};
    memcpy(ever, moved, (n + 7) / 8);
    for (int i = 0; i < TILE / 64; i++) ever[i] |= changed[i];
    memcpy(moved, ever, (n + 7) / 8);
    return ones(ever);
}

// WRITE_COUNTS of a tile of which n coordinates are in use, and the bits of what changed added to those of what ever has.
inline __attribute__((noinline)) void finish_tile(const Tally& x, int n, uint8_t* moved, int32_t* counts) {
    counts[0] = n - ones(x.changed) - x.bad;
    counts[1] = n - ones(x.proposed) - x.bad;
    counts[2] = x.ends;
    counts[3] = x.bad;
    counts[4] = 0;
    if (!moved) return;
    counts[4] = n - add_moved(x.changed, n, moved);
}

// WRITE_SUMS of a tile, from what was stored, proposed and written.
template <class T> __attribute__((noinline)) void sum_tile(const T* q, const T* z, const T* r, int n, double* totals) {
    tile_sums<5>(n, [=](int i) INLINE_LAMBDA {
        const D at = doubles(q + i), d = doubles(z + i) - at, u = doubles(r + i) - at;
        return Terms<5>{{magnitudes(at), magnitudes(d), d * d, u * d, u * u}};
    }, totals);
}

}  // namespace HALFULP_TARGET

// Random words as a function of key and element: halfulp/numbers/streams.py defines them.
//
// Threefry-2x32 of 20 rounds for streams of 32 digits, of 13 for the short ones of 16. The words of 32 (64)
// consecutive elements are those of sixteen blocks, which are computed side by side.
#pragma once

#include "lanes.h"

namespace HALFULP_TARGET {

struct Key {
    uint32_t k0, k1;
};

INLINE U turned(U x, int by) { return (x << by) | (x >> (32 - by)); }

template <int ROUNDS> INLINE void threefry(U& x0, U& x1, Key key) {
    constexpr int turns[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    const uint32_t ks[3] = {key.k0, key.k1, key.k0 ^ key.k1 ^ 0x1BD11BDA};
    x0 += ks[0], x1 += ks[1];
#pragma GCC unroll 20
    for (int r = 0; r < ROUNDS; r++) {
        x0 += x1;
        x1 = turned(x1, turns[r % 8]) ^ x0;
        if (r % 4 == 3) {
            const uint32_t s = (uint32_t)r / 4 + 1;
            x0 += ks[s % 3], x1 += ks[(s + 1) % 3] + s;
        }
    }
}

// The first lanes of blocks block .. block + W - 1 at a level of digits, ready for threefry.
INLINE void blocks(uint64_t block, uint32_t level, U& x0, U& x1) {
    x0 = (U)counting() + (uint32_t)block;
    x1 = splat((uint32_t)(block >> 32) | level << 26);
}

// The words of elements first .. first + 63, a multiple of 64: 32 digits each, or the complement of 16.
inline __attribute__((noinline)) void draw_64(bool is_short, Key key, uint64_t first, uint32_t* words) {
    U x0, x1;
    for (int k = 0; k < 16; k += W)
        if (is_short) {
            blocks((first >> 6 << 4) + k, 0, x0, x1);
            threefry<13>(x0, x1, key);
            store(words + k, x0 & 0xFFFF), store(words + 16 + k, x0 >> 16);
            store(words + 32 + k, x1 & 0xFFFF), store(words + 48 + k, x1 >> 16);
        } else {
            blocks((first >> 5 << 4) + k, 0, x0, x1);
            threefry<20>(x0, x1, key);
            store(words + k, x0), store(words + 16 + k, x1);
            blocks((first >> 5 << 4) + 16 + k, 0, x0, x1);
            threefry<20>(x0, x1, key);
            store(words + 32 + k, x0), store(words + 48 + k, x1);
        }
}

// One digit of one element.
inline double digit_at(bool is_short, Key key, uint64_t i, uint32_t level) {
    U x0, x1;
    blocks((i >> (is_short ? 6 : 5) << 4) + (i & 15), level, x0, x1);
    if (!is_short) {
        threefry<20>(x0, x1, key);
        return ((i >> 4) & 1 ? x1 : x0)[0];
    }
    threefry<13>(x0, x1, key);
    return 0xFFFF - (((i >> 5) & 1 ? x1 : x0)[0] >> (16 * ((i >> 4) & 1)) & 0xFFFF);
}

// U < fraction for element i, to the last digit.
inline bool exact_up(double fraction, bool is_short, Key key, uint64_t i) {
    for (uint32_t level = 0; fraction > 0; level++) {
        const double scaled = fraction * (is_short ? 65536.0 : 4294967296.0);
        const double digit = __builtin_floor(scaled), drawn = digit_at(is_short, key, i, level);
        if (drawn != digit) return drawn < digit;
        fraction = scaled - digit;
    }
    return false;
}

}  // namespace HALFULP_TARGET

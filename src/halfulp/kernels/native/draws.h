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

// Of several vectors of blocks side by side: each is a chain of operations that wait for one another.
template <int ROUNDS, int CHAINS> INLINE void threefry(U (&x0)[CHAINS], U (&x1)[CHAINS], Key key) {
    constexpr int turns[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    const uint32_t ks[3] = {key.k0, key.k1, key.k0 ^ key.k1 ^ 0x1BD11BDA};
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; c++) x0[c] += ks[0], x1[c] += ks[1];
#pragma GCC unroll 20
    for (int r = 0; r < ROUNDS; r++) {
        const uint32_t s = (uint32_t)r / 4 + 1;
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) {
            x0[c] += x1[c];
            x1[c] = turned(x1[c], turns[r % 8]) ^ x0[c];
            if (r % 4 == 3) x0[c] += ks[s % 3], x1[c] += ks[(s + 1) % 3] + s;
        }
    }
}

// The first lanes of blocks block .. block + W - 1 at a level of digits, ready for threefry.
INLINE void blocks(uint64_t block, uint32_t level, U& x0, U& x1) {
    x0 = (U)counting() + (uint32_t)block;
    x1 = splat((uint32_t)(block >> 32) | level << 26);
}

// The words of elements from `first`, a multiple of 64, on: 32 digits each, or the complement of 16. Returns how many.
// Processors with vectors of 16 have registers for twelve chains, and then none of them is waited for.
constexpr int DRAWN = 192, MOST_DRAWN = DRAWN / 16 * 64;  // blocks at a time, and elements

template <int LENGTH> INLINE int draw_words(Key key, uint64_t first, uint32_t* words) {
    constexpr int CHAINS = W == 16 ? 12 : 4, ROUNDS = LENGTH == 64 ? 13 : 20;  // of a sixteenth of LENGTH elements each
    const uint64_t block = first / LENGTH * 16;
    for (int k = 0; k < DRAWN; k += CHAINS * W) {
        U x0[CHAINS], x1[CHAINS];
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) blocks(block + k + c * W, 0, x0[c], x1[c]);
        threefry<ROUNDS, CHAINS>(x0, x1, key);
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) {
            const int at = k + c * W;
            uint32_t* to = words + at / 16 * LENGTH + at % 16;
            if (LENGTH == 64) {
                store(to, x0[c] & 0xFFFF), store(to + 16, x0[c] >> 16);
                store(to + 32, x1[c] & 0xFFFF), store(to + 48, x1[c] >> 16);
            } else
                store(to, x0[c]), store(to + 16, x1[c]);
        }
    }
    return DRAWN / 16 * LENGTH;
}

inline __attribute__((noinline)) int draw(bool is_short, Key key, uint64_t first, uint32_t* words) {
    return is_short ? draw_words<64>(key, first, words) : draw_words<32>(key, first, words);
}

// One digit of one element.
inline double digit_at(bool is_short, Key key, uint64_t i, uint32_t level) {
    U x0[1], x1[1];
    blocks((i >> (is_short ? 6 : 5) << 4) + (i & 15), level, x0[0], x1[0]);
    if (!is_short) {
        threefry<20>(x0, x1, key);
        return ((i >> 4) & 1 ? x1 : x0)[0][0];
    }
    threefry<13>(x0, x1, key);
    return 0xFFFF - (((i >> 5) & 1 ? x1 : x0)[0][0] >> (16 * ((i >> 4) & 1)) & 0xFFFF);
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

// Sums over a tile, added in the one order that every kernel keeps: the halving tree of reference.tile_sum.
#pragma once

#include "lanes.h"

namespace HALFULP_TARGET {

constexpr int TILE = 768;

// Halve and add from n = 3 * 2**k down to 3, then left to right.
inline double tree(double* x, int n) {
    while (n > 3) {
        n /= 2;
        for (int i = 0; i < n; i++) x[i] += x[n + i];
    }
    return x[0] + x[1] + x[2];
}

// The sum of f(0), f(1) ... f(TILE - 1).
template <class Term> INLINE double tile_sum(Term f) {
    double x[TILE / 2];
    for (int i = 0; i < TILE / 2; i++) x[i] = f(i) + f(TILE / 2 + i);
    return tree(x, TILE / 2);
}

INLINE int ones(const uint64_t* words) {
    int n = 0;
    for (int i = 0; i < TILE / 64; i++) n += __builtin_popcountll(words[i]);
    return n;
}

}  // namespace HALFULP_TARGET

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

// Doubles, half as many to a vector, from values of either type; and their magnitudes.
constexpr int HALF = W / 2;
INLINE D doubles(const double* x) { return load<D>(x); }
INLINE D doubles(const float* x) {
    typedef float Few __attribute__((vector_size(2 * W)));
    return __builtin_convertvector(load<Few>(x), D);
}
INLINE D magnitudes(D x) {
    typedef int64_t Bits __attribute__((vector_size(4 * W)));
    return (D)((Bits)x & INT64_MAX);
}

// The sum of terms(i), terms(i + SPAN), ... over a tile, in that order; terms are vectors, or structs that add up.
template <int SPAN, class Of> INLINE auto branch(Of terms, int i) -> decltype(terms(i)) {
    if constexpr (SPAN == TILE) {
        return terms(i);
    } else {
        auto a = branch<2 * SPAN>(terms, i);
        a += branch<2 * SPAN>(terms, i + SPAN);
        return a;
    }
}

// K sums over the n coordinates of a tile: terms(i) are those of i .. i + HALF - 1. Every 48th is added up in registers.
template <int K> struct Terms {
    D x[K];
    INLINE void operator+=(const Terms& other) {
#pragma GCC unroll 8
        for (int k = 0; k < K; k++) x[k] += other.x[k];
    }
};
constexpr int LEFT = 48;
template <int K, class Of> INLINE void tile_sums(int n, Of terms, double* sums) {
    alignas(64) double left[K][LEFT];
    for (int i = 0; i < LEFT; i += HALF) {
        const Terms<K> t = branch<LEFT>([&](int j) INLINE_LAMBDA { return j < n ? terms(j) : Terms<K>{}; }, i);
#pragma GCC unroll 8
        for (int k = 0; k < K; k++) store(left[k] + i, t.x[k]);
    }
    for (int k = 0; k < K; k++) sums[k] = tree(left[k], LEFT);
}

// The sum of the magnitudes of n values.
template <class T> double sum_magnitudes(const T* x, int n) {
    alignas(64) T copy[TILE] = {};
    double sum;
    memcpy(copy, x, n * sizeof(T));
    tile_sums<1>(n, [&](int i) INLINE_LAMBDA { return Terms<1>{{magnitudes(doubles(copy + i))}}; }, &sum);
    return sum;
}

INLINE int ones(const uint64_t* words) {
    int n = 0;
    for (int i = 0; i < TILE / 64; i++) n += __builtin_popcountll(words[i]);
    return n;
}

}  // namespace HALFULP_TARGET

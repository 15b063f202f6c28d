// The sums behind every allocation score, per tile of any size: halfulp/kernels/reference.py, score.
//
// What is done to single coordinates is done to a stretch of at most TILE of them, which may be several small tiles or a
// part of a large one; only the sums are of tiles.
#include <vector>

#include "scaled.h"

namespace HALFULP_TARGET {

enum { SCORES = 8, SUMS = 7 };  // all but the first are sums of what single coordinates give

template <class T> struct Stretch {
    alignas(64) T w[TILE], g[TILE], u[TILE], q[TILE], z[TILE], r[TILE];
    double scale[TILE], element[TILE];
    uint8_t fine[TILE], frozen[TILE];
};

template <class T, bool MAGICAL> void freeze_fixed(Stretch<T>& x, const ScoreCall& c, int n) {
    const Numbers<T> f = *(const Numbers<T>*)c.step.floats;
    const Integers<T> k = *(const Integers<T>*)c.step.ints;
    for (int i = 0; i < n; i += LANES<T>) {
        Is<T> e;
        const Fs<T> q = round_lanes<T, MAGICAL, false>(load<Fs<T>>(x.w + i), f, k, e);
        const Fs<T> z = in_container<T>(q + load<Fs<T>>(x.u + i), c.step.to);
        const Fs<T> r = round_lanes<T, MAGICAL, false>(z, f, k, e);
        // What is not finite is beyond the range and stays as it is.
        const Is<T> beyond = ((Is<T>)z & Real<T>::exponent) == Real<T>::exponent, same = (beyond ? z : r) == q;
        for (int j = 0; j < LANES<T>; j++) x.frozen[i + j] = same[j] != 0;
    }
}

template <class T> void freeze_scaled(Stretch<T>& x, const ScoreCall& c, int64_t first, int n) {
    const Elements g(c.step.floats, c.step.ints);
    expand(c.scales, c.scales.now, first, n, x.scale);
    nearest_scaled(x.w, x.scale, g, x.q);
    for (int i = 0; i < TILE; i++) x.element[i] = (double)x.q[i] / x.scale[i];
    add_in_container(x.q, x.u, c.step.to, x.z);
    expand(c.scales, c.scales.next, first, n, x.scale);
    nearest_scaled(x.z, x.scale, g, x.r);
    put_frozen_back(x.q, x.u, x.element, x.scale, x.r, x.z);
    for (int i = 0; i < n; i++) x.frozen[i] = x.z[i] == x.q[i];
}

// Add coordinates [a, b) of a stretch to the sums of their tile, in which they are from `at` on: the halving tree's first
// level. `half`: half of what a tile is filled up to.
template <class T> void add_up(const Stretch<T>& x, int a, int b, int64_t at, int64_t half, double* sums) {
    const int64_t left = half - at;
    const int middle = left <= 0 ? a : left < b - a ? a + (int)left : b;
    const auto column = [&](int c, auto value) INLINE_LAMBDA {
        double *first = sums + c * half + at - a, *second = first - half;
        for (int i = a; i < middle; i++) first[i] = value(i);
        for (int i = middle; i < b; i++) second[i] += value(i);
    };
    const auto gain = [&](int i) INLINE_LAMBDA {
        const double product = (double)x.g[i] * (double)x.u[i];
        return product < 0 ? -product : 0.0;
    };
    column(0, gain);
    column(1, [&](int i) { return x.frozen[i] ? gain(i) : 0.0; });
    column(2, [&](int i) { return __builtin_fabs((double)x.g[i]); });
    column(3, [&](int i) { return __builtin_fabs((double)x.u[i]); });
    column(4, [&](int i) { return __builtin_fabs((double)x.w[i]); });
    column(5, [&](int i) { return __builtin_fabs((double)x.g[i] * (double)x.w[i]); });
    column(6, [&](int i) { return __builtin_fabs((double)x.g[i] * (double)x.u[i]); });
}

template <class T> void score_tensor(const ScoreCall& given, const ScoreRow& row, int64_t t0, int64_t t1) {
    ScoreCall c = given;
    c.step.w = row.w, c.step.g = row.g, c.step.d = row.d, c.step.size = row.size;
    const bool magical = !c.scaled && ((const Integers<T>*)c.step.ints)->kind == MAGIC;
    const int64_t end = t1 * c.tile < row.size ? t1 * c.tile : row.size, many = c.tile < TILE ? TILE / c.tile * c.tile : TILE;
    std::vector<double> sums(SUMS * c.half);
    Stretch<T> x;
    int64_t frozen = 0;
    for (int64_t first = t0 * c.tile; first < end;) {
        const int64_t left = c.tile <= TILE ? end - first : (first / c.tile + 1) * c.tile - first;
        const int64_t stop = first + (left < many ? left : many) < end ? first + (left < many ? left : many) : end;
        const int n = (int)(stop - first);
        load_step(c.step, first, n, x.w, x.g, x.u, x.fine);
        if (c.scaled)
            freeze_scaled(x, c, first, n);
        else
            magical ? freeze_fixed<T, true>(x, c, n) : freeze_fixed<T, false>(x, c, n);
        for (int a = 0; a < n;) {
            const int64_t t = (first + a) / c.tile, at = first + a - t * c.tile, last = (t + 1) * c.tile < row.size ? (t + 1) * c.tile : row.size;
            const int b = last - first < n ? (int)(last - first) : n;
            for (int i = a; i < b; i++) frozen += x.frozen[i] & x.fine[i];
            add_up(x, a, b, at, c.half, sums.data());
            a = b;
            if (first + b < last) continue;
            const int64_t used = last - t * c.tile;
            row.out[t][0] += (double)frozen, frozen = 0;
            for (int s = 0; s < SUMS; s++) {
                double* of = sums.data() + s * c.half;
                for (int64_t i = used; i < c.half; i++) of[i] = 0;
                row.out[t][1 + s] += tree(of, (int)c.half);
            }
        }
        first = stop;
    }
}

template <class T> void score_tiles(const ScoreCall& c, int64_t t0, int64_t t1) {
    const auto score = [&](int64_t i, int64_t a, int64_t b) { score_tensor<T>(c, c.rows[i], a, b); };
    over_tensors(c.rows, c.tensors, t0, t1, score, c.tile);
}

}  // namespace HALFULP_TARGET

KERNEL_OF_TYPE(score, ScoreCall, step.stored)

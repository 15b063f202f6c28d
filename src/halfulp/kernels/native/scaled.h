// Grids whose scale is not folded away: integers and block formats whose scales follow the data.
//
// A value is divided by its scale in float64 and rounded to an element there. Where the quotient lands on a midpoint,
// midpoint * scale, which is exact, decides: halfulp/kernels/reference.py, _round_scaled. element * scale is exact in the
// container, so a code stays where what is written equals the old element times the new scale.
#pragma once

#include "calls.h"
#include "static_grid.h"
#include "tiles.h"

namespace HALFULP_TARGET {

// The element set, in float64.
struct Elements {
    double lo, hi, normal;  // normal: the smallest normal one; integers have no subnormals
    int64_t emin, shift, inverse, mant;

    Elements(const void* floats, const void* ints) {
        const Numbers<double>& f = *(const Numbers<double>*)floats;
        const Integers<double>& k = *(const Integers<double>*)ints;
        lo = f.lo, hi = f.hi, emin = k.emin, shift = k.shift, inverse = k.inverse, mant = k.mant;
        normal = f.normal > f.zero ? real_of<double>(emin) : 0;
    }
    INLINE int64_t exponent(double a) const {
        const int64_t e = pattern_of(a) & Real<double>::exponent;
        return e > emin ? e : emin;
    }
    // The nearest element to v / scale, without the sign of a zero.
    INLINE double nearest(double v, double scale) const {
        const double ratio = v / scale;
        double a = ratio < lo ? lo : ratio;
        a = a > hi ? hi : a;
        const int64_t e = exponent(a);
        const double c = real_of<double>(e + shift), r = (a + c) - c, half = real_of<double>(e - mant) * 0.5, side = v - a * scale;
        const bool middle = (__builtin_fabs(a - r) == half) & (a == ratio);
        return (middle & (side > 0)) ? a + half : (middle & (side < 0)) ? a - half : r;
    }
};

INLINE bool finite(double v) { return __builtin_fabs(v) < __builtin_inf(); }

// A bit for every coordinate of a tile that differs.
template <class T> INLINE void differing(const T* a, const T* b, uint64_t* bits) {
    for (int i = 0; i < TILE; i += LANES<T>)
        bits[i >> 6] |= (uint64_t)mask_of((Is<T>)(load<Fs<T>>(a + i) != load<Fs<T>>(b + i))) << (i & 63);
}

// The scale of every coordinate of a tile; 1 behind the end.
inline void expand(const Scales& s, const double* of, int64_t first, int n, double* out) {
    const int64_t per_row = (s.row + s.length - 1) / s.length;
    for (int i = 0; i < n;) {
        const int64_t at = first + i, column = at % s.row, left = s.length - column % s.length, in_row = s.row - column;
        const double scale = of[at / s.row * per_row + column / s.length];
        for (const int64_t stop = i + (left < in_row ? left : in_row); i < stop && i < n; i++) out[i] = scale;
    }
    for (int i = n; i < TILE; i++) out[i] = 1;
}

// Values of a tensor from `first` on, as a whole tile; zeros behind the end.
template <class T> INLINE void load_tile(const void* from, int64_t first, int n, bool narrow, T* out) {
    for (int i = 0; i < n; i++)
        out[i] = narrow ? (T)widened_at(from, first + i) : ((const T*)from)[first + i];
    for (int i = n; i < TILE; i++) out[i] = 0;
}

template <class T> INLINE void store_tile(const T* tile, void* to, int64_t first, int n, bool narrow) {
    for (int i = 0; i < n; i++)
        if (narrow)
            ((uint16_t*)to)[first + i] = (uint16_t)((uint32_t)pattern_of((float)tile[i]) >> 16);
        else
            ((T*)to)[first + i] = tile[i];
}

// Nearest element * scale.
template <class T> INLINE void nearest_scaled(const T* x, const double* scale, const Elements& given, T* out) {
    const Elements g = given;
    for (int i = 0; i < TILE; i++) {
        const double v = x[i], r = __builtin_copysign(g.nearest(v, scale[i]) * scale[i], v);
        out[i] = finite(v) ? (T)r : x[i];
    }
}

// Stochastic element * scale: the first 31 digits of U decide, the rare rest one by one.
template <class T>
void drawn_scaled(const T* x, const double* scale, const Elements& given, Key key, uint64_t index, T* out) {
    const Elements g = given;
    Draws draws;
    draws.begin(key, false, index);
    draws.at(TILE - W);
    const uint32_t* words = draws.words + draws.shift;
    int open = 0;
    const auto one = [&](int i, auto up) INLINE_LAMBDA {
        const double v = x[i], limit = v < 0 ? -g.lo : g.hi, size = __builtin_fabs(v / scale[i]), a = size > limit ? limit : size;
        const int64_t e = g.exponent(a);
        const double s = a * real_of<double>(g.inverse - e), n = __builtin_floor(s);
        const double r = (up(s - n) ? n + 1 : n) * real_of<double>(e - g.mant);
        out[i] = finite(v) ? (T)__builtin_copysign(r * scale[i], v) : x[i];
    };
    for (int i = 0; i < TILE; i++)
        one(i, [&](double part) INLINE_LAMBDA {
            const int32_t digits = (int32_t)(part * 0x1p31), draw = (int32_t)(words[i] >> 1);
            open += draw == digits;
            return draw < digits;
        });
    if (open)
        for (int i = 0; i < TILE; i++) one(i, [&](double part) { return exact_up(part, false, key, index + i); });
}

// q + d in the container.
template <class T> INLINE void add_in_container(const T* q, const T* d, int to, T* z) {
    for (int i = 0; i < TILE; i += LANES<T>) store(z + i, in_container<T>(load<Fs<T>>(q + i) + load<Fs<T>>(d + i), to));
}

// What is written, but q where the coordinate is frozen: where nothing is proposed, or the code stays. Returns how many of
// these are dragged along by their scale.
template <class T>
INLINE int put_frozen_back(const T* q, const T* proposed, const double* element, const double* scale, const T* r, T* seen) {
    int dragged = 0;
    for (int i = 0; i < TILE; i++) {
        const bool still = (proposed[i] == 0) | ((double)r[i] == element[i] * scale[i]);
        dragged += still & (q[i] != r[i]);
        seen[i] = still ? q[i] : r[i];
    }
    return dragged;
}

// Weights, gradients and proposals of a tile, zeroed where any of the three is not finite; returns how many were.
template <class T>
INLINE int load_step(const StepCall& c, int64_t first, int n, T* w, T* g, T* d, uint8_t* fine) {
    const bool narrow = c.stored == BFLOATS;
    load_tile(c.w, first, n, narrow, w), load_tile(c.g, first, n, narrow, g), load_tile(c.d, first, n, narrow, d);
    if (c.after)
        for (int i = 0; i < TILE; i++) d[i] = d[i] - w[i];
    int bad = 0;
    for (int i = 0; i < TILE; i++) {
        const bool ok = is_finite(w[i]) & is_finite(g[i]) & is_finite(d[i]);
        fine[i] = ok, bad += !ok;
        w[i] = ok ? w[i] : 0, g[i] = ok ? g[i] : 0, d[i] = ok ? d[i] : 0;
    }
    return bad;
}

}  // namespace HALFULP_TARGET

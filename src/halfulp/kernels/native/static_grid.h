// Rounding to grids whose scale is fixed, in a working type T: float, or double for float64 containers.
//
// halfulp/kernels/reference.py defines the results; the numbers of a grid come from halfulp/kernels/params.py. Functions of
// lanes take finite values and only notice a draw that its first 31 digits do not decide; `careful` ones take anything.
#pragma once

#include "draws.h"
#include "sums.h"

namespace HALFULP_TARGET {

// ---- a working type ------------------------------------------------------------------------------------

template <class T> struct Real;
template <> struct Real<float> {
    using whole = int32_t;
    static constexpr int cut = 23, bias = 127, lift = 24, lanes = W;
    static constexpr whole exponent = EXPONENT, sign = SIGN;
};
template <> struct Real<double> {
    using whole = int64_t;
    static constexpr int cut = 52, bias = 1023, lift = 64, lanes = W / 2;
    static constexpr whole exponent = (whole)0x7FF << 52, sign = INT64_MIN;
};
template <class T> using Whole = typename Real<T>::whole;
template <class T> constexpr int LANES = Real<T>::lanes;
template <class T> struct Wide {
    typedef T F __attribute__((vector_size(sizeof(T) * LANES<T>)));
    typedef Whole<T> I __attribute__((vector_size(sizeof(T) * LANES<T>)));
};
template <class T> using Fs = typename Wide<T>::F;
template <class T> using Is = typename Wide<T>::I;

template <class T> INLINE Whole<T> pattern_of(T x) {
    Whole<T> u;
    memcpy(&u, &x, sizeof u);
    return u;
}
template <class T> INLINE T real_of(Whole<T> u) {
    T x;
    memcpy(&x, &u, sizeof x);
    return x;
}

INLINE uint32_t mask_of(Is<float> m) { return mask(m); }
INLINE uint32_t mask_of(Is<double> m) {
#if defined(__AVX512DQ__)
    return _mm512_movepi64_mask((__m512i)m);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_pd((__m256d)m);
#else
    uint32_t holds = 0;
    for (int k = 0; k < LANES<double>; k++) holds |= (uint32_t)(m[k] & 1) << k;
    return holds;
#endif
}

// The row of one grid in the tables of halfulp/kernels/params.py, column by column.
template <class T> struct Numbers {
    T lo, hi, up, end, normal, zero, one, two31;
};
template <class T> struct Integers {
    Whole<T> kind, emin, shift, cut, top, points, half, odd, keep, inverse, mant, left, right;
};
enum { MAGIC, BITS, SCALED };  // of `kind`: how a grid is rounded to
enum { NOT_NARROWED, TO_BF16, TO_FP16 };
constexpr float TWO31 = 0x1p31f;

template <class T> INLINE bool is_magic(const void* ints) { return ((const Integers<T>*)ints)->kind == MAGIC; }

// ---- values in memory ---------------------------------------------------------------------------------

// Values of a tensor, of the working type or bfloat16.
template <class T> INLINE Fs<T> load_values(const void* from, int64_t j, bool narrow) {
    if constexpr (sizeof(T) == 4)
        if (narrow) return from_bfloat(load<U16>((const uint16_t*)from + j));
    (void)narrow;
    return load<Fs<T>>((const T*)from + j);
}

// Rounded to the nearest where bfloat16 does not hold them.
template <class T> INLINE void store_values(void* to, int64_t j, Fs<T> v, bool narrow) {
    if constexpr (sizeof(T) == 4)
        if (narrow) return store((uint16_t*)to + j, upper(nearest_bfloat((I)v)));
    (void)narrow;
    store((T*)to + j, v);
}

// ---- lanes ------------------------------------------------------------------------------------------------

// Nearest even of finite lanes. INSIDE: of magnitudes that do not come near the largest code.
template <class T, bool MAGICAL, bool INSIDE>
INLINE Fs<T> round_lanes(Fs<T> v, const Numbers<T>& f, const Integers<T>& k, Is<T>& e) {
    using R = Real<T>;
    using F = Fs<T>;
    using I = Is<T>;
    const I u = (I)v;
    if (MAGICAL) {
        F a = v;
        if (!INSIDE) {
            a = v < f.lo ? f.lo - F{} : v;
            a = a > f.hi ? f.hi - F{} : a;
        }
        e = (I)a & R::exponent;
        e = e > k.emin ? e : k.emin - I{};
        const F c = (F)(e + k.shift), r = (a + c) - c;
        return INSIDE ? r : (F)(((I)r & ~R::sign) | (u & R::sign));
    }
    const I a = u & ~R::sign;
    e = a & R::exponent;
    e = e > k.emin ? e : k.emin - I{};
    if (INSIDE) return (F)((u + k.half + ((u >> k.cut) & k.odd)) & k.keep);
    I r = (a + k.half + ((a >> k.cut) & k.odd)) & k.keep;
    r = r < k.top ? r : k.top - I{};
    return (F)(r | (u & R::sign));
}

// A neighbour by the first digits of U, a number below `base`; `open` where they do not decide. BITS: of 31 bits.
template <class T, bool MAGICAL>
INLINE Fs<T> draw_lanes(Fs<T> v, Is<T> draw, T base, const Numbers<T>& f, const Integers<T>& k, Is<T>& open) {
    using R = Real<T>;
    using F = Fs<T>;
    using I = Is<T>;
    const I u = (I)v;
    I a = u & ~R::sign, digits, r;
    if (MAGICAL) {
        const F limit = u < 0 ? -f.lo - F{} : f.hi - F{};
        F x = (F)a;
        x = x > limit ? limit : x;
        I e = (I)x & R::exponent;
        e = e > k.emin ? e : k.emin - I{};
        const F s = x * (F)(k.inverse - e), n = __builtin_convertvector(__builtin_convertvector(s, I), F);
        digits = __builtin_convertvector((s - n) * base, I);
        const F up = draw < digits ? n + 1 : n;
        r = (I)(up * (F)(e - k.mant));
    } else {
        a = a < k.top ? a : k.top - I{};
        digits = ((a & ~k.keep) << k.left) >> k.right;
        r = (a & k.keep) + ((draw < digits) & (k.odd << k.cut));
    }
    open |= draw == digits;
    return (F)(r | (u & R::sign));
}

template <class T> INLINE Is<T> draws_at(const uint32_t* words) {
    Is<T> draw;
    if constexpr (sizeof(T) == 4)
        return (Is<T>)(load<U>(words) >> 1);
    else
        for (int i = 0; i < LANES<T>; i++) draw[i] = words[i] >> 1;
    return draw;
}

// q + d, rounded to the container where it is narrower than the working type.
template <class T> INLINE Fs<T> in_container(Fs<T> z, int to) {
    if constexpr (sizeof(T) == 4) {
        const I u = (I)z, a = u & ~SIGN;
        if (to == TO_BF16) return a >= EXPONENT ? z : (F)(nearest_bfloat(u) & ~0xFFFF);
        if (to == TO_FP16) {
            const I e = a & EXPONENT;
            const F c = (F)((e > 113 << 23 ? e : splat(113 << 23)) + ((13 << 23) | (1 << 22)));
            const F size = (F)a, r = size < 65520.0f ? (size + c) - c : splat(__builtin_inff());
            return size == size ? (F)((I)r | (u & SIGN)) : z;
        }
    }
    (void)to;
    return z;
}

// The power of two by which changes are multiplied, from the largest proposal of a tile.
template <class T> INLINE T binade_of(T widest) {
    constexpr Whole<T> exponent = Real<T>::exponent, unit = (Whole<T>)1 << Real<T>::cut;
    if (widest == 0) return 1;
    const Whole<T> e = exponent - unit - (pattern_of(widest) & exponent);
    return real_of<T>(e > unit ? e : unit);
}

// How much of the proposals arrives: sums over a tile of changes, multiplied by that power of two, times proposals and
// times themselves. terms(i) are those of i .. i + LANES - 1; partial sums of every 48th are of the working type.
template <class T> struct Arrived {
    Fs<T> dot, square;
    INLINE void operator+=(const Arrived& other) { dot += other.dot, square += other.square; }
};
template <class T, class Of> INLINE void sum_arrived(Of terms, T scale, double* out) {
    alignas(64) T left[2][LEFT];
    for (int i = 0; i < LEFT; i += LANES<T>) {
        const Arrived<T> sums = branch<LEFT>(terms, i);
        store(left[0] + i, sums.dot), store(left[1] + i, sums.square);
    }
    for (int s = 0; s < 2; s++) {
        double parts[LEFT];
        for (int i = 0; i < LEFT; i++) parts[i] = left[s][i];
        out[s] = (tree(parts, LEFT) + 0.0) * (1.0 / (double)scale);
    }
}

// Codes: sign and index of floats, or two's complement of integers. `top` is the bit of the sign.
template <class T> INLINE Is<T> encode_lanes(Fs<T> r, bool integer, Whole<T> top, const Integers<T>& k) {
    using R = Real<T>;
    const T unit = real_of<T>(k.inverse - k.emin);
    if (integer) return __builtin_convertvector(r * unit, Is<T>) & (2 * top - 1);
    const Is<T> u = (Is<T>)r, a = u & ~R::sign;
    const Is<T> normal = (a - k.emin + ((Whole<T>)1 << R::cut)) >> k.cut, small = __builtin_convertvector((Fs<T>)a * unit, Is<T>);
    return (k.kind == MAGIC ? (a >= k.emin ? normal : small) : a >> k.cut) | ((u < 0) & top);
}

template <class T> INLINE Fs<T> decode_lanes(Is<T> code, bool integer, Whole<T> top, const Integers<T>& k) {
    using R = Real<T>;
    constexpr Whole<T> one = (Whole<T>)1 << R::cut;
    const T quantum = real_of<T>(k.emin - k.mant);
    if (integer) return __builtin_convertvector((code ^ top) - top, Fs<T>) * quantum;
    const Is<T> n = code & (top - 1), sign = (code & top) != 0;
    const Is<T> normal = (n << k.cut) + (k.emin - one), small = (Is<T>)(__builtin_convertvector(n, Fs<T>) * quantum);
    return (Fs<T>)((k.kind == MAGIC ? (n < one >> k.cut ? small : normal) : n << k.cut) | (sign & R::sign));
}

// ---- one by one -------------------------------------------------------------------------------------------

template <class T> INLINE bool is_finite(T x) { return (pattern_of(x) & Real<T>::exponent) != Real<T>::exponent; }

template <class T> T careful_nearest(T v, const Numbers<T>& f, const Integers<T>& k) {
    if (!is_finite(v)) return v;
    const Fs<T> x = v - Fs<T>{};
    Is<T> e;
    return (k.kind == MAGIC ? round_lanes<T, true, false>(x, f, k, e) : round_lanes<T, false, false>(x, f, k, e))[0];
}

template <class T>
T careful_drawn(T v, const Numbers<T>& f, const Integers<T>& k, bool is_short, Key key, uint64_t index) {
    using R = Real<T>;
    const Whole<T> u = pattern_of(v), sign = u & R::sign, a = u & ~R::sign;
    if (a >= R::exponent) return v;
    if (k.kind != MAGIC) {
        const Whole<T> b = a < k.top ? a : k.top;
        const bool up = exact_up((double)(b & ~k.keep) * __builtin_ldexp(1.0, -(int)k.cut), is_short, key, index);
        return real_of<T>(((b & k.keep) + ((Whole<T>)up << k.cut)) | sign);
    }
    const T limit = u < 0 ? -f.lo : f.hi, size = real_of<T>(a), x = size > limit ? limit : size;
    Whole<T> e = pattern_of(x) & R::exponent;
    e = e > k.emin ? e : k.emin;
    const T s = x * real_of<T>(k.inverse - e), n = __builtin_floor(s);
    const T up = exact_up((double)s - n, is_short, key, index) ? n + 1 : n;
    return real_of<T>(pattern_of((T)(up * real_of<T>(e - k.mant))) | sign);
}

}  // namespace HALFULP_TARGET

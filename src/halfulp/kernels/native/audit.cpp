// What every static grid would do to a step, all grids in one pass over memory: halfulp/kernels/reference.py, audit.
//
// A tile of weights and proposals is read once into buffers of the first-level cache, where every grid works on it.
// T is the working type, float or double.
#include "calls.h"
#include "static_grid.h"
#include "sums.h"
#include "tiles.h"

namespace HALFULP_TARGET {

// ---- one tile --------------------------------------------------------------------------------------------

template <class T> struct Tile {
    alignas(64) T w[TILE], d[TILE];                  // zeros where either is not finite, and behind the end
    alignas(64) T size[TILE], sized[TILE], turned[TILE];  // |w|, |d|, and d as seen from w's side of zero
    alignas(64) int32_t ratio[TILE];                 // log2(|w| / |d|) in fixed point
    alignas(64) T q[TILE], z[TILE];
    uint64_t changed[TILE / 64];
    int n, zeros, bad;
    T least, most, widest;
};

// log2 of positive values in fixed point: reference.log2_ratio's digits. Of zeros: anything.
template <class T> INLINE int32_t log2_points(T v) {
    using R = Real<T>;
    const bool tiny = v < real_of<T>((Whole<T>)1 << R::cut);
    const T scaled = tiny ? v * real_of<T>((Whole<T>)(R::bias + R::lift) << R::cut) : v;
    const Whole<T> u = pattern_of(scaled), one = (Whole<T>)R::bias << R::cut;
    const float t = (float)(real_of<T>((u & (((Whole<T>)1 << R::cut) - 1)) | one) - (T)1);
    float p = -0.009309123270213604f;
    p = p * t + 0.05205884575843811f;
    p = p * t + -0.13752110302448273f;
    p = p * t + 0.24186457693576813f;
    p = p * t + -0.34730100631713867f;
    p = p * t + 0.4786836802959442f;
    p = p * t + -0.7211657762527466f;
    p = p * t + 1.4426898956298828f;
    // Adding 1.5 * 2**23 leaves the nearest whole number in the lowest bits.
    const int32_t points = pattern_of(p * t * 65536.0f + 12582912.0f) - 0x4B400000;
    return ((int32_t)(u >> R::cut) - (tiny ? R::bias + R::lift : R::bias)) * 65536 + points;
}

// Weights and proposals of a tile, and what all grids share of it.
template <class T> void survey(Tile<T>& x, const void* before, const void* now, bool narrow, bool after, bool phase) {
    using R = Real<T>;
    const int n = x.n;
    if (narrow) {
        for (int i = 0; i < n; i++) x.w[i] = widened_at(before, i), x.d[i] = widened_at(now, i);
    } else {
        memcpy(x.w, before, n * sizeof(T));
        memcpy(x.d, now, n * sizeof(T));
    }
    if (after)
        for (int i = 0; i < n; i++) x.d[i] = x.d[i] - x.w[i];
    for (int i = n; i < TILE; i++) x.w[i] = x.d[i] = 0;
    const auto look = [&] {
        int zeros = 0, bad = 0;
        Whole<T> least = R::exponent, most = 0, widest = 0;
        for (int i = 0; i < TILE; i++) {
            const Whole<T> u = pattern_of(x.w[i]), v = pattern_of(x.d[i]), a = u & ~R::sign, b = v & ~R::sign;
            x.size[i] = real_of<T>(a), x.sized[i] = real_of<T>(b);
            x.turned[i] = real_of<T>(v ^ (u & R::sign));
            zeros += b == 0, bad += (a >= R::exponent) | (b >= R::exponent);
            most = a > most ? a : most, widest = b > widest ? b : widest;
        }
        for (int i = 0; i < n; i++) {
            const Whole<T> a = pattern_of(x.size[i]);
            least = a < least ? a : least;
        }
        x.least = real_of<T>(least), x.most = real_of<T>(most), x.widest = real_of<T>(widest);
        x.zeros = zeros - (TILE - n);
        return bad;
    };
    x.bad = look();
    if (x.bad) {
        for (int i = 0; i < n; i++)
            if (pattern_of(x.size[i]) >= R::exponent || pattern_of(x.sized[i]) >= R::exponent) x.w[i] = x.d[i] = 0;
        look();
    }
    constexpr int32_t far = 1 << 30;  // of zeros: on this side of every grid's spacing, or on that
    if (phase)
        for (int i = 0; i < TILE; i++) {
            const int32_t ratio = log2_points(x.size[i]) - log2_points(x.sized[i]);
            x.ratio[i] = x.sized[i] == 0 ? far : x.size[i] == 0 ? -far : ratio;
        }
}

// The uniform-phase sum of a grid, which depends on its mantissa alone.
template <class T> int64_t phase_sum(const Tile<T>& x, int32_t points) {
    I sums = {};  // 768 * 65536 < 2**31
    for (int i = 0; i < TILE; i += W) {
        const I v = load<I>(x.ratio + i) - points, above = v > 0 ? v : I{};
        sums += above < 65536 ? above : splat(65536);
    }
    int32_t sum = 0;
    for (int i = 0; i < W; i++) sum += sums[i];
    return sum - (int64_t)(TILE - x.n + x.bad) * 65536;
}

struct GridCounts {
    int changed, symmetric, ends, small, zero;
};

// One grid on a tile. Counts are kept per lane: a comparison that holds is -1.
template <class T, bool MAGICAL, bool INSIDE>
GridCounts audit_grid(Tile<T>& x, const Numbers<T>& fs, const Integers<T>& ks, T scale, bool keep, int to, double* arrived) {
    using F = Fs<T>;
    using I = Is<T>;
    const Numbers<T> f = fs;
    const Integers<T> k = ks;
    constexpr int L = LANES<T>;
    const T *from = INSIDE ? x.size : x.w, *by = INSIDE ? x.turned : x.d;
    const bool tiny = x.least < f.normal;
    memset(x.changed, 0, sizeof x.changed);
    I symmetric = {}, ends = {}, zero = {}, small = {};
    const auto look = [&](int j) INLINE_LAMBDA {
        const F a = load<F>(x.size + j), b = load<F>(x.sized + j), w = load<F>(from + j), d = load<F>(by + j);
        I e, unused;
        const F q = round_lanes<T, MAGICAL, INSIDE>(w, f, k, e);
        const F z = INSIDE ? q + d : in_container<T>(q + d, to);
        F r = round_lanes<T, MAGICAL, INSIDE>(z, f, k, unused);
        if (!INSIDE) {
            r = ((I)z & Real<T>::exponent) == Real<T>::exponent ? z : r;  // what leaves the container's range is not rounded
            e = (I)a & Real<T>::exponent;
            e = e > k.emin ? e : k.emin - I{};  // the spacing is the weight's, which may lie beyond the largest code
            ends += (I)((q >= f.hi) | (q <= f.lo));
        }
        x.changed[j >> 6] |= (uint64_t)differing(r, q) << (j & 63);
        symmetric += (I)(b * f.up < (F)e);
        if (keep) store(x.q + j, q), store(x.z + j, z);
        const F u = r - q, shifted = u * scale;
        return Arrived<T>{shifted * d, shifted * u};
    };
    sum_arrived<T>(look, scale, arrived);
    for (int j = 0; tiny && j < TILE; j += L) {
        const F a = load<F>(x.size + j);
        zero += (I)(a < f.zero), small += (I)(a < f.normal);
    }
    const auto counted = [](I lanes) {
        int n = 0;
        for (int i = 0; i < L; i++) n -= (int)lanes[i];
        return n;
    };
    const int rest = TILE - x.n, odd = tiny ? rest : 0;  // zeros: they do not change, and count in everything else
    const int low = !INSIDE && f.lo >= 0 ? rest : 0;
    return {ones(x.changed), counted(symmetric) - rest, counted(ends) - low, counted(small) - odd, counted(zero) - odd};
}

// Multiply every probability of never having moved, under stochastic rounding, by that of staying at q when z is written.
template <class T> void follow_odds(const Tile<T>& x, const Numbers<T>& f, const Integers<T>& k, T* stay) {
    using R = Real<T>;
    const Whole<T> gap = k.odd << k.cut;
    const T share = (T)1 / (T)(gap + (gap == 0));  // a grid may cut nothing
    for (int i = 0; i < x.n; i++) {
        const T v = x.z[i], q = v < 0 ? -x.q[i] : x.q[i], size = v < 0 ? -v : v;
        T here;
        if (k.kind == MAGIC) {
            const T limit = v < 0 ? -f.lo : f.hi, a = size > limit ? limit : size;
            Whole<T> e = pattern_of(a) & R::exponent;
            e = e > k.emin ? e : k.emin;
            const T gaps = real_of<T>(k.inverse - e), s = a * gaps, n = __builtin_floor(s), at = q * gaps;
            here = at == n + 1 ? s - n : at == n ? 1 - (s - n) : 0;
        } else {
            Whole<T> a = pattern_of(size);
            a = a < k.top ? a : k.top;
            const T low = real_of<T>(a & k.keep), high = real_of<T>((a & k.keep) + gap), part = (T)(a & ~k.keep) * share;
            here = q == low ? 1 - part : q == high ? part : 0;
        }
        stay[i] = stay[i] * here;
    }
}

INLINE void fetch(const void* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)from + i, 0, 2);
}

template <class T> void audit_tiles(const AuditCall& call, int64_t t0, int64_t t1) {
    const bool narrow = call.stored == BFLOATS;
    const int64_t bytes = narrow ? 2 : sizeof(T);
    const auto used = [&](int64_t t) { return call.places ? call.places[t][1] : call.size - t * TILE < TILE ? call.size - t * TILE : TILE; };
    const auto place = [&](int64_t t) { return call.places ? (const char*)call.places[t][0] : (const char*)call.now + t * TILE * bytes; };
    Tile<T> x;
    for (int64_t t = t0; t < t1; t++) {
        x.n = (int)used(t);
        if (t + 1 < t1) fetch((const char*)call.before + (t + 1) * TILE * bytes, used(t + 1) * bytes);
        survey(x, (const char*)call.before + t * TILE * bytes, place(t), narrow, call.after, call.phase);
        if (t + 1 < t1) fetch(place(t + 1), used(t + 1) * bytes);
        call.shared[2 * t] = x.zeros - x.bad;
        call.shared[2 * t + 1] = x.bad;
        tile_sums<2>(x.n, [&](int i) INLINE_LAMBDA {
            const D w = doubles(x.size + i), d = doubles(x.sized + i);
            return Terms<2>{{w * w, d * d}};
        }, call.sums + 2 * t);
        const T scale = binade_of(x.widest);
        for (int64_t g = 0; g < call.rows; g++) {
            const Numbers<T>& f = ((const Numbers<T>*)call.floats)[g];
            const Integers<T>& k = ((const Integers<T>*)call.ints)[g];
            const int64_t o = t * call.grids + call.slots[g];
            if (call.phase) call.phases[o] = phase_sum(x, (int32_t)k.points);
            if (k.kind == SCALED) continue;  // its row is there for the phase sum
            const bool inside = call.to == NOT_NARROWED && x.most + x.most + x.widest < f.hi && f.lo == -f.hi, keep = call.stay;
            const auto audit = k.kind == MAGIC ? (inside ? audit_grid<T, true, true> : audit_grid<T, true, false>)
                                               : (inside ? audit_grid<T, false, true> : audit_grid<T, false, false>);
            const GridCounts c = audit(x, f, k, scale, keep, call.to, call.arrived + 2 * o);
            int32_t* counts = call.counts + o * call.kinds;
            counts[0] = x.n - c.changed - x.bad;
            counts[1] = c.symmetric - x.bad;
            counts[2] = c.ends;
            counts[3] = c.small - c.zero;
            counts[4] = c.zero - x.bad;
            if (call.moved) {
                uint8_t* moved = call.moved + call.slots[g] * call.moved_row + t * (TILE / 8);
                counts[5] = x.n - add_moved(x.changed, x.n, moved);
            }
            if (keep) {
                T* stay = (T*)call.stay + call.slots[g] * call.stay_row + t * TILE;
                follow_odds(x, f, k, stay);
                call.expected[o] = sum_magnitudes(stay, x.n);
            }
        }
    }
}

// Values copied side by side, from where each tile of them is.
inline void copy_tiles(const CopyCall& call, int64_t t0, int64_t t1) {
    for (int64_t t = t0; t < t1; t++)
        memcpy(call.into + t * TILE * call.bytes, (const void*)call.places[t][0], call.places[t][1] * call.bytes);
}

}  // namespace HALFULP_TARGET

KERNEL_OF_TYPE(audit, AuditCall, stored)
KERNEL(copy, CopyCall)

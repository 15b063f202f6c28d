// One optimizer step in one sweep over memory: moments, proposal, policy, stored values and counts.
//
// halfulp/kernels/onepass_reference.py defines every bit. A rule and a policy are template arguments; how
// weights, gradients and moments are stored is asked once a vector, of numbers that never change within a call.
#include "calls.h"
#include "static_grid.h"
#include "tiles.h"

namespace HALFULP_TARGET {

enum Family { ADAMS, SGDS, LIONS };  // AdamW and Adam; SGD with momentum, Nesterov's too; Lion
enum Keeps { NOTHING, CARRY, ERROR, MASTER, REMAINDER, REMAINDER8 };  // the last in 16 and in 8 bits

struct Rates {
    float decay, share, beta2, rest2, root, inverse, eps, step, feed, beta1;
};

// One tensor, or one tile of it.
struct Job : OnepassRow {
    const Rates* rates;
    const Key* keys;  // of the streams of weights and of moments
    int32_t (*counts)[5];
    double (*totals)[5];
};

// How a loop finds weights and gradients: float32 on a grid of its own or on bfloat16's, both bfloat16, or codes
// beside float32. Anything else is brought into one of these a tile at a time.
enum Layout { ON_GRID, ON_BFLOAT, NARROW, CODED };

// ---- rounding ------------------------------------------------------------------------------------------

enum Rounding { BFLOAT, FLOAT, WHOLE };  // to the patterns of bfloat16; to floats; to integers

struct Grid {
    Numbers<float> f;
    Integers<float> k;
    int rounding;
    int32_t top;  // the bit of the sign of codes

    explicit Grid(const OnepassCall& c)
        : f(*(const Numbers<float>*)c.floats), k(*(const Integers<float>*)c.ints), rounding(c.kind.rounding), top(c.kind.top) {}
};

// Patterns above this are rounded to bfloat16's largest number, or might be, or are not finite.
constexpr int32_t NEAR_END = 0x7F7E0000;

// Whether lanes are not finite, or at an end of bfloat16's range, which the functions below do not look at.
INLINE I is_rare(F v, const Grid& g) { return (bits(v) & MAGNITUDE) > (g.rounding == BFLOAT ? NEAR_END : EXPONENT - 1); }

INLINE F nearest(F v, const Grid& g) {
    if (g.rounding == BFLOAT) return floats(nearest_bfloat(bits(v)) & ~0xFFFF);
    I e;
    return round_lanes<float, true, false>(v, g.f, g.k, e);
}

// A neighbour by the first digits of U; `open` where they do not decide.
INLINE F drawn(F v, I word, const Grid& g, bool is_short, I& open) {
    if (g.rounding != BFLOAT)
        return draw_lanes<float, true>(v, is_short ? word ^ 0xFFFF : (I)((U)word >> 1), is_short ? 0x1p16f : TWO31, g.f, g.k, open);
    const I u = bits(v);
    if (is_short) return floats((u + word) & ~0xFFFF);  // its digits are the complement: to go up is to carry
    const I digits = (u & 0xFFFF) << 15, draw = (I)((U)word >> 1);
    open |= draw == digits;
    return floats((u & ~0xFFFF) + ((draw < digits) & 0x10000));
}

// ---- how things are stored ---------------------------------------------------------------------------

template <int LAYOUT> INLINE F load_stored(const Grid& g, const void* from, int64_t j) {
    if (LAYOUT == CODED) return decode_lanes<float>(widened(load<U8>((const uint8_t*)from + j)), g.rounding == WHOLE, g.top, g.k);
    if (LAYOUT == NARROW) return from_bfloat(load<U16>((const uint16_t*)from + j));
    return load<F>((const float*)from + j);
}

template <int LAYOUT> INLINE void store_stored(const Grid& g, void* to, int64_t j, F r) {
    if (LAYOUT == CODED)
        store((uint8_t*)to + j, lowest(encode_lanes<float>(r, g.rounding == WHOLE, g.top, g.k)));
    else if (LAYOUT == NARROW)
        store((uint16_t*)to + j, upper(bits(r)));
    else
        store((float*)to + j, r);
}

template <bool BFLOATS_> INLINE F load_floats(const void* from, int64_t j) {
    return BFLOATS_ ? from_bfloat(load<U16>((const uint16_t*)from + j)) : load<F>((const float*)from + j);
}

// A carry or a master as it is, a master from its remainder.
template <int KEEPS> INLINE F load_kept(const void* from, int64_t j, F q) {
    if (KEEPS == REMAINDER) return floats(bits(q) + widened(load<I16>((const int16_t*)from + j)));
    if (KEEPS == REMAINDER8) return floats(bits(q) + (widened(load<I8>((const int8_t*)from + j)) << 8));
    return load<F>((const float*)from + j);
}

template <int KEEPS> INLINE void store_kept(void* to, int64_t j, F x, F r) {
    if (KEEPS == REMAINDER)
        store((int16_t*)to + j, narrowed((bits(x) - bits(r)) & 0xFFFF));
    else if (KEEPS == REMAINDER8)
        store((int8_t*)to + j, lowest((bits(x) - bits(r)) >> 8));
    else
        store((float*)to + j, x);
}

// float32, or bfloat16 by a draw of 16 digits: to go up is to carry.
template <bool BFLOATS_> INLINE void store_moment(void* to, int64_t j, F x, I word, bool rare) {
    if (!BFLOATS_) return store((float*)to + j, x);
    const I u = bits(x);
    I r = u + word;
    if (rare) r = (u & EXPONENT) == EXPONENT ? u | ((x != x) & 0x400000) : r;
    store((uint16_t*)to + j, upper(r));
}

// ---- the step of one vector --------------------------------------------------------------------------

struct Proposal {
    F z, m, v, below;  // below: Adam's denominator
};

// `late`: lanes that lie behind torch's last whole vector, where it sums in another order.
template <Family FAMILY> INLINE Proposal propose(const OnepassCase& c, const Rates& a, F w, F g, F m, F v, bool behind, I late) {
    Proposal p;
    if (FAMILY == LIONS) {
        const F turn = m * a.beta1 + g * a.share;
        const F sign = turn > 0 ? splat(1.0f) : turn < 0 ? splat(-1.0f) : turn;
        p.m = m * a.beta2 + g * a.rest2;
        p.z = w * a.decay + sign * a.step;
        return p;
    }
    if (c.rule == ADAMW)
        w = w * a.decay;
    else if (a.decay != 0)
        g = fma(w, splat(a.decay), g);
    if (FAMILY == SGDS) {
        p.m = fma(g, splat(a.share), m * a.beta1);
        if (behind) p.m = late ? fma(m, splat(a.beta1), g * a.share) : p.m;
        p.z = fma(c.rule == NESTEROV ? fma(p.m, splat(a.beta2), g) : p.m, splat(a.step), w);
        return p;
    }
    p.m = fma(g - m, splat(a.share), c.small ? m : g);
    const F weighted = g * a.rest2;
    p.v = fma(weighted, g, v * a.beta2);
    if (behind) p.v = late ? fma(v, splat(a.beta2), weighted * g) : p.v;
    // sqrt(v) / root: by the reciprocal and one correction, which rounds as the division does (Markstein).
    const F r = root_of(p.v), x = r * a.inverse;
    p.below = fma(fma(x, splat(-a.root), r), splat(a.inverse), x) + a.eps;
    p.z = w + p.m * a.step / p.below;
    return p;
}

// What a remainder can keep of a finite master.
inline float careful_master(float z, bool eight, bool is_short, Key key, uint64_t index) {
    int64_t u = pattern(z) & MAGNITUDE;
    const int64_t most = eight ? 0x7F7F7FFF & ~255 : 0x7F7F7FFF;
    if (eight) u = (u & ~255) + 256 * exact_up((u & 255) / 256.0, is_short, key, index);
    return real((int32_t)(u > most ? most : u) | (pattern(z) & SIGN));
}

// What a vector becomes: q what is stored, z what is proposed, r what will be stored, rest what is kept.
struct Group {
    F q, z, r, rest, before;
    Proposal p;
    uint32_t bad;  // proposals that are not finite
    int ends;      // weights at an end of the range
};

// A vector with something rare in it, one by one: not finite, at an end, a draw that needs more digits.
template <Family FAMILY, int MODE, int KEEPS>
__attribute__((noinline)) Group careful(OnepassCase c, Grid g, Rates a, Key key, uint64_t index, Group x) {
    x.bad = 0, x.ends = 0;
    for (int i = 0; i < W; i++) {
        const float q = x.q[i];
        float z = x.z[i], r;
        if (FAMILY == ADAMS) {
            const float old = KEEPS >= MASTER ? x.before[i] : q;
            const float below = __builtin_sqrtf(x.p.v[i]) / a.root + a.eps;
            z = (c.rule == ADAMW ? old * a.decay : old) + x.p.m[i] * a.step / below;
            x.p.below[i] = below;
        }
        const bool fine = (pattern(z) & EXPONENT) != EXPONENT;
        if (!fine) {
            x.bad |= 1u << i;
            x.z[i] = x.r[i] = q;
            x.rest[i] = KEEPS == NOTHING || KEEPS == ERROR ? 0 : x.before[i];
            continue;
        }
        if (KEEPS == CARRY) {
            const float whole = z + x.before[i];
            if ((pattern(whole) & EXPONENT) != EXPONENT) z = whole;
        }
        if (KEEPS >= REMAINDER) {
            z = careful_master(z, KEEPS == REMAINDER8, c.is_short, key, index + i);
            const int32_t u = pattern(z);
            r = real((u + 0x8000) & ~0xFFFF);
        } else {
            r = careful_nearest(z, g.f, g.k);
            if (MODE == STOCHASTIC || (MODE == DEADZONE && r == q && z != q))
                r = careful_drawn(z, g.f, g.k, c.is_short, key, index + i);
        }
        const bool over = r >= g.f.hi, under = r <= g.f.lo;
        x.ends += over || under;
        x.z[i] = z, x.r[i] = r;
        x.rest[i] = z;
        if (KEEPS == CARRY || KEEPS == ERROR) x.rest[i] = (over && z > r) || (under && z < r) ? 0 : z - r;
    }
    return x;
}

// Rounds x.z by the policy; everything else of the group follows from it.
template <Family FAMILY, int MODE, int KEEPS>
INLINE bool round_group(const OnepassCase& c, const Grid& g, const Rates& a, Key key, uint64_t index, I word, Group& x) {
    constexpr bool RESTS = KEEPS == CARRY || KEEPS == ERROR;
    const F asked = x.z;
    I rare;
    if (KEEPS == CARRY) x.z = x.z + x.before;
    if (KEEPS >= REMAINDER) {
        I u = bits(x.z);
        rare = (u & MAGNITUDE) > NEAR_END;
        if (KEEPS == REMAINDER8) {
            const I digits = (u & 255) << 23, draw = (I)((U)word >> 1);
            if (!c.is_short) rare |= digits == draw;
            u = c.is_short ? (u + (I)((U)word >> 8)) & ~255 : (u & ~255) + ((draw < digits) & 256);
        }
        x.z = floats(u);
        x.r = floats((u + 0x8000) & ~0xFFFF);
    } else {
        rare = is_rare(x.z, g);
        if (MODE == NEAREST) {
            x.r = nearest(x.z, g);
        } else {
            x.r = drawn(x.z, word, g, c.is_short, rare);
            if (MODE == DEADZONE) {
                const F near = nearest(x.z, g);
                x.r = ((near == x.q) & (x.z != x.q)) ? x.r : near;
            }
        }
    }
    x.rest = RESTS ? x.z - x.r : x.z;
    x.bad = 0, x.ends = 0;
    if (g.rounding != BFLOAT) {
        const I over = x.r >= g.f.hi, under = x.r <= g.f.lo;
        const uint32_t ends = mask(over | under);
        x.ends = __builtin_popcount(ends);
        if (RESTS && ends) x.rest = ((over & (x.z > x.r)) | (under & (x.z < x.r))) ? F{} : x.rest;
    }
    if (__builtin_expect(mask(rare) == 0, 1)) return false;
    x.z = asked;
    x = careful<FAMILY, MODE, KEEPS>(c, g, a, key, index, x);
    return true;
}

// ---- tiles -------------------------------------------------------------------------------------------

// One whole tile, number t of the job.
template <Family FAMILY, int MODE, int KEEPS, int LAYOUT, bool BFLOAT_MOMENTS>
void step_tile(const OnepassCase& case_, const Grid& grid, const Job& job_, int64_t t) {
    constexpr bool BESIDE = KEEPS != NOTHING && KEEPS != ERROR, DRAWS = MODE != NEAREST || KEEPS == REMAINDER8;
    const OnepassCase c = case_;  // copies that nobody else can see: stores do not make the compiler read them again
    const Job job = job_;
    const Rates a = *job.rates;
    Grid g = grid;
    if (LAYOUT == ON_BFLOAT || LAYOUT == NARROW) g.rounding = BFLOAT;
    const int64_t first = t * TILE;
    const bool sampled = job.sums && t % job.sums == 0;
    Draws own, pair;
    own.begin(job.keys[0], c.is_short, job.offset + first);
    pair.begin(job.keys[1], true, job.offset + first);
    Tally tally = {};
    float all_q[TILE], all_z[TILE], all_r[TILE];
    for (int i = 0; i < TILE; i += W) {
        const int64_t j = first + i;
        Group x;
        x.q = load_stored<LAYOUT>(g, job.stored, j);
        if (BESIDE) x.before = load_kept<KEEPS>(job.kept, j, x.q);
        const F w = KEEPS >= MASTER ? x.before : x.q;
        const F m = load_floats<BFLOAT_MOMENTS>(job.first, j);
        const F v = FAMILY == ADAMS ? load_floats<BFLOAT_MOMENTS>(job.second, j) : F{};
        const bool behind = j + W > job.plain;
        const I late = behind ? counting() >= (int32_t)(job.plain - j > -W ? job.plain - j : -W) : I{};
        x.p = propose<FAMILY>(c, a, w, load_floats<LAYOUT == NARROW>(job.grad, j), m, v, behind, late);
        x.z = x.p.z;
        const I word = DRAWS ? load<I>(own.at(i)) : I{};
        const bool rare = round_group<FAMILY, MODE, KEEPS>(c, g, a, job.keys[0], job.offset + j, word, x);
        tally.ends += x.ends, tally.bad += __builtin_popcount(x.bad);
        F next = x.p.m;
        if (KEEPS == ERROR && a.feed != 0) {  // what the moment cannot hold is not fed back
            const F fed = FAMILY == ADAMS ? next + (x.p.below * x.rest) * a.feed : fma(x.rest, splat(a.feed), next);
            next = (bits(fed) & EXPONENT) == EXPONENT ? next : fed;
        }
        const I digits = BFLOAT_MOMENTS ? load<I>(pair.at(i)) : I{};
        store_moment<BFLOAT_MOMENTS>(job.first, j, next, digits, rare);
        if (FAMILY == ADAMS) store_moment<BFLOAT_MOMENTS>(job.second, j, x.p.v, digits >> 8 | (digits & 255) << 8, rare);
        if (BESIDE) store_kept<KEEPS>(job.kept, j, x.rest, x.r);
        store_stored<LAYOUT>(g, job.stored, j, x.r);
        tally.changed[i >> 6] |= (uint64_t)mask(x.r != x.q) << (i & 63);
        tally.proposed[i >> 6] |= (uint64_t)mask(x.z != x.q) << (i & 63);
        if (sampled) {
            F z = x.z;
            if (KEEPS >= REMAINDER) z = floats(bits(z) | (((bits(z) & 0xFFFF) == 0x8000) & 1));  // as two passes have it
            store(all_q + i, x.q);
            store(all_z + i, z);
            store(all_r + i, x.r);
            for (int k = 0; rare && k < W; k++)
                if (x.bad >> k & 1) all_q[i + k] = all_z[i + k] = all_r[i + k] = 0;
        }
    }
    finish_tile(tally, TILE, job.moved ? job.moved + t * (TILE / 8) : nullptr, job.counts[t]);
    if (sampled) sum_tile(all_q, all_z, all_r, job.totals[t]);
}

// ---- tiles that a loop does not take as they are -----------------------------------------------------------

// Codes packed to the bit, the lowest first. A tile is whole bytes at every width.
inline void unpack(const uint8_t* packed, int64_t bytes, int bits, int64_t n, uint8_t* codes) {
    for (int64_t i = 0, at = 0; i < n; i += 8, at += bits) {
        uint64_t word = 0;
        for (int b = 0; b < bits && at + b < bytes; b++) word |= (uint64_t)packed[at + b] << (8 * b);
        for (int k = 0; k < 8; k++, word >>= bits) codes[i + k] = (uint8_t)(word & ((1u << bits) - 1));
    }
}

inline void pack(uint8_t* codes, int bits, int64_t n, uint8_t* packed, int64_t bytes) {
    for (int64_t i = n; i < (n + 7) / 8 * 8; i++) codes[i] = 0;
    for (int64_t i = 0, at = 0; i < n; i += 8, at += bits) {
        uint64_t word = 0;
        for (int k = 7; k >= 0; k--) word = word << bits | codes[i + k];
        for (int b = 0; b < bits && at + b < bytes; b++) packed[at + b] = (uint8_t)(word >> (8 * b));
    }
}

// An array of a tile as the loop of a layout wants it: a Part or, if it is packed or bfloat16 that is to be float32, a copy.
struct Staged {
    Part part;
    int n, bits;
    bool widens;

    void* begin(const void* of, int64_t t, int n_, int size, bool widens_, int bits_ = 8) {
        n = n_, bits = bits_, widens = widens_;
        if (!of) return part.real = nullptr;
        if (!widens && bits == 8) return part.begin(of, t * TILE, size, n);
        part.real = (char*)of + t * TILE * size * bits / 8;
        memset(part.copy, 0, n < TILE ? sizeof part.copy : 0);
        if (bits < 8) unpack((const uint8_t*)part.real, (n * bits + 7) / 8, bits, n, (uint8_t*)part.copy);
        int i = 0;
        for (; widens && i + W <= n; i += W) store((float*)part.copy + i, from_bfloat(load<U16>((const uint16_t*)part.real + i)));
        for (; widens && i < n; i++) ((float*)part.copy)[i] = widened_at(part.real, i);
        return part.copy;
    }
    // bfloat16 is rounded to the nearest; what is on its grid stays.
    void end(void* used) {
        if (!used) return;
        if (!widens && bits == 8) return part.end((const char*)used);
        if (bits < 8) pack((uint8_t*)part.copy, bits, n, (uint8_t*)part.real, (n * bits + 7) / 8);
        int i = 0;
        for (; widens && i + W <= n; i += W) store((uint16_t*)part.real + i, upper(nearest_bfloat(load<I>((const int32_t*)part.copy + i))));
        for (; widens && i < n; i++) {
            const uint32_t u = ((const uint32_t*)part.copy)[i];
            ((uint16_t*)part.real)[i] = (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
        }
    }
};

// A tile with copies in place of what the loop does not take. What fills it up are weights of zero that have no gradient and stay.
template <class Step> void step_staged(const OnepassCase& c, int layout, int bits, const Job& job, int64_t t, Step step) {
    const int64_t at = t * TILE;
    const int n = in_tile(job.size, t), moment = c.narrow_moments ? 2 : 4;
    Staged stored, grad, kept, first, second;
    uint8_t moved[TILE / 8] = {};
    Job one = job;
    one.offset += at, one.plain -= at, one.counts += t, one.totals += t, one.sums = job.sums && t % job.sums == 0;
    one.stored = stored.begin(job.stored, t, n, SIZE_OF[c.stored], c.stored == BFLOATS && layout != NARROW, bits);
    one.grad = grad.begin(job.grad, t, n, c.narrow_grad ? 2 : 4, c.narrow_grad && layout != NARROW);
    one.kept = kept.begin(job.kept, t, n, SIZE_OF[c.kept], c.kept == BFLOATS);
    one.first = first.begin(job.first, t, n, moment, false);
    one.second = second.begin(job.second, t, n, moment, false);
    for (int i = n; one.second && i < TILE; i++)  // a denominator that is not zero
        if (c.narrow_moments)
            ((uint16_t*)one.second)[i] = 0x3F80;
        else
            ((float*)one.second)[i] = 1;
    if (job.moved) memcpy(one.moved = moved, job.moved + at / 8, (n + 7) / 8);
    step(one);
    stored.end(one.stored), kept.end(one.kept), first.end(one.first), second.end(one.second);
    if (job.moved) memcpy(job.moved + at / 8, moved, (n + 7) / 8);
    int32_t* counts = job.counts[t];
    counts[0] -= TILE - n, counts[1] -= TILE - n;
    if (job.moved) counts[4] -= TILE - n;
}

template <Family FAMILY, int MODE, int KEEPS, int LAYOUT, bool BFLOAT_MOMENTS>
void step_tiles(const OnepassCase& c, const Grid& g, const Job& job, int64_t t0, int64_t t1) {
    const int bits = c.stored == CODES ? (int)job.bits : 8;
    const bool staged = (c.stored == BFLOATS) != (LAYOUT == NARROW) || (c.narrow_grad && LAYOUT != NARROW) || c.kept == BFLOATS || bits < 8;
    for (int64_t t = t0; t < t1; t++)
        if (!staged && (t + 1) * TILE <= job.size)
            step_tile<FAMILY, MODE, KEEPS, LAYOUT, BFLOAT_MOMENTS>(c, g, job, t);
        else
            step_staged(c, LAYOUT, bits, job, t, [&](const Job& one) { step_tile<FAMILY, MODE, KEEPS, LAYOUT, BFLOAT_MOMENTS>(c, g, one, 0); });
}

// ---- the loop of a case ----------------------------------------------------------------------------------

using Step = void (*)(const OnepassCase&, const Grid&, const Job&, int64_t, int64_t);

template <Family FAMILY, int MODE, int KEEPS> Step step_of_policy(const OnepassCase& c, const Grid& g) {
    const bool narrow = c.stored == BFLOATS && c.narrow_grad && g.rounding == BFLOAT;
    const int layout = c.stored == CODES ? CODED : narrow ? NARROW : g.rounding == BFLOAT ? ON_BFLOAT : ON_GRID;
    constexpr int GRID = KEEPS >= REMAINDER ? ON_BFLOAT : ON_GRID, CODE = KEEPS >= REMAINDER ? NARROW : CODED;  // it is of bfloat16 alone
    static const Step table[4][2] = {
        {step_tiles<FAMILY, MODE, KEEPS, GRID, false>, step_tiles<FAMILY, MODE, KEEPS, GRID, true>},
        {step_tiles<FAMILY, MODE, KEEPS, ON_BFLOAT, false>, step_tiles<FAMILY, MODE, KEEPS, ON_BFLOAT, true>},
        {step_tiles<FAMILY, MODE, KEEPS, NARROW, false>, step_tiles<FAMILY, MODE, KEEPS, NARROW, true>},
        {step_tiles<FAMILY, MODE, KEEPS, CODE, false>, step_tiles<FAMILY, MODE, KEEPS, CODE, true>},
    };
    return table[layout][c.narrow_moments];
}

template <Family FAMILY> Step step_of_family(const OnepassCase& c, const Grid& g) {
    switch (c.keeps) {
    case CARRY: return step_of_policy<FAMILY, NEAREST, CARRY>(c, g);
    case MASTER: return step_of_policy<FAMILY, NEAREST, MASTER>(c, g);
    case ERROR: return c.mode ? step_of_policy<FAMILY, STOCHASTIC, ERROR>(c, g) : step_of_policy<FAMILY, NEAREST, ERROR>(c, g);
    case REMAINDER:
        return c.kept == CHARS ? step_of_policy<FAMILY, NEAREST, REMAINDER8>(c, g) : step_of_policy<FAMILY, NEAREST, REMAINDER>(c, g);
    default:
        return c.mode == DEADZONE     ? step_of_policy<FAMILY, DEADZONE, NOTHING>(c, g)
               : c.mode == STOCHASTIC ? step_of_policy<FAMILY, STOCHASTIC, NOTHING>(c, g)
                                      : step_of_policy<FAMILY, NEAREST, NOTHING>(c, g);
    }
}

inline Step step_of(const OnepassCase& c, const Grid& g) {
    return c.rule == LION ? step_of_family<LIONS>(c, g) : c.rule >= SGD ? step_of_family<SGDS>(c, g) : step_of_family<ADAMS>(c, g);
}

// The tiles [t0, t1) of those of all tensors, one after the other.
inline void onepass_tiles(const OnepassCall& call, int64_t t0, int64_t t1) {
    const Grid g(call);
    const Step step = step_of(call.kind, g);
    over_tensors(call.rows, call.tensors, t0, t1, [&](int64_t i, int64_t a, int64_t b) {
        const OnepassRow& row = call.rows[i];
        const Job job = {row, (const Rates*)call.rates + i, (const Key*)call.keys + 2 * i, call.counts + row.start, call.totals + row.start};
        step(call.kind, g, job, a, b);
    });
}

}  // namespace HALFULP_TARGET

KERNEL(onepass, OnepassCall)

// One optimizer step in one sweep over memory: moments, proposal, policy, stored values and counts.
//
// halfulp/kernels/onepass_reference.py defines every bit. A tile goes through four stages, 64 weights at a time: load,
// propose, round, store. Between stages those 64 (BLOCK) stay in the nearest cache, so each stage asks once a block what it is
// to do, and its loop over the vectors of a block asks nothing.
#include "calls.h"
#include "coded_moments.h"
#include "static_grid.h"
#include "tiles.h"

namespace HALFULP_TARGET {

// AdamW and Adam, and the same with torch's own root; SGD with momentum, Nesterov's too, and without; Lion.
enum Family { ADAMS, ROOTED, SGDS, PLAINS, LIONS };
enum Keeps { NOTHING, CARRY, ERROR, MASTER, REMAINDER, REMAINDER8 };  // the last in 16 and in 8 bits
enum Rounding { BFLOAT, FLOAT, WHOLE };  // to the patterns of bfloat16; to floats; to integers
enum Way { TO_BFLOAT, BY_VALUE, FLOAT_INDEX, WHOLE_INDEX };  // how lanes are rounded: see below

struct Rates {
    float decay, share, beta2, rest2, root, inverse, eps, step, feed, beta1;
};

// Of a grid: its tables; and what a draw by index needs, where it serves (see index_lanes).
struct Grid {
    Numbers<float> f;
    Integers<float> k;
    int rounding;
    int32_t top;  // the bit of the sign of codes
    bool indexed = false;
    int32_t cut = 0, normal = 0, most[2] = {}, left = 0;  // fraction bits; the first float that is no subnormal; the largest by sign
    float fine = 0, quantum = 0;

    explicit Grid(const OnepassCall& c)
        : f(*(const Numbers<float>*)c.floats), k(*(const Integers<float>*)c.ints), rounding(c.kind.rounding), top(c.kind.top) {
        if (rounding == BFLOAT) return;
        cut = rounding == WHOLE ? 16 : k.cut;
        normal = rounding == WHOLE ? INT32_MAX : k.emin;
        fine = real((int32_t)((uint32_t)k.inverse - (uint32_t)k.emin)) * (float)(1 << cut), quantum = real(k.emin - k.mant);
        const double largest = (double)(f.hi > -f.lo ? f.hi : -f.lo) * fine;
        indexed = c.kind.is_short && cut >= 16 && f.lo < 0 && pattern(fine) < EXPONENT &&
                  (rounding == FLOAT ? f.lo == -f.hi : largest < 0x1p31);
        if (!indexed) return;
        most[0] = position(f.hi), most[1] = position(-f.lo), left = __builtin_clz(top);
    }
    int32_t position(float a) const { return pattern(a) >= normal ? pattern(a) - (normal - 0x800000) : (int32_t)((double)a * fine); }
};

// One tensor, or one tile of it.
struct Job : OnepassRow {
    const Key* keys;  // of the streams of weights and of moments
    int32_t (*counts)[5];
    double (*totals)[5];
};

// A block on its way. q what is stored, before what is kept beside it, z what is proposed, r what will be stored, rest
// what will be kept, below Adam's denominator, alone z without its carry.
struct alignas(64) Block {
    F q[LOTS], before[LOTS], m[LOTS], v[LOTS], z[LOTS], below[LOTS], r[LOTS], rest[LOTS], alone[LOTS];
    I code[LOTS];
    float *first, *second;            // the next moments: m and v, or where they belong if they are stored as they are
    uint64_t changed, proposed, bad;  // a bit for each weight that changed, was to, or has no finite proposal
    uint32_t rare;                    // a bit for each vector in which some were done one by one
    int ends;                         // weights at an end of the range
};

// Square roots as torch makes them (MKL's, see halfulp/kernels/native/__init__.py), each as if alone.
using RootOf = void (*)(int many, const float* from, float* to, int64_t mode);
constexpr int64_t ROOT_MODE = 0x140102;  // as torch asks for them: high accuracy, subnormal numbers kept, no errors raised

// What the stages of a tile see: all of it stays as it is within a call.
struct Work {
    OnepassCase c;
    Grid g;
    Rates a;
    Job job;
    int keeps;
    RootOf root;
};

#define EACH _Pragma("GCC unroll 4") for (int i = 0; i < LOTS; i++)

// ---- load ----------------------------------------------------------------------------------------------

// Codes packed to the bit, the lowest first: 64 are whole bytes at every width.
inline void unpack(const uint8_t* packed, int bits, uint8_t* codes) {
    for (int i = 0; i < BLOCK; i += 8, packed += bits) {
        uint64_t word = 0;
        for (int b = 0; b < bits; b++) word |= (uint64_t)packed[b] << (8 * b);
        for (int k = 0; k < 8; k++, word >>= bits) codes[i + k] = (uint8_t)(word & ((1u << bits) - 1));
    }
}

inline void pack(const uint8_t* codes, int bits, uint8_t* packed) {
    for (int i = 0; i < BLOCK; i += 8, packed += bits) {
        uint64_t word = 0;
        for (int k = 7; k >= 0; k--) word = word << bits | codes[i + k];
        for (int b = 0; b < bits; b++) packed[b] = (uint8_t)(word >> (8 * b));
    }
}

template <bool WHOLES> INLINE void load_codes(const Grid& g, const uint8_t* codes, F* q) {
    EACH q[i] = decode_lanes<float>(widened(load<U8>(codes + i * W)), WHOLES, g.top, g.k);
}

INLINE void load_floats(const void* from, int64_t j, bool bfloats, F* to) {
    if (bfloats)
        EACH to[i] = from_bfloat(load<U16>((const uint16_t*)from + j + i * W));
    else
        EACH to[i] = load<F>((const float*)from + j + i * W);
}

// Moments of eight bits, of which `live` are in use. The others have none, and a denominator that is not zero.
__attribute__((noinline)) void load_moments(const Work& s, int64_t j, int live, Block& x) {
    const bool both = s.c.rule <= ADAM;
    decode_moment<false>((const int8_t*)s.job.first + j, s.job.first_scales[j / BLOCK], x.m);
    if (both) decode_moment<true>((const uint8_t*)s.job.second + j, s.job.second_scales[j / BLOCK], x.v);
    for (int k = live; k < BLOCK; k++) x.m[k / W][k % W] = 0, x.v[k / W][k % W] = 1;
}

// What is stored, and what is kept beside it: a carry or a master as it is, a master from its remainder.
__attribute__((noinline)) void load_block(const Work& s, int64_t j, Block& x) {
    const Grid& g = s.g;
    if (s.c.stored == CODES) {
        uint8_t unpacked[BLOCK];
        const uint8_t* codes = (const uint8_t*)s.job.stored + j * s.job.bits / 8;
        if (s.job.bits < 8) unpack(codes, (int)s.job.bits, unpacked), codes = unpacked;
        if (g.rounding == WHOLE)
            load_codes<true>(g, codes, x.q);
        else
            load_codes<false>(g, codes, x.q);
    } else
        load_floats(s.job.stored, j, s.c.stored == BFLOATS, x.q);
    if (s.keeps == REMAINDER)
        EACH x.before[i] = floats(bits(x.q[i]) + widened(load<I16>((const int16_t*)s.job.kept + j + i * W)));
    else if (s.keeps == REMAINDER8)
        EACH x.before[i] = floats(bits(x.q[i]) + (widened(load<I8>((const int8_t*)s.job.kept + j + i * W)) << 8));
    else if (s.keeps == CARRY || s.keeps == MASTER)
        load_floats(s.job.kept, j, s.c.kept == BFLOATS, x.before);
}

// ---- propose -------------------------------------------------------------------------------------------

// Moments and proposals. LATE: of a block that reaches behind torch's last whole vector, where it sums in another order.
template <Family FAMILY, bool NARROW_GRAD, bool NARROW_MOMENTS, bool LATE>
INLINE void propose_lanes(const Work& s, int64_t j, Block& x) {
    const Rates a = s.a;
    const Job job = s.job;  // copies that nobody else can see: stores do not make the compiler read them again
    const bool decoupled = s.c.rule == ADAMW, decays = !decoupled && a.decay != 0, nesterov = s.c.rule == NESTEROV, small = s.c.small;
    const bool feeds = s.keeps == ERROR;
    const bool coded = s.c.moments == CHARS;
    x.first = NARROW_MOMENTS || coded || feeds ? (float*)x.m : (float*)job.first + j;
    x.second = NARROW_MOMENTS || coded ? (float*)x.v : (float*)job.second + j;
    const F* masters = s.keeps >= MASTER ? x.before : x.q;
    const auto from = [&](const void* of, int64_t at, bool narrow) INLINE_LAMBDA {
        return narrow ? from_bfloat(load<U16>((const uint16_t*)of + at)) : load<F>((const float*)of + at);
    };
    // sqrt(v) / root + eps: by the reciprocal and one correction, which rounds as the division does (Markstein).
    const auto below_of = [&](F r) INLINE_LAMBDA {
        const F y = r * a.inverse;
        return fma(fma(y, splat(-a.root), r), splat(a.inverse), y) + a.eps;
    };
    EACH {
        F w = masters[i], g = from(job.grad, j + i * W, NARROW_GRAD);
        const F m = FAMILY == PLAINS ? F{} : coded ? x.m[i] : from(job.first, j + i * W, NARROW_MOMENTS);
        const I late = LATE ? counting() >= (int32_t)(job.plain - j - i * W > -W ? job.plain - j - i * W : -W) : I{};
        if (FAMILY == LIONS) {
            const F turn = m * a.beta1 + g * a.share;
            const F sign = turn > 0 ? splat(1.0f) : turn < 0 ? splat(-1.0f) : turn;
            store(x.first + i * W, m * a.beta2 + g * a.rest2);
            x.z[i] = w * a.decay + sign * a.step;
            continue;
        }
        if (decays) g = fma(w, splat(a.decay), g);
        if (FAMILY == PLAINS) {
            x.z[i] = fma(g, splat(a.step), w);
            continue;
        }
        if (FAMILY == SGDS) {
            F p = fma(g, splat(a.share), m * a.beta1);
            if (LATE) p = late ? fma(m, splat(a.beta1), g * a.share) : p;
            store(x.first + i * W, p);
            x.z[i] = fma(nesterov ? fma(p, splat(a.beta2), g) : p, splat(a.step), w);
            continue;
        }
        if (decoupled) w = w * a.decay;
        const F v = coded ? x.v[i] : from(job.second, j + i * W, NARROW_MOMENTS), weighted = g * a.rest2;
        const F first = fma(g - m, splat(a.share), small ? m : g);
        F second = fma(weighted, g, v * a.beta2);
        if (LATE) second = late ? fma(v, splat(a.beta2), weighted * g) : second;
        store(x.first + i * W, first), store(x.second + i * W, second);
        if (FAMILY == ROOTED) {
            x.z[i] = w;
            continue;
        }
        const F below = below_of(root_of(second));
        if (feeds) x.below[i] = below;
        x.z[i] = w + first * a.step / below;
    }
    if (FAMILY != ROOTED) return;
    s.root(BLOCK, x.second, (float*)x.below, ROOT_MODE);
    EACH x.z[i] = x.z[i] + load<F>(x.first + i * W) * a.step / below_of(x.below[i]);
}

template <Family FAMILY, bool NARROW_GRAD, bool NARROW_MOMENTS> __attribute__((noinline)) void propose_block(const Work& s, int64_t j, Block& x) {
    if (FAMILY != ROOTED && j + BLOCK > s.job.plain)
        propose_lanes<FAMILY, NARROW_GRAD, NARROW_MOMENTS, true>(s, j, x);
    else
        propose_lanes<FAMILY, NARROW_GRAD, NARROW_MOMENTS, false>(s, j, x);
}

// ---- round ---------------------------------------------------------------------------------------------

// Patterns above this are rounded to bfloat16's largest number, or might be, or are not finite.
constexpr int32_t NEAR_END = 0x7F7E0000;
// What a vector's widest may be: the pattern of a magnitude, or its index.
template <Way WAY> INLINE int32_t limit(const Grid& g) {
    return WAY == TO_BFLOAT ? NEAR_END : WAY == FLOAT_INDEX ? (g.most[0] >> g.cut) - 1 : EXPONENT - 1;
}

template <Way WAY> INLINE F nearest(F v, const Grid& g) {
    if (WAY == TO_BFLOAT) return floats(nearest_bfloat(bits(v)) & ~0xFFFF);
    I e;
    return round_lanes<float, true, false>(v, g.f, g.k, e);
}

// A neighbour by the first digits of U; `open` where they do not decide.
template <Way WAY> INLINE F drawn(F v, I word, const Grid& g, bool is_short, I& open) {
    if (WAY != TO_BFLOAT)
        return draw_lanes<float, true>(v, is_short ? word ^ 0xFFFF : (I)((U)word >> 1), is_short ? 0x1p16f : TWO31, g.f, g.k, open);
    const I u = bits(v);
    if (is_short) return floats((u + word) & ~0xFFFF);  // its digits are the complement: to go up is to carry
    const I digits = (u & 0xFFFF) << 15, draw = (I)((U)word >> 1);
    open |= draw == digits;
    return floats((u & ~0xFFFF) + ((draw < digits) & 0x10000));
}

// The same of a grid of few digits, for 16 digits of U. Magnitudes are counted in steps of the grid, with a fraction: of
// floats that are v's own bits. The word is the complement of U: to go up is to carry, and a fraction that
// comes out full is one that the word does not decide. What is not finite comes out as the largest.
template <bool WHOLES> INLINE F index_lanes(F v, I word, const Grid& g, I& code, I& open, I& ends, I& widest) {
    const I u = bits(v), a = u & MAGNITUDE, digits = splat(0xFFFF << (g.cut - 16));
    I p = __builtin_convertvector(floats(a) * g.fine, I);
    if (!WHOLES) p = a >= g.normal ? a - (g.normal - 0x800000) : p;
    I most = splat(g.most[0]);
    if (WHOLES) most = u < 0 ? splat(g.most[1]) : most;
    p = (U)p < (U)most ? p : most;
    p += word << (g.cut - 16);
    open |= (p & digits) == digits;
    const I index = p >> g.cut;
    const F small = __builtin_convertvector(index, F) * g.quantum;
    if (WHOLES) {
        ends = index == most >> g.cut;
        code = ((index ^ (u >> 31)) - (u >> 31)) & (2 * g.top - 1);
        return floats(bits(small) | (u & SIGN));
    }
    widest = index > widest ? index : widest;
    code = index | (u >> g.left & g.top);
    return floats((index >= 0x800000 >> g.cut ? (index << g.cut) + (g.normal - 0x800000) : bits(small)) | (u & SIGN));
}

// What a remainder can keep of a finite master.
inline float careful_master(float z, bool eight, bool is_short, Key key, uint64_t index) {
    int64_t u = pattern(z) & MAGNITUDE;
    const int64_t most = eight ? 0x7F7F7FFF & ~255 : 0x7F7F7FFF;
    if (eight) u = (u & ~255) + 256 * exact_up((u & 255) / 256.0, is_short, key, index);
    return real((int32_t)(u > most ? most : u) | (pattern(z) & SIGN));
}

// Those lanes of vector i with something rare in them, one by one: not finite, at an end, a draw that needs more digits.
template <int MODE, int KEEPS>
__attribute__((noinline)) void careful(const Work& s, Block& x, int i, uint32_t lanes, F proposed, uint64_t index) {
    const OnepassCase& c = s.c;
    const Grid& g = s.g;
    const Rates& a = s.a;
    for (; lanes; lanes &= lanes - 1) {
        const int k = __builtin_ctz(lanes);
        const float q = x.q[i][k];
        const float before = KEEPS == NOTHING || KEEPS == ERROR ? 0 : x.before[i][k];
        float z = proposed[k], r, rest;
        if (c.rule <= ADAM) {
            const float old = KEEPS >= MASTER ? before : q;
            const float root = s.root ? x.below[i][k] : __builtin_sqrtf(x.second[i * W + k]);
            const float below = root / a.root + a.eps;
            z = (c.rule == ADAMW ? old * a.decay : old) + x.first[i * W + k] * a.step / below;
            x.below[i][k] = below;
        }
        if ((pattern(z) & EXPONENT) == EXPONENT) {
            x.bad |= (uint64_t)1 << (i * W + k);
            z = r = q, rest = before;
        } else {
            if (KEEPS == CARRY) {
                const float whole = z + before;
                if ((pattern(whole) & EXPONENT) != EXPONENT) z = whole;
            }
            if (KEEPS >= REMAINDER) {
                z = careful_master(z, KEEPS == REMAINDER8, c.is_short, s.job.keys[0], index + k);
                r = real((pattern(z) + 0x8000) & ~0xFFFF);
            } else {
                r = careful_nearest(z, g.f, g.k);
                if (MODE == STOCHASTIC || (MODE == DEADZONE && r == q && z != q))
                    r = careful_drawn(z, g.f, g.k, c.is_short, s.job.keys[0], index + k);
            }
            const bool over = r >= g.f.hi, under = r <= g.f.lo;
            x.ends += over || under;
            rest = z;
            if (KEEPS == CARRY || KEEPS == ERROR) rest = (over && z > r) || (under && z < r) ? 0 : z - r;
        }
        x.z[i][k] = z, x.r[i][k] = r, x.rest[i][k] = rest;
        x.code[i][k] = encode_lanes<float>(splat(r), g.rounding == WHOLE, g.top, g.k)[0];
    }
}

// Rounds a vector of proposals, to which a carry is added first. `odd`: lanes that must be looked at one by one, but not
// those of which `widest` tells it, the largest magnitude so far; `ends`: those at an end of the range, among which is
// what is not finite if a draw is by index.
template <int MODE, int KEEPS, Way WAY>
INLINE F round_vector(const Grid& g, bool is_short, F q, F before, I word, F& z, I& code, I& odd, I& ends, I& widest) {
    if (KEEPS == CARRY) z = z + before;
    if (WAY < FLOAT_INDEX) {
        const I size = bits(z) & MAGNITUDE;
        widest = size > widest ? size : widest;
    }
    if (KEEPS == REMAINDER8) {
        const I u = bits(z), digits = (u & 255) << 23, draw = (I)((U)word >> 1);
        if (!is_short) odd |= digits == draw;
        z = floats(is_short ? (u + (I)((U)word >> 8)) & ~255 : (u & ~255) + ((draw < digits) & 256));
    }
    if (KEEPS >= REMAINDER) return floats((bits(z) + 0x8000) & ~0xFFFF);
    if (WAY >= FLOAT_INDEX) return index_lanes<WAY == WHOLE_INDEX>(z, word, g, code, odd, ends, widest);
    F r = MODE == STOCHASTIC ? F{} : nearest<WAY>(z, g);
    if (MODE != NEAREST) {
        const F draw = drawn<WAY>(z, word, g, is_short, odd);
        r = MODE == STOCHASTIC ? draw : ((r == q) & (z != q)) ? draw : r;
    }
    if (WAY == BY_VALUE) ends |= (r >= g.f.hi) | (r <= g.f.lo);
    return r;
}

// What must be looked at in a block: a carry or an error at an end of the range is none, and odd lanes go one by one.
template <int MODE, int KEEPS, Way WAY>
__attribute__((noinline)) void mend_block(const Work& s, Block& x, const uint32_t* words, uint64_t index) {
    const Grid& g = s.g;
    constexpr bool DRAWS = MODE != NEAREST || KEEPS == REMAINDER8;
    for (int i = 0; i < LOTS; i++) {
        const F proposed = KEEPS == CARRY || KEEPS == REMAINDER8 ? x.alone[i] : x.z[i];
        F z = proposed;
        I code, odd = {}, ends = {}, widest = {};
        const F r = round_vector<MODE, KEEPS, WAY>(g, s.c.is_short, x.q[i], x.before[i], DRAWS ? load<I>(words + i * W) : I{}, z, code, odd, ends, widest);
        const uint32_t lanes = mask(odd | (WAY < FLOAT_INDEX ? widest > limit<WAY>(g) : (bits(z) & MAGNITUDE) >= EXPONENT));
        if (WAY == FLOAT_INDEX) ends = widest > limit<WAY>(g);
        x.ends += __builtin_popcount(mask(ends) & ~lanes);
        if (KEEPS == CARRY || KEEPS == ERROR) x.rest[i] = (((r >= g.f.hi) & (z > r)) | ((r <= g.f.lo) & (z < r))) ? F{} : x.rest[i];
        if (!lanes) continue;
        x.rare |= 1u << i;
        careful<MODE, KEEPS>(s, x, i, lanes, proposed, index + i * W);
        const uint64_t here = ~((uint64_t)((1u << W) - 1) << (i * W));
        x.changed = (x.changed & here) | (uint64_t)differing(x.r[i], x.q[i]) << (i * W);
        x.proposed = (x.proposed & here) | (uint64_t)differing(x.z[i], x.q[i]) << (i * W);
    }
}

// Rounds x.z by the policy; everything else of the block follows from it.
template <int MODE, int KEEPS, Way WAY> __attribute__((noinline)) void round_block(const Work& s, Block& x, const uint32_t* words, uint64_t index) {
    const Grid g = s.g;  // a copy that nobody else can see: stores do not make the compiler read it again
    const bool is_short = s.c.is_short;
    uint64_t changed = 0, proposed = 0;
    I odd = {}, ends = {}, widest = {};
    EACH {
        F z = x.z[i];
        if (KEEPS == CARRY || KEEPS == REMAINDER8) x.alone[i] = z;
        const I word = MODE != NEAREST || KEEPS == REMAINDER8 ? load<I>(words + i * W) : I{};
        I code, last = {};
        const F r = round_vector<MODE, KEEPS, WAY>(g, is_short, x.q[i], x.before[i], word, z, code, odd, last, widest);
        ends |= last;
        x.r[i] = r;
        if (KEEPS == CARRY || KEEPS == REMAINDER8) x.z[i] = z;
        if (WAY >= FLOAT_INDEX) x.code[i] = code;
        if (KEEPS != NOTHING) x.rest[i] = KEEPS == CARRY || KEEPS == ERROR ? z - r : z;
        changed |= (uint64_t)differing(r, x.q[i]) << (i * W);
        proposed |= (uint64_t)differing(z, x.q[i]) << (i * W);
    }
    x.changed = changed, x.proposed = proposed;
    x.rare = 0, x.bad = 0, x.ends = 0;
    if (__builtin_expect(mask(odd | ends | (widest > limit<WAY>(g))), 0)) mend_block<MODE, KEEPS, WAY>(s, x, words, index);
}

// ---- store ---------------------------------------------------------------------------------------------

// bfloat16 by a draw of 16 digits: to go up is to carry. Of v the digits are those of m, their bytes exchanged.
template <bool SWAPPED> INLINE void store_moment(void* to, int64_t j, const F* x, const uint32_t* words, uint32_t rare) {
    EACH {
        I word = load<I>(words + i * W);
        if (SWAPPED) word = exchanged(word);
        const I u = bits(x[i]);
        I r = u + word;
        if (rare >> i & 1) r = (u & EXPONENT) == EXPONENT ? u | ((x[i] != x[i]) & 0x400000) : r;
        store((uint16_t*)to + j + i * W, upper(r));
    }
}

// Moments of eight bits, of which `live` are in use.
__attribute__((noinline)) void store_moments(const Work& s, int64_t j, int live, Block& x, const uint32_t* pair) {
    const bool both = s.c.rule <= ADAM;
    for (int k = live; k < BLOCK; k++) x.m[k / W][k % W] = x.v[k / W][k % W] = 0;
    const Coder<false> first(x.m, (int8_t*)s.job.first + j);
    const Coder<true> second(both ? x.v : x.m, both ? (uint8_t*)s.job.second + j : nullptr);
    EACH {
        const I word = load<I>(pair + i * W);
        first.code(i, word);
        if (both) second.code(i, word);
    }
    s.job.first_scales[j / BLOCK] = first.scale();
    if (both) s.job.second_scales[j / BLOCK] = second.scale();
}

__attribute__((noinline)) void store_block(const Work& s, int64_t j, int live, Block& x, const uint32_t* pair, bool indexed) {
    const Grid& g = s.g;
    const Job job = s.job;
    const bool narrow = s.c.moments == BFLOATS, coded = s.c.moments == CHARS;
    if (s.keeps == ERROR) {
        const float feed = s.a.feed;
        EACH {
            const F fed = s.c.rule <= ADAM ? x.m[i] + (x.below[i] * x.rest[i]) * feed : fma(x.rest[i], splat(feed), x.m[i]);
            // What the moment cannot hold is not fed back.
            if (feed != 0) x.m[i] = (bits(fed) & EXPONENT) == EXPONENT ? x.m[i] : fed;
            if (!narrow && !coded) store((float*)job.first + j + i * W, x.m[i]);
        }
    }
    if (narrow) store_moment<false>(job.first, j, x.m, pair, x.rare);
    if (narrow && s.c.rule <= ADAM) store_moment<true>(job.second, j, x.v, pair, x.rare);
    if (coded) store_moments(s, j, live, x, pair);
    if (s.keeps == REMAINDER)
        EACH store((int16_t*)job.kept + j + i * W, narrowed((bits(x.rest[i]) - bits(x.r[i])) & 0xFFFF));
    else if (s.keeps == REMAINDER8)
        EACH store((int8_t*)job.kept + j + i * W, lowest((bits(x.rest[i]) - bits(x.r[i])) >> 8));
    else if (s.keeps == CARRY || s.keeps == MASTER) {
        if (s.c.kept == BFLOATS)
            EACH store((uint16_t*)job.kept + j + i * W, upper(nearest_bfloat(bits(x.rest[i]))));
        else
            EACH store((float*)job.kept + j + i * W, x.rest[i]);
    }
    if (s.c.stored == FLOATS)
        EACH store((float*)job.stored + j + i * W, x.r[i]);
    else if (s.c.stored == BFLOATS)
        EACH store((uint16_t*)job.stored + j + i * W, upper(bits(x.r[i])));
    else {
        uint8_t buffer[BLOCK], *packed = (uint8_t*)job.stored + j * job.bits / 8, *codes = job.bits < 8 ? buffer : packed;
        if (!indexed)
            EACH store(codes + i * W, lowest(encode_lanes<float>(x.r[i], g.rounding == WHOLE, g.top, g.k)));
        else
            EACH store(codes + i * W, lowest(x.code[i]));
        if (job.bits < 8) pack(buffer, (int)job.bits, packed);
    }
}

// ---- tiles ---------------------------------------------------------------------------------------------

struct Stages {
    void (*propose)(const Work&, int64_t, Block&);
    void (*round)(const Work&, Block&, const uint32_t*, uint64_t);
    bool draws, indexed;
};

// Tile t of the job, of whose weights n are in use; whole blocks of it are there.
void step_tile(const Work& s, const Stages& stages, int64_t t, int n) {
    const Job& job = s.job;
    const int64_t first = t * TILE;
    const bool sampled = job.sums && t % job.sums == 0;
    Draws own, pair;
    own.begin(job.keys[0], s.c.is_short, job.offset + first);
    pair.begin(job.keys[1], true, job.offset + first);
    float all_q[TILE], all_z[TILE], all_r[TILE];
    Block blocks[2];
    const auto begin = [&](int b) INLINE_LAMBDA {
        load_block(s, first + b, blocks[b / BLOCK % 2]);
        if (s.c.moments == CHARS) load_moments(s, first + b, n - b, blocks[b / BLOCK % 2]);
        stages.propose(s, first + b, blocks[b / BLOCK % 2]);
    };
    begin(0);
    int changed = 0, proposed = 0, bad = 0, ends = 0, ever = 0;
    for (int b = 0; b < n; b += BLOCK) {
        const int64_t j = first + b;
        Block& x = blocks[b / BLOCK % 2];
        if (b + BLOCK < n) begin(b + BLOCK);  // roots and divisions take the time of what follows here
        stages.round(s, x, stages.draws ? own.block(b) : nullptr, job.offset + j);
        store_block(s, j, n - b, x, s.c.moments != FLOATS ? pair.block(b) : nullptr, stages.indexed);
        changed += __builtin_popcountll(x.changed), proposed += __builtin_popcountll(x.proposed);
        bad += __builtin_popcountll(x.bad), ends += x.ends;
        if (job.moved) {
            const uint64_t moved = load<uint64_t>(job.moved + j / 8) | x.changed;
            store(job.moved + j / 8, moved), ever += __builtin_popcountll(moved);
        }
        if (!sampled) continue;
        if (s.keeps >= REMAINDER) EACH x.z[i] = floats(bits(x.z[i]) | (((bits(x.z[i]) & 0xFFFF) == 0x8000) & 1));  // as two passes have it
        EACH store(all_q + b + i * W, x.q[i]), store(all_z + b + i * W, x.z[i]), store(all_r + b + i * W, x.r[i]);
        for (uint64_t left = x.bad; left; left &= left - 1) {
            const int k = b + __builtin_ctzll(left);
            all_q[k] = all_z[k] = all_r[k] = 0;
        }
    }
    int32_t* counts = job.counts[t];
    counts[0] = n - changed - bad, counts[1] = n - proposed - bad, counts[2] = ends, counts[3] = bad;
    counts[4] = job.moved ? n - ever : 0;
    if (sampled) sum_tile(all_q, all_z, all_r, n, job.totals[t]);
}

// The last tile, of n weights: in copies filled up with weights of zero that have no gradient and stay.
void step_short(const Work& given, const Stages& stages, int64_t t, int n) {
    Work s = given;
    Job& job = s.job;
    const int64_t at = t * TILE;
    const int moment = SIZE_OF[s.c.moments], blocks = filled(n) / BLOCK;
    Part stored, grad, kept, first, second, moved;
    if (s.c.stored == CODES)
        job.stored = stored.of_bytes((char*)job.stored + at * job.bits / 8, (n * job.bits + 7) / 8, blocks * BLOCK * job.bits / 8, n);
    else
        job.stored = stored.begin(job.stored, at, SIZE_OF[s.c.stored], n);
    job.grad = grad.begin(job.grad, at, s.c.narrow_grad ? 2 : 4, n);
    if (job.first) job.first = first.begin(job.first, at, moment, n);
    if (job.kept) job.kept = kept.begin(job.kept, at, SIZE_OF[s.c.kept], n);
    if (job.second) job.second = second.begin(job.second, at, moment, n);
    for (int i = n; job.second && i < blocks * BLOCK; i++)  // a denominator that is not zero
        if (s.c.moments == BFLOATS)
            ((uint16_t*)job.second)[i] = 0x3F80;
        else if (s.c.moments == FLOATS)
            ((float*)job.second)[i] = 1;
    if (s.c.moments == CHARS) job.first_scales += at / BLOCK, job.second_scales += job.second ? at / BLOCK : 0;
    if (job.moved) job.moved = (uint8_t*)moved.of_bytes((char*)job.moved + at / 8, (n + 7) / 8, blocks * BLOCK / 8, n);
    job.offset += at, job.plain -= at, job.counts += t, job.totals += t, job.sums = job.sums && t % job.sums == 0;
    step_tile(s, stages, 0, n);
    stored.end((char*)job.stored);
    if (job.first) first.end((char*)job.first);
    if (job.kept) kept.end((char*)job.kept);
    if (job.second) second.end((char*)job.second);
    if (job.moved) moved.end((char*)job.moved);
}

// ---- the stages of a case --------------------------------------------------------------------------------

template <Family FAMILY> auto propose_of(const OnepassCase& c) {
    const bool narrow = c.moments == BFLOATS;
    return c.narrow_grad ? (narrow ? propose_block<FAMILY, true, true> : propose_block<FAMILY, true, false>)
                         : (narrow ? propose_block<FAMILY, false, true> : propose_block<FAMILY, false, false>);
}

template <int MODE, int KEEPS> auto round_of(Way way) {
    constexpr bool DRAWS = MODE == STOCHASTIC;  // by index that is all
    return way == TO_BFLOAT              ? round_block<MODE, KEEPS, TO_BFLOAT>
           : !DRAWS || way == BY_VALUE ? round_block<MODE, KEEPS, BY_VALUE>
           : way == FLOAT_INDEX        ? round_block<MODE, KEEPS, DRAWS ? FLOAT_INDEX : BY_VALUE>
                                       : round_block<MODE, KEEPS, DRAWS ? WHOLE_INDEX : BY_VALUE>;
}

inline Stages stages_of(const OnepassCase& c, const Grid& g, int keeps, bool rooted) {
    const Way way = g.rounding == BFLOAT ? TO_BFLOAT : !g.indexed ? BY_VALUE : g.rounding == WHOLE ? WHOLE_INDEX : FLOAT_INDEX;
    Stages stages;
    stages.propose = c.rule == PLAIN    ? propose_of<PLAINS>(c)
                    : c.rule == LION ? propose_of<LIONS>(c)
                    : c.rule >= SGD  ? propose_of<SGDS>(c)
                    : rooted         ? propose_of<ROOTED>(c)
                                     : propose_of<ADAMS>(c);
    stages.draws = c.mode != NEAREST || keeps == REMAINDER8;
    stages.indexed = way >= FLOAT_INDEX && c.mode == STOCHASTIC && (keeps == NOTHING || keeps == ERROR);
    switch (keeps) {
    case CARRY: stages.round = round_of<NEAREST, CARRY>(way); break;
    case MASTER: stages.round = round_of<NEAREST, MASTER>(way); break;
    case ERROR: stages.round = c.mode ? round_of<STOCHASTIC, ERROR>(way) : round_of<NEAREST, ERROR>(way); break;
    case REMAINDER: stages.round = round_block<NEAREST, REMAINDER, TO_BFLOAT>; break;
    case REMAINDER8: stages.round = round_block<NEAREST, REMAINDER8, TO_BFLOAT>; break;
    default:
        stages.round = c.mode == DEADZONE     ? round_of<DEADZONE, NOTHING>(way)
                      : c.mode == STOCHASTIC ? round_of<STOCHASTIC, NOTHING>(way)
                                             : round_of<NEAREST, NOTHING>(way);
    }
    return stages;
}

// The tiles [t0, t1) of those of all tensors, one after the other.
inline void onepass_tiles(const OnepassCall& call, int64_t t0, int64_t t1) {
    Work s = {call.kind, Grid(call), {}, {}, call.kind.keeps, (RootOf)call.root};
    if (s.keeps == REMAINDER && s.c.kept == CHARS) s.keeps = REMAINDER8;
    const Stages stages = stages_of(s.c, s.g, s.keeps, s.root != nullptr);
    over_tensors(call.rows, call.tensors, t0, t1, [&](int64_t i, int64_t a, int64_t b) {
        const OnepassRow& row = call.rows[i];
        s.a = ((const Rates*)call.rates)[i];
        s.job = {row, (const Key*)call.keys + 2 * i, call.counts + row.start, call.totals + row.start};
        for (int64_t t = a; t < b; t++) {
            const int n = in_tile(row.size, t);
            if (n == TILE)
                step_tile(s, stages, t, TILE);
            else
                step_short(s, stages, t, n);
        }
    });
}

}  // namespace HALFULP_TARGET

KERNEL(onepass, OnepassCall)

// Moments in eight bits: codes and the scale of each 64, decoded for a step and written by draws after it.
//
// halfulp/kernels/coded_moments.py defines every bit. A first moment is a signed square of its code, a second one a
// fourth power.
#include "calls.h"
#include "tiles.h"

namespace HALFULP_TARGET {

constexpr int BLOCK = 64;

INLINE F real_of(I x) { return __builtin_convertvector(x, F); }
INLINE I absolute(I x) { return x < 0 ? -x : x; }

template <bool SECOND> INLINE I code_of(const uint8_t* codes) {
    if (SECOND) return widened(load<U8>(codes));
    return widened(load<I8>(codes));
}

template <bool SECOND> INLINE F power(I c) {
    const F y = real_of(c * absolute(c));
    return SECOND ? y * y : y;
}

template <bool SECOND> void decode_block(const uint8_t* codes, float scale, float* values) {
    const F most = power<SECOND>(splat(SECOND ? 255 : 127));
    for (int i = 0; i < BLOCK; i += W) store(values + i, power<SECOND>(code_of<SECOND>(codes + i)) / most * scale);
}

template <bool SECOND> float encode_block(const float* values, const uint32_t* words, uint8_t* codes) {
    I largest = {};
    for (int i = 0; i < BLOCK; i += W) {
        const I u = load<I>(values + i) & MAGNITUDE;
        largest = u > largest ? u : largest;
    }
    int32_t top = 0;
    for (int k = 0; k < W; k++) top = largest[k] > top ? largest[k] : top;
    if (top == 0 || top >= EXPONENT) {  // nothing, or not finite, which no code can say of one value
        memset(codes, 0, BLOCK);
        return top ? real(0x7FC00000) : 0;
    }
    const F scale = splat(real(top)), most = power<SECOND>(splat(SECOND ? 255 : 127));
    for (int i = 0; i < BLOCK; i += W) {
        const F x = load<F>(values + i);
        const F t = floats(bits(x) & MAGNITUDE) / scale * most;
        const F root = SECOND ? root_of(root_of(t)) : root_of(t);
        I c = __builtin_convertvector(root, I);  // towards zero
        const F low = power<SECOND>(c), gap = power<SECOND>(c + 1) - low;
        I word = load<I>(words + i) ^ 0xFFFF;
        if (SECOND) word = word >> 8 | (word & 255) << 8;
        c -= (real_of(word) + 0.5f) * gap < (t - low) * 65536.0f;
        if (SECOND) c = ((c == 0) & (t > 0)) ? c + 1 : c;  // no step divides by a zero that was none
        if (!SECOND) c = bits(x) < 0 ? -c : c;
        store(codes + i, lowest(c));
    }
    return real(top);
}

template <bool SECOND> void moments_tile(const MomentsCall& c, int64_t t) {
    const int64_t first = t * TILE;
    const int n = in_tile(c.size, t);
    Draws draws;
    draws.begin({c.key[0], c.key[1]}, true, c.offset + first);
    float values[BLOCK];
    uint8_t codes[BLOCK];
    for (int i = 0; i < n; i += BLOCK) {
        const int64_t j = first + i;
        const int here = n - i < BLOCK ? n - i : BLOCK;
        const bool whole = here == BLOCK;
        float* x = whole ? c.values + j : values;
        uint8_t* k = whole ? c.codes + j : codes;
        if (!whole) memset(values, 0, sizeof values), memset(codes, 0, sizeof codes);
        if (!c.encodes) {
            if (!whole) memcpy(codes, c.codes + j, here);
            decode_block<SECOND>(k, c.scales[j / BLOCK], x);
            if (!whole) memcpy(c.values + j, values, here * 4);
            continue;
        }
        if (!whole) memcpy(values, c.values + j, here * 4);
        uint32_t words[BLOCK];
        for (int w = 0; w < BLOCK; w += W) store(words + w, load<I>(draws.at(i + w)));
        c.scales[j / BLOCK] = encode_block<SECOND>(x, words, k);
        if (!whole) memcpy(c.codes + j, codes, here);
    }
}

inline void moments_tiles(const MomentsCall& c, int64_t t0, int64_t t1) {
    for (int64_t t = t0; t < t1; t++) c.second ? moments_tile<true>(c, t) : moments_tile<false>(c, t);
}

}  // namespace HALFULP_TARGET

KERNEL(moments, MomentsCall)

// Moments in eight bits: the codes of 64 values and their scale, decoded for a step and drawn after it.
//
// halfulp/kernels/coded_moments.py defines every bit. A first moment is a signed square of its code, a second one a
// fourth power.
#pragma once

#include "draws.h"

namespace HALFULP_TARGET {

constexpr int BLOCK = 64, LOTS = BLOCK / W;  // values that share a scale, and vectors of them

template <bool SECOND> INLINE F power(F c) {
    const F y = SECOND ? c * c : c * floats(bits(c) & MAGNITUDE);
    return SECOND ? y * y : y;
}

// That of the largest code.
template <bool SECOND> constexpr float MOST = SECOND ? 255.0f * 255 * (255.0f * 255) : 127 * 127;

template <bool SECOND> INLINE void decode_moment(const void* codes, float scale, F* values) {
    const float most = MOST<SECOND>, inverse = 1 / most;
#pragma GCC unroll 4
    for (int i = 0; i < LOTS; i++) {
        const uint8_t* here = (const uint8_t*)codes + i * W;
        const F p = power<SECOND>(__builtin_convertvector(SECOND ? widened(load<U8>(here)) : widened(load<I8>(here)), F));
        const F y = p * inverse;  // p / most: for every code one correction rounds as the division does
        values[i] = fma(fma(y, splat(-most), p), splat(inverse), y) * scale;
    }
}

// Codes the values of a block vector by vector, so that two moments can go side by side.
template <bool SECOND> struct Coder {
    const F* values;
    uint8_t* codes;
    int32_t top = 0;  // the largest magnitude

    INLINE Coder(const F* from, void* to) : values(from), codes((uint8_t*)to) {
        I largest = {};
#pragma GCC unroll 4
        for (int i = 0; i < LOTS; i++) {
            const I u = bits(from[i]) & MAGNITUDE;
            largest = u > largest ? u : largest;
        }
        for (int k = 0; k < W; k++) top = largest[k] > top ? largest[k] : top;
    }

    // By draws of 16 digits, whose complements are given.
    INLINE void code(int i, I word) const {
        const I u = bits(values[i]);
        const F t = floats(u & MAGNITUDE) / splat(real(top ? top : EXPONENT)) * MOST<SECOND>;
        F c, low, gap;
        if (SECOND) {
            // The whole number nearest to the root of the root, or where t is between two, one of these.
            const F near = near_inverse_root(near_inverse_root(t)) + 0x1p23f - 0x1p23f;
            c = power<true>(near) > t ? near - 1 : near;
            low = power<true>(c), gap = power<true>(c + 1) - low;
            gap = low > 0 ? gap : F{};  // up, unless t is zero: no step divides by a zero that was none
            word = exchanged(word);
        } else {
            c = floor_of(root_of(t));  // a root that was rounded up to the next code is drawn up by the definition
            low = c * c, gap = c + c + 1;
        }
        const F draw = 65535.5f / 65536 - __builtin_convertvector(word, F) * 0x1p-16f;
        c = draw * gap < t - low ? c + 1 : c;
        if (!SECOND) c = floats(bits(c) | (u & SIGN));
        store(codes + i * W, lowest(__builtin_convertvector(c, I)));
    }

    // The scale; values of which one is not finite have no codes.
    INLINE float scale() const {
        if (top < EXPONENT) return real(top);
        memset(codes, 0, BLOCK);
        return real(0x7FC00000);
    }
};

}  // namespace HALFULP_TARGET

// Moments in eight bits as a whole: for states that are loaded in another form. A step codes its own (onepass.cpp).
#include "calls.h"
#include "coded_moments.h"
#include "tiles.h"

namespace HALFULP_TARGET {

template <bool SECOND> void moments_tile(const MomentsCall& c, int64_t t) {
    Draws draws;
    draws.begin({c.key[0], c.key[1]}, true, c.offset + t * TILE);
    for (int i = 0; i < in_tile(c.size, t); i += BLOCK) {
        const int64_t j = t * TILE + i, live = c.size - j < BLOCK ? c.size - j : BLOCK;
        uint8_t codes[BLOCK] = {};
        F values[LOTS] = {};
        if (c.encodes) {
            memcpy(values, c.values + j, live * 4);
            const Coder<SECOND> coder(values, codes);
            const uint32_t* words = draws.block(i);
            for (int k = 0; k < LOTS; k++) coder.code(k, load<I>(words + k * W));
            c.scales[j / BLOCK] = coder.scale();
            memcpy(c.codes + j, codes, live);
        } else {
            memcpy(codes, c.codes + j, live);
            decode_moment<SECOND>(codes, c.scales[j / BLOCK], values);
            memcpy(c.values + j, values, live * 4);
        }
    }
}

inline void moments_tiles(const MomentsCall& c, int64_t t0, int64_t t1) {
    for (int64_t t = t0; t < t1; t++) c.second ? moments_tile<true>(c, t) : moments_tile<false>(c, t);
}

}  // namespace HALFULP_TARGET

KERNEL(moments, MomentsCall)

// What a policy makes of one vector of proposals: what write-backs and rehearsals share.
#pragma once

#include "static_grid.h"
#include "tiles.h"

namespace HALFULP_TARGET {

// q what is stored, z what is proposed, r what is written, rest what is not; `bad`: a bit for each proposal that is not
// finite; `ends`: how many codes lie at an end of the range.
template <class T> struct Written {
    Fs<T> q, z, r, rest;
    uint32_t bad;
    int ends;
};

// A vector with something rare in it, one by one. z comes without its carry.
template <class T, int MODE, bool CARRIES>
__attribute__((noinline)) Written<T> write_carefully(
    Written<T> x, Fs<T> carry, bool carry_in, Numbers<T> f, Integers<T> k, Key key, uint64_t index) {
    x.bad = 0, x.ends = 0;
    for (int i = 0; i < LANES<T>; i++) {
        const T q = x.q[i];
        T z = x.z[i];
        if (!is_finite(z)) {
            x.bad |= 1u << i;
            x.z[i] = x.r[i] = q, x.rest[i] = carry[i];
            continue;
        }
        if (CARRIES && carry_in && is_finite((T)(z + carry[i]))) z = z + carry[i];
        T r = careful_nearest(z, f, k);
        if (MODE == STOCHASTIC || (MODE == DEADZONE && r == q && z != q)) r = careful_drawn(z, f, k, false, key, index + i);
        const bool over = r >= f.hi, under = r <= f.lo;
        x.ends += over || under;
        x.z[i] = z, x.r[i] = r;
        x.rest[i] = (over && z > r) || (under && z < r) ? 0 : z - r;
    }
    return x;
}

// From x.q and the proposals. With CARRIES, rest comes out, and where carry_in the carry is added first.
template <class T, bool MAGICAL, int MODE, bool CARRIES>
INLINE Written<T> write_lanes(
    Fs<T> q, Fs<T> proposed, Fs<T> carry, bool carry_in, const Numbers<T>& f, const Integers<T>& k, Draws& draws, int i) {
    Written<T> x;
    x.q = q, x.z = CARRIES && carry_in ? proposed + carry : proposed;
    Is<T> rare = ((Is<T>)x.z & Real<T>::exponent) == Real<T>::exponent, e;
    if (MODE != STOCHASTIC) x.r = round_lanes<T, MAGICAL, false>(x.z, f, k, e);
    if (MODE != NEAREST) {
        const Fs<T> drawn = draw_lanes<T, MAGICAL>(x.z, draws_at<T>(draws.at(i)), TWO31, f, k, rare);
        x.r = MODE == DEADZONE ? ((x.r == x.q) & (x.z != x.q) ? drawn : x.r) : drawn;
    }
    const Is<T> over = x.r >= f.hi, under = x.r <= f.lo;
    const uint32_t ends = mask_of(over | under);
    x.ends = __builtin_popcount(ends), x.bad = 0;
    if (CARRIES) {
        x.rest = x.z - x.r;
        if (ends) x.rest = (over & (x.z > x.r)) | (under & (x.z < x.r)) ? Fs<T>{} : x.rest;
    }
    if (__builtin_expect(mask_of(rare) != 0, 0)) {
        x.z = proposed;
        x = write_carefully<T, MODE, CARRIES>(x, carry, carry_in, f, k, draws.key, draws.start + draws.shift + i);
    }
    return x;
}

}  // namespace HALFULP_TARGET

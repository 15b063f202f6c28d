// One step of runs that do not happen: a write-back of s + (d + k (w - s)), halfulp/kernels/rehearse/reference.py.
//
// Several tensors lie side by side, each beginning at a tile. What is held has a row for every pull k.
#include "calls.h"
#include "write.h"

namespace HALFULP_TARGET {

enum { HELD_NOTHING, HELD_CARRY, HELD_PENDING, HELD_MASTER };  // what is kept beside, or in place of, the codes

template <class T> INLINE Fs<T> load_held(const void* from, int i, int as, Whole<T> top, const Integers<T>& k) {
    if (as == FLOATS || as == DOUBLES) return load<Fs<T>>((const T*)from + i);
    Is<T> code;
    if constexpr (sizeof(T) == 4)
        code = as == CODES ? widened(load<U8>((const uint8_t*)from + i)) : widened(load<U16>((const uint16_t*)from + i));
    else
        for (int j = 0; j < LANES<T>; j++) code[j] = as == CODES ? ((const uint8_t*)from)[i + j] : ((const uint16_t*)from)[i + j];
    return decode_lanes<T>(code, false, top, k);
}

template <class T> INLINE void store_held(void* to, int i, int as, Fs<T> r, Whole<T> top, const Integers<T>& k) {
    if (as == FLOATS || as == DOUBLES) return store((T*)to + i, r);
    const Is<T> code = encode_lanes<T>(r, false, top, k);
    if constexpr (sizeof(T) == 4)
        return as == CODES ? store((uint8_t*)to + i, __builtin_convertvector(code, U8)) : store((uint16_t*)to + i, narrowed(code));
    for (int j = 0; j < LANES<T>; j++)
        if (as == CODES)
            ((uint8_t*)to)[i + j] = (uint8_t)code[j];
        else
            ((uint16_t*)to)[i + j] = (uint16_t)code[j];
}

template <class T, bool MAGICAL, int MODE> void rehearse_tile(const RehearseCall& given, int64_t t, int64_t row) {
    const RehearseCall c = given;
    const Numbers<T> f = *(const Numbers<T>*)c.floats;
    const Integers<T> k = *(const Integers<T>*)c.ints;
    const int64_t of = c.tiles[t][0], first = t * TILE, here = row * c.size + first;
    const int n = (int)c.tiles[t][2];
    const T pull = ((const T*)c.pulls)[of * c.rows + row], again = ((const T*)c.back)[2 * of], fresh = ((const T*)c.back)[2 * of + 1];
    const bool narrow = c.stored == BFLOATS, narrow_kept = c.kept_as == BFLOATS, beside = c.keeps == HELD_CARRY || c.keeps == HELD_PENDING;
    const int size_w = SIZE_OF[c.stored], size_h = SIZE_OF[c.held_as], size_k = SIZE_OF[c.kept_as];
    Part part_w, part_a, part_h, part_k;
    const char *w = part_w.begin(c.w, first, size_w, n), *after = part_a.begin(c.after, first, size_w, n);
    char *held = part_h.begin(c.held, here, size_h, n), *kept = beside ? part_k.begin(c.kept, here, size_k, n) : nullptr;
    const Key key = {c.keys[of][0], c.keys[of][1]};
    const uint64_t place = c.offsets[of] + (t - c.tiles[t][1]) * TILE;
    Draws draws;
    draws.begin(key, false, place);
    Tally tally = {};
    for (int i = 0; i < filled(n); i += LANES<T>) {
        const Fs<T> x = load_values<T>(w, i, narrow), d = load_values<T>(after, i, narrow) - x;
        const Fs<T> q = load_held<T>(held, i, c.held_as, c.top, k), beyond = beside ? load_values<T>(kept, i, narrow_kept) : Fs<T>{};
        const Fs<T> proposed = q + (d + (x - q) * pull);
        const Is<T> bad = ((Is<T>)proposed & Real<T>::exponent) == Real<T>::exponent;
        const Written<T> written = write_lanes<T, MAGICAL, MODE, true>(q, proposed, beyond, beside, f, k, draws, i);
        Is<T> e;
        const Fs<T> old = c.keeps == HELD_MASTER ? round_lanes<T, MAGICAL, false>(q, f, k, e) : q;
        const Fs<T> r = bad ? old : written.r;
        tally.bad += __builtin_popcount(written.bad);
        tally.changed[i >> 6] |= (uint64_t)mask_of((Is<T>)(r != old)) << (i & 63);
        if (beside) {
            const Fs<T> next = c.keeps == HELD_CARRY ? written.rest : beyond * again + written.rest * fresh;
            store_values<T>(kept, i, bad ? beyond : next, narrow_kept);
        }
        Fs<T> next = r;
        if (c.keeps == HELD_MASTER) {
            next = written.z;
            for (int j = 0; c.chosen && j < LANES<T> && i + j < n; j++)
                if (!c.chosen[first + i + j]) next[j] = bad[j] ? q[j] : r[j];
        }
        store_held<T>(held, i, c.held_as, next, c.top, k);
    }
    part_h.end(held);
    if (beside) part_k.end(kept);
    int32_t* counts = c.counts[t * c.rows + row];
    counts[0] = n - ones(tally.changed) - tally.bad;
    counts[1] = n - add_moved(tally.changed, n, c.moved + row * c.moved_row + t * (TILE / 8));
    counts[2] = tally.bad;
}

template <class T> void rehearse_tiles(const RehearseCall& c, int64_t t0, int64_t t1) {
    using Tile = void (*)(const RehearseCall&, int64_t, int64_t);
    static const Tile table[2][3] = {
        {rehearse_tile<T, false, NEAREST>, rehearse_tile<T, false, STOCHASTIC>, rehearse_tile<T, false, DEADZONE>},
        {rehearse_tile<T, true, NEAREST>, rehearse_tile<T, true, STOCHASTIC>, rehearse_tile<T, true, DEADZONE>},
    };
    const Tile tile = table[is_magic<T>(c.ints)][c.mode];
    for (int64_t t = t0; t < t1; t++)
        for (int64_t row = 0; c.tiles[t][0] >= 0 && row < c.rows; row++) tile(c, t, row);
}

}  // namespace HALFULP_TARGET

KERNEL_OF_TYPE(rehearse, RehearseCall, stored)

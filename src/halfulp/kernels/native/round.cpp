// Values rounded to a static grid, and grid values as codes.
#include "calls.h"
#include "static_grid.h"
#include "tiles.h"

namespace HALFULP_TARGET {

template <class T, bool MAGICAL> void round_by(const RoundCall& given, int64_t t0, int64_t t1) {
    const RoundCall call = given;
    const Numbers<T> f = *(const Numbers<T>*)call.floats;
    const Integers<T> k = *(const Integers<T>*)call.ints;
    const Key key = {call.key[0], call.key[1]};
    const bool narrow = call.stored == BFLOATS;
    for (int64_t t = t0; t < t1; t++) {
        const int64_t first = t * TILE;
        const int n = in_tile(call.size, t);
        Part in, out;
        const char* from = in.begin(call.x, first, SIZE_OF[call.stored], n);
        char* to = out.begin(call.out, first, SIZE_OF[call.stored], n);
        Draws draws;
        draws.begin(key, false, call.offset + first);
        for (int i = 0; i < filled(n); i += LANES<T>) {
            const Fs<T> v = load_values<T>(from, i, narrow);
            const Is<T> beyond = ((Is<T>)v & Real<T>::exponent) == Real<T>::exponent;
            Is<T> open = {}, e;
            Fs<T> r;
            if (call.mode == NEAREST) {
                r = round_lanes<T, MAGICAL, false>(v, f, k, e);
            } else {
                const uint32_t* words = call.words ? call.words + first + i : draws.at(i);
                r = draw_lanes<T, MAGICAL>(v, draws_at<T>(words), TWO31, f, k, open);
                if (call.words)
                    *call.open += __builtin_popcount(mask_of(open));
                else if (__builtin_expect(mask_of(open) != 0, 0))
                    for (int j = 0; j < LANES<T>; j++) r[j] = careful_drawn<T>(v[j], f, k, false, key, call.offset + first + i + j);
            }
            store_values<T>(to, i, beyond ? v : r, narrow);
        }
        out.end(to);
    }
}

template <class T> void round_tiles(const RoundCall& call, int64_t t0, int64_t t1) {
    (is_magic<T>(call.ints) ? round_by<T, true> : round_by<T, false>)(call, t0, t1);
}

// Codes of the nearest values: sign and index for floats, two's complement for integers; and how many were not finite.
template <class T, bool MAGICAL> void encode_by(const CodeCall& given, int64_t t0, int64_t t1) {
    const CodeCall call = given;
    const Numbers<T> f = *(const Numbers<T>*)call.floats;
    const Integers<T> k = *(const Integers<T>*)call.ints;
    const Whole<T> top = (Whole<T>)1 << (call.bits - 1);
    int64_t bad = 0;
    for (int64_t t = t0; t < t1; t++) {
        const int n = in_tile(call.size, t);
        Part in;
        const char* from = in.begin(call.x, t * TILE, SIZE_OF[call.stored], n);
        int32_t codes[TILE];
        uint8_t bytes[TILE];
        for (int i = 0; i < filled(n); i += LANES<T>) {
            const Fs<T> v = load_values<T>(from, i, call.stored == BFLOATS);
            Is<T> e;
            bad += __builtin_popcount(mask_of((Is<T>)(((Is<T>)v & Real<T>::exponent) == Real<T>::exponent)));
            const Is<T> code = encode_lanes<T>(round_lanes<T, MAGICAL, false>(v, f, k, e), call.integer, top, k);
            for (int j = 0; j < LANES<T>; j++) codes[i + j] = (int32_t)code[j], bytes[i + j] = (uint8_t)code[j];
        }
        if (call.bits <= 8)
            memcpy((uint8_t*)call.codes + t * TILE, bytes, n);
        else
            memcpy((int32_t*)call.codes + t * TILE, codes, n * sizeof(int32_t));
    }
    __atomic_fetch_add(call.bad, bad, __ATOMIC_RELAXED);
}

template <class T> void encode_tiles(const CodeCall& call, int64_t t0, int64_t t1) {
    (is_magic<T>(call.ints) ? encode_by<T, true> : encode_by<T, false>)(call, t0, t1);
}

template <class Code> void decode_tiles_of(const DecodeCall& call, int64_t t0, int64_t t1) {
    int64_t bad = 0;
    for (int64_t i = t0 * TILE; i < t1 * TILE && i < call.size; i++) {
        const double v = call.values[((const Code*)call.codes)[i]];
        call.out[i] = v;
        bad += v != v;
    }
    __atomic_fetch_add(call.bad, bad, __ATOMIC_RELAXED);
}

inline void decode_tiles(const DecodeCall& call, int64_t t0, int64_t t1) {
    const auto decode = call.bytes == 1   ? decode_tiles_of<uint8_t>
                        : call.bytes == 2 ? decode_tiles_of<int16_t>
                        : call.bytes == 4 ? decode_tiles_of<int32_t>
                                          : decode_tiles_of<int64_t>;
    decode(call, t0, t1);
}

// The bfloat16 patterns of float32 values, and of how many the lower half is lost.
inline void aside_tiles(const AsideCall& call, int64_t t0, int64_t t1) {
    over_tensors(call.rows, call.tensors, t0, t1, [&](int64_t i, int64_t a, int64_t b) {
        const AsideRow& row = call.rows[i];
        const uint32_t* from = (const uint32_t*)row.from;
        uint32_t lower = 0;
        for (int64_t j = a * TILE; j < b * TILE && j < row.size; j++) row.to[j] = (uint16_t)(from[j] >> 16), lower |= from[j] & 0xFFFF;
        if (lower) __atomic_fetch_add(call.off + i, 1, __ATOMIC_RELAXED);
    });
}

inline void words_tiles(const WordsCall& call, int64_t t0, int64_t t1) {
    const Key key = {call.key[0], call.key[1]};
    for (int64_t t = t0; t < t1; t++) {
        Draws draws;
        draws.begin(key, call.is_short, call.offset + t * TILE);
        draws.at(TILE - W);
        for (int i = 0; i < in_tile(call.size, t); i++) {
            const uint32_t word = draws.words[draws.shift + i], digit = call.is_short ? word ^ 0xFFFF : word;
            const uint64_t index = call.offset + t * TILE + i;
            call.out[t * TILE + i] = call.level ? (uint32_t)digit_at(call.is_short, key, index, call.level) : digit;
        }
    }
}

}  // namespace HALFULP_TARGET

KERNEL(aside, AsideCall)
KERNEL(decode, DecodeCall)
KERNEL_OF_TYPE(encode, CodeCall, stored)
KERNEL_OF_TYPE(round, RoundCall, stored)
KERNEL(words, WordsCall)

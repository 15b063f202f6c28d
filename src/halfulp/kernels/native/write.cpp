// Stored values replaced by what a policy makes of proposed ones: halfulp/kernels/reference.py, write_back.
//
// Static grids only. What is stored, proposed, written and carried may be of the working type T or bfloat16.
#include "calls.h"
#include "write.h"

namespace HALFULP_TARGET {

template <class T, bool MAGICAL, int MODE, bool CARRIES>
void write_tensor(const WriteCall& given, int64_t of, int64_t t0, int64_t t1) {
    const WriteCall call = given;  // copies that nobody else can see: stores do not make the compiler read them again
    const WriteRow row = call.rows[of];
    const Numbers<T> f = *(const Numbers<T>*)call.floats;
    const Integers<T> k = *(const Integers<T>*)call.ints;
    const Key key = {call.keys[of][0], call.keys[of][1]};
    constexpr int L = LANES<T>;
    const int size_q = SIZE_OF[call.stored], size_z = SIZE_OF[call.proposed], size_c = SIZE_OF[call.carried];
    for (int64_t t = t0; t < t1; t++) {
        const int64_t first = t * TILE;
        const int n = in_tile(row.size, t);
        const bool sampled = row.sums && t % row.sums == 0;
        alignas(64) T all_q[TILE], all_z[TILE], all_r[TILE];
        Part part_q, part_z, part_out, part_carry;
        const char* from_q = part_q.begin(row.q, first, size_q, n);
        const char* from_z = part_z.begin(row.z, first, size_z, n);
        char* to = part_out.begin(row.out, first, size_z, n);
        char* carried = CARRIES ? part_carry.begin(row.carry, first, size_c, n) : nullptr;
        Draws draws;
        draws.begin(key, false, row.offset + first);
        Tally tally = {};
        for (int i = 0; i < filled(n); i += L) {
            const Fs<T> q = load_values<T>(from_q, i, call.stored == BFLOATS), z = load_values<T>(from_z, i, call.proposed == BFLOATS);
            const Fs<T> carry = CARRIES ? load_values<T>(carried, i, call.carried == BFLOATS) : Fs<T>{};
            const Written<T> x = write_lanes<T, MAGICAL, MODE, CARRIES>(q, z, carry, call.carry_in, f, k, draws, i);
            if (CARRIES) store_values<T>(carried, i, x.rest, call.carried == BFLOATS);
            store_values<T>(to, i, x.r, call.proposed == BFLOATS);
            tally.ends += x.ends, tally.bad += __builtin_popcount(x.bad);
            tally.changed[i >> 6] |= (uint64_t)differing(x.r, x.q) << (i & 63);
            tally.proposed[i >> 6] |= (uint64_t)differing(x.z, x.q) << (i & 63);
            if (sampled) {
                store(all_q + i, x.q), store(all_z + i, x.z), store(all_r + i, x.r);
                for (int j = 0; x.bad && j < L; j++)
                    if (x.bad >> j & 1) all_q[i + j] = all_z[i + j] = all_r[i + j] = 0;
            }
        }
        part_out.end(to);
        if (CARRIES) part_carry.end(carried);
        if (f.lo >= 0) tally.ends -= filled(n) - n;
        finish_tile(tally, n, row.moved ? row.moved + t * (TILE / 8) : nullptr, call.counts[row.start + t]);
        if (sampled) sum_tile(all_q, all_z, all_r, n, call.totals[row.start + t]);
    }
}

template <class T, int MODE, bool CARRIES> void write_tensors(const WriteCall& call, int64_t t0, int64_t t1) {
    const auto write = is_magic<T>(call.ints) ? write_tensor<T, true, MODE, CARRIES> : write_tensor<T, false, MODE, CARRIES>;
    over_tensors(call.rows, call.tensors, t0, t1, [&](int64_t i, int64_t a, int64_t b) { write(call, i, a, b); });
}

template <class T> void write_tiles(const WriteCall& call, int64_t t0, int64_t t1) {
    using Write = void (*)(const WriteCall&, int64_t, int64_t);
    static const Write table[3][2] = {
        {write_tensors<T, NEAREST, false>, write_tensors<T, NEAREST, true>},
        {write_tensors<T, STOCHASTIC, false>, write_tensors<T, STOCHASTIC, true>},
        {write_tensors<T, DEADZONE, false>, write_tensors<T, DEADZONE, true>},
    };
    table[call.mode][call.rows->carry != nullptr](call, t0, t1);
}

}  // namespace HALFULP_TARGET

KERNEL_OF_TYPE(write, WriteCall, proposed)

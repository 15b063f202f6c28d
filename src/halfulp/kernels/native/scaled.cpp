// Statistics, rounding, audit and write-back on grids whose scales follow the data: see scaled.h.
#include "scaled.h"

namespace HALFULP_TARGET {

// ---- statistics of spans ---------------------------------------------------------------------------------------

enum { LARGEST, SIGNED, TOTAL };  // what a rule wants to know beside the largest magnitude

// Fold finite values into (largest magnitude, largest value, sum of magnitudes, count).
template <class T> INLINE void gather(const T* x, int n, int want, double* stats) {
    T most = 0;
    int count = 0;
    for (int i = 0; i < n; i++) {
        const T a = x[i] < 0 ? -x[i] : x[i];
        const bool fine = is_finite(x[i]);
        count += fine;
        most = fine & (a > most) ? a : most;
    }
    stats[0] = stats[0] > (double)most ? stats[0] : (double)most, stats[3] += count;
    for (int i = 0; want != LARGEST && i < n; i++) {
        const double v = x[i], a = __builtin_fabs(v);
        if (want == SIGNED && v > stats[1] && finite(v)) stats[1] = v;
        if (want == TOTAL && finite(a)) stats[2] += a;
    }
}

// Of the weights, or (proposed) of what is written next, Q(w) + d. Without proposals: of any values.
template <class T> void stats_tiles(const StatsCall& c, int64_t s0, int64_t s1) {
    const Elements elements(c.step.floats, c.step.ints);
    const int64_t per_row = (c.scales.row + c.span - 1) / c.span;
    alignas(64) T w[TILE], g[TILE], d[TILE], q[TILE];
    double scale[TILE];
    uint8_t fine[TILE];
    const auto begin = [&](int64_t s) { return s / per_row * c.scales.row + s % per_row * c.span; };  // spans follow each other
    int64_t s = s0;
    for (int64_t first = begin(s0), stop = begin(s1) < c.step.size ? begin(s1) : c.step.size; first < stop; first += TILE) {
        const int n = (int)(stop - first < TILE ? stop - first : TILE);
        if (!c.step.d) {
            load_tile(c.step.w, first, n, c.step.stored == BFLOATS, w);
        } else {
            load_step(c.step, first, n, w, g, d, fine);
            if (c.proposed) {
                expand(c.scales, c.scales.now, first, n, scale);
                nearest_scaled(w, scale, elements, q);
                add_in_container(q, d, c.step.to, w);
            }
        }
        for (int a = 0; a < n;) {
            const int64_t end = begin(s + 1) - first;
            const int b = end < n ? (int)end : n;
            gather(w + a, b - a, c.want, c.stats[s]);
            a = b, s += end <= n;
        }
    }
}

// ---- rounding --------------------------------------------------------------------------------------------------

template <class T> void round_scaled_tiles(const RoundCall& c, int64_t t0, int64_t t1) {
    const Elements elements(c.floats, c.ints);
    alignas(64) T x[TILE], r[TILE];
    double scale[TILE];
    for (int64_t t = t0; t < t1; t++) {
        const int64_t first = t * TILE;
        const int n = in_tile(c.size, t);
        load_tile(c.x, first, n, c.stored == BFLOATS, x);
        expand(c.scales, c.scales.now, first, n, scale);
        if (c.mode == NEAREST)
            nearest_scaled(x, scale, elements, r);
        else
            drawn_scaled(x, scale, elements, {c.key[0], c.key[1]}, c.offset + first, r);
        store_tile(r, c.out, first, n, c.stored == BFLOATS);
    }
}

// ---- audit -----------------------------------------------------------------------------------------------------

// How much of the proposals arrives where r is written over q: reference.arrival.
template <class T> void arrival(const T* q, const T* r, const T* d, double* out) {
    T widest = 0;
    for (int i = 0; i < TILE; i++) {
        const T a = d[i] < 0 ? -d[i] : d[i];
        widest = a > widest ? a : widest;
    }
    const T scale = binade_of(widest);
    const auto terms = [&](int i) INLINE_LAMBDA {
        const Fs<T> u = load<Fs<T>>(r + i) - load<Fs<T>>(q + i), shifted = u * scale;
        return Arrived<T>{shifted * load<Fs<T>>(d + i), shifted * u};
    };
    sum_arrived<T>(terms, scale, out);
}

// The probability of staying, on the grid of the next scales: by value, by code, or where nothing is proposed.
template <class T>
INLINE void follow_odds(const T* q, const T* z, const T* d, const double* element, const double* scale, const Elements& g, int n, T* stay) {
    for (int i = 0; i < n; i++) {
        const double v = (double)z[i] / scale[i], limit = v < 0 ? -g.lo : g.hi, size = __builtin_fabs(v), a = size > limit ? limit : size;
        const double gaps = real_of<double>(g.inverse - g.exponent(a)), s = a * gaps, k = __builtin_floor(s), side = v < 0 ? -gaps : gaps;
        const double value = (double)q[i] / scale[i] * side, code = element[i] * side;
        const bool low = d[i] == 0 || value == k || code == k, high = d[i] == 0 || value == k + 1 || code == k + 1;
        stay[i] = stay[i] * (T)((low ? 1 - (s - k) : 0) + (high ? s - k : 0));
    }
}

// One grid on every tile: reference.audit's counts, without the shared ones.
template <class T> void audit_scaled_tiles(const AuditScaledCall& c, int64_t t0, int64_t t1) {
    const Elements g(c.step.floats, c.step.ints);
    alignas(64) T w[TILE], z[TILE], d[TILE], q[TILE], r[TILE], seen[TILE];
    double scale[TILE], element[TILE];
    uint8_t fine[TILE];
    for (int64_t t = t0; t < t1; t++) {
        const int64_t first = t * TILE;
        const int n = in_tile(c.step.size, t), bad = load_step(c.step, first, n, w, z, d, fine);
        expand(c.scales, c.scales.now, first, n, scale);
        nearest_scaled(w, scale, g, q);
        add_in_container(q, d, c.step.to, z);
        int symmetric = 0, ends = 0, zeros = 0, smalls = 0;
        for (int i = 0; i < n; i++) {
            const int64_t e = g.exponent(__builtin_fabs((double)w[i] / scale[i]));
            element[i] = (double)q[i] / scale[i];
            symmetric += __builtin_fabs((double)d[i]) < real_of<double>(e - g.mant) * scale[i] / 2;
            ends += (element[i] >= g.hi) | (element[i] <= g.lo);
            zeros += q[i] == 0;
            smalls += (q[i] != 0) & (__builtin_fabs(element[i]) < g.normal);
        }
        for (int i = n; i < TILE; i++) element[i] = 0;
        expand(c.scales, c.scales.next, first, n, scale);
        nearest_scaled(z, scale, g, r);
        arrival(q, r, d, c.arrived[t]);
        int32_t* counts = c.counts[t];
        counts[6] = put_frozen_back(q, d, element, scale, r, seen);
        uint64_t changed[TILE / 64] = {};
        differing(q, seen, changed);
        counts[0] = n - ones(changed) - bad, counts[1] = symmetric - bad, counts[2] = ends, counts[3] = smalls, counts[4] = zeros - bad;
        if (c.moved) counts[5] = n - add_moved(changed, n, c.moved + t * (TILE / 8));
        if (c.stay) {
            T* stay = (T*)c.stay + first;
            follow_odds(q, z, d, element, scale, g, n, stay);
            c.expected[t] = sum_magnitudes(stay, n);
        }
    }
}

// ---- write-back --------------------------------------------------------------------------------------------------

template <class T> void write_scaled_tiles(const WriteCall& c, int64_t t0, int64_t t1) {
    const Elements g(c.floats, c.ints);
    const WriteRow& row = *c.rows;
    const Key key = {c.keys[0][0], c.keys[0][1]};
    const bool narrow = c.stored == BFLOATS;
    alignas(64) T q[TILE], z[TILE], r[TILE], near[TILE], seen[TILE], proposed[TILE];
    double scale[TILE], element[TILE];
    uint8_t fine[TILE];
    for (int64_t t = t0; t < t1; t++) {
        const int64_t first = t * TILE;
        const int n = in_tile(row.size, t);
        T* carry = row.carry ? (T*)row.carry + first : nullptr;
        Tally tally = {};
        load_tile(row.q, first, n, narrow, q), load_tile(row.z, first, n, narrow, z);
        for (int i = 0; i < TILE; i++) {
            fine[i] = is_finite(z[i]);
            tally.bad += !fine[i];
            const T whole = carry && c.carry_in && i < n ? z[i] + carry[i] : z[i];
            z[i] = !fine[i] ? q[i] : is_finite(whole) ? whole : z[i];
            proposed[i] = z[i] != q[i];
        }
        if (c.scales.now) {
            expand(c.scales, c.scales.now, first, n, scale);
            for (int i = 0; i < TILE; i++) element[i] = g.nearest(q[i], scale[i]);
        } else {  // scales are fixed: by value alone
            for (int i = 0; i < TILE; i++) proposed[i] = 1, element[i] = __builtin_nan("");
        }
        expand(c.scales, c.scales.next, first, n, scale);
        if (c.mode != STOCHASTIC) nearest_scaled(z, scale, g, near);
        if (c.mode == NEAREST) memcpy(r, near, sizeof r);
        if (c.mode != NEAREST) drawn_scaled(z, scale, g, key, row.offset + first, r);
        if (c.mode == DEADZONE) {  // the draw only where nearest throws a proposal away
            put_frozen_back(q, proposed, element, scale, near, seen);
            for (int i = 0; i < TILE; i++) r[i] = (seen[i] == q[i]) & (z[i] != q[i]) ? r[i] : near[i];
        }
        for (int i = 0; i < TILE; i++) r[i] = fine[i] ? r[i] : q[i];
        put_frozen_back(q, proposed, element, scale, r, seen);
        for (int i = 0; i < n; i++) {
            const double at = (double)r[i] / scale[i];
            const bool end = at >= g.hi || at <= g.lo;  // they differ from scale to scale
            tally.ends += fine[i] && end;
            if (carry && fine[i]) {
                const T a = z[i] < 0 ? -z[i] : z[i], b = r[i] < 0 ? -r[i] : r[i];
                carry[i] = !end || a < b ? z[i] - r[i] : 0;
            }
        }
        store_tile(r, row.out, first, n, narrow);
        differing(q, seen, tally.changed), differing(q, z, tally.proposed);
        finish_tile(tally, n, row.moved ? row.moved + t * (TILE / 8) : nullptr, c.counts[t]);
        if (row.sums && t % row.sums == 0) {
            for (int i = 0; i < TILE; i++)
                if (!fine[i]) q[i] = z[i] = r[i] = 0;
            sum_tile(q, z, r, n, c.totals[t]);
        }
    }
}

}  // namespace HALFULP_TARGET

KERNEL_OF_TYPE(audit_scaled, AuditScaledCall, step.stored)
KERNEL_OF_TYPE(round_scaled, RoundCall, stored)
KERNEL_OF_TYPE(stats, StatsCall, step.stored)
KERNEL_OF_TYPE(write_scaled, WriteCall, proposed)

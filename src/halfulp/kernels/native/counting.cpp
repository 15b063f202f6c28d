// Loops that know no grid: how often each of many codes occurs, and what tiles add up to.
//
// A table of counts has LANES rows, into which a loop counts in turn: equal values in a row do not wait for each other.
#include "calls.h"

enum { LANES = 4 };

template <class Code, class Count> static void occurrences(const Code* codes, int64_t n, int64_t width, Count* out) {
    for (int64_t i = 0; i < n; i++) out[i % LANES * width + codes[i]]++;
}

PUBLIC void halfulp_occurrences(const void* codes, int bytes, int64_t n, int64_t width, void* out, int wide) {
    if (bytes == 1)
        wide ? occurrences((const uint8_t*)codes, n, width, (int64_t*)out) : occurrences((const uint8_t*)codes, n, width, (uint32_t*)out);
    else
        wide ? occurrences((const uint16_t*)codes, n, width, (int64_t*)out) : occurrences((const uint16_t*)codes, n, width, (uint32_t*)out);
}

// The class of a magnitude: its binade (times 16), how many of that binade's `first` and `second` it is at or above
// (times 4), whether it begins the binade (times 2), and whether it is odd.
PUBLIC void halfulp_classes(const uint32_t* bits, int64_t n, int mantissa, const int64_t* first, const int64_t* second, int64_t binades, uint32_t* out) {
    const int64_t fraction = ((int64_t)1 << mantissa) - 1, magnitude = (binades << mantissa) - 1;
    for (int64_t i = 0; i < n; i++) {
        const int64_t m = bits[i] & magnitude, e = m >> mantissa;
        const int64_t c = e * 16 + (m & 1) + 4 * (m >= first[e]) + 4 * (m >= second[e]) + 2 * ((m & fraction) == 0);
        out[i % LANES * 16 * binades + c]++;
    }
}

// See the struct.
PUBLIC void halfulp_add_tiles(const Audited& a) {
    for (int64_t i = 0; i < a.tensors; i++) {
        double *row = a.made + i * (a.grids * a.each + 4), *rest = row + a.grids * a.each;
        const int64_t last = i + 1 < a.tensors ? a.starts[i + 1] : a.tiles;
        for (int64_t t = a.starts[i]; t < last; t++) {
            for (int64_t g = 0; g < a.grids; g++) {
                const int64_t o = t * a.grids + g;
                double* at = row + g * a.each;
                for (int64_t j = 0; j < a.kinds; j++) at[j] += a.counts[o * a.kinds + j];
                at += a.kinds;
                at[0] += (double)a.phase[o], at[1] += a.expected[o], at[2] += a.arrived[2 * o], at[3] += a.arrived[2 * o + 1];
            }
            for (int64_t j = 0; j < 2; j++) rest[j] += a.shared[2 * t + j], rest[2 + j] += a.sums[2 * t + j];
        }
    }
}

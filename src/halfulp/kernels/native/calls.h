// What Python passes: plain structs of addresses and numbers, the same for every target.
//
// Python reads the structs and the list of kernels from this file (halfulp/kernels/native/__init__.py): a member is an
// int32_t, an int64_t, an array uint32_t x[2], another struct, or a pointer.
#pragma once

#include <stdint.h>

enum Rule { ADAMW, ADAM, SGD, NESTEROV, LION, PLAIN };
enum Stored { FLOATS, BFLOATS, CODES, SHORTS, CHARS, DOUBLES };
constexpr int SIZE_OF[] = {4, 2, 1, 2, 1, 8};

struct OnepassCase {
    int32_t rule, mode, keeps, stored, kept;
    int32_t is_short, small, narrow_grad, moments;  // moments: FLOATS, BFLOATS, or CHARS for codes with scales
    int32_t rounding, top;  // how the grid is rounded to (Rounding in onepass.cpp), the bit of the sign of its codes
};

struct OnepassRow {
    void *stored, *grad, *first, *second, *kept;
    uint8_t* moved;
    float *first_scales, *second_scales;
    int64_t size, offset, plain, sums, start, bits;
};

struct OnepassCall {
    OnepassCase kind;
    const void *floats, *ints;
    int64_t tensors;
    const OnepassRow* rows;
    const void* root;  // what makes Adam's square roots; none: rounded ones
    const float* rates;
    const uint32_t* keys;
    int32_t (*counts)[5];
    double (*totals)[5];
};

struct MomentsCall {  // one moment: its values and its codes, of which a scale is shared by 64
    int32_t second, encodes;
    uint32_t key[2];
    uint8_t* codes;
    float *scales, *values;
    int64_t size, offset;
};

// Scales of segments: values of a row (of `row` values) share one by `length`. `now`: those of what is stored; `next`: of
// what is written.
struct Scales {
    int64_t row, length;
    const double *now, *next;
};

struct CopyCall {
    int64_t bytes;               // of a value
    const int64_t (*places)[2];  // as below
    char* into;
};

struct AuditCall {
    int32_t stored, after, phase, to;
    const void *before, *now;
    const int64_t (*places)[2];  // of every tile: the address of what it is compared with, and how much is in use
    int64_t size, rows, grids, kinds;
    const void *floats, *ints;
    const int64_t* slots;  // where the results of a row of the tables go
    uint8_t* moved;
    void* stay;
    int64_t moved_row, stay_row;
    int32_t *counts, *shared;
    double *sums, *arrived, *expected;
    int64_t* phases;
};

struct WriteRow {
    const void *q, *z;
    void *out, *carry;
    uint8_t* moved;
    int64_t size, offset, sums, start;
};

struct WriteCall {
    int32_t mode, carry_in, stored, proposed, carried;  // out is of the type of what is proposed
    const void *floats, *ints;
    int64_t tensors;
    Scales scales;  // of the only tensor, if the grid has them; `now`: none where they are fixed
    const WriteRow* rows;
    const uint32_t (*keys)[2];
    int32_t (*counts)[5];
    double (*totals)[5];
};

struct AsideRow {
    const float* from;
    uint16_t* to;
    int64_t size, start;
};

struct AsideCall {
    int64_t tensors;
    const AsideRow* rows;
    int64_t* off;  // of every tensor, values that bfloat16 does not hold
};

struct RoundCall {
    int32_t mode, stored;
    uint32_t key[2];
    const void* x;
    void* out;
    const void *floats, *ints;
    int64_t size, offset;
    Scales scales;          // if the grid has them
    const uint32_t* words;  // draws in place of a stream's, for tests: then a draw that does not decide is
    int64_t* open;          // counted here, and taken for one that does
};

struct WordsCall {  // for tests: the words of a stream, at a level of digits
    uint32_t key[2];
    int32_t is_short, level;
    int64_t size, offset;
    uint32_t* out;
};

struct DecodeCall {
    int32_t bytes;  // of a code
    const void* codes;
    const double* values;  // not a number: no code of the grid
    double* out;
    int64_t size;
    int64_t* bad;
};

struct CodeCall {
    int32_t stored, bits, integer;
    const void* x;
    void* codes;  // a byte each for grids of at most eight bits, else int32
    const void *floats, *ints;
    int64_t size;
    int64_t* bad;
};

// A step: weights, gradients and proposals, all stored alike; `after`: d holds the weights after it. `to`: the container.
struct StepCall {
    int32_t stored, after, to, unused;
    const void *w, *g, *d, *floats, *ints;
    int64_t size;
};

struct StatsCall {
    StepCall step;  // without proposals: of any values
    Scales scales;
    int64_t proposed, want, span;
    double (*stats)[4];
};

struct AuditScaledCall {
    StepCall step;
    Scales scales;
    uint8_t* moved;
    void* stay;
    int32_t (*counts)[7];
    double (*arrived)[2];
    double* expected;
};

struct ScoreRow {
    const void *w, *g, *d;
    double (*out)[8];
    int64_t size, start;
};

struct ScoreCall {
    StepCall step;  // its tensors are those of the rows
    Scales scales;
    int64_t scaled, tile, half, tensors;
    const ScoreRow* rows;
};

struct RehearseCall {
    int32_t mode, keeps, stored, held_as, kept_as, top;
    const void *w, *after;
    const int64_t (*tiles)[3];  // whose a tile is (below 0: nobody's), the first tile of that tensor, how much is in use
    const uint32_t (*keys)[2];
    const int64_t* offsets;
    const void *pulls, *back, *floats, *ints;
    void *held, *kept;
    const uint8_t* chosen;
    uint8_t* moved;
    int32_t (*counts)[3];
    int64_t rows, size, moved_row;
};

// What an audit found, tile after tile, into a row for each tensor: grid after grid, then what they share.
struct Audited {
    const int32_t *counts, *shared;
    const int64_t* phase;
    const double *expected, *arrived, *sums;
    int64_t tiles, grids, kinds, each, tensors;
    const int64_t* starts;
    double* made;
};

// What Python calls.
#if defined(_WIN32)
#define PUBLIC extern "C" __declspec(dllexport)
#else
#define PUBLIC extern "C" __attribute__((visibility("default")))
#endif

// Every kernel: its name, and what it is called with.
#define KERNELS(X)                   \
    X(aside, AsideCall)              \
    X(audit, AuditCall)              \
    X(audit_scaled, AuditScaledCall) \
    X(copy, CopyCall)                \
    X(decode, DecodeCall)            \
    X(encode, CodeCall)              \
    X(moments, MomentsCall)          \
    X(onepass, OnepassCall)          \
    X(rehearse, RehearseCall)        \
    X(round, RoundCall)              \
    X(round_scaled, RoundCall)       \
    X(score, ScoreCall)              \
    X(stats, StatsCall)              \
    X(words, WordsCall)              \
    X(write, WriteCall)              \
    X(write_scaled, WriteCall)

// The entry point of one kernel for one target: name_tiles(call, t0, t1) of the target's namespace; or that of the working
// type, which is double where values are stored so.
#define NAMED(target, name) halfulp_##target##_##name
#define EXPORT(target, name) NAMED(target, name)
#define KERNEL(name, Call)                                                                   \
    extern "C" void EXPORT(HALFULP_TARGET, name)(const Call& call, int64_t t0, int64_t t1) { \
        HALFULP_TARGET::name##_tiles(call, t0, t1);                                          \
    }
#define KERNEL_OF_TYPE(name, Call, stored)                                                   \
    extern "C" void EXPORT(HALFULP_TARGET, name)(const Call& call, int64_t t0, int64_t t1) { \
        if (call.stored == DOUBLES)                                                          \
            HALFULP_TARGET::name##_tiles<double>(call, t0, t1);                              \
        else                                                                                 \
            HALFULP_TARGET::name##_tiles<float>(call, t0, t1);                               \
    }

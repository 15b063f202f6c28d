// Vectors as wide as the target's registers, with the few operations that the language does not spell.
//
// Everything lives in a namespace of the target (HALFULP_TARGET), because the same headers are compiled once
// for each: two copies of one inline function must never be merged by the linker.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) || defined(__SSE4_1__)
#include <immintrin.h>
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace HALFULP_TARGET {

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef uint16_t U16 __attribute__((vector_size(2 * W)));
typedef int16_t I16 __attribute__((vector_size(2 * W)));
typedef uint8_t U8 __attribute__((vector_size(W)));
typedef int8_t I8 __attribute__((vector_size(W)));

typedef double D __attribute__((vector_size(4 * W)));

constexpr int32_t SIGN = INT32_MIN, MAGNITUDE = INT32_MAX, EXPONENT = 0x7F800000;

template <class V> INLINE V load(const void* from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}
template <class V> INLINE void store(void* to, V v) { memcpy(to, &v, sizeof v); }

INLINE F splat(float x) { return x - F{}; }
INLINE I splat(int32_t x) { return x - I{}; }
INLINE U splat(uint32_t x) { return x - U{}; }
INLINE I bits(F x) { return (I)x; }
INLINE F floats(I x) { return (F)x; }
INLINE float real(int32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
INLINE int32_t pattern(float x) {
    int32_t u;
    memcpy(&u, &x, 4);
    return u;
}

INLINE I counting() {
    I i;
    for (int k = 0; k < W; k++) i[k] = k;
    return i;
}

// One bit for each lane whose comparison holds.
INLINE uint32_t mask(I m) {
#if defined(__AVX512DQ__)
    if constexpr (W == 16) return _mm512_movepi32_mask((__m512i)m);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps((__m256)m);
#elif defined(__SSE4_1__)
    return (uint32_t)_mm_movemask_ps((__m128)m);
#endif
    uint32_t holds = 0;
    for (int k = 0; k < W; k++) holds |= (uint32_t)(m[k] & 1) << k;
    return holds;
}

// One bit for each lane in which two are not equal, by value.
INLINE uint32_t differing(F a, F b) {
#if defined(__AVX512DQ__)
    if constexpr (W == 16) return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_NEQ_UQ);
#endif
    return mask(a != b);
}

INLINE uint32_t differing(D a, D b) {
#if defined(__AVX512DQ__)
    if constexpr (W == 16) return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_NEQ_UQ);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_pd((__m256d)(a != b));
#endif
    uint32_t holds = 0;
    for (int k = 0; k < W / 2; k++) holds |= (uint32_t)(a[k] != b[k]) << k;
    return holds;
}

// a * b + c, rounded once.
INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
    F r;
    for (int k = 0; k < W; k++) r[k] = __builtin_fmaf(a[k], b[k], c[k]);
    return r;
}

INLINE F root_of(F x) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return (F)_mm512_maskz_sqrt_ps(0xFFFF, (__m512)x);
#elif defined(__AVX2__)
    return (F)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE4_1__)
    return (F)_mm_sqrt_ps((__m128)x);
#elif defined(__ARM_NEON)
    return (F)vsqrtq_f32((float32x4_t)x);
#endif
    F r;
    for (int k = 0; k < W; k++) r[k] = __builtin_sqrtf(x[k]);
    return r;
}

// 1 / sqrt(x) to a four thousandth; of 0 infinity, of infinity 0.
INLINE F near_inverse_root(F x) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return (F)_mm512_maskz_rsqrt14_ps(0xFFFF, (__m512)x);
#elif defined(__AVX2__)
    return (F)_mm256_rsqrt_ps((__m256)x);
#elif defined(__SSE4_1__)
    return (F)_mm_rsqrt_ps((__m128)x);
#endif
    return 1 / root_of(x);
}

// Of values from 0 up to 2**24.
INLINE F floor_of(F x) { return __builtin_convertvector(__builtin_convertvector(x, I), F); }

// Sixteen and eight bits to 32, and the lowest eight of 32; the compilers' own conversions take several steps.
#if defined(__AVX512BW__)
#define CONVERTED(name, To, From, wide, narrow) INLINE To name(From x) { return (To)wide; }
#elif defined(__AVX2__)
#define CONVERTED(name, To, From, wide, narrow) INLINE To name(From x) { return (To)narrow; }
#else
#define CONVERTED(name, To, From, wide, narrow) INLINE To name(From x) { return __builtin_convertvector(x, To); }
#endif
CONVERTED(widened, I, U16, _mm512_cvtepu16_epi32((__m256i)x), _mm256_cvtepu16_epi32((__m128i)x))
CONVERTED(widened, I, I16, _mm512_cvtepi16_epi32((__m256i)x), _mm256_cvtepi16_epi32((__m128i)x))
CONVERTED(widened, I, U8, _mm512_cvtepu8_epi32((__m128i)x), __builtin_convertvector(x, I))
CONVERTED(widened, I, I8, _mm512_cvtepi8_epi32((__m128i)x), __builtin_convertvector(x, I))
CONVERTED(lowest, U8, I, _mm512_cvtepi32_epi8((__m512i)x), __builtin_convertvector(x, U8))
INLINE U16 narrowed(I x) {  // of values below 2**16
#if defined(__AVX512BW__)
    return (U16)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
    const __m256i both = _mm256_packus_epi32((__m256i)x, (__m256i)x);
    return (U16)_mm256_castsi256_si128(_mm256_permute4x64_epi64(both, 0x08));
#else
    return __builtin_convertvector(x, U16);
#endif
}

// Their lowest two bytes, exchanged, and zeros above.
INLINE I exchanged(I x) {
#if defined(__SSE4_1__)
    constexpr int o = -128;
    const __m128i order = _mm_setr_epi8(1, 0, o, o, 5, 4, o, o, 9, 8, o, o, 13, 12, o, o);
#if defined(__AVX512BW__)
    if constexpr (W == 16) return (I)_mm512_shuffle_epi8((__m512i)x, _mm512_broadcast_i32x4(order));
#elif defined(__AVX2__)
    return (I)_mm256_shuffle_epi8((__m256i)x, _mm256_broadcastsi128_si256(order));
#else
    return (I)_mm_shuffle_epi8((__m128i)x, order);
#endif
#endif
    return (x >> 8 & 255) | (x & 255) << 8;
}

INLINE float widened_at(const void* bfloats, int64_t i) { return real((int32_t)((uint32_t)((const uint16_t*)bfloats)[i] << 16)); }
INLINE F from_bfloat(U16 x) { return floats(widened(x) << 16); }
// The upper halves of patterns.
INLINE U16 upper(I x) { return narrowed((I)((U)x >> 16)); }
// To the nearest, ties to even; of finite values.
INLINE I nearest_bfloat(I u) { return u + 0x7FFF + ((u >> 16) & 1); }

}  // namespace HALFULP_TARGET

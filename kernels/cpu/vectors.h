/* Vectors of float32, whatever their length on this CPU, and the types of tensors. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define PANEL_VECS 4
#elif defined(__AVX__)
#define LANES 8
#define PANEL_VECS 2
#else
#define LANES 4
#define PANEL_VECS 2
#endif

#define LN_2 0.6931471805599453f
#define LOG2_E 1.4426950408889634f

#define ALWAYS static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec_u __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2)));

enum type { FLOAT32, BFLOAT16, FLOAT16 };

ALWAYS vec splat(float x) { return x - (vec){0}; }

ALWAYS vec larger(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    ivec mask = a > b;
    return (vec)(((ivec)a & mask) | ((ivec)b & ~mask));
#endif
}

ALWAYS float largest_lane(vec a) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)a);
#else
    float best = a[0];
    for (int i = 1; i < LANES; i++)
        best = a[i] > best ? a[i] : best;
    return best;
#endif
}

ALWAYS float sum_lanes(vec a) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)a);
#endif
    float sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += a[i];
    return sum;
}

/* Lanes below `count` are all ones. */
ALWAYS ivec first_lanes(int64_t count) {
    ivec lane;
    for (int i = 0; i < LANES; i++)
        lane[i] = i;
    return lane < (int32_t)count - (ivec){0};
}

/* 2^x to 2e-7 for x <= 0; 2^-126 for what is below. */
ALWAYS vec exp2_of(vec x) {
    const float to_integer = 12582912.0f; /* 1.5 * 2^23: the low bits are the integer */
    const float c[] = {1.0000001192f, 0.6931469440f,   0.2402212024f,
                       0.0555071346f, 0.009675540961f, 0.001327646663f};
    x = larger(x, splat(-126));
    vec shifted = x + to_integer;
    vec f = x - (shifted - to_integer);
    vec p = c[5] * f + c[4];
    UNROLL for (int i = 3; i >= 0; i--) p = p * f + c[i];
    return (vec)((ivec)p + ((ivec)shifted << 23));
}

/* tanh, by 2^(-2 |x| log2 e). */
ALWAYS vec tanh_of(vec x) {
    vec magnitude = larger(x, -x);
    vec e = exp2_of(-2 * LOG2_E * magnitude);
    vec positive = (1 - e) / (1 + e);
    ivec sign = (ivec)x & (ivec)splat(-0.0f);
    return (vec)((ivec)positive | sign);
}

ALWAYS int64_t up_to(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

/* ---- types of the tensors ---- */

ALWAYS size_t size_of(enum type type) { return type == FLOAT32 ? 4 : 2; }

ALWAYS vec load(enum type type, const void *from) {
    if (type == FLOAT32)
        return *(const vec_u *)from;
#if defined(__AVX512F__)
    __m256i half = _mm256_loadu_si256((const void *)from);
    if (type == FLOAT16)
        return (vec)_mm512_cvtph_ps(half);
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#elif defined(__F16C__)
    if (type == FLOAT16)
        return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const void *)from));
#endif
    return (vec)(__builtin_convertvector(*(const hvec *)from, uvec) << 16);
}

/* `count` elements, zeros behind them. */
static vec load_some(enum type type, const void *from, int64_t count) {
    float whole[LANES] = {0};
    memcpy(whole, from, count * size_of(type));
    return load(type, whole);
}

ALWAYS vec load_at(enum type type, const char *row, int64_t at, int64_t dim) {
    const char *from = row + at * size_of(type);
    return at + LANES <= dim ? load(type, from) : load_some(type, from, dim - at);
}

ALWAYS void store(enum type type, void *to, vec x) {
    if (type == FLOAT32) {
        *(vec_u *)to = x;
        return;
    }
#if defined(__AVX512F__)
    if (type == FLOAT16) {
        _mm256_storeu_si256(to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
        return;
    }
#elif defined(__F16C__)
    if (type == FLOAT16) {
        _mm_storeu_si128(to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
        return;
    }
#endif
    uvec bits = (uvec)x; /* to nearest, ties to even */
    bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    *(hvec *)to = __builtin_convertvector(bits, hvec);
}

/* `count` numbers times `factor`; `from` is padded to whole vectors. */
static void store_row(enum type type, void *to, const float *from, int64_t count,
                      float factor) {
    for (int64_t i = 0; i < count; i += LANES) {
        vec x = *(const vec *)(from + i) * factor;
        char *at = (char *)to + i * size_of(type), whole[4 * LANES];
        if (i + LANES <= count) {
            store(type, at, x);
        } else {
            store(type, whole, x);
            memcpy(at, whole, (count - i) * size_of(type));
        }
    }
}

/* Attention over a paged KV pool on a CPU: packed queries against lists of KV slots.
 *
 * An item is a set of query rows and a run of keys that all of them see, or that they
 * see up to a diagonal. For each KV head its rows times the query heads of that head are
 * the rows of two matrix products, so a key is loaded once for all of them. Keys and
 * values are widened to float32 and packed block by block; softmax is online, in base 2.
 * Rows with several items get partial results that are merged by log-sum-exp.
 *
 * float32 throughout, also for 16-bit pools: on the CPUs this was measured on, a bf16
 * dot product takes four times as long as a float32 FMA and does twice the work.
 */
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
/* A panel is as wide, and a tile of rows as high, as accumulators fit the registers. */
#define PANEL (LANES * PANEL_VECS)
#define TILE 6
/* Keys that are packed at once; their keys and values stay in the second-level cache. */
#define BLOCK 256
#define BLOCK_PANELS (BLOCK / PANEL)
/* How many keys ahead of use the cache is told of one. */
#define AHEAD 32
#define UNSEEN (-1e30f)
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

/* As in native_library.py. Strides in elements; the innermost dimension is dense. */
struct call {
    const void *q, *k, *v;
    void *out;
    float *lse; /* [queries, query heads], natural logarithm; NULL if not wanted */
    int64_t q_row, q_head, k_slot, k_head, v_slot, v_head, out_row, out_head, lse_row;
    const int32_t *table;      /* KV slots */
    const int64_t *items;      /* [num_items, ITEM_FIELDS] */
    const int32_t *rows;       /* query rows of items */
    const int64_t *merges;     /* [num_merges, 2]: query row, end of its partials */
    const int64_t *partials;   /* indices of partial results, row after row */
    float *partial_out;        /* [num_partials, query heads, value_dim] */
    float *partial_lse;        /* [num_partials, query heads], base 2 */
    int64_t num_items, num_merges;
    int32_t q_type, kv_type, kv_heads, group, dim, value_dim, num_threads;
    float scale, soft_cap;
};

/* Of an item: first slot in the table, keys, first of its rows, rows, how many of its
 * keys the first row sees (every further row one more; none if not positive), and its
 * first partial result, or -1 for results that go to `out`. */
enum { SLOTS, KEYS, ROWS, NUM_ROWS, SEEN, PARTIAL, ITEM_FIELDS };

/* ---- vectors ---- */

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

int taper_has_float16(void) {
#if defined(__F16C__) || defined(__AVX512F__)
    return 1;
#else
    return 0;
#endif
}

int taper_lanes(void) { return LANES; }

/* ---- packing ---- */

struct scratch {
    float *keys;   /* [BLOCK_PANELS][padded dim][PANEL] */
    float *values; /* [panels of value_dim][BLOCK][PANEL] */
    float *scores; /* [TILE][BLOCK] */
    float *q;      /* [rows][dim] */
    float *out;    /* [rows][padded value_dim] */
    float *max;    /* [rows] */
    vec *sum;      /* [rows] */
};

/* Slots may lie anywhere: what is needed soon has to be asked for. */
ALWAYS void fetch(const char *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64)
        __builtin_prefetch(from + at);
}

#if defined(__AVX512F__)
ALWAYS void transpose(__m512i a[16]) {
    __m512i b[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
        a[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
    }
}

/* Sixteen keys to columns. Two bf16 dimensions are transposed as one number. */
ALWAYS void pack_columns(enum type type, const char *const rows[LANES], int64_t dim,
                         float *to) {
    __m512i a[16];
    int64_t at = 0;
    for (; type == BFLOAT16 && at + 32 <= dim; at += 32) {
        UNROLL for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + 2 * at);
        transpose(a);
        UNROLL for (int i = 0; i < 16; i++) {
            float *even = to + (at + 2 * i) * PANEL;
            _mm512_store_si512(even, _mm512_slli_epi32(a[i], 16));
            __m512i odd = _mm512_and_si512(a[i], _mm512_set1_epi32(0xffff0000));
            _mm512_store_si512(even + PANEL, odd);
        }
    }
    for (; at < dim; at += 16) {
        UNROLL for (int i = 0; i < 16; i++) a[i] =
            (__m512i)load_at(type, rows[i], at, dim);
        transpose(a);
        UNROLL for (int i = 0; i < 16; i++)
            _mm512_store_si512(to + (at + i) * PANEL, a[i]);
    }
}
#else
ALWAYS void pack_columns(enum type type, const char *const rows[LANES], int64_t dim,
                         float *to) {
    for (int lane = 0; lane < LANES; lane++)
        for (int64_t at = 0; at < dim; at += LANES) {
            vec some = load_at(type, rows[lane], at, dim);
            for (int i = 0; i < LANES; i++)
                to[(at + i) * PANEL + lane] = some[i];
        }
}
#endif

/* Keys as columns of panels. Lanes beyond `count` repeat the last key. */
ALWAYS void pack_keys(enum type type, const struct call *c, int head,
                      const int32_t *slots, int64_t count, float *to) {
    const char *base = (const char *)c->k + head * c->k_head * size_of(type);
    for (int64_t first = 0; first < count; first += LANES) {
        const char *rows[LANES];
        for (int i = 0; i < LANES; i++) {
            int64_t key = first + i < count ? first + i : count - 1;
            rows[i] = base + slots[key] * c->k_slot * size_of(type);
            int64_t later = key + AHEAD < count ? key + AHEAD : count - 1;
            fetch(base + slots[later] * c->k_slot * size_of(type), c->dim * size_of(type));
        }
        int64_t panel = first / PANEL * up_to(c->dim, LANES) * PANEL;
        pack_columns(type, rows, c->dim, to + panel + first % PANEL);
    }
}

/* Values as rows of panels, padded with zeros to whole vectors. */
ALWAYS void pack_values(enum type type, const struct call *c, int head,
                        const int32_t *slots, int64_t count, float *to) {
    const char *base = (const char *)c->v + head * c->v_head * size_of(type);
    for (int64_t key = 0; key < count; key++) {
        const char *row = base + slots[key] * c->v_slot * size_of(type);
        int64_t later = key + AHEAD < count ? key + AHEAD : count - 1;
        fetch(base + slots[later] * c->v_slot * size_of(type),
              c->value_dim * size_of(type));
        for (int64_t at = 0; at < c->value_dim; at += LANES) {
            float *panel = to + at / PANEL * BLOCK * PANEL + key * PANEL + at % PANEL;
            *(vec *)panel = load_at(type, row, at, c->value_dim);
        }
    }
}

static void pack(const struct call *c, int head, const int32_t *slots, int64_t count,
                 struct scratch *w) {
    switch (c->kv_type) {
    case FLOAT32:
        pack_keys(FLOAT32, c, head, slots, count, w->keys);
        pack_values(FLOAT32, c, head, slots, count, w->values);
        break;
    case BFLOAT16:
        pack_keys(BFLOAT16, c, head, slots, count, w->keys);
        pack_values(BFLOAT16, c, head, slots, count, w->values);
        break;
    default:
        pack_keys(FLOAT16, c, head, slots, count, w->keys);
        pack_values(FLOAT16, c, head, slots, count, w->values);
    }
}

/* Queries in float32, times `factor`. */
static void pack_queries(const struct call *c, int head, const int32_t *rows,
                         int64_t num_rows, float factor, float *to) {
    size_t size = size_of(c->q_type);
    for (int64_t r = 0; r < num_rows; r++)
        for (int g = 0; g < c->group; g++) {
            int64_t at = rows[r] * c->q_row + (head * c->group + g) * c->q_head;
            const char *from = (const char *)c->q + at * size;
            for (int64_t d = 0; d < c->dim; d += LANES, to += LANES)
                *(vec *)to = factor * load_at(c->q_type, from, d, c->dim);
        }
}

/* ---- the two products and the softmax between them ---- */

/* c[rows][vecs] = c * factor[row] + a[rows][depth] b[depth][PANEL]; without a factor
 * what was in c does not matter. */
ALWAYS void multiply(int rows, int vecs, const float *a, int64_t a_row, const float *b,
                     int64_t depth, float *c, int64_t c_row, const float *factor) {
    vec sum[TILE][PANEL_VECS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vecs; v++) sum[r][v] =
        factor ? *(vec *)(c + r * c_row + v * LANES) * factor[r] : (vec){0};
    for (int64_t k = 0; k < depth; k++) {
        const vec *line = (const vec *)(b + k * PANEL);
        UNROLL for (int r = 0; r < rows; r++) {
            vec x = splat(a[r * a_row + k]);
            UNROLL for (int v = 0; v < vecs; v++) sum[r][v] += x * line[v];
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vecs; v++)
        *(vec *)(c + r * c_row + v * LANES) = sum[r][v];
}

static void multiply_any(int rows, int vecs, const float *a, int64_t a_row,
                         const float *b, int64_t depth, float *c, int64_t c_row,
                         const float *factor) {
#define CASE(R, V)                                                                      \
    case R * (PANEL_VECS + 1) + V:                                                      \
        multiply(R, V, a, a_row, b, depth, c, c_row, factor);                           \
        break;
#if PANEL_VECS == 4
#define CASES(R) CASE(R, 1) CASE(R, 2) CASE(R, 3) CASE(R, 4)
#else
#define CASES(R) CASE(R, 1) CASE(R, 2)
#endif
    switch (rows * (PANEL_VECS + 1) + vecs) {
        CASES(1) CASES(2) CASES(3) CASES(4) CASES(5) CASES(6)
    }
}

ALWAYS int vecs_of(int64_t numbers) {
    return (int)(numbers >= PANEL ? PANEL_VECS : (numbers + LANES - 1) / LANES);
}

/* Lanes of vector `i` of a row that sees `seen` keys. */
ALWAYS ivec seen_lanes(int64_t i, int64_t seen) { return first_lanes(seen - i * LANES); }

/* Scores of a row to weights relative to the largest so far; returns what earlier
 * results are to be multiplied by. The row sees `seen` of `count` keys. Four vectors at
 * a time, because each step of a maximum or a sum waits for the one before. */
static float weigh(float *scores, int64_t count, int64_t seen, float cap, float *max,
                   vec *sum) {
    int64_t whole = seen < 0 ? 0 : seen / LANES, fours = whole / 4 * 4;
    int64_t vecs = (count + LANES - 1) / LANES;
    vec *s = (vec *)scores, best[4], total[4] = {{0}};
    if (cap)
        for (int64_t i = 0; i < vecs; i++)
            s[i] = cap * tanh_of(s[i]);
    UNROLL for (int v = 0; v < 4; v++) best[v] = splat(*max);
    for (int64_t i = 0; i < fours; i += 4)
        UNROLL for (int v = 0; v < 4; v++) best[v] = larger(best[v], s[i + v]);
    for (int64_t i = fours; i < vecs; i++) {
        if (i >= whole) {
            ivec mask = seen_lanes(i, seen);
            s[i] = (vec)(((ivec)s[i] & mask) | ((ivec)splat(UNSEEN) & ~mask));
        }
        best[0] = larger(best[0], s[i]);
    }
    best[0] = larger(larger(best[0], best[1]), larger(best[2], best[3]));
    float now = largest_lane(best[0]), before = exp2_of(splat(*max - now))[0];
    for (int64_t i = 0; i < fours; i += 4)
        UNROLL for (int v = 0; v < 4; v++) {
            s[i + v] = exp2_of(s[i + v] - now);
            total[v] += s[i + v];
        }
    for (int64_t i = fours; i < vecs; i++) {
        s[i] = exp2_of(s[i] - now);
        if (i >= whole)
            s[i] = (vec)((ivec)s[i] & seen_lanes(i, seen));
        total[0] += s[i];
    }
    *sum = *sum * before + ((total[0] + total[1]) + (total[2] + total[3]));
    *max = now;
    return before;
}

/* Rows [first, first + rows) over the `count` packed keys, of which the first row of the
 * item sees `seen`. */
static void attend_tile(const struct call *c, struct scratch *w, int64_t first, int rows,
                        int64_t count, int64_t seen, float cap) {
    int64_t dim = up_to(c->dim, LANES), value_dim = up_to(c->value_dim, LANES);
    float factor[TILE];
    const float *q = w->q + first * dim;
    for (int64_t p = 0; p < count; p += PANEL)
        multiply_any(rows, vecs_of(count - p), q, dim, w->keys + p * dim, c->dim,
                     w->scores + p, BLOCK, NULL);
    for (int r = 0; r < rows; r++) {
        int64_t row = first + r;
        int64_t sees = seen + row / c->group;
        factor[r] = weigh(w->scores + r * BLOCK, count, sees < count ? sees : count, cap,
                          w->max + row, w->sum + row);
    }
    for (int64_t d = 0; d < value_dim; d += PANEL)
        multiply_any(rows, vecs_of(value_dim - d), w->scores, BLOCK, w->values + d * BLOCK,
                     count, w->out + first * value_dim + d, value_dim, factor);
}

static void attend_block(const struct call *c, struct scratch *w, int64_t num_rows,
                         int64_t count, int64_t seen, float cap) {
    int64_t tiles = (num_rows + TILE - 1) / TILE;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t first = t * num_rows / tiles, end = (t + 1) * num_rows / tiles;
        int64_t most = seen + (end - 1) / c->group;
        most = most < count ? most : count;
        if (most > 0)
            attend_tile(c, w, first, (int)(end - first), most, seen, cap);
    }
}

/* ---- an item, the merge, the call ---- */

static void write_result(const struct call *c, const struct scratch *w, int head,
                         const int64_t *item, int64_t index) {
    int64_t value_dim = up_to(c->value_dim, LANES), heads = c->kv_heads * c->group;
    int64_t row = index / c->group, at = head * c->group + index % c->group;
    const float *out = w->out + index * value_dim;
    float total = sum_lanes(w->sum[index]), factor = total > 0 ? 1 / total : 0;
    int is_partial = item[PARTIAL] >= 0;
    float lse = -INFINITY;
    if (total > 0 && (is_partial || c->lse))
        lse = w->max[index] + log2f(total);
    if (is_partial) {
        int64_t to = (item[PARTIAL] + row) * heads + at;
        store_row(FLOAT32, c->partial_out + to * c->value_dim, out, c->value_dim, factor);
        c->partial_lse[to] = lse;
        return;
    }
    int64_t query = c->rows[item[ROWS] + row];
    char *to = (char *)c->out;
    to += (query * c->out_row + at * c->out_head) * size_of(c->q_type);
    store_row(c->q_type, to, out, c->value_dim, factor);
    if (c->lse)
        c->lse[query * c->lse_row + at] = lse * LN_2;
}

static void attend(const struct call *c, const int64_t *item, int head,
                   struct scratch *w) {
    int64_t num_rows = item[NUM_ROWS] * c->group;
    int64_t value_dim = up_to(c->value_dim, LANES);
    const int32_t *slots = c->table + item[SLOTS];
    float cap = c->soft_cap * LOG2_E;
    float factor = cap ? c->scale / c->soft_cap : c->scale * LOG2_E;
    pack_queries(c, head, c->rows + item[ROWS], item[NUM_ROWS], factor, w->q);
    memset(w->out, 0, num_rows * value_dim * sizeof(float));
    memset(w->sum, 0, num_rows * sizeof(vec));
    for (int64_t i = 0; i < num_rows; i++)
        w->max[i] = UNSEEN;
    for (int64_t key = 0; key < item[KEYS]; key += BLOCK) {
        int64_t left = item[KEYS] - key, count = left < BLOCK ? left : BLOCK;
        pack(c, head, slots + key, count, w);
        attend_block(c, w, num_rows, count, item[SEEN] - key, cap);
    }
    for (int64_t i = 0; i < num_rows; i++)
        write_result(c, w, head, item, i);
}

static void merge(const struct call *c, int64_t index, int head, float *sum) {
    int64_t query = c->merges[2 * index], end = c->merges[2 * index + 1];
    int64_t begin = index ? c->merges[2 * index - 1] : 0;
    int64_t heads = c->kv_heads * c->group;
    float best = -INFINITY, total = 0;
    for (int64_t p = begin; p < end; p++)
        best = fmaxf(best, c->partial_lse[c->partials[p] * heads + head]);
    memset(sum, 0, up_to(c->value_dim, LANES) * sizeof(float));
    for (int64_t p = begin; p < end && best > -INFINITY; p++) {
        int64_t at = c->partials[p] * heads + head;
        float weight = exp2f(c->partial_lse[at] - best);
        const float *from = c->partial_out + at * c->value_dim;
        for (int64_t d = 0; d < c->value_dim; d++)
            sum[d] += weight * from[d];
        total += weight;
    }
    char *to = (char *)c->out;
    to += (query * c->out_row + head * c->out_head) * size_of(c->q_type);
    store_row(c->q_type, to, sum, c->value_dim, total > 0 ? 1 / total : 0);
    if (c->lse)
        c->lse[query * c->lse_row + head] = (best + log2f(total)) * LN_2;
}

/* Memory of a thread, kept between calls: the threads of a pool are. */
static _Thread_local char *memory;
static _Thread_local size_t memory_size;

static int reserve(const struct call *c, int64_t max_rows, struct scratch *w) {
    int64_t dim = up_to(c->dim, 2 * LANES), value_dim = up_to(c->value_dim, PANEL);
    int64_t rows = max_rows * c->group;
    size_t sizes[] = {BLOCK * dim,  BLOCK * value_dim, TILE * BLOCK, rows * dim,
                      rows * value_dim, rows,          rows * LANES};
    float **parts[] = {&w->keys, &w->values, &w->scores,       &w->q,
                       &w->out,  &w->max,    (float **)&w->sum};
    size_t needed = 64;
    for (int i = 0; i < 7; i++)
        needed += up_to(sizes[i] * sizeof(float), 64);
    if (memory_size < needed) {
        free(memory);
        memory = aligned_alloc(64, up_to(needed, 4096));
        memory_size = memory ? needed : 0;
    }
    char *at = memory;
    for (int i = 0; at && i < 7; i++) {
        *parts[i] = (float *)at;
        at += up_to(sizes[i] * sizeof(float), 64);
    }
    return memory ? 0 : -1;
}

/* Returns 0, or -1 if there is no memory. */
int taper_attend(const struct call *c) {
    int64_t max_rows = 1, num_heads = c->kv_heads * c->group;
    int failed = 0;
    for (int64_t i = 0; i < c->num_items; i++)
        if (c->items[i * ITEM_FIELDS + NUM_ROWS] > max_rows)
            max_rows = c->items[i * ITEM_FIELDS + NUM_ROWS];
#pragma omp parallel num_threads(c->num_threads) reduction(| : failed)
    {
        struct scratch w;
        failed = reserve(c, max_rows, &w);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < c->num_items * c->kv_heads; i++)
            if (!failed)
                attend(c, c->items + i / c->kv_heads * ITEM_FIELDS, i % c->kv_heads, &w);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < c->num_merges * num_heads; i++)
            if (!failed)
                merge(c, i / num_heads, i % num_heads, w.out);
    }
    return failed;
}

/* What a call is, and its keys, values and queries in the order that the products read. */
#include "vectors.h"

/* A panel is as wide, and a tile of rows as high, as accumulators fit the registers. */
#define PANEL (LANES * PANEL_VECS)
#define TILE 6
/* Keys that are packed at once; their keys and values stay in the second-level cache. */
#define BLOCK 256
#define BLOCK_PANELS (BLOCK / PANEL)
/* How many keys ahead of use the cache is told of one. */
#define AHEAD 32

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

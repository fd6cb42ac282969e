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
#include "packing.h"

#define UNSEEN (-1e30f)

int taper_has_float16(void) {
#if defined(__F16C__) || defined(__AVX512F__)
    return 1;
#else
    return 0;
#endif
}

int taper_lanes(void) { return LANES; }

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

ALWAYS int64_t whole_vecs(int64_t seen) { return seen < 0 ? 0 : seen / LANES; }

/* The largest of `max` and a row's scores, after the soft cap; the row sees `seen` of the
 * keys in `vecs` vectors, the others become UNSEEN. Four at a time, because each step of
 * a maximum waits for the one before. */
static float largest_score(vec *s, int64_t vecs, int64_t seen, float cap, float max) {
    int64_t whole = whole_vecs(seen), fours = whole / 4 * 4;
    vec best[4];
    UNROLL for (int v = 0; v < 4; v++) best[v] = splat(max);
    if (cap)
        for (int64_t i = 0; i < vecs; i++)
            s[i] = cap * tanh_of(s[i]);
    for (int64_t i = 0; i < fours; i += 4)
        UNROLL for (int v = 0; v < 4; v++) best[v] = larger(best[v], s[i + v]);
    for (int64_t i = fours; i < vecs; i++) {
        if (i >= whole) {
            ivec mask = seen_lanes(i, seen);
            s[i] = (vec)(((ivec)s[i] & mask) | ((ivec)splat(UNSEEN) & ~mask));
        }
        best[0] = larger(best[0], s[i]);
    }
    return largest_lane(larger(larger(best[0], best[1]), larger(best[2], best[3])));
}

/* Scores to weights relative to `max`; returns their sum. */
static vec weigh(vec *s, int64_t vecs, int64_t seen, float max) {
    int64_t whole = whole_vecs(seen), fours = whole / 4 * 4;
    vec sum[4] = {{0}};
    for (int64_t i = 0; i < fours; i += 4)
        UNROLL for (int v = 0; v < 4; v++) {
            s[i + v] = exp2_of(s[i + v] - max);
            sum[v] += s[i + v];
        }
    for (int64_t i = fours; i < vecs; i++) {
        s[i] = exp2_of(s[i] - max);
        if (i >= whole)
            s[i] = (vec)((ivec)s[i] & seen_lanes(i, seen));
        sum[0] += s[i];
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* Rows [first, first + rows) over the `count` packed keys, of which the first row of the
 * item sees `seen`. Maxima of all rows first: they are long waits that can overlap. */
static void attend_tile(const struct call *c, struct scratch *w, int64_t first, int rows,
                        int64_t count, int64_t seen, float cap) {
    int64_t dim = up_to(c->dim, LANES), value_dim = up_to(c->value_dim, LANES);
    int64_t vecs = up_to(count, LANES) / LANES, sees[TILE];
    float factor[TILE], max[TILE];
    const float *q = w->q + first * dim;
    for (int64_t p = 0; p < count; p += PANEL)
        multiply_any(rows, vecs_of(count - p), q, dim, w->keys + p * dim, c->dim,
                     w->scores + p, BLOCK, NULL);
    for (int r = 0; r < rows; r++) {
        int64_t most = seen + (first + r) / c->group;
        sees[r] = most < count ? most : count;
        vec *scores = (vec *)(w->scores + r * BLOCK);
        max[r] = largest_score(scores, vecs, sees[r], cap, w->max[first + r]);
    }
    for (int r = 0; r < rows; r++) {
        int64_t row = first + r;
        factor[r] = exp2_of(splat(w->max[row] - max[r]))[0];
        w->max[row] = max[r];
        w->sum[row] = w->sum[row] * factor[r] +
                      weigh((vec *)(w->scores + r * BLOCK), vecs, sees[r], max[r]);
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

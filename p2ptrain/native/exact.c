/* Kernels of serving: a row's bits depend neither on the other rows, nor on threads, nor on the width of vectors.
 *
 * The order of every sum is part of the definition, for 16 lanes on any CPU:
 *
 * - dot(x, w): lane l adds x[k] * w[k], fused, for k = l, l + 16, ...; then lanes are added in pairs 8, 4, 2, 1 apart.
 * - Attention: a score adds over the width in order, fused. Pages of 64 keys follow in order, by an online softmax
 *   (Milakov and Gimelshein, 2018). A row reads no key behind its own position.
 * - int8: sums of integers, which are exact; then single operations, as in `p2ptrain.models.int8`.
 *
 * Everything else is single IEEE-754 operations, compiled with -ffp-contract=off: only `fused` fuses. AVX-512, AVX2 and
 * arm64 have an instruction for it; the plain build calls fmaf, which the C library rounds correctly on any CPU.
 * `run` sets rounding to nearest, without flushing to zero. build.py compiles this file once for each kind of CPU.
 */
#include <fenv.h>
#include <limits.h>
#include <linux/futex.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif
#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define UNROLL _Pragma("GCC unroll 16")
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
#define PASTE(name, build) name##_##build
#define NAMED(name, build) PASTE(name, build)

#define COUNTER(type) _Atomic(type)
#include "exact.h"

enum { BLOCK = 32, QUERIES = 4, BLOCK_ROWS = 16 };
#if defined(__AVX512F__)
enum { WIDTH = 16, TILE = 16, ROWS = 4, SPAN = 64, MIXED = 4 };
#elif defined(__FMA__)
enum { WIDTH = 8, TILE = 4, ROWS = 2, SPAN = 16, MIXED = 2 };
#else
enum { WIDTH = 4, TILE = 2, ROWS = 2, SPAN = 16, MIXED = 2 };
#endif
/* WIDTH: floats of a vector. TILE: dot products at one time; ROWS: rows of it, at most. SPAN: scores of a query at one
 * time. MIXED: vectors of a value at one time. None changes a result. */
enum { PARTS = LANES / WIDTH };

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));

INLINE vec load(const float *at) { vec v; memcpy(&v, at, sizeof v); return v; }
INLINE void store(float *at, vec v) { memcpy(at, &v, sizeof v); }
INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }
INLINE vec load_some(const float *at, long n) { vec v = {0}; memcpy(&v, at, (size_t)n * sizeof *at); return v; }

/* a * b + c, rounded once. */
INLINE vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < WIDTH; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/* The sum of 16 lanes. */
INLINE float sum(const vec *parts) {
    float v[LANES], a[8], b[4];
    for (int i = 0; i < PARTS; i++) store(v + i * WIDTH, parts[i]);
    for (int i = 0; i < 8; i++) a[i] = v[i] + v[i + 8];
    for (int i = 0; i < 4; i++) b[i] = a[i] + a[i + 4];
    return (b[0] + b[2]) + (b[1] + b[3]);
}

#if defined(__AVX512F__)
/* `sum` of 16 vectors at once: each step adds halves of two vectors into one, in the pairs of `sum`. */
#define SUMS(name, type, own, permute) \
    INLINE type name(const type *v) { \
        type a[8], b[4], c[2]; \
        const ivec lo8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}, hi8 = lo8 + 8; \
        const ivec lo4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}, hi4 = lo4 + 4; \
        const ivec lo2 = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29}, hi2 = lo2 + 2; \
        const ivec even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, odd = even + 1; \
        UNROLL for (int i = 0; i < 8; i++) a[i] = PAIRS(type, own, permute, v[2 * i], v[2 * i + 1], lo8, hi8); \
        UNROLL for (int i = 0; i < 4; i++) b[i] = PAIRS(type, own, permute, a[2 * i], a[2 * i + 1], lo4, hi4); \
        UNROLL for (int i = 0; i < 2; i++) c[i] = PAIRS(type, own, permute, b[2 * i], b[2 * i + 1], lo2, hi2); \
        return PAIRS(type, own, permute, c[0], c[1], even, odd); \
    }
#define PAIRS(type, own, permute, one, other, low, high) \
    (type)permute((own)(one), (__m512i)(low), (own)(other)) + (type)permute((own)(one), (__m512i)(high), (own)(other))
SUMS(sums, vec, __m512, _mm512_permutex2var_ps)
SUMS(integer_sums, ivec, __m512i, _mm512_permutex2var_epi32)
#endif

/* Linear layers. */

/* found[m][n] = dot(x[m], w[n]). Always inlined with constant rows and columns: the sums stay in registers. */
INLINE void tile(const float *x, const float *w, float *found, const int rows, const int columns, long inputs) {
    vec acc[TILE][PARTS], row[ROWS], weight;
    UNROLL for (int i = 0; i < rows * columns; i++) UNROLL for (int p = 0; p < PARTS; p++) acc[i][p] = (vec){0};
    long k = 0;
    for (; k + LANES <= inputs; k += LANES)
        UNROLL for (int p = 0; p < PARTS; p++) {
            UNROLL for (int m = 0; m < rows; m++) row[m] = load(x + m * inputs + k + p * WIDTH);
            UNROLL for (int n = 0; n < columns; n++) {
                weight = load(w + n * inputs + k + p * WIDTH);
                UNROLL for (int m = 0; m < rows; m++)
                    acc[m * columns + n][p] = fused(row[m], weight, acc[m * columns + n][p]);
            }
        }
    if (__builtin_expect(k < inputs, 0))  /* Without this hint gcc 12 spills the sums of large tiles. */
        UNROLL for (int p = 0; p < PARTS; p++) {
            long at = k + p * WIDTH, rest = inputs < at ? 0 : LEAST(inputs - at, WIDTH);
            UNROLL for (int m = 0; m < rows; m++) row[m] = load_some(x + m * inputs + at, rest);
            UNROLL for (int n = 0; n < columns; n++) {
                weight = load_some(w + n * inputs + at, rest);
                UNROLL for (int m = 0; m < rows; m++)
                    acc[m * columns + n][p] = fused(row[m], weight, acc[m * columns + n][p]);
            }
        }
#if defined(__AVX512F__)
    if (rows * columns == TILE) {
        vec all[TILE];
        UNROLL for (int i = 0; i < TILE; i++) all[i] = acc[i][0];
        vec each = sums(all);
        UNROLL for (int m = 0; m < rows; m++)
            memcpy(found + m * BLOCK, (float *)&each + m * columns, (size_t)columns * sizeof *found);
        return;
    }
#endif
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int n = 0; n < columns; n++) found[m * BLOCK + n] = sum(acc[m * columns + n]);
}

/* Add the bias, and store, or add `factor` times the result. */
INLINE void finish(const struct op *op, const float *found, float *y, long columns, const float *bias) {
    for (long n = 0; n < columns; n++) {
        float value = bias ? found[n] + bias[n] : found[n];
        y[n] = op->factor ? y[n] + op->factor * value : value;
    }
}

/* BLOCK outputs of all rows: their weights stay in the cache. */
static void linear(const struct op *op, const struct batch *batch, long item) {
    long from = item * BLOCK, columns = LEAST(op->outputs - from, BLOCK), inputs = op->inputs;
    const float *x = op->x, *w = (const float *)op->weight + from * inputs, *bias = op->bias ? op->bias + from : 0;
#define COLUMNS(R, C) for (; n + C <= columns; n += C) tile(x + m * inputs, w + n * inputs, found[0] + n, R, C, inputs);
#define PASS(R) \
    for (; m + R <= batch->rows; m += R) { \
        long n = 0; \
        COLUMNS(R, TILE / R) \
        COLUMNS(R, 1) \
        for (int i = 0; i < R; i++) finish(op, found[i], (float *)op->y + (m + i) * op->stride + from, columns, bias); \
    }
    float found[ROWS][BLOCK];
    long m = 0;
    if (ROWS == 4) PASS(ROWS)
    PASS(2)
    PASS(1)
}

/* A row as two int8 digits, y [rows, 2, inputs], and a scale: scale * (high + low / 254). */
static void digits(const struct op *op, long row) {
    const float *x = (const float *)op->x + row * op->inputs, round = 0x1.8p23f;
    int8_t *high = (int8_t *)op->y + row * 2 * op->inputs, *low = high + op->inputs;
    int32_t peak = 0;  /* The bits of |x| order like |x|. */
    for (long k = 0; k < op->inputs; k++) {
        int32_t bits;
        memcpy(&bits, x + k, 4);
        bits &= 0x7FFFFFFF;
        peak = bits > peak ? bits : peak;
    }
    float scale;
    memcpy(&scale, &peak, 4);
    scale /= 127;
    op->row_scale[row] = scale;
    for (long k = 0; k < op->inputs; k++) {
        float exact = scale ? x[k] / scale : 0, shifted = exact + round;
        float rest = (exact - (shifted - round)) * 254 + round;
        int32_t one, other;
        memcpy(&one, &shifted, 4);
        memcpy(&other, &rest, 4);
        high[k] = (int8_t)one;
        low[k] = (int8_t)other;
    }
}

INLINE float exact8(int32_t high, int32_t low, float row_scale, float scale) {
    return ((float)low * (1.0f / 254) + (float)high) * row_scale * scale;
}

/* Tiles of `number` / rows outputs, as many as fit; returns how many outputs are done. */
#define TILES(target, tile, number) \
    target static long tile##s(const struct op *op, const int8_t *x, const float *row_scale, long from, long columns, \
                               float *found, int rows) { \
        const int step = rows == 2 ? (number) / 2 : (number); \
        long n = 0; \
        for (; n + step <= columns; n += step) \
            if (rows == 2) tile(op, x, row_scale, from + n, found + n, 2); \
            else tile(op, x, row_scale, from + n, found + n, 1); \
        return n; \
    }

#if defined(__AVX512F__)
#define VNNI __attribute__((target("arch=x86-64-v4,avx512vnni")))
INLINE VNNI __m512i bytes(const int8_t *at, long n) {
    return n >= 64 ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi8(~0ULL >> (64 - n), at);
}

/* 8 / rows outputs of some rows. The instruction wants one side unsigned: add 128, and take it out of the sums. */
INLINE VNNI void vnni_tile(
    const struct op *op, const int8_t *x, const float *row_scale, long n, float *found, const int rows) {
    const int columns = 8 / rows;
    const __m512i flip = _mm512_set1_epi8(-128);
    const int8_t *w = (const int8_t *)op->weight + n * op->inputs;
    ivec acc[16];
    UNROLL for (int i = 0; i < 16; i++) acc[i] = (ivec){0};
    for (long k = 0; k < op->inputs; k += 64) {
        __m512i digit[4];
        UNROLL for (int i = 0; i < 2 * rows; i++)
            digit[i] = _mm512_xor_si512(bytes(x + i * op->inputs + k, op->inputs - k), flip);
        UNROLL for (int c = 0; c < columns; c++) {
            __m512i weight = bytes(w + c * op->inputs + k, op->inputs - k);
            UNROLL for (int i = 0; i < 2 * rows; i++)
                acc[i * columns + c] = (ivec)_mm512_dpbusd_epi32((__m512i)acc[i * columns + c], digit[i], weight);
        }
    }
    ivec all = integer_sums(acc);
    for (int m = 0; m < rows; m++)
        for (int c = 0; c < columns; c++) {
            int32_t extra = 128 * op->weight_sums[n + c];
            int32_t high = all[2 * m * columns + c] - extra, low = all[(2 * m + 1) * columns + c] - extra;
            found[m * BLOCK + c] = exact8(high, low, row_scale[m], op->scale[n + c]);
        }
}

TILES(VNNI, vnni_tile, 8)
#endif

#if defined(__AVX2__)
INLINE __m256i wide(const int8_t *at) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at)); }

/* 4 / rows outputs of some rows: pairs of products of 16 bits are added in 32. */
INLINE void wide_tile(
    const struct op *op, const int8_t *x, const float *row_scale, long n, float *found, const int rows) {
    const int columns = 4 / rows;
    const int8_t *w = (const int8_t *)op->weight + n * op->inputs;
    __m256i acc[8], digit[4];
    long k = 0;
    UNROLL for (int i = 0; i < 8; i++) acc[i] = _mm256_setzero_si256();
    for (; k + 16 <= op->inputs; k += 16) {
        UNROLL for (int i = 0; i < 2 * rows; i++) digit[i] = wide(x + i * op->inputs + k);
        UNROLL for (int c = 0; c < columns; c++) {
            __m256i weight = wide(w + c * op->inputs + k);
            UNROLL for (int i = 0; i < 2 * rows; i++)
                acc[i * columns + c] = _mm256_add_epi32(acc[i * columns + c], _mm256_madd_epi16(digit[i], weight));
        }
    }
    for (int m = 0; m < rows; m++)
        for (int c = 0; c < columns; c++) {
            int32_t each[2] = {0, 0}, lanes[8];
            for (int i = 0; i < 2; i++) {
                memcpy(lanes, acc + (2 * m + i) * columns + c, sizeof lanes);
                for (int l = 0; l < 8; l++) each[i] += lanes[l];
                for (long r = k; r < op->inputs; r++)
                    each[i] += w[c * op->inputs + r] * x[(2 * m + i) * op->inputs + r];
            }
            found[m * BLOCK + c] = exact8(each[0], each[1], row_scale[m], op->scale[n + c]);
        }
}
TILES(, wide_tile, 4)
#endif

static void linear8(const struct op *op, const struct batch *batch, long item) {
    long from = item * BLOCK, columns = LEAST(op->outputs - from, BLOCK), inputs = op->inputs;
    const float *row_scale = op->row_scale, *bias = op->bias ? op->bias + from : 0;
    float found[2][BLOCK];
    for (long m = 0, some; m < batch->rows; m += some) {
        long done = 0;
        some = batch->rows - m < 2 ? 1 : 2;
        const int8_t *x = (const int8_t *)op->x + 2 * m * inputs;
#if defined(__AVX512F__)
        if (__builtin_cpu_supports("avx512vnni"))
            done = vnni_tiles(op, x, row_scale + m, from, columns, found[0], (int)some);
        else
#endif
#if defined(__AVX2__)
            done = wide_tiles(op, x, row_scale + m, from, columns, found[0], (int)some);
#endif
        for (long i = 0; i < some; i++, x += 2 * inputs) {
            for (long n = done; n < columns; n++) {
                const int8_t *w = (const int8_t *)op->weight + (from + n) * inputs;
                int32_t high = 0, low = 0;
                for (long k = 0; k < inputs; k++) high += w[k] * x[k], low += w[k] * x[inputs + k];
                found[i][n] = exact8(high, low, row_scale[m + i], op->scale[from + n]);
            }
            finish(op, found[i], (float *)op->y + (m + i) * op->stride + from, columns, bias);
        }
    }
}

/* Normalisation, activation, addition: a row. */

/* `inputs` values; x and y may be one. */
static void normalise(const struct op *op, const float *x, float *y) {
    long width = op->inputs;
    const float *weight = op->weight;
    float mean = 0;
    vec acc[PARTS] = {0};
    if (op->kind == LAYER_NORM) {
        for (long k = 0; k < width; k += LANES)
            for (int p = 0; p < PARTS; p++) {
                long at = k + p * WIDTH;
                acc[p] += load_some(x + at, width < at ? 0 : LEAST(width - at, WIDTH));
            }
        mean = sum(acc) / (float)width;
        for (int p = 0; p < PARTS; p++) acc[p] = (vec){0};
    }
    for (long k = 0; k < width; k++) y[k] = op->kind == LAYER_NORM ? x[k] - mean : x[k];
    for (long k = 0; k < width; k += LANES)
        for (int p = 0; p < PARTS; p++) {
            long at = k + p * WIDTH;
            vec each = load_some(y + at, width < at ? 0 : LEAST(width - at, WIDTH));
            acc[p] = fused(each, each, acc[p]);
        }
    float inverse = 1.0f / sqrtf(sum(acc) / (float)width + op->factor);
    for (long k = 0; k < width; k++) {
        float value = weight[k] * (y[k] * inverse);
        y[k] = op->kind == LAYER_NORM ? value + op->bias[k] : value;
    }
}

static void norm(const struct op *op, long row) {
    normalise(op, (const float *)op->x + row * op->inputs, (float *)op->y + row * op->inputs);
}

/* `outputs` heads of `inputs` values each, in place. */
static void norm_heads(const struct op *op, long row) {
    float *head = (float *)op->y + row * op->stride;
    for (long i = 0; i < op->outputs; i++, head += op->inputs) normalise(op, head, head);
}

/* e ** x for x <= 88 (Cephes' expf); 0 below -87. */
INLINE vec exponential(vec x) {
    vec low = splat(-87.0f), clamped = choose(x > low, x, low), round = splat(0x1.8p23f);
    vec n = fused(clamped, splat(1.44269504088896341f), round) - round;
    vec r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), clamped));
    vec p = splat(1.9875691500e-4f);
    p = fused(p, r, splat(1.3981999507e-3f));
    p = fused(p, r, splat(8.3334519073e-3f));
    p = fused(p, r, splat(4.1665795894e-2f));
    p = fused(p, r, splat(1.6666665459e-1f));
    p = fused(p, r, splat(5.0000001201e-1f));
    p = fused(p, r * r, r) + 1.0f;
    ivec bits = (__builtin_convertvector(n, ivec) + 127) << 23;
    return choose(x > low, p * (vec)bits, splat(0.0f));
}

/* x / (1 + e ** -t). */
INLINE vec sigmoid_times(vec x, vec t) {
    vec most = splat(88.0f), minus = choose(-t < most, -t, most);
    return x / (1.0f + exponential(minus));
}

static void activate(const struct op *op, long row) {
    const float *x = (const float *)op->x + row * (op->kind == SILU ? 2 : 1) * op->inputs;
    float *y = (float *)op->y + row * op->inputs;
    for (long k = 0; k < op->inputs; k += WIDTH) {
        long some = LEAST(op->inputs - k, WIDTH);
        vec value = load_some(x + k, some), found;
        if (op->kind == SILU) {  /* of the first half, times the second */
            found = sigmoid_times(value, value) * load_some(x + op->inputs + k, some);
        } else {  /* GELU's tanh form: (1 + tanh(t)) / 2 is the sigmoid of 2 t */
            vec cubed = value * value * value;
            found = sigmoid_times(value, (value + cubed * 0.044715f) * 1.5957691216057308f);
        }
        memcpy(y + k, &found, (size_t)some * sizeof *y);
    }
}

static void add(const struct op *op, long row) {
    const float *x = (const float *)op->x + row * op->inputs;
    float *y = (float *)op->y + row * op->inputs;
    for (long k = 0; k < op->inputs; k++) y[k] += x[k];
}

/* Attention. A row of x is [heads queries, kv_heads keys, kv_heads values] of `width` floats each. */

INLINE float *keys_of(const struct op *op, const struct batch *batch, long page, long head) {
    return batch->keys
        + ((op->layer * batch->num_pages + page) * batch->kv_heads + head) * batch->width * PAGE;
}
INLINE float *values_of(const struct op *op, const struct batch *batch, long page, long head) {
    return batch->values
        + ((op->layer * batch->num_pages + page) * batch->kv_heads + head) * batch->stride * PAGE;
}

/* Rotate a row's queries and keys, scale the queries by `factor`, and put keys and values into the row's page. */
static void place(const struct op *op, const struct batch *batch, long row) {
    long width = batch->width, half = width / 2, position = batch->positions[row], at = position % PAGE;
    float *x = (float *)op->y + row * op->stride, *key = x + batch->heads * width;
    float *value = key + batch->kv_heads * width;
    if (batch->cosines) {
        const float *cosine = batch->cosines + position * half, *sine = batch->sines + position * half;
        for (float *head = x; head < value; head += width)
            for (long d = 0; d < half; d++) {
                float one = head[d], other = head[half + d];
                head[d] = one * cosine[d] - other * sine[d];
                head[half + d] = other * cosine[d] + one * sine[d];
            }
    }
    for (long i = 0; i < batch->heads * width; i++) x[i] *= op->factor;
    for (long head = 0; head < batch->kv_heads; head++, key += width, value += width) {
        float *keys = keys_of(op, batch, batch->row_pages[row], head);
        for (long d = 0; d < width; d++) keys[d * PAGE + at] = key[d];
        memcpy(values_of(op, batch, batch->row_pages[row], head) + at * batch->stride, value, (size_t)width * 4);
    }
}

struct query {
    const float *x;
    float *out;  /* [stride]: the values' weighted sum so far */
    float highest, total;
    long position;
};

/* Add `vectors` vectors of a page's values to the outputs of some queries. */
INLINE void mix(struct query *queries, float (*weights)[PAGE], const float *decay, const long *sees, long least,
                const float *value, long d, long stride, const int number, const int vectors) {
    vec mixed[QUERIES][MIXED];
    UNROLL for (int j = 0; j < number; j++)
        UNROLL for (int v = 0; v < vectors; v++) mixed[j][v] = load(queries[j].out + d + v * WIDTH) * decay[j];
    for (long k = 0; k < least; k++)  /* values that all of the queries see, then the rest of each */
        UNROLL for (int v = 0; v < vectors; v++) {
            vec each = load(value + k * stride + d + v * WIDTH);
            UNROLL for (int j = 0; j < number; j++) mixed[j][v] = fused(splat(weights[j][k]), each, mixed[j][v]);
        }
    UNROLL for (int j = 0; j < number; j++) {
        for (long k = least; k < sees[j]; k++)
            UNROLL for (int v = 0; v < vectors; v++)
                mixed[j][v] = fused(splat(weights[j][k]), load(value + k * stride + d + v * WIDTH), mixed[j][v]);
        UNROLL for (int v = 0; v < vectors; v++) store(queries[j].out + d + v * WIDTH, mixed[j][v]);
    }
}

/* Softmax of a query's scores in a page, of which it sees some; the factor for what it summed up before. */
INLINE float soften(struct query *query, float *scores, long sees) {
    if (!sees) return 1;
    ivec index;
    for (int i = 0; i < WIDTH; i++) index[i] = i;
    vec best = splat(query->highest);
    for (int k = 0; k < PAGE; k += WIDTH) {
        vec each = choose(index + k < (ivec){0} + (int32_t)sees, load(scores + k), splat(-INFINITY));
        best = choose(each > best, each, best);
        store(scores + k, each);
    }
    float top = best[0];
    for (int i = 1; i < WIDTH; i++) top = best[i] > top ? best[i] : top;
    vec lanes[PARTS];
    for (int p = 0; p < PARTS; p++) {
        vec weight[PAGE / LANES];
        for (int i = 0; i < PAGE / LANES; i++) {
            weight[i] = exponential(load(scores + i * LANES + p * WIDTH) - top);
            store(scores + i * LANES + p * WIDTH, weight[i]);
        }
        lanes[p] = (weight[0] + weight[1]) + (weight[2] + weight[3]);
    }
    float decay = exponential(splat(query->highest - top))[0];
    query->total = __builtin_fmaf(query->total, decay, sum(lanes));
    query->highest = top;
    return decay;
}

/* Some queries of one key/value head against one page. */
INLINE void attend_page(struct query *queries, const float *key, const float *value, long start, long width,
                        long stride, const int number) {
    float weights[QUERIES][PAGE], decay[QUERIES];
    long sees[QUERIES], least = PAGE, d = 0;
    for (int from = 0; from < PAGE; from += SPAN) {
        vec score[QUERIES][SPAN / WIDTH] = {0};
        for (long w = 0; w < width; w++)
            UNROLL for (int p = 0; p < SPAN / WIDTH; p++) {
                vec column = load(key + w * PAGE + from + p * WIDTH);
                UNROLL for (int j = 0; j < number; j++)
                    score[j][p] = fused(splat(queries[j].x[w]), column, score[j][p]);
            }
        UNROLL for (int j = 0; j < number; j++)
            UNROLL for (int p = 0; p < SPAN / WIDTH; p++) store(weights[j] + from + p * WIDTH, score[j][p]);
    }
    for (int j = 0; j < number; j++) {
        long left = queries[j].position + 1 - start;
        sees[j] = left < 0 ? 0 : LEAST(left, PAGE);
        least = LEAST(least, sees[j]);
        decay[j] = soften(queries + j, weights[j], sees[j]);
    }
    for (; d + MIXED * WIDTH <= stride; d += MIXED * WIDTH)
        mix(queries, weights, decay, sees, least, value, d, stride, number, MIXED);
    for (; d < stride; d += WIDTH) mix(queries, weights, decay, sees, least, value, d, stride, number, 1);
}

/* Items: for each part, for each key/value head, blocks of rows. */
INLINE long blocks_of(const struct part *part) { return (part->rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }

static void attend(const struct op *op, const struct batch *batch, long item, long thread) {
    const struct part *part = batch->parts;
    for (; item >= blocks_of(part) * batch->kv_heads; part++) item -= blocks_of(part) * batch->kv_heads;
    long width = batch->width, stride = batch->stride, group = batch->heads / batch->kv_heads;
    long head = item % batch->kv_heads, begin = item / batch->kv_heads * BLOCK_ROWS;
    long rows = LEAST(part->rows - begin, BLOCK_ROWS), count = rows * group;
    float *out = batch->scratch + thread * batch->scratch_floats;
    for (long i = 0; i < count; i += QUERIES) {
        long number = LEAST(count - i, QUERIES), last = 0;
        struct query queries[QUERIES];
        for (long j = 0; j < number; j++) {
            long row = begin + (i + j) / group, of = head * group + (i + j) % group;
            queries[j] = (struct query){
                (const float *)op->x + (part->row + row) * op->inputs + of * width, out + j * stride, -INFINITY, 0,
                part->first + row,
            };
            last = queries[j].position;
        }
        memset(out, 0, (size_t)(QUERIES * stride) * sizeof *out);
        for (long page = 0; page * PAGE <= last; page++) {
            const float *key = keys_of(op, batch, batch->pages[part->page + page], head);
            const float *value = values_of(op, batch, batch->pages[part->page + page], head);
#define NUMBER(N) case N: attend_page(queries, key, value, page * PAGE, width, stride, N); break;
            switch (number) { NUMBER(1) NUMBER(2) NUMBER(3) NUMBER(4) }
        }
        for (long j = 0; j < number; j++) {
            long row = part->row + begin + (i + j) / group, of = head * group + (i + j) % group;
            float *y = (float *)op->y + (row * batch->heads + of) * width;
            for (long d = 0; d < width; d++) y[d] = queries[j].out[d] / queries[j].total;
        }
    }
}

/* Programs. */

static long count_items(const struct op *op, const struct batch *batch) {
    if (op->kind == LINEAR || op->kind == LINEAR8) return (op->outputs + BLOCK - 1) / BLOCK;
    if (op->kind != ATTEND) return batch->rows;
    long items = 0;
    for (long i = 0; i < batch->num_parts; i++) items += blocks_of(batch->parts + i) * batch->kv_heads;
    return items;
}

static void run_item(const struct op *op, const struct batch *batch, long item, long thread) {
    switch ((enum kind)op->kind) {
        case RMS_NORM: case LAYER_NORM: norm(op, item); break;
        case HEAD_NORM: norm_heads(op, item); break;
        case LINEAR: linear(op, batch, item); break;
        case DIGITS: digits(op, item); break;
        case LINEAR8: linear8(op, batch, item); break;
        case PLACE: place(op, batch, item); break;
        case ATTEND: attend(op, batch, item, thread); break;
        case SILU: case GELU: activate(op, item); break;
        case ADD: add(op, item); break;
    }
}

/* A barrier: waiting threads spin for a moment, then sleep, because others may want their core. */
static void wait_for_all(struct batch *batch) {
    if (batch->threads == 1) return;
    int generation = atomic_load(&batch->generation);
    if (atomic_fetch_add(&batch->arrived, 1) + 1 == batch->threads) {
        atomic_store(&batch->arrived, 0);
        atomic_fetch_add(&batch->generation, 1);
        if (atomic_load(&batch->sleeping)) syscall(SYS_futex, &batch->generation, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
        return;
    }
    for (int spins = 0; spins < 5000; spins++)
        if (atomic_load(&batch->generation) != generation) return;
    atomic_fetch_add(&batch->sleeping, 1);
    while (atomic_load(&batch->generation) == generation)
        syscall(SYS_futex, &batch->generation, FUTEX_WAIT_PRIVATE, generation, 0, 0, 0);
    atomic_fetch_sub(&batch->sleeping, 1);
}

/* Run a program as one of `batch->threads` threads, which all call this. They take items in any order. */
EXPORT void NAMED(run, BUILD)(const struct op *ops, struct batch *batch, long thread) {
    fenv_t mode;
    fegetenv(&mode);
    fesetenv(FE_DFL_ENV);
    for (long i = 0; i < batch->num_ops; i++) {
        long items = count_items(ops + i, batch), item;
        while ((item = atomic_fetch_add(&batch->taken[i], 1)) < items) run_item(ops + i, batch, item, thread);
        wait_for_all(batch);
    }
    fesetenv(&mode);
}

/* Sampling, in double: the operations of `p2ptrain.models.exact.elementary` and `p2ptrain.serving.sampling`. */

#define HORNER(x, coefficients) \
    double result = (coefficients)[0]; \
    UNROLL for (unsigned i = 1; i < sizeof(coefficients) / sizeof *(coefficients); i++) \
        result = result * (x) + (coefficients)[i]

INLINE double exp_polynomial(double x) {
    const double coefficients[] = {
        1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
        1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 1.0 / 2, 1.0, 1.0,
    };
    HORNER(x, coefficients);
    return result;
}

INLINE double log_polynomial(double x) {
    const double coefficients[] = {
        1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
        2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01,
    };
    HORNER(x, coefficients);
    return result;
}

INLINE double log_double(double x) {
    int64_t bits, exponent;
    double f;
    memcpy(&bits, &x, 8);
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52;
    bits -= (int64_t)((uint64_t)exponent << 52);
    memcpy(&f, &bits, 8);
    f -= 1.0;
    double s = f / (2.0 + f), square = s * s, half = 0.5 * f * f;
    double tail = s * (half + square * log_polynomial(square)) + (double)exponent * 1.90821492927058770002e-10;
    return (double)exponent * 6.93147180369123816490e-01 + ((tail - half) + f);
}

/* e ** x for x <= 700; 0 below -700. */
EXPORT void NAMED(exponentials, BUILD)(const double *x, double *y, long count) {
    for (long i = 0; i < count; i++) {
        double clamped = x[i] > -700.0 ? x[i] : -700.0, shifted = clamped * 1.44269504088896338700 + 0x1.8p52, power;
        double number = shifted - 0x1.8p52;
        double rest = (clamped - number * 6.93147180369123816490e-01) - number * 1.90821492927058770002e-10;
        int64_t bits;
        memcpy(&bits, &shifted, 8);  /* The low bits hold the number. */
        bits = (int64_t)((uint64_t)(bits + 1023) << 52);
        memcpy(&power, &bits, 8);
        y[i] = x[i] < -700.0 ? 0.0 : exp_polynomial(rest) * power;
    }
}

/* Gumbel noise -log(-log(u)) of a position's ids; u is word id % 4 of Philox4x32-10 (Salmon et al., 2011). */
EXPORT void NAMED(gumbel, BUILD)(const int64_t *ids, double *y, long count, uint64_t seed, uint64_t position) {
    for (long i = 0; i < count; i++) {
        uint64_t c0 = (uint64_t)ids[i] >> 2, c1 = position & 0xFFFFFFFF, c2 = position >> 32, c3 = 0;
        uint64_t k0 = seed & 0xFFFFFFFF, k1 = seed >> 32;
        for (int round = 0; round < 10; round++) {
            uint64_t one = c0 * 0xD2511F53, other = c2 * 0xCD9E8D57;
            c0 = (other >> 32) ^ c1 ^ k0;
            c2 = (one >> 32) ^ c3 ^ k1;
            c1 = other & 0xFFFFFFFF;
            c3 = one & 0xFFFFFFFF;
            k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF;
            k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF;
        }
        uint64_t low = ids[i] & 1 ? c1 : c0, high = ids[i] & 1 ? c3 : c2, word = ids[i] & 2 ? high : low;
        y[i] = -log_double(-log_double(((double)(int64_t)word + 0.5) * 0x1p-32));
    }
}

#ifdef CHOOSES  /* the build that any CPU can run */
/* How many of the builds beyond the plain one this CPU can run. */
EXPORT int cpu_level(void) {
#if defined(__x86_64__)
    int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    int v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
        && __builtin_cpu_supports("avx512cd");
    return v3 + v4;
#else
    return 0;
#endif
}
#endif

/* The kernels of serving on a GPU, with the bits of `exact.c`: its head comment defines the order of every sum.
 *
 * One launch runs a whole program. Its blocks are all resident, share the items of an operation, and meet at a barrier
 * before the next. Four threads compute a dot product, each of them four of its 16 lanes.
 *
 * This is C and C++ alike: the driver's compiler takes it as C++ (`p2ptrain.native.cuda`), and tests compile it with
 * `cuda_emulator.c` for a CPU. Nothing is fused but by `fused`: the compiler is told so. It is told THREADS of a block, too,
 * and WIDEST, the width of a head at most.
 */
#define COUNTER(type) type
#ifndef EMULATED
#define INLINE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 2)
#define PAUSE() __nanosleep(32)
#define SHARED ((float *)shared_memory)
#define CONSTANT const __grid_constant__
#define UNROLL _Pragma("unroll")
#define UNROLL_SOME _Pragma("unroll 4")
#define OUTLINE static __device__ __noinline__
extern __shared__ float4 shared_memory[];
#endif
#include "exact.h"

enum { WARP = 32, WARPS = THREADS / WARP, TEAM = 4, TEAMS = WARP / TEAM };
/* TEAM: threads of a dot product. */
enum { BLOCK_ROWS = 32, DEPTH = 64, SPACED = DEPTH + LANES, FETCHES = 2 * BLOCK_ROWS * DEPTH / 4 / THREADS };
/* Of a block's tile: rows and outputs, inputs at one time, and the distance of rows that lie in different banks. */
enum { QUERIES = 8, TOGETHER = THREADS / PAGE, CHUNK = 4096, MIXED = QUERIES * WIDEST / THREADS };
/* QUERIES of a block, one for each warp. TOGETHER: pages whose scores a block computes at one time. CHUNK: floats of a
 * row that a norm holds in shared memory. MIXED: outputs of a thread, at most. */

#define FULL 0xFFFFFFFFu
#define NEGATIVE_INFINITY __int_as_float((int)0xFF800000u)
#define THREAD ((int)threadIdx.x)
#define BLOCK ((long)blockIdx.x)
#define BLOCKS ((long)gridDim.x)
INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long up(long a, long b) { return (a + b - 1) / b; }
INLINE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }

/* e ** x for x <= 88 (Cephes' expf); 0 below -87. */
INLINE float exponential(float x) {
    const float low = -87.0f, round = 12582912.0f;
    float clamped = x > low ? x : low;
    float n = fused(clamped, 1.44269504088896341f, round) - round;
    float r = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, clamped));
    float p = 1.9875691500e-4f;
    p = fused(p, r, 1.3981999507e-3f);
    p = fused(p, r, 8.3334519073e-3f);
    p = fused(p, r, 4.1665795894e-2f);
    p = fused(p, r, 1.6666665459e-1f);
    p = fused(p, r, 5.0000001201e-1f);
    p = fused(p, r * r, r) + 1.0f;
    return x > low ? p * __int_as_float(((int)n + 127) << 23) : 0.0f;
}

/* x / (1 + e ** -t). */
INLINE float sigmoid_times(float x, float t) {
    float minus = -t < 88.0f ? -t : 88.0f;
    return x / (1.0f + exponential(minus));
}

/* Tiles of a product: ROWS rows by COLUMNS * TEAMS outputs, for a warp. */

/* The sum of 16 lanes, in each of the team's threads, which hold four lanes each. */
INLINE float sum_lanes(const float *lanes) {
    float b[4];
    UNROLL for (int i = 0; i < 4; i++) {
        float a = lanes[i] + __shfl_xor_sync(FULL, lanes[i], 2);
        b[i] = a + __shfl_xor_sync(FULL, a, 1);
    }
    return (b[0] + b[2]) + (b[1] + b[3]);
}

INLINE int sum_team(int value) {
    value += __shfl_xor_sync(FULL, value, 2);
    return value + __shfl_xor_sync(FULL, value, 1);
}

/* Four values of a row from column k; zeros behind its end. Rows of `whole` have a multiple of four. */
INLINE float4 four(const float *row, long k, long inputs, const int whole, const int constant) {
    float4 found = {0, 0, 0, 0};
    if (whole) {
        if (k < inputs) found = constant ? __ldg((const float4 *)(row + k)) : *(const float4 *)(row + k);
    } else {
        if (k < inputs) found.x = row[k];
        if (k + 1 < inputs) found.y = row[k + 1];
        if (k + 2 < inputs) found.z = row[k + 2];
        if (k + 3 < inputs) found.w = row[k + 3];
    }
    return found;
}

/* Add the bias, and store, or add `factor` times the result. */
INLINE void finish(const struct op *op, float found, long row, long n) {
    float *y = (float *)op->y + row * op->stride + n;
    float value = op->bias ? found + op->bias[n] : found;
    *y = op->factor ? *y + op->factor * value : value;
}

INLINE void dots(const struct op *op, long row, long rows, long n, const int ROWS, const int COLUMNS, const int STEPS,
                 const int whole) {
    const int team = THREAD % WARP / TEAM, member = THREAD % TEAM;
    const long inputs = op->inputs, stop = up(inputs, LANES) * LANES;
    const float *x = (const float *)op->x + row * inputs, *w[2];  /* Buffers hold whole tiles of rows. */
    float acc[8][2][4];
    UNROLL for (int c = 0; c < COLUMNS; c++)
        w[c] = (const float *)op->weight + least(n + c * TEAMS + team, op->outputs - 1) * inputs;
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int c = 0; c < COLUMNS; c++) UNROLL for (int i = 0; i < 4; i++) acc[r][c][i] = 0;
    for (long k = 4 * member; k < stop; k += STEPS * LANES) {
        float4 weight[8][2];
        UNROLL for (int s = 0; s < STEPS; s++)
            UNROLL for (int c = 0; c < COLUMNS; c++) weight[s][c] = four(w[c], k + s * LANES, inputs, whole, 1);
        UNROLL for (int s = 0; s < STEPS; s++) {
            if (k + s * LANES >= stop) break;
            UNROLL for (int r = 0; r < ROWS; r++) {
                float4 each = four(x + r * inputs, k + s * LANES, inputs, whole, 0);
                UNROLL for (int c = 0; c < COLUMNS; c++) {
                    acc[r][c][0] = fused(each.x, weight[s][c].x, acc[r][c][0]);
                    acc[r][c][1] = fused(each.y, weight[s][c].y, acc[r][c][1]);
                    acc[r][c][2] = fused(each.z, weight[s][c].z, acc[r][c][2]);
                    acc[r][c][3] = fused(each.w, weight[s][c].w, acc[r][c][3]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int c = 0; c < COLUMNS; c++) {
            float found = sum_lanes(acc[r][c]);
            long output = n + c * TEAMS + team;
            if (r % TEAM == member && row + r < rows && output < op->outputs) finish(op, found, row + r, output);
        }
}

/* Sixteen int8 values of a row from column k; zeros behind its end. Rows of `whole` have a multiple of sixteen. */
INLINE int4 sixteen(const signed char *row, long k, long inputs, const int whole, const int constant) {
    int4 found = {0, 0, 0, 0};
    if (whole) {
        if (k < inputs) found = constant ? __ldg((const int4 *)(row + k)) : *(const int4 *)(row + k);
    } else {
        int words[4];
        for (int i = 0; i < 4; i++) {
            words[i] = 0;
            for (int b = 0; b < 4; b++)
                if (k + 4 * i + b < inputs) words[i] |= (int)((unsigned)(unsigned char)row[k + 4 * i + b] << 8 * b);
        }
        found.x = words[0], found.y = words[1], found.z = words[2], found.w = words[3];
    }
    return found;
}

INLINE int dot16(int4 a, int4 b, int sum) {
    return __dp4a(a.w, b.w, __dp4a(a.z, b.z, __dp4a(a.y, b.y, __dp4a(a.x, b.x, sum))));
}

INLINE void dots8(const struct op *op, long row, long rows, long n, const int ROWS, const int COLUMNS, const int STEPS,
                  const int whole) {
    const int team = THREAD % WARP / TEAM, member = THREAD % TEAM;
    const long inputs = op->inputs;
    const signed char *x = (const signed char *)op->x + row * 2 * inputs, *w[2];
    int high[8][2], low[8][2];
    UNROLL for (int c = 0; c < COLUMNS; c++)
        w[c] = (const signed char *)op->weight + least(n + c * TEAMS + team, op->outputs - 1) * inputs;
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int c = 0; c < COLUMNS; c++) high[r][c] = low[r][c] = 0;
    for (long k = 16 * member; k < inputs; k += STEPS * 16 * TEAM) {
        int4 weight[8][2];
        UNROLL for (int s = 0; s < STEPS; s++)
            UNROLL for (int c = 0; c < COLUMNS; c++)
                weight[s][c] = sixteen(w[c], k + s * 16 * TEAM, inputs, whole, 1);
        UNROLL for (int s = 0; s < STEPS; s++)
            UNROLL for (int r = 0; r < ROWS; r++) {
                int4 one = sixteen(x + 2 * r * inputs, k + s * 16 * TEAM, inputs, whole, 0);
                int4 other = sixteen(x + (2 * r + 1) * inputs, k + s * 16 * TEAM, inputs, whole, 0);
                UNROLL for (int c = 0; c < COLUMNS; c++) {
                    high[r][c] = dot16(one, weight[s][c], high[r][c]);
                    low[r][c] = dot16(other, weight[s][c], low[r][c]);
                }
            }
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int c = 0; c < COLUMNS; c++) {
            int one = sum_team(high[r][c]), other = sum_team(low[r][c]);
            long output = n + c * TEAMS + team;
            if (r % TEAM == member && row + r < rows && output < op->outputs) {
                float found = (float)other * (1.0f / 254) + (float)one;
                finish(op, found * op->row_scale[row + r] * op->scale[output], row + r, output);
            }
        }
}

/* Tiles of many rows: BLOCK_ROWS rows by BLOCK_ROWS outputs, for a block, which shares their inputs. */

/* A thread's part of a tile's next inputs: of its rows, then of its weights. */
INLINE void fetch(const struct op *op, long row, long rows, long n, long k, float4 *found) {
    UNROLL for (int i = 0; i < FETCHES; i++) {
        const long at = (THREAD + i * THREADS) / (DEPTH / 4), column = k + (THREAD + i * THREADS) % (DEPTH / 4) * 4;
        const float4 none = {0, 0, 0, 0};
        found[i] = none;
        if (at < BLOCK_ROWS) {
            if (row + at < rows) found[i] = four((const float *)op->x + (row + at) * op->inputs, column, op->inputs, 1, 0);
        } else if (n + at - BLOCK_ROWS < op->outputs) {
            const float *weight = (const float *)op->weight + (n + at - BLOCK_ROWS) * op->inputs;
            found[i] = four(weight, column, op->inputs, 1, 1);
        }
    }
}

OUTLINE void linear_blocks(const struct op *op, long rows) {
    /* A team has 8 rows and 2 outputs; 2 by 4 teams are a warp, and 2 by 4 warps a block. */
    const int warp = THREAD / WARP, team = THREAD % WARP / TEAM, member = THREAD % TEAM;
    const int mine = warp / 4 * 16 + team / 4, theirs = BLOCK_ROWS + warp % 4 * 8 + team % 4;
    const long high = up(rows, BLOCK_ROWS), tiles = high * up(op->outputs, BLOCK_ROWS);
    const long stop = up(op->inputs, LANES) * LANES;
    for (long tile = BLOCK; tile < tiles; tile += BLOCKS) {
        const long row = tile % high * BLOCK_ROWS, n = tile / high * BLOCK_ROWS;
        float acc[8][2][4];
        float4 next[FETCHES];
        UNROLL for (int r = 0; r < 8; r++)
            UNROLL for (int c = 0; c < 2; c++) UNROLL for (int i = 0; i < 4; i++) acc[r][c][i] = 0;
        fetch(op, row, rows, n, 0, next);
        for (long k = 0; k < stop; k += DEPTH) {
            __syncthreads();
            UNROLL for (int i = 0; i < FETCHES; i++) {
                const int at = THREAD + i * THREADS;
                *(float4 *)(SHARED + at / (DEPTH / 4) * SPACED + at % (DEPTH / 4) * 4) = next[i];
            }
            __syncthreads();
            if (k + DEPTH < stop) fetch(op, row, rows, n, k + DEPTH, next);
            for (int step = 0; step < least(stop - k, DEPTH); step += LANES) {
                const float *held = SHARED + step + 4 * member;
                float4 weight[2];
                UNROLL for (int c = 0; c < 2; c++) weight[c] = *(const float4 *)(held + (theirs + 4 * c) * SPACED);
                UNROLL for (int r = 0; r < 8; r++) {
                    float4 each = *(const float4 *)(held + (mine + 2 * r) * SPACED);
                    UNROLL for (int c = 0; c < 2; c++) {
                        acc[r][c][0] = fused(each.x, weight[c].x, acc[r][c][0]);
                        acc[r][c][1] = fused(each.y, weight[c].y, acc[r][c][1]);
                        acc[r][c][2] = fused(each.z, weight[c].z, acc[r][c][2]);
                        acc[r][c][3] = fused(each.w, weight[c].w, acc[r][c][3]);
                    }
                }
            }
        }
        UNROLL for (int r = 0; r < 8; r++)
            UNROLL for (int c = 0; c < 2; c++) {
                float found = sum_lanes(acc[r][c]);
                long to = row + mine + 2 * r, output = n + theirs - BLOCK_ROWS + 4 * c;
                if (r % TEAM == member && to < rows && output < op->outputs) finish(op, found, to, output);
            }
    }
    __syncthreads();
}

/* A warp takes every so many tiles. Few tiles are spread over the blocks; of many, a block takes neighbours. */
#define PASS(dots, ROWS, COLUMNS, STEPS, whole) { \
    const long high = up(rows, ROWS), tiles = high * up(op->outputs, COLUMNS * TEAMS); \
    const int spread = tiles < BLOCKS * WARPS; \
    const long first = spread ? THREAD / WARP * BLOCKS + BLOCK : BLOCK * WARPS + THREAD / WARP; \
    for (long tile = first; tile < tiles; tile += BLOCKS * WARPS) \
        dots(op, tile % high * ROWS, rows, tile / high * (COLUMNS * TEAMS), ROWS, COLUMNS, STEPS, whole); \
    }

/* The fewer the rows, the more weights are on their way at one time. */
OUTLINE void linear(const struct op *op, long rows) {
    if (op->inputs % 4) PASS(dots, 1, 1, 1, 0)
    else if (rows == 1) PASS(dots, 1, 1, 8, 1)
    else if (rows == 2) PASS(dots, 2, 1, 8, 1)
    else if (rows <= 4) PASS(dots, 4, 1, 8, 1)
    else if (rows <= 8 || 2 * up(rows, BLOCK_ROWS) * up(op->outputs, BLOCK_ROWS) < BLOCKS) PASS(dots, 8, 1, 8, 1)
    else linear_blocks(op, rows);
}

OUTLINE void linear8(const struct op *op, long rows) {
    if (op->inputs % 16) PASS(dots8, 1, 1, 1, 0)
    else if (rows == 1) PASS(dots8, 1, 1, 8, 1)
    else if (rows == 2) PASS(dots8, 2, 1, 8, 1)
    else if (rows <= 4) PASS(dots8, 4, 1, 4, 1)
    else if (rows <= 32) PASS(dots8, 8, 1, 2, 1)
    else PASS(dots8, 8, 2, 1, 1)
}

/* Rows: a block takes one after another. */

/* A row as two int8 digits, y [rows, 2, inputs], and a scale: scale * (high + low / 254). */
OUTLINE void digits(const struct op *op, long row) {
    const float *x = (const float *)op->x + row * op->inputs, round = 12582912.0f;
    signed char *high = (signed char *)op->y + row * 2 * op->inputs, *low = high + op->inputs;
    int *peaks = (int *)SHARED, peak = 0;  /* The bits of |x| order like |x|. */
    for (long k = THREAD; k < op->inputs; k += THREADS) {
        int bits = __float_as_int(x[k]) & 0x7FFFFFFF;
        peak = bits > peak ? bits : peak;
    }
    peaks[THREAD] = peak;
    for (int half = THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (THREAD < half && peaks[THREAD + half] > peaks[THREAD]) peaks[THREAD] = peaks[THREAD + half];
    }
    __syncthreads();
    float scale = __int_as_float(peaks[0]) / 127;
    if (THREAD == 0) op->row_scale[row] = scale;
    for (long k = THREAD; k < op->inputs; k += THREADS) {
        float exact = scale ? x[k] / scale : 0, shifted = exact + round;
        float rest = (exact - (shifted - round)) * 254 + round;
        high[k] = (signed char)(unsigned char)__float_as_int(shifted);
        low[k] = (signed char)(unsigned char)__float_as_int(rest);
    }
    __syncthreads();
}

/* The sum over 16 lanes of a row's values, less `mean`, or of their squares; in all threads. */
INLINE float sum_row(const float *x, long width, float mean, const int squares) {
    float *held = SHARED, *lanes = held + CHUNK, acc = 0;
    for (long from = 0; from < width; from += CHUNK) {
        const long some = least(up(width - from, LANES) * LANES, CHUNK);
        for (long k = THREAD; k < some; k += THREADS) held[k] = from + k < width ? x[from + k] - mean : 0.0f;
        __syncthreads();
        if (THREAD < LANES)
            UNROLL_SOME for (long k = THREAD; k < some; k += LANES)
                acc = squares ? fused(held[k], held[k], acc) : acc + held[k];
        __syncthreads();
    }
    if (THREAD < LANES) lanes[THREAD] = acc;
    __syncthreads();
    float b[4];
    for (int i = 0; i < 4; i++) b[i] = (lanes[i] + lanes[i + 8]) + (lanes[i + 4] + lanes[i + 12]);
    __syncthreads();
    return (b[0] + b[2]) + (b[1] + b[3]);
}

/* `inputs` values; x and y may be one. */
OUTLINE void normalise(const struct op *op, const float *x, float *y) {
    const long width = op->inputs;
    const int centers = op->kind == LAYER_NORM;
    const float *weight = (const float *)op->weight;
    float mean = 0;
    if (centers) mean = sum_row(x, width, 0, 0) / (float)width;
    float inverse = 1.0f / sqrtf(sum_row(x, width, mean, 1) / (float)width + op->factor);
    for (long k = THREAD; k < width; k += THREADS) {
        float value = weight[k] * ((centers ? x[k] - mean : x[k]) * inverse);
        y[k] = centers ? value + op->bias[k] : value;
    }
}

INLINE void norm(const struct op *op, long row) {
    normalise(op, (const float *)op->x + row * op->inputs, (float *)op->y + row * op->inputs);
}

/* `outputs` heads of `inputs` values each, in place. */
INLINE void norm_heads(const struct op *op, long rows) {
    for (long i = BLOCK; i < rows * op->outputs; i += BLOCKS) {
        float *head = (float *)op->y + i / op->outputs * op->stride + i % op->outputs * op->inputs;
        normalise(op, head, head);
    }
}

/* Values: each thread takes every so many. */

OUTLINE void activate(const struct op *op, long rows) {
    const long inputs = op->inputs;
    for (long i = BLOCK * THREADS + THREAD; i < rows * inputs; i += BLOCKS * THREADS) {
        const float *x = (const float *)op->x + (op->kind == SILU ? i / inputs * 2 * inputs + i % inputs : i);
        float value = x[0], found;
        if (op->kind == SILU) {  /* of the first half, times the second */
            found = sigmoid_times(value, value) * x[inputs];
        } else {  /* GELU's tanh form: (1 + tanh(t)) / 2 is the sigmoid of 2 t */
            float cubed = value * value * value;
            found = sigmoid_times(value, (value + cubed * 0.044715f) * 1.5957691216057308f);
        }
        ((float *)op->y)[i] = found;
    }
}

INLINE void add(const struct op *op, long rows) {
    for (long i = BLOCK * THREADS + THREAD; i < rows * op->inputs; i += BLOCKS * THREADS)
        ((float *)op->y)[i] += ((const float *)op->x)[i];
}

/* Attention. A row of x is [heads queries, kv_heads keys, kv_heads values] of `width` floats each. */

INLINE float *keys_of(const struct op *op, const struct batch *batch, long page, long head) {
    return batch->keys + ((op->layer * batch->num_pages + page) * batch->kv_heads + head) * batch->width * PAGE;
}
INLINE float *values_of(const struct op *op, const struct batch *batch, long page, long head) {
    return batch->values + ((op->layer * batch->num_pages + page) * batch->kv_heads + head) * batch->stride * PAGE;
}

/* Put a value of a row, counted in its queries and keys, where it belongs: scaled, or into the row's page. */
INLINE void put(const struct op *op, const struct batch *batch, long row, float *x, long i, float value) {
    const long width = batch->width, queries = batch->heads * width;
    if (i < queries) x[i] = value * op->factor;
    else keys_of(op, batch, batch->row_pages[row], (i - queries) / width)
            [(i - queries) % width * PAGE + batch->positions[row] % PAGE] = value;
}

/* Rotate a row's queries and keys, scale the queries by `factor`, and put keys and values into the row's page. */
OUTLINE void place(const struct op *op, const struct batch *batch) {
    const long width = batch->width, half = width / 2, turned = (batch->heads + batch->kv_heads) * width;
    const long items = turned + batch->kv_heads * width;
    for (long item = BLOCK * THREADS + THREAD; item < batch->rows * items; item += BLOCKS * THREADS) {
        const long row = item / items, i = item % items, d = i % width, position = batch->positions[row];
        float *x = (float *)op->y + row * op->stride;
        if (i >= turned) {
            values_of(op, batch, batch->row_pages[row], (i - turned) / width)[position % PAGE * batch->stride + d] =
                x[i];
        } else if (!batch->cosines) {
            put(op, batch, row, x, i, x[i]);
        } else if (d < half) {
            float one = x[i], other = x[i + half];
            float cosine = batch->cosines[position * half + d], sine = batch->sines[position * half + d];
            put(op, batch, row, x, i, one * cosine - other * sine);
            put(op, batch, row, x, i + half, other * cosine + one * sine);
        }
    }
}

/* Softmax of the scores of a warp's query in a page, of which it sees some; the factor for the sum before. */
INLINE float soften(float *scores, long sees, float *highest, float *total) {
    if (sees <= 0) return 1;
    const int lane = THREAD % WARP;
    float one = lane < sees ? scores[lane] : NEGATIVE_INFINITY;
    float other = lane + WARP < sees ? scores[lane + WARP] : NEGATIVE_INFINITY;
    float top = one > *highest ? one : *highest;
    top = other > top ? other : top;
    UNROLL for (int apart = WARP / 2; apart; apart /= 2) {
        float theirs = __shfl_xor_sync(FULL, top, apart);
        top = theirs > top ? theirs : top;
    }
    scores[lane] = one = exponential(one - top);
    scores[lane + WARP] = other = exponential(other - top);
    float sum = (one + __shfl_xor_sync(FULL, one, 16)) + (other + __shfl_xor_sync(FULL, other, 16));
    UNROLL for (int apart = 8; apart; apart /= 2) sum += __shfl_xor_sync(FULL, sum, apart);
    float decay = exponential(*highest - top);
    *total = fused(*total, decay, sum);
    *highest = top;
    return decay;
}

/* QUERIES queries of one key/value head. */
OUTLINE void attend(const struct op *op, const struct batch *batch, const struct part *part, long head, long first) {
    const long width = batch->width, stride = batch->stride, group = batch->heads / batch->kv_heads;
    const long count = least(part->rows * group - first, QUERIES);
    const long last = part->first + (first + count - 1) / group, pages = last / PAGE + 1;
    float *queries = SHARED, *scores = queries + QUERIES * WIDEST;  /* [QUERIES, width], [QUERIES, TOGETHER, PAGE] */
    float *decays = scores + QUERIES * TOGETHER * PAGE, *totals = decays + QUERIES * TOGETHER;
    const int mine = THREAD / WARP;  /* the query whose scores this thread's warp softens */
    const long position = part->first + (first + mine) / group;
    float highest = NEGATIVE_INFINITY, total = 0, mixed[MIXED];
    UNROLL for (int j = 0; j < MIXED; j++) mixed[j] = 0;
    for (long i = THREAD; i < QUERIES * width; i += THREADS) {
        const long q = i / width, of = head * group + (first + q) % group, row = part->row + (first + q) / group;
        queries[i] = q < count ? ((const float *)op->x)[row * op->inputs + of * width + i % width] : 0.0f;
    }
    __syncthreads();
    for (long from = 0; from < pages; from += TOGETHER) {
        const long number = least(pages - from, TOGETHER), page = THREAD / PAGE, k = THREAD % PAGE;
        if (page < number) {
            const float *key = keys_of(op, batch, batch->pages[part->page + from + page], head) + k;
            float score[QUERIES];
            UNROLL for (int q = 0; q < QUERIES; q++) score[q] = 0;
            UNROLL_SOME for (long d = 0; d < width; d++) {
                float column = key[d * PAGE];
                UNROLL for (int q = 0; q < QUERIES; q++) score[q] = fused(queries[q * width + d], column, score[q]);
            }
            UNROLL for (int q = 0; q < QUERIES; q++) scores[(q * TOGETHER + page) * PAGE + k] = score[q];
        }
        __syncthreads();
        if (mine < count)
            for (long p = 0; p < number; p++) {
                const long sees = least(position + 1 - (from + p) * PAGE, PAGE);
                float decay = soften(scores + (mine * TOGETHER + p) * PAGE, sees, &highest, &total);
                if (THREAD % WARP == 0) decays[mine * TOGETHER + p] = decay;
            }
        __syncthreads();
        for (long p = 0; p < number; p++) {
            const float *value = values_of(op, batch, batch->pages[part->page + from + p], head);
            UNROLL for (int j = 0; j < MIXED; j++) {
                const long i = THREAD + j * THREADS, q = i / width, d = i % width;
                if (i >= count * width) break;
                const long sees = least(part->first + (first + q) / group + 1 - (from + p) * PAGE, PAGE);
                const float *weights = scores + (q * TOGETHER + p) * PAGE;
                float acc = mixed[j] * decays[q * TOGETHER + p];
                UNROLL_SOME for (long each = 0; each < sees; each++)
                    acc = fused(weights[each], value[each * stride + d], acc);
                mixed[j] = acc;
            }
        }
        __syncthreads();
    }
    if (mine < count && THREAD % WARP == 0) totals[mine] = total;
    __syncthreads();
    UNROLL for (int j = 0; j < MIXED; j++) {
        const long i = THREAD + j * THREADS, q = i / width;
        if (i >= count * width) break;
        const long of = head * group + (first + q) % group, row = part->row + (first + q) / group;
        ((float *)op->y)[(row * batch->heads + of) * width + i % width] = mixed[j] / totals[q];
    }
    __syncthreads();
}

/* Items: for each part, for each key/value head, blocks of queries. */
INLINE void attend_all(const struct op *op, const struct batch *batch) {
    const long group = batch->heads / batch->kv_heads;
    long before = 0;
    for (long i = 0; i < batch->num_parts; i++) {
        const struct part part = batch->parts[i];
        const long items = up(part.rows * group, QUERIES) * batch->kv_heads;
        for (long item = (BLOCK - before % BLOCKS + BLOCKS) % BLOCKS; item < items; item += BLOCKS)
            attend(op, batch, &part, item % batch->kv_heads, item / batch->kv_heads * QUERIES);
        before += items;
    }
}

/* Wait until all blocks have arrived `times` times: they see what others wrote before. The last time resets, at once. */
INLINE void meet(const struct batch *batch, long times) {
    const unsigned all = (unsigned)(times * BLOCKS);
    __syncthreads();
    if (THREAD == 0) {
        volatile unsigned *arrived = (volatile unsigned *)batch->taken;
        __threadfence();
        unsigned before = atomicAdd((unsigned *)batch->taken, 1u);
        if (times < batch->num_ops)
            while (*arrived < all) PAUSE();
        else if (before + 1 == all)
            *arrived = 0;
        __threadfence();
    }
    __syncthreads();
}

#define ROWS_OF(name) for (long row = BLOCK; row < batch.rows; row += BLOCKS) name(&op, row);

/* Run a program. All blocks are resident; `batch.taken` has 0 before and after. */
KERNEL run(const struct op *ops, CONSTANT struct batch batch) {
    for (long i = 0; i < batch.num_ops; i++) {
        const struct op op = ops[i];
        switch (op.kind) {
            case RMS_NORM: case LAYER_NORM: ROWS_OF(norm) break;
            case HEAD_NORM: norm_heads(&op, batch.rows); break;
            case LINEAR: linear(&op, batch.rows); break;
            case DIGITS: ROWS_OF(digits) break;
            case LINEAR8: linear8(&op, batch.rows); break;
            case PLACE: place(&op, &batch); break;
            case ATTEND: attend_all(&op, &batch); break;
            case SILU: case GELU: activate(&op, batch.rows); break;
            case ADD: add(&op, batch.rows); break;
        }
        meet(&batch, i + 1);
    }
}

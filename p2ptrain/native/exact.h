/* A program and the batch that it works on, for `exact.c` and `exact.cu`; `p2ptrain.native.exact` has them for Python.
 *
 * A `long` has 64 bits. COUNTER(type) is a type that threads share.
 */
enum { LANES = 16, PAGE = 64 };

struct part {  /* Consecutive rows of one session. */
    long row, rows, first, page;  /* first row in the batch, number of rows, first row's position, first in `pages` */
};

struct batch {
    long rows, num_parts, num_ops, threads;
    const struct part *parts;
    const long *positions, *row_pages, *pages;  /* of each row: its position, and its page; and all pages of each part */
    const float *cosines, *sines;               /* [positions, width / 2] */
    float *keys;                                /* [layers, pages, kv_heads, width, PAGE]: scores need no sums of lanes */
    float *values;                              /* [layers, pages, kv_heads, PAGE, stride] */
    float *scratch;                             /* [threads, scratch_floats]; the CPU's */
    long num_pages, heads, kv_heads, width, stride, scratch_floats;
    COUNTER(long) *taken;                       /* items that threads took of each operation; a GPU's: its barrier */
    COUNTER(int) arrived, generation, sleeping;
};

struct op {
    long kind, layer;
    const void *x, *weight;
    const float *scale, *bias;
    const int *weight_sums;
    float *row_scale;
    void *y;
    long inputs, outputs, stride;  /* stride: floats from a row of y to the next */
    float factor;
};

enum kind { RMS_NORM, LAYER_NORM, LINEAR, DIGITS, LINEAR8, PLACE, ATTEND, SILU, GELU, ADD, HEAD_NORM };

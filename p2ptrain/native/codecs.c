/* The codecs' inner loops, bit for bit what the codecs compute with torch and NumPy.
 *
 * A function works on `count` whole blocks, at any two addresses that do not overlap. It returns 1 when a block
 * is refused, else 0. The loops are written for gcc and clang to vectorise; build.py has the flags. Each operation is a
 * single IEEE-754 operation, and none is fused: every CPU computes the same bits. Four facts carry the code:
 *
 * - The bits of |x| order like |x|, with infinity and NaN on top: an integer maximum finds a block's peak, and one
 *   comparison refuses numbers that are not finite.
 * - x + 1.5 * 2^23 rounds |x| < 2^22 to the nearest whole number, halves to even, and leaves it in the low bits.
 * - bfloat16 is the upper half of fp32: adding 0x7fff, and 1 where that half is odd, rounds to nearest, halves to even.
 * - x + 2^(e + 13), for 2^e <= x < 2^(e + 1), rounds x to the 11 bits of fp16 and leaves them in the low bits. Below
 *   2^-14 fp16 has fewer: e = -14 rounds to those.
 */
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "encoded numbers are little-endian"
#endif

#if defined(CLONES) && defined(__x86_64__) /* For newer CPUs, too; the dynamic linker chooses. */
#include <immintrin.h>
#define CPUS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define AVX512 __attribute__((target("arch=x86-64-v4")))
#define AVX2 __attribute__((target("arch=x86-64-v3")))
#ifndef HAS_AVX512 /* Tests give both, to try what this CPU would not choose. */
#define HAS_AVX512 __builtin_cpu_supports("avx512vl")
#define HAS_AVX2 (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
#endif
#else
#define CPUS
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#endif
#define INLINE static inline __attribute__((always_inline))
#define VISIBLE(name) \
    __attribute__((visibility("default"))) \
    int name(const uint8_t *restrict source, uint8_t *restrict target, long count, float weight)
#define FUNCTION(name) CPUS VISIBLE(name)
#define LOCAL(name, cpu) \
    static __attribute__((unused)) int name##_##cpu( \
        const uint8_t *restrict source, uint8_t *restrict target, long count, __attribute__((unused)) float weight)
#define BLOCKS(source_bytes, target_bytes) \
    for (; count > 0; count--, source += (source_bytes), target += (target_bytes))

/* Numbers at any address. */
typedef float f32 __attribute__((aligned(1), may_alias));
typedef int32_t i32 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef uint64_t u64 __attribute__((aligned(1), may_alias));

enum {
    MAGNITUDE = 0x7FFFFFFF,
    MAX_PEAK = 0x7B800000, /* 2^120 */
    INFINITE = 0x7F800000,
    FP16_LIMIT = 0x477FF000, /* 65520, half-way between the largest half and infinity */
    BF16_LIMIT = 0x7F7F8000, /* the smallest fp32 that rounds to infinity in bfloat16 */
};
#define MIN_PEAK 0x1p-100f
#define ROUNDER 0x1.8p23f

INLINE float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

INLINE int32_t larger(int32_t one, int32_t other) { return one > other ? one : other; }

/* The bits of the largest magnitude, in four parts whose maxima do not wait for each other. */
INLINE int32_t peak_bits(const uint8_t *source, int values) {
    const i32 *bits = (const i32 *)source;
    int32_t peak = 0;
    for (int i = 0, part = values / 4; i < part; i++) {
        int32_t first = larger(bits[i] & MAGNITUDE, bits[part + i] & MAGNITUDE);
        int32_t second = larger(bits[2 * part + i] & MAGNITUDE, bits[3 * part + i] & MAGNITUDE);
        peak = larger(peak, larger(first, second));
    }
    return peak;
}

/* int8 and int4: a scale and the codes of 256 or 128 values. In int4, byte i holds values i and 64 + i. */

enum { VALUES8 = 256, BYTES8 = 4 + VALUES8, VALUES4 = 128, HALF4 = 64, BYTES4 = 4 + HALF4 };

/* Write a block's scale; the factor from values to codes. */
INLINE float write_scale(int32_t bits, float levels, uint8_t *target) {
    float peak = as_float((uint32_t)bits), floored = peak > MIN_PEAK ? peak : MIN_PEAK;
    *(f32 *)target = bits ? floored / levels : 0;
    return levels / floored;
}

INLINE uint32_t code(float value, float factor) { return as_bits(value * factor + ROUNDER); }

FUNCTION(encode_int8) {
    int refused = 0;
    BLOCKS(4 * VALUES8, BYTES8) {
        const f32 *values = (const f32 *)source;
        int32_t peak = peak_bits(source, VALUES8);
        float factor = write_scale(peak, 127, target);
        for (int i = 0; i < VALUES8; i++) target[4 + i] = (uint8_t)code(values[i], factor);
        refused |= peak > MAX_PEAK;
    }
    return refused;
}

FUNCTION(encode_int4) {
    int refused = 0;
    BLOCKS(4 * VALUES4, BYTES4) {
        const f32 *values = (const f32 *)source;
        int32_t peak = peak_bits(source, VALUES4);
        float factor = write_scale(peak, 7, target);
        for (int i = 0; i < HALF4; i++) {
            uint32_t low = code(values[i], factor) + 8, high = code(values[HALF4 + i], factor) + 8;
            target[4 + i] = (uint8_t)((low & 15) | (high << 4));
        }
        refused |= peak > MAX_PEAK;
    }
    return refused;
}

#define DECODE_CODES(name, operator, factor) \
    CPUS LOCAL(name##_int8, plain) { \
        BLOCKS(BYTES8, 4 * VALUES8) { \
            f32 *values = (f32 *)target; \
            float scale = *(const f32 *)source factor; \
            for (int i = 0; i < VALUES8; i++) values[i] operator (float)(int8_t)source[4 + i] * scale; \
        } \
        return 0; \
    } \
    DECODE_INT8_AVX2(name, operator, factor) \
    VISIBLE(name##_int8) { return CHOSEN_INT8(name##_int8)(source, target, count, weight); } \
    FUNCTION(name##_int4) { \
        BLOCKS(BYTES4, 4 * VALUES4) { \
            f32 *values = (f32 *)target; \
            float scale = *(const f32 *)source factor; \
            for (int i = 0; i < HALF4; i++) values[i] operator (float)((source[4 + i] & 15) - 8) * scale; \
            for (int i = 0; i < HALF4; i++) values[HALF4 + i] operator (float)((source[4 + i] >> 4) - 8) * scale; \
        } \
        return 0; \
    }

/* With AVX2 alone, gcc widens bytes in two steps; one is a fifth faster. */
#if defined(CLONES) && defined(__x86_64__)
typedef float floats8 __attribute__((vector_size(32), aligned(1), may_alias));
#define DECODE_INT8_AVX2(name, operator, factor) \
    AVX2 LOCAL(name##_int8, avx2) { \
        BLOCKS(BYTES8, 4 * VALUES8) { \
            float scale = *(const f32 *)source factor; \
            _Pragma("GCC unroll 4") for (int i = 0; i < VALUES8; i += 8) { \
                __m256i codes = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(source + 4 + i))); \
                *(floats8 *)(target + 4 * i) operator (floats8)_mm256_cvtepi32_ps(codes) * scale; \
            } \
        } \
        return 0; \
    }
#define CHOSEN_INT8(name) (HAS_AVX2 && !HAS_AVX512 ? name##_avx2 : name##_plain)
#else
#define DECODE_INT8_AVX2(name, operator, factor)
#define CHOSEN_INT8(name) name##_plain
#endif

DECODE_CODES(decode, =, )
DECODE_CODES(accumulate, +=, * weight)

/* The sum of the squares of a block's codes. */

FUNCTION(squares_int8) {
    BLOCKS(BYTES8, 4) {
        int16_t codes[VALUES8];
        int32_t sum = 0;
        for (int i = 0; i < VALUES8; i++) codes[i] = (int8_t)source[4 + i];
        for (int i = 0; i < VALUES8; i++) sum += codes[i] * codes[i];
        *(i32 *)target = sum;
    }
    return 0;
}
FUNCTION(squares_int4) {
    BLOCKS(BYTES4, 4) {
        uint16_t sum = 0; /* At most 128 * 64. */
        for (int i = 0; i < HALF4 / 2; i++) {
            uint16_t four = ((const u16 *)(source + 4))[i];
            for (int j = 0; j < 4; j++) {
                int16_t code = (int16_t)((four >> 4 * j & 15) - 8);
                sum = (uint16_t)(sum + (uint16_t)(code * code));
            }
        }
        *(i32 *)target = sum;
    }
    return 0;
}

/* fp32, fp16 and bf16, in blocks of 128 values. */

enum { DENSE = 128 };

/* For magnitudes below FP16_LIMIT; the CPU's own conversions below round in the same way. */
INLINE uint16_t to_fp16(uint32_t bits) {
    int32_t exponent = (int32_t)bits & INFINITE;
    exponent = exponent > 113 << 23 ? exponent : 113 << 23;
    float sum = as_float(bits & MAGNITUDE) + as_float((uint32_t)exponent + (13 << 23));
    return (uint16_t)((as_bits(sum) + (uint32_t)(exponent >> 13) - (113 << 10)) | (bits >> 16 & 0x8000));
}

INLINE float from_fp16(uint16_t half) {
    uint16_t exponent = half & 0x7C00, extra = half & 0x8000;
    extra |= exponent == 0x7C00 ? 0x7F80 : 0; /* Infinity and NaN. */
    exponent = exponent > 0x400 ? exponent : 0x400;
    uint16_t fraction = (uint16_t)((half & 0x7FFF) - exponent + 0x400);
    uint32_t power = (uint32_t)(uint16_t)((exponent >> 3) + (125 << 7)) << 16;
    return as_float(as_bits(as_float(power + fraction) - as_float(power)) | (uint32_t)extra << 16);
}

INLINE uint16_t to_bf16(uint32_t bits) { return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16); }

INLINE float from_bf16(uint16_t half) { return as_float((uint32_t)half << 16); }

/* Encode with an expression of `bits`; a magnitude of `limit` or more is refused. */
#define ENCODE_DENSE(name, type, expression, limit) \
    name { \
        int32_t peak = 0; \
        for (long i = 0; i < count * DENSE; i++) { \
            uint32_t bits = ((const u32 *)source)[i]; \
            peak = larger(peak, (int32_t)(bits & MAGNITUDE)); \
            ((type *)target)[i] = expression; \
        } \
        return peak >= limit; \
    }

ENCODE_DENSE(FUNCTION(encode_fp32), u32, bits, INFINITE)
ENCODE_DENSE(FUNCTION(encode_bf16), u16, to_bf16(bits), BF16_LIMIT)

#define DECODE_DENSE(name, type, operator, expression) \
    name { \
        for (long i = 0; i < count * DENSE; i++) { \
            type value = ((const type *)source)[i]; \
            ((f32 *)target)[i] operator expression; \
        } \
        return 0; \
    }

DECODE_DENSE(FUNCTION(decode_bf16), u16, =, from_bf16(value))
DECODE_DENSE(FUNCTION(accumulate_fp32), f32, +=, value * weight)
DECODE_DENSE(FUNCTION(accumulate_bf16), u16, +=, from_bf16(value) * weight)

/* fp16 with the conversions of x86-64's F16C and AVX-512 and of arm64, else with those above. */

#define HALVES(options, cpu, lanes, floats, write_halves, read_halves) \
    typedef int32_t bits_of_##floats __attribute__((vector_size(4 * lanes))); \
    options LOCAL(encode_fp16, cpu) { \
        bits_of_##floats refused = {0}; \
        for (long i = 0; i < count * DENSE; i += lanes) { \
            floats values = *(const floats *)(source + 4 * i); \
            refused |= ((bits_of_##floats)values & MAGNITUDE) >= FP16_LIMIT; \
            write_halves(target + 2 * i, values); \
        } \
        int any = 0; \
        for (int i = 0; i < lanes; i++) any |= refused[i]; \
        return any != 0; \
    } \
    options LOCAL(decode_fp16, cpu) { \
        for (long i = 0; i < count * DENSE; i += lanes) *(floats *)(target + 4 * i) = read_halves(source + 2 * i); \
        return 0; \
    } \
    options LOCAL(accumulate_fp16, cpu) { \
        for (long i = 0; i < count * DENSE; i += lanes) \
            *(floats *)(target + 4 * i) += read_halves(source + 2 * i) * weight; \
        return 0; \
    }

ENCODE_DENSE(LOCAL(encode_fp16, plain), u16, to_fp16(bits), FP16_LIMIT)
DECODE_DENSE(LOCAL(decode_fp16, plain), u16, =, from_fp16(value))
DECODE_DENSE(LOCAL(accumulate_fp16, plain), u16, +=, from_fp16(value) * weight)

#if defined(CLONES) && defined(__x86_64__)
typedef float floats16 __attribute__((vector_size(64), aligned(1), may_alias));
#define TO_16(target, values) \
    _mm256_storeu_si256((__m256i *)(target), _mm512_cvtps_ph((__m512)(values), _MM_FROUND_TO_NEAREST_INT))
#define FROM_16(source) (floats16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(source)))
#define TO_8(target, values) \
    _mm_storeu_si128((__m128i *)(target), _mm256_cvtps_ph((__m256)(values), _MM_FROUND_TO_NEAREST_INT))
#define FROM_8(source) (floats8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(source)))
HALVES(AVX512, avx512, 16, floats16, TO_16, FROM_16)
HALVES(AVX2, avx2, 8, floats8, TO_8, FROM_8)
#define CHOSEN(name) (HAS_AVX512 ? name##_avx512 : HAS_AVX2 ? name##_avx2 : name##_plain)
#elif defined(__aarch64__)
#define TO_4(target, values) vst1_u16((uint16_t *)(target), vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)(values))))
#define FROM_4(source) (floats4)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)(source))))
typedef float floats4 __attribute__((vector_size(16), aligned(1), may_alias));
HALVES(, neon, 4, floats4, TO_4, FROM_4)
#define CHOSEN(name) name##_neon
#else
#define CHOSEN(name) name##_plain
#endif

VISIBLE(encode_fp16) { return CHOSEN(encode_fp16)(source, target, count, weight); }
VISIBLE(decode_fp16) { return CHOSEN(decode_fp16)(source, target, count, weight); }
VISIBLE(accumulate_fp16) { return CHOSEN(accumulate_fp16)(source, target, count, weight); }

FUNCTION(validate_fp32) {
    int refused = 0;
    BLOCKS(4 * DENSE, 0) refused |= peak_bits(source, DENSE) >= INFINITE;
    return refused;
}

/* Whether numbers of 16 bits are not finite. */
INLINE int not_finite(const uint8_t *source, long count, int exponent) {
    int16_t refused = 0;
    for (long i = 0; i < count * DENSE; i++) refused |= (((const u16 *)source)[i] & exponent) == exponent;
    return refused;
}

FUNCTION(validate_fp16) { return not_finite(source, count, 0x7C00); }

FUNCTION(validate_bf16) { return not_finite(source, count, 0x7F80); }

/* Add the squares of 16 rows of 1024 values to the columns in the target: codecs/norms.py, sums_of_squares. */

enum { COLUMNS = 1024, ROWS = 16 };

FUNCTION(energy_fp32) {
    BLOCKS(4 * ROWS * COLUMNS, 4 * COLUMNS) {
        for (int row = 0; row < ROWS; row++) {
            const f32 *values = (const f32 *)source + row * COLUMNS;
            for (int i = 0; i < COLUMNS; i++) ((f32 *)target)[i] += values[i] * values[i];
        }
    }
    return 0;
}

/* topk: whole chunks in the format of codecs/topk.py.
 *
 * The 64 largest of 4096 magnitudes are found in two steps. Bisection over the upper halves of all finds the largest
 * that at least 64 reach. Bisection over the lower halves decides among those whose upper half is just that. */

enum {
    CHUNK = 4096, KEPT = 64, BUCKET = 64,
    BUCKETS_AT = 4, CODES_AT = 20, PLACES_AT = 36, ROW_BYTES = 84,
    MIN_LEVEL = 0x0D80, MAX_LEVEL = 0x7B80, /* 2^-100 and 2^120 in bf16 */
};

/* Write the columns of the 64 largest magnitudes of a chunk, ascending. The lowest columns win ties. */
INLINE void select_largest(const u32 *bits, uint32_t mask, uint32_t peak, uint16_t *columns) {
    int16_t upper[CHUNK];
    uint8_t reaches[CHUNK];
    uint16_t found[CHUNK];
    for (int i = 0; i < CHUNK; i++) upper[i] = (int16_t)((bits[i] & mask) >> 16);
    int low = 0, high = (int)(peak >> 16) + 1, reached = CHUNK; /* `low` is reached by 64 at least, `high` by fewer. */
    while (high - low > 1 && reached != KEPT) {
        int16_t middle = (int16_t)((low + high) / 2), num = 0;
        for (int i = 0; i < CHUNK; i++) num = (int16_t)(num + (upper[i] >= middle));
        if (num >= KEPT) low = middle, reached = num;
        else high = middle;
    }
    for (int i = 0; i < CHUNK; i++) reaches[i] = upper[i] >= (int16_t)low;
    int num = 0;
    for (int i = 0; i < CHUNK; i += 8)
        for (uint64_t word = *(const u64 *)(reaches + i); word; word &= word - 1)
            found[num++] = (uint16_t)(i + __builtin_ctzll(word) / 8);
    /* Magnitudes above `limit` are kept, and of those equal to it the first `ties`. */
    uint32_t limit = (uint32_t)low << 16, beyond = limit + 0x10000;
    int ties = num;
    if (num > KEPT) {
        while (beyond - limit > 1) {
            uint32_t middle = limit + (beyond - limit) / 2;
            int enough = 0;
            for (int i = 0; i < num; i++) enough += (bits[found[i]] & mask) >= middle;
            if (enough >= KEPT) limit = middle;
            else beyond = middle;
        }
        ties = KEPT;
        for (int i = 0; i < num; i++) ties -= (bits[found[i]] & mask) > limit;
    }
    for (int i = 0, kept = 0; i < num && kept < KEPT; i++) {
        uint32_t magnitude = bits[found[i]] & mask;
        int equal = num > KEPT && magnitude == limit;
        if (magnitude > limit || (equal && ties > 0) || num <= KEPT) columns[kept++] = found[i];
        ties -= equal;
    }
}

/* A level rounded to fp32 and then to bf16; below the least one it is zero. */
INLINE uint16_t to_level(double level) { return level < MIN_PEAK ? 0 : to_bf16(as_bits((float)level)); }

/* Write the two levels with the least squared error; which values have the higher one. */
INLINE void write_levels(const int32_t *magnitudes, uint8_t *target, uint8_t *high) {
    int32_t ranks[KEPT] = {0};
    float ordered[KEPT];
    double sums[KEPT], total = 0, scores[KEPT];
    for (int i = 0; i < KEPT; i++) /* The first of equals ranks first. */
        for (int j = 0; j < KEPT; j++) ranks[j] += magnitudes[i] < magnitudes[j] + (i < j);
    for (int i = 0; i < KEPT; i++) ordered[ranks[i]] = as_float((uint32_t)magnitudes[i]);
    for (int i = 0; i < KEPT; i++) sums[i] = total += (double)ordered[i];
    for (int i = 0; i < KEPT - 1; i++) {
        double rest = total - sums[i];
        scores[i] = sums[i] * sums[i] / (i + 1) + rest * rest / (KEPT - 1 - i);
    }
    int split = 0;
    for (int i = 1; i < KEPT - 1; i++) split = scores[i] > scores[split] ? i : split;
    ((u16 *)target)[0] = to_level(sums[split] / (split + 1));
    ((u16 *)target)[1] = to_level((total - sums[split]) / (KEPT - 1 - split));
    for (int i = 0; i < KEPT; i++) high[i] = ranks[i] > split;
}

FUNCTION(encode_topk) {
    int refused = 0;
    BLOCKS(4 * CHUNK, ROW_BYTES) {
        const u32 *bits = (const u32 *)source;
        uint32_t peak = (uint32_t)peak_bits(source, CHUNK);
        /* A refused chunk is encoded as zeros: the levels need finite numbers. */
        uint32_t mask = peak > MAX_PEAK ? 0 : MAGNITUDE;
        refused |= peak > MAX_PEAK;
        uint16_t columns[KEPT] = {0}; /* In bounds even if another thread writes to the chunk meanwhile. */
        int32_t magnitudes[KEPT];
        uint8_t high[KEPT];
        select_largest(bits, mask, peak & mask, columns);
        for (int i = 0; i < KEPT; i++) magnitudes[i] = (int32_t)(bits[columns[i]] & mask);
        write_levels(magnitudes, target, high);
        uint64_t buckets[2] = {0}, codes[2] = {0};
        for (int i = 0; i < KEPT; i++) {
            int position = columns[i] / BUCKET + i;
            buckets[position / 64] |= 1ull << position % 64;
            codes[i / 32] |= ((uint64_t)high[i] << 1 | bits[columns[i]] >> 31) << 2 * i % 64;
        }
        memcpy(target + BUCKETS_AT, buckets, 16);
        memcpy(target + CODES_AT, codes, 16);
        for (int i = 0; i < KEPT; i += 4) {
            uint32_t places = 0;
            for (int j = 0; j < 4; j++) places |= (uint32_t)(columns[i + j] % BUCKET) << 6 * j;
            for (int j = 0; j < 3; j++) target[PLACES_AT + i / 4 * 3 + j] = (uint8_t)(places >> 8 * j);
        }
    }
    return refused;
}

/* Read the columns of a chunk's kept values. Return whether the field of buckets has another number of bits than 64, or
 * leads out of the chunk; columns are within the chunk all the same. */
INLINE int read_columns(const uint8_t *source, uint16_t *columns) {
    uint64_t buckets[2];
    memcpy(buckets, source + BUCKETS_AT, 16);
    /* Of 64 bits the last is for the last bucket at most, unless it is bit 127. */
    if (__builtin_popcountll(buckets[0]) + __builtin_popcountll(buckets[1]) != KEPT || buckets[1] >> 63) {
        memset(columns, 0, sizeof(uint16_t) * KEPT);
        return 1;
    }
    for (int word = 0, i = 0; word < 2; word++)
        for (uint64_t rest = buckets[word]; rest; rest &= rest - 1, i++)
            columns[i] = (uint16_t)((word * 64 + __builtin_ctzll(rest) - i) * BUCKET);
    for (int i = 0; i < KEPT; i += 4) {
        const uint8_t *three = source + PLACES_AT + i / 4 * 3;
        uint32_t places = three[0] | (uint32_t)three[1] << 8 | (uint32_t)three[2] << 16;
        for (int j = 0; j < 4; j++) columns[i + j] |= places >> 6 * j & (BUCKET - 1);
    }
    return 0;
}

/* Add a chunk's terms. */
INLINE int scatter(const uint8_t *source, f32 *values, float weight) {
    uint16_t columns[KEPT];
    int refused = read_columns(source, columns);
    float levels[2];
    for (int i = 0; i < 2; i++) levels[i] = from_bf16(((const u16 *)source)[i]) * weight;
    float terms[4] = {levels[0], -levels[0], levels[1], -levels[1]};
    for (int i = 0; i < KEPT; i++) values[columns[i]] += terms[source[CODES_AT + i / 4] >> 2 * (i % 4) & 3];
    return refused;
}

FUNCTION(decode_topk) {
    int refused = 0;
    BLOCKS(ROW_BYTES, 4 * CHUNK) {
        memset(target, 0, 4 * CHUNK);
        refused |= scatter(source, (f32 *)target, 1);
    }
    return refused;
}

FUNCTION(accumulate_topk) {
    int refused = 0;
    BLOCKS(ROW_BYTES, 4 * CHUNK) refused |= scatter(source, (f32 *)target, weight);
    return refused;
}

FUNCTION(validate_topk) {
    int refused = 0;
    BLOCKS(ROW_BYTES, 0) {
        uint16_t columns[KEPT];
        refused |= read_columns(source, columns);
        for (int i = 1; i < KEPT; i++) refused |= columns[i] <= columns[i - 1];
        for (int i = 0; i < 2; i++) {
            int level = ((const u16 *)source)[i];
            refused |= level && (level < MIN_LEVEL || level > MAX_LEVEL);
        }
    }
    return refused;
}

/* Masks: the sum of AES-128-CTR streams, added to 32-bit words. All streams of a group of blocks stay in registers. */

enum { GROUP = 32, GROUP_WORDS = 4 * GROUP, ROUNDS = 10, MAX_STREAMS = 16, STREAM_AT = 16, STREAM_BYTES = 24 };

#ifdef AVX512
#define UNROLLED _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++)
#define AES __attribute__((target("aes,sse4.1")))

/* The round keys of `MAX_STREAMS` streams, each four times, for registers of four blocks. */
typedef struct {
    __attribute__((aligned(64))) __m128i keys[MAX_STREAMS][ROUNDS + 1][4];
    int negative[MAX_STREAMS];
} schedule_t;

AES static void expand(const uint8_t *key, __m128i keys[ROUNDS + 1][4]) {
    __m128i last = _mm_loadu_si128((const __m128i *)key);
    for (int i = 0; i < 4; i++) keys[0][i] = last;
#define EXPAND(round, constant) { \
        __m128i word = _mm_shuffle_epi32(_mm_aeskeygenassist_si128(last, constant), 0xFF); \
        for (int i = 0; i < 3; i++) last = _mm_xor_si128(last, _mm_slli_si128(last, 4)); \
        last = _mm_xor_si128(last, word); \
        for (int i = 0; i < 4; i++) keys[round][i] = last; \
    }
    EXPAND(1, 1) EXPAND(2, 2) EXPAND(3, 4) EXPAND(4, 8) EXPAND(5, 16)
    EXPAND(6, 32) EXPAND(7, 64) EXPAND(8, 128) EXPAND(9, 27) EXPAND(10, 54)
}

/* Write the sum of the streams from `block` on, one group. */
#define SUM_STREAMS(cpu, features, size, bits, rounds, last_round) \
    typedef uint32_t words##cpu __attribute__((vector_size(size), aligned(1), may_alias)); \
    __attribute__((target(features))) \
    static void sum_##cpu(const schedule_t *schedule, int streams, uint64_t block, uint8_t *sum) { \
        for (int part = 0; part < 16 * GROUP / (8 * size); part++, block += size / 2) { \
            words##cpu totals[8] = {{0}}; \
            uint64_t counters[size]; \
            for (int i = 0; i < size / 2; i++) counters[2 * i] = 0, counters[2 * i + 1] = __builtin_bswap64(block + i); \
            for (int stream = 0; stream < streams; stream++) { \
                const __m128i (*keys)[4] = schedule->keys[stream]; \
                words##cpu state[8]; \
                UNROLLED state[i] = ((words##cpu *)counters)[i] ^ *(words##cpu *)keys[0]; \
                for (int round = 1; round < ROUNDS; round++) \
                    UNROLLED state[i] = (words##cpu)rounds((bits)state[i], *(bits *)keys[round]); \
                UNROLLED state[i] = (words##cpu)last_round((bits)state[i], *(bits *)keys[ROUNDS]); \
                if (schedule->negative[stream]) UNROLLED totals[i] -= state[i]; \
                else UNROLLED totals[i] += state[i]; \
            } \
            memcpy(sum + part * 8 * size, totals, sizeof totals); \
        } \
    }
SUM_STREAMS(v4, "arch=x86-64-v4,aes,vaes", 64, __m512i, _mm512_aesenc_epi128, _mm512_aesenclast_epi128)
SUM_STREAMS(v3, "arch=x86-64-v3,aes,vaes", 32, __m256i, _mm256_aesenc_epi128, _mm256_aesenclast_epi128)
SUM_STREAMS(v2, "aes,sse4.1", 16, __m128i, _mm_aesenc_si128, _mm_aesenclast_si128)
#endif

/* Add streams to `count` words. The source has two u64: the place of the first word in the streams, and their number;
 * then of each stream its key and a u64, 1 if it is subtracted. Refused by CPUs without AES. */
VISIBLE(add_masked) {
    (void)weight;
#ifdef AVX512
    const u64 *header = (const u64 *)source;
    if (!__builtin_cpu_supports("aes")) return 1;
    void (*sum_streams)(const schedule_t *, int, uint64_t, uint8_t *) = sum_v2;
    if (__builtin_cpu_supports("vaes") && HAS_AVX2) sum_streams = HAS_AVX512 ? sum_v4 : sum_v3;
    u32 *words = (u32 *)target;
    long skipped = (long)(header[0] % 4), left = (long)header[1];
    for (source += STREAM_AT; left > 0; left -= MAX_STREAMS) {
        schedule_t schedule;
        int streams = left < MAX_STREAMS ? (int)left : MAX_STREAMS;
        for (int i = 0; i < streams; i++, source += STREAM_BYTES) {
            expand(source, schedule.keys[i]);
            schedule.negative[i] = *(const u64 *)(source + 16) != 0;
        }
        uint64_t block = header[0] / 4;
        for (long at = -skipped; at < count; at += GROUP_WORDS, block += GROUP) {
            uint32_t sum[GROUP_WORDS];
            sum_streams(&schedule, streams, block, (uint8_t *)sum);
            long first = at < 0 ? -at : 0, end = count - at < GROUP_WORDS ? count - at : GROUP_WORDS;
            for (long i = first; i < end; i++) words[at + i] += sum[i];
        }
    }
    return 0;
#else
    (void)source, (void)target, (void)count;
    return 1;
#endif
}

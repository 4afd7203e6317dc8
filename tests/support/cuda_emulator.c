/* Runs `exact.cu` on a CPU: every thread of every block is a fiber, which gives way where GPU threads wait. */
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define EMULATED
#define INLINE static inline
#define OUTLINE static
#define KERNEL static void
#define CONSTANT const
#define UNROLL
#define UNROLL_SOME
#define PAUSE() give_way()
#define SHARED (me->block->shared)
#define threadIdx (me->thread)
#define blockIdx (me->block->index)
#define gridDim grid
#define __fmaf_rn __builtin_fmaf
#define __ldg(at) (*(at))
#define __threadfence() ((void)0)
#define __syncthreads() wait_for(&me->block->barrier, THREADS)
#define __shfl_xor_sync(mask, value, apart) \
    _Generic((value), float: shuffle_float, int: shuffle_int)(value, apart)

typedef struct { float x, y, z, w; } float4;
typedef struct { int x, y, z, w; } int4;
struct index { unsigned x; };
struct barrier { int arrived, generation; };
struct warp { struct barrier barrier; int slots[32]; };
struct block { struct index index; struct barrier barrier; struct warp warps[THREADS / 32]; float *shared; };
struct fiber { struct block *block; struct index thread; int done, started; ucontext_t first; jmp_buf at; };

static struct fiber *me;
static struct index grid;
static jmp_buf scheduler;
enum { STACK = 1 << 16 };

static void give_way(void) {
    if (!_setjmp(me->at)) _longjmp(scheduler, 1);
}

static void wait_for(struct barrier *barrier, int all) {
    int generation = barrier->generation;
    if (++barrier->arrived == all) {
        barrier->arrived = 0;
        barrier->generation++;
        return;
    }
    while (barrier->generation == generation) give_way();
}

static int shuffle_int(int value, int apart) {
    struct warp *warp = me->block->warps + me->thread.x / 32;
    int lane = (int)(me->thread.x % 32), found;
    warp->slots[lane] = value;
    wait_for(&warp->barrier, 32);
    found = warp->slots[lane ^ apart];
    wait_for(&warp->barrier, 32);
    return found;
}

static int __float_as_int(float value) { int bits; memcpy(&bits, &value, 4); return bits; }
static float __int_as_float(int bits) { float value; memcpy(&value, &bits, 4); return value; }
static float shuffle_float(float value, int apart) {
    return __int_as_float(shuffle_int(__float_as_int(value), apart));
}
static unsigned atomicAdd(unsigned *at, unsigned value) { *at += value; return *at - value; }
static int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int)(signed char)(a >> i) * (int)(signed char)(b >> i);
    return sum;
}

#include "exact.cu"

static const struct op *program;
static const struct batch *given;

static void enter(void) {
    run(program, *given);
    me->done = 1;
    _longjmp(scheduler, 1);
}

/* Run a program on some blocks; returns 1 without memory. */
int emulate(const struct op *ops, const struct batch *batch, long blocks, long shared_bytes) {
    long count = blocks * THREADS, left = count;
    struct fiber *fibers = calloc((size_t)count, sizeof *fibers);
    struct block *all = calloc((size_t)blocks, sizeof *all);
    char *stacks = malloc((size_t)count * STACK), *shared = calloc((size_t)blocks, (size_t)shared_bytes);
    if (!fibers || !all || !stacks || !shared) return 1;
    program = ops, given = batch, grid.x = (unsigned)blocks;
    for (long i = 0; i < count; i++) {
        struct block *block = all + i / THREADS;
        block->index.x = (unsigned)(i / THREADS);
        block->shared = (float *)(shared + i / THREADS * shared_bytes);
        fibers[i].block = block;
        fibers[i].thread.x = (unsigned)(i % THREADS);
        getcontext(&fibers[i].first);
        fibers[i].first.uc_stack.ss_sp = stacks + i * STACK;
        fibers[i].first.uc_stack.ss_size = STACK;
        makecontext(&fibers[i].first, enter, 0);
    }
    for (volatile long i = 0; left; i = (i + 1) % count) {
        me = fibers + i;
        if (me->done) continue;
        if (!_setjmp(scheduler)) {
            if (me->started) _longjmp(me->at, 1);
            me->started = 1;
            setcontext(&me->first);
        }
        if (me->done) left--;
    }
    free(fibers), free(all), free(stacks), free(shared);
    return 0;
}

/* The sLSTM over sequences on a CPU, by the formulas of reference.py.

   A task is a head and a block of rows from the first token to the last: no task waits for another. Of a token it goes
   through the columns of the head, a vector at a time: the products of the four gates for a few rows stay in registers,
   and the states after the token follow from them. The recurrent weights of a head are first laid out as they are read,
   in float32, and stay in the cache of the core.

   An element's bits depend neither on the rows beside it nor on the number of threads: every sum has the order of the
   elements of h, from zero, and everything behind it is one function of one element. Compiled without -ffast-math: the
   stabilizer relies on infinities, and a NaN must stay one. */

#include <stdint.h>
#include <string.h>

/* floats of a vector, and rows whose 4 sums each stay in registers */
#if defined(__AVX512F__)
#define WIDTH 16
#define ROWS 4
#elif defined(__AVX__)
#define WIDTH 8
#define ROWS 2
#elif defined(__aarch64__)
#define WIDTH 4
#define ROWS 4
#else
#define WIDTH 4
#define ROWS 2
#endif
/* most rows of a task */
#define BLOCK 32
/* products of a thread: fewer are not worth starting one */
#define THREAD_WORK (1 << 18)
/* calls of fewer tokens read weights where the caller has them: they would not pay for laying them out */
#define IN_PLACE 16
#define GATES 4
/* rows of weights that one task lays out */
#define LAID_ROWS 32

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t hvec __attribute__((vector_size(2 * WIDTH)));
/* the same at any address */
typedef float uvec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint16_t uhvec __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

enum { FLOAT32, FLOAT16, BFLOAT16 };

/* launch_cpu.py has the same fields; all have 8 bytes. Strides count elements; what has none is contiguous. */
typedef struct {
    const void *x, *r;
    const float *bias;       /* [4, heads, dim] */
    const float *initial[4]; /* h, c, n and m: [batch, heads, dim] */
    const int32_t *starts, *lens;
    const uint8_t *resets; /* [batch, tokens] */
    void *y;
    float *last[4];
    float *scratch; /* at a multiple of 64 bytes, as long as scratch_floats says */
    int64_t batch, tokens, heads, dim, dtype, exponential, threads;
    int64_t x_row, x_token, x_gate, x_head, x_column;
    int64_t r_gate, r_head, r_from, r_to;
} Call;

/* what all threads of a call share */
typedef struct {
    const Call *call;
    int64_t next, tasks;
    void (*task)(const Call *, int64_t);
} Work;

/* GOMP_parallel of the OpenMP that PyTorch runs on */
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t parts(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t padded(const Call *call) { return parts(call->dim, WIDTH) * WIDTH; }

/* ---- numbers ---- */

INLINE vec splat(float value) { return value - (vec){0}; }
INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }
INLINE vec magnitude(vec x) { return (vec)((ivec)x & 0x7fffffff); }
INLINE vec with_sign(vec x, vec sign) { return (vec)((ivec)x | ((ivec)sign & INT32_MIN)); }
/* 2^n for n from -126 to 127 */
INLINE vec power(ivec n) { return (vec)((n + 127) << 23); }

/* p of e^x = 2^n (1 + p) for x <= 0, not below `least`; Taylor to r^7 on |r| <= ln 2 / 2 */
INLINE vec reduced(vec x, float least, ivec *n) {
    const vec shift = splat(0x1.8p23f);
    x = choose(x < least, splat(least), x);
    vec t = x * 0x1.715476p0f + shift, whole = t - shift;
    vec r = x - whole * 0x1.62e4p-1f;
    r = r - whole * 0x1.7f7d1cp-20f;
    *n = (ivec)t - (ivec)shift;
    vec q = splat(1.0f / 5040);
    q = q * r + 1.0f / 720;
    q = q * r + 1.0f / 120;
    q = q * r + 1.0f / 24;
    q = q * r + 1.0f / 6;
    q = q * r + 0.5f;
    return q * (r * r) + r;
}

/* e^x for x <= 0: exactly 1 of 0, NaN of NaN, and 0 where the result would be subnormal */
INLINE vec exponential(vec x) {
    ivec n;
    vec p = reduced(x, -87.0f, &n);
    vec s = power(n);
    return (vec)(((x >= -87.0f) | (x != x)) & (ivec)(s * p + s));
}

/* log(1 + e) for e from 0 to 1, by 2 atanh(e / (2 + e)) */
INLINE vec log1p_of(vec e) {
    vec s = e / (e + 2.0f), w = s * s;
    vec q = splat(1.0f / 13);
    q = q * w + 1.0f / 11;
    q = q * w + 1.0f / 9;
    q = q * w + 1.0f / 7;
    q = q * w + 1.0f / 5;
    q = q * w + 1.0f / 3;
    s = s + s;
    return q * w * s + s;
}

INLINE vec log_sigmoid(vec x) {
    vec below = choose(x < 0.0f, x, splat(0.0f));
    return below - log1p_of(exponential(-magnitude(x)));
}

INLINE vec tanh_of(vec x) {
    vec twice = -2.0f * magnitude(x);
    ivec n;
    /* behind 40 nothing is left of it in float32 */
    vec p = reduced(twice, -40.0f, &n);
    vec s = power(n), less = s * p + (s - 1.0f);
    return with_sign(-less / (less + 2.0f), x);
}

/* elements of 16 bits in float32, exactly */
INLINE vec widened(hvec values, int64_t dtype) {
    ivec bits = __builtin_convertvector(values, ivec);
    if (dtype == BFLOAT16) return (vec)(bits << 16);
    ivec rest = (bits & 0x7fff) << 13, infinite = (bits & 0x7c00) == 0x7c00;
    rest = (ivec)choose(infinite, (vec)(rest | 0x7f800000), (vec)rest * 0x1p112f);
    return (vec)(rest | (bits & 0x8000) << 16);
}

/* float32 in 16 bits, to nearest even */
INLINE hvec narrowed(vec values, int64_t dtype) {
    ivec bits = (ivec)values, rest = bits & 0x7fffffff;
    ivec nan = rest > 0x7f800000, found;
    if (dtype == BFLOAT16) {
        found = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        found = (nan & 0x7fc0) | (~nan & found);
    } else {
        ivec huge = rest >= 0x477ff000, small = rest < 0x38800000;
        found = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
        /* subnormal: the addition rounds to a multiple of 2^-24 */
        ivec low = (ivec)((vec)rest + 0.5f) - 0x3f000000;
        found = (small & low) | (~small & found);
        found = (huge & 0x7c00) | (~huge & found);
        found = ((nan & 0x7e00) | (~nan & found)) | (bits >> 16 & 0x8000);
    }
    return __builtin_convertvector(found, hvec);
}

/* a vector of `count` elements in float32, zeros behind them */
INLINE vec load(const void *base, int64_t place, int64_t stride, int64_t count, int64_t dtype) {
    count = least(count, WIDTH);
    if (dtype == FLOAT32) {
        const float *from = (const float *)base + place;
        if (stride == 1 && count == WIDTH) return *(const uvec *)from;
        float some[WIDTH] = {0};
        for (int64_t i = 0; i < count; i++) some[i] = from[i * stride];
        return *(const uvec *)some;
    }
    const uint16_t *from = (const uint16_t *)base + place;
    if (stride == 1 && count == WIDTH) return widened(*(const uhvec *)from, dtype);
    uint16_t some[WIDTH] = {0};
    for (int64_t i = 0; i < count; i++) some[i] = from[i * stride];
    return widened(*(const uhvec *)some, dtype);
}

INLINE void store(void *y, int64_t place, const float *from, int64_t count, int64_t dtype) {
    if (dtype == FLOAT32) {
        memcpy((float *)y + place, from, 4 * count);
        return;
    }
    uint16_t *into = (uint16_t *)y + place;
    /* `from` is padded to a whole vector */
    for (int64_t k = 0; k < count; k += WIDTH) {
        hvec some = narrowed(*(const uvec *)(from + k), dtype);
        if (count - k >= WIDTH)
            *(uhvec *)(into + k) = some;
        else
            memcpy(into + k, &some, 2 * (count - k));
    }
}

/* ---- one token ---- */

/* x of the gates i and f is no less, as in reference.py */
INLINE vec not_below(vec x) { return choose(x < -1e5f, splat(-1e5f), x); }

/* A vector of elements: their states after a token from its pre-activations. In memory and by itself, so that it is one
   code wherever the elements stand. */
static __attribute__((noinline)) void cell(const vec *a, uvec *h, uvec *c, uvec *n, uvec *m, int64_t exponential_gate) {
    vec lf = exponential_gate ? a[1] : log_sigmoid(a[1]);
    /* an element without history has no weight, whatever its m is */
    vec before = choose(*n == 0.0f, splat(-__builtin_inff()), lf + *m);
    ivec kept = (before > a[0]) | (before != before);
    vec most = choose(kept, before, a[0]);
    /* of the two weights the one of the larger exponent is e^0, NaN of an infinite one */
    vec one = (most - most) + 1.0f, other = exponential(-magnitude(before - a[0]));
    vec forget = choose(kept, one, other), added = choose(kept, other, one);
    vec c_new = forget * *c + added * tanh_of(a[2]), n_new = forget * *n + added;
    /* sigmoid(a_o) c / n by one division, with halves so that nothing overflows */
    vec e = exponential(-magnitude(a[3]));
    *h = choose(a[3] < 0.0f, 0.5f * e, splat(0.5f)) * c_new / ((0.5f * e + 0.5f) * n_new);
    *c = c_new, *n = n_new, *m = most;
}

/* the sums of the four gates for some rows: h [dim] of each, weights of one vector of columns */
INLINE void product(int rows, const float *const *h, const float *w, int64_t from, int64_t gate, int64_t dim, vec *out) {
    vec sums[ROWS][GATES] = {{{0}}};
    for (int64_t j = 0; j < dim; j++, w += from) {
        vec w_i = *(const uvec *)w, w_f = *(const uvec *)(w + gate);
        vec w_z = *(const uvec *)(w + 2 * gate), w_o = *(const uvec *)(w + 3 * gate);
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            vec one = splat(h[row][j]);
            sums[row][0] += one * w_i;
            sums[row][1] += one * w_f;
            sums[row][2] += one * w_z;
            sums[row][3] += one * w_o;
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
        for (int g = 0; g < GATES; g++) out[row * GATES + g] = sums[row][g];
}

static void products(int64_t rows, const float *const *h, const float *w, int64_t from, int64_t gate, int64_t dim,
                     vec *out) {
    switch (rows) {
#if ROWS == 4
    case 4:
        product(4, h, w, from, gate, dim, out);
        break;
    case 3:
        product(3, h, w, from, gate, dim, out);
        break;
#endif
    case 2:
        product(2, h, w, from, gate, dim, out);
        break;
    default:
        product(1, h, w, from, gate, dim, out);
    }
}

/* ---- the weights ---- */

static int laid_out(const Call *call) {
    return call->tokens >= IN_PLACE || call->dtype != FLOAT32 || call->r_to != 1 || call->dim % WIDTH != 0;
}

static int64_t laid_floats(const Call *call) {
    return laid_out(call) ? call->heads * call->dim * GATES * padded(call) : 0;
}

/* Some rows of a head's weights in the order in which they are read: by vector of columns, element of h, gate. */
static void lay_out(const Call *call, int64_t task) {
    int64_t each = parts(call->dim, LAID_ROWS), head = task / each, first = task % each * LAID_ROWS;
    int64_t end = least(first + LAID_ROWS, call->dim);
    float *w = call->scratch + head * call->dim * GATES * padded(call);
    for (int64_t k = 0; k < call->dim; k += WIDTH)
        for (int64_t j = first; j < end; j++)
            for (int64_t g = 0; g < GATES; g++) {
                int64_t place = g * call->r_gate + head * call->r_head + j * call->r_from + k * call->r_to;
                *(vec *)(w + (k * call->dim + j * WIDTH) * GATES + g * WIDTH) =
                    load(call->r, place, call->r_to, call->dim - k, call->dtype);
            }
}

/* ---- a sequence ---- */

static int64_t block_of(const Call *call) {
    int64_t blocks = parts(call->threads, call->heads);
    return least(parts(parts(call->batch, blocks), ROWS) * ROWS, BLOCK);
}

static void span(const Call *call, int64_t row, int64_t *begin, int64_t *end) {
    int64_t start = call->starts && call->starts[row] > 0 ? call->starts[row] : 0;
    *end = call->lens ? least(call->tokens, start + call->lens[row]) : call->tokens;
    *begin = least(start, call->tokens);
    if (*end < *begin) *end = *begin;
}

/* the states of a row in scratch: h before and after a token, c, n and m */
enum { H, H_NEW, C, N, M, STATES };

/* Where a row's elements of a gate lie. Rows and tokens may be a page apart, where a processor reads nothing ahead. */
INLINE void fetch(const Call *call, int64_t row, int64_t t, int64_t head, int64_t k) {
    const int64_t size = call->dtype == FLOAT32 ? 4 : 2;
    const int64_t place = row * call->x_row + t * call->x_token + head * call->x_head + k * call->x_column;
    for (int64_t g = 0; g < GATES; g++) __builtin_prefetch((const char *)call->x + (place + g * call->x_gate) * size);
}

static void sequence(const Call *call, int64_t task) {
    const int64_t dim = call->dim, wide = padded(call), block = block_of(call), all = parts(call->batch, block);
    const int64_t head = task / all, first = task % all * block, rows = least(block, call->batch - first);
    const int64_t y_token = call->heads * dim, y_row = call->tokens * y_token, size = call->dtype == FLOAT32 ? 4 : 2;
    float *const memory = call->scratch + laid_floats(call) + (head * call->batch + first) * STATES * wide;
    float *states[BLOCK][STATES];
    int64_t begin[BLOCK], end[BLOCK], least_begin = call->tokens, most_end = 0;
    memset(memory, 0, 4 * rows * STATES * wide);
    for (int64_t row = 0; row < rows; row++) {
        for (int s = 0; s < STATES; s++) states[row][s] = memory + (row * STATES + s) * wide;
        for (int s = 0; call->initial[0] && s < 4; s++)
            memcpy(states[row][s ? s + 1 : H], call->initial[s] + ((first + row) * call->heads + head) * dim, 4 * dim);
        span(call, first + row, &begin[row], &end[row]);
        least_begin = least(least_begin, begin[row]);
        most_end = end[row] > most_end ? end[row] : most_end;
        for (int64_t t = 0; t < call->tokens; t++)
            if (t < begin[row] || t >= end[row])
                memset((char *)call->y + ((first + row) * y_row + t * y_token + head * dim) * size, 0, dim * size);
    }
    for (int64_t t = least_begin; t < most_end; t++) {
        int64_t now[BLOCK], count = 0;
        for (int64_t row = 0; row < rows; row++) {
            if (t < begin[row] || t >= end[row]) continue;
            now[count++] = row;
            if (call->resets && call->resets[(first + row) * call->tokens + t]) {
                memset(states[row][H], 0, 4 * wide);
                memset(states[row][C], 0, 4 * 3 * wide);
            }
        }
        for (int64_t k = 0; k < dim; k += WIDTH) {
            const int in_place = !laid_out(call);
            const int plain = call->dtype == FLOAT32 && call->x_column == 1 && dim - k >= WIDTH;
            const float *w = in_place ? (const float *)call->r + head * call->r_head + k
                                      : call->scratch + (head * wide + k) * dim * GATES;
            vec bias[GATES] = {{0}};
            for (int64_t g = 0; call->bias && g < GATES; g++)
                bias[g] = load(call->bias, (g * call->heads + head) * dim + k, 1, dim - k, FLOAT32);
            for (int64_t i = 0; i < count; i += ROWS) {
                const int64_t some = least(ROWS, count - i);
                const float *h[ROWS];
                vec sums[ROWS * GATES];
                for (int64_t row = 0; row < some; row++) h[row] = states[now[i + row]][H];
                /* the next rows, columns or token */
                const int more_rows = i + ROWS < count, more_columns = k + WIDTH < dim;
                const int64_t next_t = more_rows || more_columns ? t : t + 1;
                const int64_t next_k = more_rows ? k : more_columns ? k + WIDTH : 0, next_i = more_rows ? i + ROWS : 0;
                for (int64_t row = next_i; row < least(next_i + ROWS, count) && next_t < most_end; row++)
                    fetch(call, first + now[row], next_t, head, next_k);
                products(some, h, w, in_place ? call->r_from : GATES * WIDTH, in_place ? call->r_gate : WIDTH, dim,
                         sums);
                for (int64_t row = 0; row < some; row++) {
                    float **its = states[now[i + row]];
                    vec a[GATES];
                    const int64_t place = (first + now[i + row]) * call->x_row + t * call->x_token +
                                          head * call->x_head + k * call->x_column;
                    if (plain)
                        for (int64_t g = 0; g < GATES; g++)
                            a[g] = *(const uvec *)((const float *)call->x + place + g * call->x_gate);
                    else
                        for (int64_t g = 0; g < GATES; g++)
                            a[g] = load(call->x, place + g * call->x_gate, call->x_column, dim - k, call->dtype);
                    for (int64_t g = 0; g < GATES; g++)
                        a[g] = ((g < 2 ? not_below(a[g]) : a[g]) + bias[g]) + sums[row * GATES + g];
                    cell(a, (uvec *)(its[H_NEW] + k), (uvec *)(its[C] + k), (uvec *)(its[N] + k), (uvec *)(its[M] + k),
                         call->exponential);
                }
            }
        }
        for (int64_t i = 0; i < count; i++) {
            float **its = states[now[i]], *before = its[H];
            its[H] = its[H_NEW], its[H_NEW] = before;
            store(call->y, (first + now[i]) * y_row + t * y_token + head * dim, its[H], dim, call->dtype);
        }
    }
    for (int64_t row = 0; call->last[0] && row < rows; row++)
        for (int s = 0; s < 4; s++)
            memcpy(call->last[s] + ((first + row) * call->heads + head) * dim, states[row][s ? s + 1 : H], 4 * dim);
}

/* ---- threads ---- */

static void work_on(void *shared) {
    Work *work = shared;
    for (;;) {
        int64_t task = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (task >= work->tasks) return;
        work->task(work->call, task);
    }
}

static void all_of(const Call *call, Parallel parallel, int64_t threads, int64_t tasks,
                   void (*task)(const Call *, int64_t)) {
    Work work = {call, 0, tasks, task};
    threads = least(threads, tasks);
    if (parallel && threads > 1)
        parallel(work_on, &work, (unsigned)threads, 0);
    else
        work_on(&work);
}

int64_t scratch_floats(const Call *call) {
    return laid_floats(call) + call->heads * call->batch * STATES * padded(call);
}

void run(const Call *call, Parallel parallel) {
    int64_t laid = call->heads * call->dim * call->dim * GATES, products = laid * call->batch * call->tokens;
    if (laid_out(call))
        all_of(call, parallel, least(call->threads, 1 + laid / THREAD_WORK), call->heads * parts(call->dim, LAID_ROWS),
               lay_out);
    all_of(call, parallel, least(call->threads, 1 + products / THREAD_WORK),
           call->heads * parts(call->batch, block_of(call)), sequence);
}

/* for tests: the functions of the gates, in float32 */
void functions(const float *x, float *y, int64_t count, int64_t which) {
    for (int64_t i = 0; i < count; i += WIDTH) {
        int64_t some = least(WIDTH, count - i);
        vec one = load(x, i, 1, some, FLOAT32);
        one = which == 0 ? exponential(one) : which == 1 ? log_sigmoid(one) : tanh_of(one);
        memcpy(y + i, &one, 4 * some);
    }
}

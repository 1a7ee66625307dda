// What crosses from Python: __init__.py holds the same structures.  All sizes are counts of elements.
#pragma once

#include <cstdint>

typedef unsigned short bfloat16;    // the upper half of a float32

struct Matrix {
    const void *weights;            // [outputs, inputs], as the checkpoint has them
    const void *bias;               // [outputs], or null
    long outputs, inputs;
};

// A decoder layer: its weights and norms are all float32 or all bfloat16, its keys and values either.  Without weights of
// `gate` it ends after the attention, its result added to the input.
struct Layer {
    long heads, kv_heads, size;                 // of attention; `size` of a head
    long half_weights, half_cache;              // whether they are bfloat16
    long pool_tokens;                           // in a KV head's rows of the pool
    Matrix q, k, v, o, gate, up, down;
    const void *input_norm, *middle_norm, *q_norm, *k_norm;     // the last two may be null
    void *keys, *values;                        // [kv heads, tokens, size], this layer's part of the pool
    float epsilon, scaling;
};

constexpr long ROWS_MAX = 64;

// A step's rows, at most ROWS_MAX of them, each the next token of a sequence.
struct Rows {
    long count;
    const long *slots;              // where a row's key and value go in the pool
    const long *starts, *lengths;   // the rows of the pool it attends to, its own the last
};

// The experts of a layer, all float32 or all bfloat16: their matrices one after another.
struct Experts {
    long count, hidden, inner, half_weights;
    const void *gate_up, *down;     // [count, gate before up, inner, hidden], [count, hidden, inner]
};

// The rows that chose one expert: pairs [first, first + count).
struct Group {
    long expert, first, count;
    float *normal, *wide;           // the kernel's own: where operands lie
};

// A row, and one of its experts with its weight.
struct Pair {
    long row, group;
    float weight;
};

// Which experts the rows chose, `each` at most.
struct Choices {
    long rows, each, group_count, pair_count;
    Group *groups;                  // in the order of experts
    const Pair *pairs;              // group by group, in each in the order of rows
    const long *of_row;             // [rows, each], the pairs of a row, in the order of experts; -1: no more
};

enum Activation : int { NONE, GELU_TANH, SILU };

// Attention's operands, all float32: rows of `count` heads of `size` elements, `*_stride` apart, and segments of
// `lengths` rows, one after another, within which each row attends to all.
struct Heads {
    const float *queries, *keys, *values;
    float *out;                                 // [rows, count, size]
    long query_stride, key_stride, value_stride;
    long count, size, segments;
    const long *lengths;
    float scaling;
};

struct Kernels {
    void (*linear)(const Matrix &, bool half, const void *in, float *out, long rows);
    void (*layer)(const Layer &, const Rows &, const void *cosines, const void *sines, const void *in, void *out);
    void (*experts)(const Experts &, const Choices &, const void *in, float *out);
    // For many rows of float32; null where torch does as well.  Whether there was memory for it.
    bool (*gemm)(const Matrix &, const float *in, float *out, long rows, Activation);
    bool (*flash)(const Heads &);
};

// One for each set of instructions; the last is empty where the compiler is too old for it.
extern const Kernels avx2_kernels, avx512_kernels, amx_kernels;

// out [rows, hidden] of float32 = the sum of what the `chosen` experts [rows, each] make of `in` [rows, hidden], of the
// weights' type, times `weights`; a number that is no expert's counts for none.
void mix_experts(const Kernels &kernels, const Experts &experts, const long *chosen, const float *weights, long rows,
                 long each, const void *in, float *out);

// `rows` rows of a matrix of FP8 numbers from row `top` on, each block of `high` x `wide` of the matrix with one of
// `scales`, to float32 or, `half`, bfloat16.  Says whether one of them is NaN.
bool dequantise(const uint8_t *in, long rows, long columns, const float *scales, long high, long wide, long top,
                void *out, bool half);

// Floats that live until the calling thread asks again.
float *scratch(long count);
// The same of another memory, of many megabytes; null where there is none.
float *large_scratch(long count);

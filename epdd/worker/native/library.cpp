// The C interface that __init__.py calls, and the choice of an instruction set.

#include <cstdlib>

#include "library.h"

static const Kernels *const kernels =
    __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
            && __builtin_cpu_supports("avx512vl") ? &avx512_kernels
    : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &avx2_kernels
                                                                      : nullptr;
static const Kernels *chosen = kernels;

float *scratch(long count) {
    static thread_local float *held = nullptr;
    static thread_local long size = 0;
    if (count > size) {
        free(held);
        size = (count + 1023) / 1024 * 1024;
        held = static_cast<float *>(aligned_alloc(64, size * sizeof(float)));
        if (held == nullptr)
            abort();        // a decode step's few megabytes: nothing could go on without them
    }
    return held;
}

extern "C" {

// The instruction set in use, or an empty string where the CPU has none of them.
const char *epdd_instructions() {
    return chosen == &avx512_kernels ? "AVX-512" : chosen == &avx2_kernels ? "AVX2" : "";
}

// For tests: what an older CPU would use.
void epdd_prefer_avx2(int wanted) { chosen = wanted && kernels != nullptr ? &avx2_kernels : kernels; }

// out [rows, outputs] = in [rows, inputs] x weights^T + bias; `in` has the weights' type, `out` is float32.
void epdd_linear(const Matrix *matrix, int half, const void *in, float *out, long rows) {
    chosen->linear(*matrix, half, in, out, rows);
}

// One decoder layer over hidden states [rows, hidden] of the weights' type; cosines and sines are [rows, size].
void epdd_layer(const Layer *layer, const Rows *rows, const void *cosines, const void *sines, const void *in,
                void *out) {
    chosen->layer(*layer, *rows, cosines, sines, in, out);
}

}

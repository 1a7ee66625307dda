// The C interface that __init__.py calls, and the choice of an instruction set.

#include <cpuid.h>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "library.h"

static bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

static bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
           && __builtin_cpu_supports("avx512vl");
}

// Whether the CPU multiplies bfloat16 tiles, and the kernel lets this process have the registers for them.
static bool has_amx() {
    unsigned eax, ebx, ecx, edx = 0;
    const bool there = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx >> 22 & 1) && (edx >> 24 & 1);
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return there && has_avx512() && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// What this CPU can run, the best first.
static const struct Choice {
    const char *name;
    const Kernels *kernels;
    bool there;
} CHOICES[] = {
    {"AMX", &amx_kernels, amx_kernels.layer != nullptr && has_amx()},
    {"AVX-512", &avx512_kernels, has_avx512()},
    {"AVX2", &avx2_kernels, has_avx2()},
    {"", nullptr, true},
};

static const Choice *best() {
    const Choice *choice = CHOICES;
    while (!choice->there)
        choice++;
    return choice;
}

static const Choice *chosen = best();

// Memory that grows with what is asked of it; its content does not matter.
struct Growing {
    float *held = nullptr;
    long bytes = 0;

    // Null where there is none; whole units of bytes, and aligned to them.
    float *take(long count, long unit) {
        const long wanted = count * long(sizeof(float));
        if (wanted > bytes) {
            free(held);
            bytes = (wanted + unit - 1) / unit * unit;
            held = static_cast<float *>(aligned_alloc(unit, bytes));
            if (held == nullptr)
                bytes = 0;
            else if (unit == HUGE)
                madvise(held, bytes, MADV_HUGEPAGE);
        }
        return held;
    }

    static constexpr long PAGE = 4 << 10, HUGE = 2 << 20;
};

float *scratch(long count) {
    static thread_local Growing memory;
    float *taken = memory.take(count, Growing::PAGE);
    if (taken == nullptr)
        abort();        // a decode step's few megabytes: nothing could go on without them
    return taken;
}

float *large_scratch(long count) {
    static thread_local Growing memory;
    return memory.take(count, Growing::HUGE);       // read and written from end to end
}

extern "C" {

// The instruction set in use, or an empty string where the CPU has none of them.
const char *epdd_instructions() { return chosen->name; }

// For tests: what another CPU would use, if this one can; any other name brings back the best.
void epdd_prefer(const char *name) {
    chosen = best();
    for (const Choice &choice : CHOICES)
        if (choice.there && choice.kernels != nullptr && strcmp(choice.name, name) == 0)
            chosen = &choice;
}

// out [rows, outputs] = in [rows, inputs] x weights^T + bias; `in` has the weights' type, `out` is float32.
void epdd_linear(const Matrix *matrix, int half, const void *in, float *out, long rows) {
    chosen->kernels->linear(*matrix, half, in, out, rows);
}

// One decoder layer over hidden states [rows, hidden] of the weights' type; cosines and sines are [rows, size].
void epdd_layer(const Layer *layer, const Rows *rows, const void *cosines, const void *sines, const void *in,
                void *out) {
    chosen->kernels->layer(*layer, *rows, cosines, sines, in, out);
}

// A mixture of experts as `mix_experts` has it.
void epdd_experts(const Experts *experts, const long *choices, const float *weights, long rows, long each, const void *in,
                  float *out) {
    mix_experts(*chosen->kernels, *experts, choices, weights, rows, each, in, out);
}

// Whether there are kernels for many rows of float32.
int epdd_has_gemm() { return chosen->kernels != nullptr && chosen->kernels->gemm != nullptr; }

// out [rows, outputs] = activation(in [rows, inputs] x weights^T + bias), all float32; 0 where there is no memory for it.
int epdd_gemm(const Matrix *matrix, const float *in, float *out, long rows, int activation) {
    return chosen->kernels->gemm(*matrix, in, out, rows, Activation(activation));
}

// FP8 numbers as `dequantise` makes them.
int epdd_fp8(const uint8_t *in, long rows, long columns, const float *scales, long high, long wide, long top, void *out,
             int half) {
    return dequantise(in, rows, columns, scales, high, wide, top, out, half);
}

// Attention within segments; 0 where there is no memory for it.
int epdd_flash(const Heads *heads) { return chosen->kernels->flash(*heads); }

}

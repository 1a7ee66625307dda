// Products of many float32 rows by AMX; fewer are a matter of memory and of products.h.
#pragma once

#include "split.h"

namespace {

constexpr long STEPS_MAX = 36;          // of a block of columns: with PANEL outputs, 0.9 MB of the second-level cache
constexpr long PANEL = 4;               // EDGE outputs each, that stay there while all rows pass
// EDGE rows each and bfloat16s: what is split at a time, so that its memory has a bound.
constexpr long ROWS_BLOCK = 32, HELD_HALVES = 16 << 20;

inline Vector activated(Vector x, Activation activation) {
    switch (activation) {
    case SILU: return x / (exponential(-x) + 1.0f);
    // x / 2 (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
    case GELU_TANH: return x / (exponential(x * (x * x * 0.044715f + 1.0f) * -1.5957691216057308f) + 1.0f);
    default: return x;
    }
}

// How threads share the product: `outputs` beside one another, each with another part of the rows.
struct Grid {
    long outputs = 1, rows;

    Grid(long threads, long output_blocks, long row_blocks) : rows(threads) {
        long best = output_blocks * up(row_blocks, threads);
        for (long tried = 2; tried <= threads; tried++) {
            const long longest = up(output_blocks, tried) * up(row_blocks, threads / tried);
            if (longest <= best) {
                best = longest;
                outputs = tried;
                rows = threads / tried;
            }
        }
    }
};

// Of blocks of at most so many things, as even as can be: how many a block has.
inline long even_blocks(long count, long most) { return up(count, up(count, most)); }

class Gemm {
  public:
    Gemm(const Matrix &matrix, const float *in, float *out, long rows, Activation activation)
        : matrix(matrix), in(in), out(out), rows(rows), activation(activation), steps(up(matrix.inputs, EDGE)),
          blocks(up(steps, STEPS_MAX)), block_steps(up(steps, blocks)),
          held(even_blocks(up(rows, EDGE), least(ROWS_BLOCK, HELD_HALVES / (steps * STEP) + 1))) {}

    // Whether there was memory for it.
    bool run() {
        const long threads = omp_get_max_threads();
        const long panel = PANEL * block_steps * STEP / 2, sums = PANEL * BLOCK_SUMS * (blocks > 1 ? held : 1);
        float *memory = large_scratch(held * steps * STEP / 2 + threads * (panel + sums));
        if (memory == nullptr)
            return false;
        right = reinterpret_cast<bfloat16 *>(memory);
#pragma omp parallel
        {
            const Member member;
            float *mine = memory + held * steps * STEP / 2 + member.thread * (panel + sums);
            const Tiles tiles(whole_tiles());
            for (long first = 0; first < up(rows, EDGE); first += held) {
                const long count = least(held, up(rows, EDGE) - first);
                const Share share = member.of(count);
                for (long i = share.begin; i < share.end; i++)
                    put_right(in + (first + i) * EDGE * matrix.inputs, matrix.inputs, rows - (first + i) * EDGE,
                              matrix.inputs, 1.0f, right + i * steps * STEP);
#pragma omp barrier
                share_of(member, first, count, reinterpret_cast<bfloat16 *>(mine), mine + panel);
#pragma omp barrier
            }
        }
        return true;
    }

  private:
    const Matrix &matrix;
    const float *in;
    float *out;
    const long rows;
    const Activation activation;
    const long steps, blocks, block_steps;      // of EDGE columns; blocks of them; steps of a block
    const long held;                            // times EDGE rows are split at a time
    bfloat16 *right = nullptr;

    void share_of(Member member, long first, long count, bfloat16 *panel, float *sums) const {
        const Grid grid(member.threads, up(matrix.outputs, EDGE), count);
        if (member.thread >= grid.outputs * grid.rows)
            return;
        const Share across(up(matrix.outputs, EDGE), 1, member.thread % grid.outputs, grid.outputs);
        const Share down(count, 1, member.thread / grid.outputs, grid.rows);
        for (long output = across.begin; output < across.end; output += PANEL) {
            const long wide = least(PANEL, across.end - output);
            for (long step = 0; step < steps; step += block_steps) {
                const long deep = least(block_steps, steps - step);
                for (long i = 0; i < wide; i++) {
                    const long top = (output + i) * EDGE, column = step * EDGE;
                    put_left(static_cast<const float *>(matrix.weights) + top * matrix.inputs + column, matrix.inputs,
                             matrix.outputs - top, least(deep * EDGE, matrix.inputs - column),
                             panel + i * deep * STEP);
                }
                for (long row = down.begin; row < down.end; row++) {
                    float *here = sums + (blocks > 1 ? (row - down.begin) * wide * BLOCK_SUMS : 0);
                    for (long i = 0; i < wide; i++)
                        multiply<2>(panel + i * deep * STEP, right + (row * steps + step) * STEP, deep,
                                    here + i * BLOCK_SUMS, step == 0, [] {});
                    if (step + deep == steps)
                        for (long i = 0; i < wide; i++)
                            finish(here + i * BLOCK_SUMS, (first + row) * EDGE, (output + i) * EDGE);
                }
            }
        }
    }

    // A block of sums to its place, bias and activation with it.
    void finish(const float *sums, long row, long output) const {
        const float *bias = static_cast<const float *>(matrix.bias);
        for (long left = 0; left < 2; left++, output += 16) {
            if (output >= matrix.outputs)
                return;
            const __mmask16 there = lanes(matrix.outputs - output);
            const Vector more = bias == nullptr ? Vector{} : Vector(_mm512_maskz_loadu_ps(there, bias + output));
            for (long right = 0; right < 2; right++, sums += 256) {
                __m512i lines[16];
                for (int i = 0; i < 16; i++)
                    lines[i] = _mm512_load_si512(sums + i * 16);
                transpose(lines);
                for (long i = 0; i < least(16, rows - row - right * 16); i++)
                    _mm512_mask_storeu_ps(out + (row + right * 16 + i) * matrix.outputs + output, there,
                                          activated(Vector(_mm512_castsi512_ps(lines[i])) + more, activation));
            }
        }
    }
};

}

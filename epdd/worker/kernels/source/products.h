// Products of few activation rows with a matrix that is read once, as it lies, at the speed of memory.
//
// A sum runs over its columns in one order, LANES side by side, whatever else is computed with it: so a row's values
// do not depend on the number of rows, nor on which thread computes them.
#pragma once

// Only declarations are taken from here: the runtime is the one torch has loaded, so both use the same threads.
#include <omp.h>

#include "vectors.h"

namespace {

// Rows computed together, and the matrix rows beside them: as many sums as the registers hold.
constexpr long GROUP = LANES == 16 ? 8 : 4;
constexpr int matrix_rows(int rows) {
    if (LANES == 16)
        return rows <= 3 ? 8 : rows == 4 ? 6 : rows <= 6 ? 4 : 3;
    return rows == 1 ? 8 : rows == 2 ? 5 : rows == 3 ? 4 : 3;
}
// Matrix rows that stay in the second-level cache while all groups of rows pass; a multiple of what goes together.
constexpr long STRIP = LANES == 16 ? 24 : 60;

constexpr long least(long a, long b) { return a < b ? a : b; }
constexpr long up(long count, long unit) { return (count + unit - 1) / unit; }

// Activations in float32, groups of rows interleaved by vectors: read in one stream, without conflicts in the cache.
struct Panel {
    float *data;
    long columns, rows;

    static long floats(long rows, long columns) { return rows * columns; }
    long width(long row) const { return least(GROUP, rows - row / GROUP * GROUP); }
    const float *group(long row) const { return data + row / GROUP * GROUP * columns; }
    // Where LANES columns of a row lie.
    float *at(long row, long column) const {
        return data + row / GROUP * GROUP * columns + (column / LANES * width(row) + row % GROUP) * LANES;
    }
    void put(long row, long column, Vector value) const { store(at(row, column), value); }
};

// The lanes' sums of a tile, in whole eights.
template <int R, int M> struct Sums {
    alignas(64) Vector of[(R * M + 7) / 8 * 8] = {};
};

// Adds columns [first, last): sums of[m * R + r] += row r of `matrix` times row m of a group.  Meanwhile the rows `ahead`
// are fetched, into the second-level cache: the first one holds the activations.
template <int R, int M, class W>
inline __attribute__((always_inline)) void add(const W *matrix, long columns, long first, long last,
                                               const float *group, Sums<R, M> &sums, long ahead) {
    for (long k = first; k < last; k += LANES) {
        Vector w[R];
        for (int r = 0; r < R; r++) {
            w[r] = load(matrix + r * columns + k);
            __builtin_prefetch(matrix + (r + ahead) * columns + k, 0, 2);
        }
        for (int m = 0; m < M; m++) {
            Vector x = load(group + k * M + m * LANES);
            if (R > 1)
                __asm__("" : "+v"(x));      // stay in a register, instead of being read again for each product
            for (int r = 0; r < R; r++)
                sums.of[m * R + r] += w[r] * x;
        }
    }
}

// out[m * stride + r] = a sum's lanes together.
template <int R, int M>
inline __attribute__((always_inline)) void finish(const Sums<R, M> &sums, float *out, long stride) {
    float found[(R * M + 7) / 8 * 8 + LANES];
    for (int i = 0; i < R * M; i += 8)
        store(found + i, eight(sums.of + i));
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++)
            out[m * stride + r] = found[m * R + r];
}

template <int R, int M, class W>
inline void tile(const W *matrix, long columns, const float *group, float *out, long stride) {
    Sums<R, M> sums;
    add(matrix, columns, 0, columns, group, sums, R);
    finish(sums, out, stride);
}

// Tiles side by side, block by block of columns: the activations of a block stay in the first-level cache.
constexpr int TILES = 8;
constexpr long BLOCK = 4096;        // floats of a block: half of that cache

template <int R, int M, class W>
inline void tiles(const W *matrix, long columns, const float *group, float *out, long stride) {
    constexpr long block = BLOCK / M / LANES * LANES;
    Sums<R, M> kept[TILES];
    for (long k = 0; k < columns; k += block)
        for (int j = 0; j < TILES; j++) {
            Sums<R, M> sums = kept[j];      // in registers
            add(matrix + j * R * columns, columns, k, least(columns, k + block), group, sums, TILES * R);
            kept[j] = sums;
        }
    for (int j = 0; j < TILES; j++)
        finish(kept[j], out + j * R, stride);
}

template <int M, class W>
void strip(const W *matrix, long count, long columns, const float *group, float *out, long stride, bool blocks) {
    constexpr int R = matrix_rows(M);
    long i = 0;
    if (blocks && M > GROUP / 2)       // fewer rows wait for memory anyway
        for (; i + TILES * R <= count; i += TILES * R)
            tiles<R, M>(matrix + i * columns, columns, group, out + i, stride);
    for (; i + R <= count; i += R)
        tile<R, M>(matrix + i * columns, columns, group, out + i, stride);
    for (; i < count; i++)
        tile<1, M>(matrix + i * columns, columns, group, out + i, stride);
}

template <class W>
void strip(const W *matrix, long count, long columns, const float *group, long rows, float *out, long stride,
           bool blocks) {
    switch (rows) {
    case 1: return strip<1>(matrix, count, columns, group, out, stride, blocks);
    case 2: return strip<2>(matrix, count, columns, group, out, stride, blocks);
    case 3: return strip<3>(matrix, count, columns, group, out, stride, blocks);
    case 4: return strip<4>(matrix, count, columns, group, out, stride, blocks);
#if LANES == 16
    case 5: return strip<5>(matrix, count, columns, group, out, stride, blocks);
    case 6: return strip<6>(matrix, count, columns, group, out, stride, blocks);
    case 7: return strip<7>(matrix, count, columns, group, out, stride, blocks);
    case 8: return strip<8>(matrix, count, columns, group, out, stride, blocks);
#endif
    }
}

// out[row * stride + i] = row i of `matrix` times each row of the panel, for `count` rows of the matrix.
template <class W> void product(const W *matrix, long count, const Panel &panel, float *out, long stride) {
    const long step = panel.rows > GROUP ? STRIP : count;
    // Measured: with more groups each finds the matrix in the cache, and keeping sums apart costs more than it gains.
    const bool blocks = panel.rows <= 2 * GROUP && panel.columns * panel.width(0) > BLOCK * 3 / 2;
    for (long i = 0; i < count; i += step)
        for (long row = 0; row < panel.rows; row += GROUP)
            strip(matrix + i * panel.columns, least(step, count - i), panel.columns, panel.group(row),
                  panel.width(row), out + row * stride + i, stride, blocks);
}

// One thread's part of `count` things, in whole multiples of `unit`.
struct Share {
    long begin, end;

    Share(long count, long unit, long thread, long threads) {
        const long units = up(count, unit);
        begin = least(count, units * thread / threads * unit);
        end = least(count, units * (thread + 1) / threads * unit);
    }
};

// A thread among those of a parallel region.
struct Member {
    long thread = omp_get_thread_num(), threads = omp_get_num_threads();

    Share of(long count, long unit = 1) const { return Share(count, unit, thread, threads); }
};

constexpr long UNIT = 48;       // outputs: a multiple of LANES, and of the matrix rows that go together

// This thread's share of the outputs, bias added: out[row * stride + output].
template <class W, class Operand>
void project(const Matrix &matrix, Share share, const Operand &panel, float *out, long stride) {
    const W *weights = static_cast<const W *>(matrix.weights), *bias = static_cast<const W *>(matrix.bias);
    product(weights + share.begin * panel.columns, share.end - share.begin, panel, out + share.begin, stride);
    if (bias != nullptr)
        for (long row = 0; row < panel.rows; row++)
            for (long i = share.begin; i < share.end; i++)
                out[row * stride + i] += get(bias + i);
}

}

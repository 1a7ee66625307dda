// Products with bfloat16 weights by AMX: 16 rows of the matrix, as they lie, with up to 64 activation rows at once.
//
// Activations are rounded to bfloat16 first, as transformers keeps them; sums are float32.  A sum runs over its columns
// in one order here too, whatever the number of rows.
#pragma once

#include <immintrin.h>

#include "products.h"

namespace {

constexpr long TILE = 16;       // rows of a tile, and sums beside one another in it
constexpr long DEPTH = 32;      // columns of a matrix tile, two in each four bytes

// Activations as a tile wants them: for each DEPTH columns a tile for every 16 rows, in it two columns of a row together
// and the rows side by side.  Rows that fill up the last tile hold anything: they reach only sums that nobody reads.
struct Pairs {
    float *data;        // for the allocator; bfloat16 in truth
    long columns, rows;

    static long floats(long rows, long columns) {
        return up(columns, DEPTH) * DEPTH * up(rows, TILE) * TILE / 2;
    }
    long width() const { return least(rows, TILE); }
    long groups() const { return up(rows, TILE); }
    bfloat16 *tile(long column, long group) const {
        return reinterpret_cast<bfloat16 *>(data) + (column / DEPTH * groups() + group) * width() * DEPTH;
    }
    // LANES columns of a row.
    void put(long row, long column, Vector value) const {
        bfloat16 half[LANES];
        store(half, value);
        bfloat16 *to = tile(column, row / TILE) + (column % DEPTH / 2 * width() + row % TILE) * 2;
        for (long pair = 0; pair < LANES / 2; pair++)
            memcpy(to + pair * width() * 2, half + pair * 2, 4);
    }
};

// What ldtilecfg reads: the shapes of the tile registers.
struct alignas(64) TileShapes {
    unsigned char palette = 1, start_row = 0, reserved[14] = {};
    unsigned short bytes[16] = {};
    unsigned char rows[16] = {};

    void set(int tile, long count, long row_bytes) {
        rows[tile] = count;
        bytes[tile] = row_bytes;
    }
};

// The tile registers in these shapes, until the end of the block it is made in.
struct Tiles {
    explicit Tiles(const TileShapes &shapes) {
        __asm__ volatile("" : : "r"(&shapes) : "memory");      // the compiler believes that eight bytes are read
        _tile_loadconfig(&shapes);
    }
    ~Tiles() { _tile_release(); }
};

// Four of sums, the matrix and the activations, and both where fewer than DEPTH columns are left.
inline TileShapes shapes_of(long width) {
    TileShapes shapes;
    for (int sums = 0; sums < 4; sums++)
        shapes.set(sums, TILE, width * 4);
    shapes.set(4, TILE, DEPTH * 2);
    shapes.set(5, DEPTH / 2, width * 4);
    shapes.set(6, TILE, DEPTH);
    shapes.set(7, DEPTH / 4, width * 4);
    return shapes;
}

// sums[group] [16, width] = 16 rows of the matrix times the rows of G groups; the next 16 rows are fetched meanwhile.
template <int G> void sixteen(const bfloat16 *matrix, const Pairs &panel, float (*sums)[TILE * TILE]) {
    const long columns = panel.columns, width = panel.width() * 4;
    _tile_zero(0);
    if constexpr (G > 1) _tile_zero(1);
    if constexpr (G > 2) _tile_zero(2);
    if constexpr (G > 3) _tile_zero(3);
    long k = 0;
    for (; k + DEPTH <= columns; k += DEPTH) {
        _tile_loadd(4, matrix + k, columns * 2);
        for (long row = TILE; row < 2 * TILE; row++)
            __builtin_prefetch(matrix + row * columns + k, 0, 2);
        _tile_loadd(5, panel.tile(k, 0), width);
        _tile_dpbf16ps(0, 4, 5);
        if constexpr (G > 1) { _tile_loadd(5, panel.tile(k, 1), width); _tile_dpbf16ps(1, 4, 5); }
        if constexpr (G > 2) { _tile_loadd(5, panel.tile(k, 2), width); _tile_dpbf16ps(2, 4, 5); }
        if constexpr (G > 3) { _tile_loadd(5, panel.tile(k, 3), width); _tile_dpbf16ps(3, 4, 5); }
    }
    if (k < columns) {
        _tile_loadd(6, matrix + k, columns * 2);
        _tile_loadd(7, panel.tile(k, 0), width);
        _tile_dpbf16ps(0, 6, 7);
        if constexpr (G > 1) { _tile_loadd(7, panel.tile(k, 1), width); _tile_dpbf16ps(1, 6, 7); }
        if constexpr (G > 2) { _tile_loadd(7, panel.tile(k, 2), width); _tile_dpbf16ps(2, 6, 7); }
        if constexpr (G > 3) { _tile_loadd(7, panel.tile(k, 3), width); _tile_dpbf16ps(3, 6, 7); }
    }
    _tile_stored(0, sums[0], width);
    if constexpr (G > 1) _tile_stored(1, sums[1], width);
    if constexpr (G > 2) _tile_stored(2, sums[2], width);
    if constexpr (G > 3) _tile_stored(3, sums[3], width);
}

// out[row * stride + i] = row i of `matrix` times each row of the panel, for `count` rows of the matrix, whole tiles.
void product(const bfloat16 *matrix, long count, const Pairs &panel, float *out, long stride) {
    const long width = panel.width();
    const Tiles tiles(shapes_of(width));
    alignas(64) float sums[4][TILE * TILE];
    for (long i = 0; i < count; i += TILE) {
        switch (panel.groups()) {
        case 1: sixteen<1>(matrix + i * panel.columns, panel, sums); break;
        case 2: sixteen<2>(matrix + i * panel.columns, panel, sums); break;
        case 3: sixteen<3>(matrix + i * panel.columns, panel, sums); break;
        default: sixteen<4>(matrix + i * panel.columns, panel, sums); break;
        }
        for (long row = 0; row < panel.rows; row++)
            for (long output = 0; output < TILE; output++)
                out[row * stride + i + output] = sums[row / TILE][output * width + row % TILE];
    }
}

}

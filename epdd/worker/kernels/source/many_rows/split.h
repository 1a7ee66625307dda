// Float32 products by AMX, which knows bfloat16: a float32's 24 bits are three bfloat16s of 8, exactly, and of the nine
// products of two such triples the six largest leave out 2^-24 at most.  Sums are float32, as everywhere.  An infinity
// becomes a NaN, since its parts are no numbers; a NaN stays one.
//
// A thing is "left" or "right" of a product.  Left: rows as they lie, 16 of 32 columns a tile.  Right: two columns of a
// row together and 16 rows side by side.  Left times right is a tile with a left row in each line.
#pragma once

#include "tiles.h"

namespace {

constexpr long PARTS = 3;
constexpr long EDGE = 32;               // rows that are computed together, and columns of a step
constexpr long TILE_HALVES = 512;       // bfloat16s of a tile: 16 lines of 64 bytes
constexpr long STEP = PARTS * 2 * TILE_HALVES;      // of a step of EDGE rows: part by part, two tiles each
constexpr long BLOCK_SUMS = EDGE * EDGE;            // floats of a block of sums: (left tile, right tile), 16 x 16 each

constexpr long AHEAD = 4 * EDGE;        // of a row, fetched before it is split

constexpr struct Odd {
    alignas(64) unsigned short of[32] = {};

    constexpr Odd() {
        for (int i = 0; i < 32; i++)
            of[i] = 2 * i + 1;
    }
} ODD;

// The upper halves of 16 numbers and of 16 more, one after another.
inline __m512i upper(__m512i a, __m512i b) {
    return _mm512_permutex2var_epi16(a, _mm512_load_si512(ODD.of), b);
}

// 16 numbers' next part, in the upper halves, taken away from them.  The first is cut off, so that a NaN is one still;
// the others are rounded, so that what is left out has either sign.
template <int PART> inline __m512i part(__m512 &numbers) {
    __m512i bits = _mm512_castps_si512(numbers);
    if (PART > 0)
        bits = _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
    if (PART == PARTS - 1)
        return bits;
    const __m512i cut = _mm512_and_si512(bits, _mm512_set1_epi32(int(0xffff0000)));
    numbers = _mm512_sub_ps(numbers, _mm512_castsi512_ps(cut));
    return cut;
}

// The parts of 32 numbers, in the order of the numbers.
inline void split(__m512 a, __m512 b, __m512i *parts) {
    parts[0] = upper(part<0>(a), part<0>(b));
    parts[1] = upper(part<1>(a), part<1>(b));
    parts[2] = upper(part<2>(a), part<2>(b));
}

// The parts of two rows of 16 numbers each, pair by pair.
inline void split_pairs(__m512 even, __m512 odd, __m512i *parts) {
    const auto pair = [](__m512i a, __m512i b) {
        return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(a, 16), b);
    };
    parts[0] = pair(part<0>(even), part<0>(odd));
    parts[1] = pair(part<1>(even), part<1>(odd));
    parts[2] = pair(part<2>(even), part<2>(odd));
}

// The first `left` of 16 lanes, or all.
inline __mmask16 lanes(long left) { return left >= 16 ? 0xffff : left <= 0 ? 0 : (1u << left) - 1; }

// 32 numbers, or as many as are left, and zeros.
inline void fetch(const float *from, long left, __m512 &a, __m512 &b) {
    if (__builtin_expect(left >= EDGE, 1)) {
        a = _mm512_loadu_ps(from);
        b = _mm512_loadu_ps(from + 16);
        return;
    }
    a = _mm512_maskz_loadu_ps(lanes(left), from);
    b = _mm512_maskz_loadu_ps(lanes(left - 16), from + 16);
}

// 16 lines of 16 numbers of 32 bits.
inline void transpose(__m512i *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 16; j += 8) {
            t[j + i] = _mm512_shuffle_i32x4(r[j + i], r[j + i + 4], 0x88);
            t[j + i + 4] = _mm512_shuffle_i32x4(r[j + i], r[j + i + 4], 0xdd);
        }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// EDGE rows of a matrix, `rows` of them there, to the left: columns / EDGE steps one after another.  Tile by tile, so
// that what is written lies together; what comes after is fetched meanwhile.
inline void put_left(const float *from, long stride, long rows, long columns, bfloat16 *to) {
    for (long step = 0; step < up(columns, EDGE); step++, from += EDGE)
        for (long row = 0; row < EDGE; row++) {
            __m512 a, b;
            __m512i parts[PARTS];
            __builtin_prefetch(from + row * stride + AHEAD);
            __builtin_prefetch(from + row * stride + AHEAD + 16);
            fetch(from + row * stride, row < rows ? columns - step * EDGE : 0, a, b);
            split(a, b, parts);
            for (int p = 0; p < PARTS; p++)
                _mm512_store_si512(to + step * STEP + p * 2 * TILE_HALVES + row * EDGE, parts[p]);
        }
}

// The same to the right, times a factor.
inline void put_right(const float *from, long stride, long rows, long columns, float factor, bfloat16 *to) {
    for (long step = 0; step < up(columns, EDGE); step++, to += STEP)
        for (long half = 0; half < 2; half++) {
            __m512i lines[PARTS][16] = {};
            for (long row = half * 16; row < least(rows, half * 16 + 16); row++) {
                __m512 a, b;
                __m512i parts[PARTS];
                fetch(from + row * stride + step * EDGE, columns - step * EDGE, a, b);
                split(_mm512_mul_ps(a, _mm512_set1_ps(factor)), _mm512_mul_ps(b, _mm512_set1_ps(factor)), parts);
                for (int p = 0; p < PARTS; p++)
                    lines[p][row % 16] = parts[p];
            }
            for (int p = 0; p < PARTS; p++) {
                transpose(lines[p]);
                for (int line = 0; line < 16; line++)
                    _mm512_store_si512(to + (p * 2 + half) * TILE_HALVES + line * EDGE, lines[p][line]);
            }
        }
}

// All tile registers 16 lines of 64 bytes.
inline TileShapes whole_tiles() {
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++)
        shapes.set(tile, 16, 64);
    return shapes;
}

// A block of sums, begun or gone on with: left [16 L, EDGE steps] times right.  L is 2, or 1 where 16 rows are left;
// then the left steps are half as long.  Tiles take their time: `meanwhile` is called again and again, for the vector
// units to have something to do.
template <int L, class Do>
inline void multiply(const bfloat16 *left, const bfloat16 *right, long steps, float *sums, bool begin, Do meanwhile) {
    constexpr long HALF = L * TILE_HALVES;      // of a part of a left step
    __asm__ volatile("" ::: "memory");          // the compiler believes that loading a tile reads nothing
    if (begin) {
        _tile_zero(0); _tile_zero(1);
        if (L == 2) { _tile_zero(2); _tile_zero(3); }
    } else {
        _tile_loadd(0, sums, 64); _tile_loadd(1, sums + 256, 64);
        if (L == 2) { _tile_loadd(2, sums + 512, 64); _tile_loadd(3, sums + 768, 64); }
    }
    const auto take_left = [&](int p) {
        _tile_loadd(4, left + p * HALF, 64);
        if (L == 2) _tile_loadd(5, left + p * HALF + TILE_HALVES, 64);
    };
    const auto take_right = [&](int p) {
        _tile_loadd(6, right + p * 2 * TILE_HALVES, 64);
        _tile_loadd(7, right + (p * 2 + 1) * TILE_HALVES, 64);
    };
    const auto add = [&] {
        _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
        if (L == 2) { _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7); }
        meanwhile();
    };
    for (long step = 0; step < steps; step++, left += PARTS * HALF, right += STEP) {
        take_left(0);
        take_right(2); add();
        take_right(1); add();
        take_right(0); add();
        take_left(1); add();
        take_right(1); add();
        take_left(2);
        take_right(0); add();
    }
    _tile_stored(0, sums, 64); _tile_stored(1, sums + 256, 64);
    if (L == 2) { _tile_stored(2, sums + 512, 64); _tile_stored(3, sums + 768, 64); }
}

}

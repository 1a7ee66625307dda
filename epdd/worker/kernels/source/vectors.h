// Vectors of LANES floats and what is computed with them alone.  Included once for each instruction set.
#pragma once

#include <cmath>
#include <cstring>
#include <initializer_list>

#include "library.h"

namespace {

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef unsigned int Bits __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int Integers __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef bfloat16 Halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

template <class To, class From> inline To as(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "not the same bits");
    memcpy(&to, &from, sizeof to);
    return to;
}

inline Vector load(const float *from) { return *reinterpret_cast<const Vector *>(from); }

inline Vector load(const bfloat16 *from) {
    return as<Vector>(__builtin_convertvector(*reinterpret_cast<const Halves *>(from), Bits) << 16);
}

inline void store(float *to, Vector value) { *reinterpret_cast<Vector *>(to) = value; }

inline void store(bfloat16 *to, Vector value) {     // rounds to nearest, ties to even; a NaN stays one
    Bits bits = as<Bits>(value);
    Bits rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    Bits nan = as<Bits>(value != value);
    *reinterpret_cast<Halves *>(to) = __builtin_convertvector((rounded & ~nan) | (quiet & nan), Halves);
}

inline float get(const float *from) { return *from; }
inline float get(const bfloat16 *from) { return as<float>(static_cast<unsigned int>(*from) << 16); }

// Sums of neighbouring lanes: of `a` in the lower half, of `b` in the upper.
inline Vector pairs(Vector a, Vector b) {
#if LANES == 16
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
         + __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14)
         + __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#endif
}

// The sums of eight vectors' lanes in the first eight lanes.
inline Vector eight(const Vector *v) {
    Vector all = pairs(pairs(pairs(v[0], v[1]), pairs(v[2], v[3])), pairs(pairs(v[4], v[5]), pairs(v[6], v[7])));
    return LANES == 16 ? pairs(all, all) : all;
}

inline float sum(Vector v) {
    const Vector all[8] = {v};
    return eight(all)[0];
}

inline float largest(const float *values, long count) {
    float most = values[0];
    for (long i = 1; i < count; i++)
        most = values[i] > most ? values[i] : most;
    return most;
}

// e^x within 2 units in the last place: x = n ln 2 + r, e^r by the Taylor polynomial of |r| <= ln 2 / 2.
inline Vector exponential(Vector x) {
    const Vector low = Vector{} - 87.0f, high = Vector{} + 88.0f, shift = Vector{} + 12582912.0f;     // 1.5 x 2^23
    const Vector bounded = x < low ? low : x > high ? high : x;
    const Vector rounded = bounded * 1.44269504088896341f + shift;      // its last bits are n
    const Vector n = rounded - shift;
    const Vector r = (bounded - n * 0.693359375f) + n * 2.12194440054690583e-4f;
    Vector e = r * (1.0f / 5040) + 1.0f / 720;
    e = e * r + 1.0f / 120;
    e = e * r + 1.0f / 24;
    e = e * r + 1.0f / 6;
    e = e * r + 0.5f;
    e = e * r * r + r + 1.0f;
    const Bits scaled = as<Bits>(e) + (as<Bits>(rounded) << 23);
    return x != x ? x : as<Vector>(scaled);
}

}

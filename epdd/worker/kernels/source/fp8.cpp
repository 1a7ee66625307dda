// FP8 (E4M3) numbers with scales to float32 or bfloat16: one pass over a band of rows, where torch takes nine.

#include <cstdint>
#include <cstring>

#include "library.h"

namespace {

// Where bfloat16 is asked for, float32 rounded to the nearest, ties to even.  There is no NaN among the products.
inline uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float number(uint8_t stored) {
    // Exponent and mantissa moved to where float32 has them: the exponents' biases are 7 and 127, and a factor makes up
    // for that, for subnormal numbers too.
    constexpr float UNBIAS = 0x1p120f;
    const uint32_t bits = uint32_t(stored & 0x80) << 24 | uint32_t(stored & 0x7f) << 20;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value * UNBIAS;
}

// One row; says whether a number in it is NaN.
__attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
int row(const uint8_t *in, long columns, const float *scales, long wide, float *singles, uint16_t *halves) {
    uint8_t nan = 0;
    for (long i = 0; i < columns; i++)
        nan |= (in[i] & 0x7f) == 0x7f;
    for (long left = 0; left < columns; left += wide) {
        const long right = left + wide < columns ? left + wide : columns;
        const float scale = *scales++;
        if (halves)
            for (long i = left; i < right; i++)
                halves[i] = rounded(number(in[i]) * scale);
        else
            for (long i = left; i < right; i++)
                singles[i] = number(in[i]) * scale;
    }
    return nan;
}

}

bool dequantise(const uint8_t *in, long rows, long columns, const float *scales, long high, long wide, long top,
                void *out, bool half) {
    const long across = (columns + wide - 1) / wide;
    int nan = 0;
    for (long i = 0; i < rows; i++) {
        const long at = i * columns;
        nan |= row(in + at, columns, scales + (top + i) / high * across, wide, static_cast<float *>(out) + (half ? 0 : at),
                   half ? static_cast<uint16_t *>(out) + at : nullptr);
    }
    return nan;
}

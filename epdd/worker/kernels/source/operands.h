// The activation rows of a product, by the type of its weights, and the memory that they lie in.
#pragma once

#include "products.h"
#ifdef AMX
#include "tiles.h"
#endif

namespace {

// What is multiplied by weights of a type.
template <class W> struct OperandOf { typedef Panel Type; };
#ifdef AMX
template <> struct OperandOf<bfloat16> { typedef Pairs Type; };
#endif

// Hands out scratch memory; without any, counts what is needed.
struct Memory {
    float *base;
    long used = 0;

    float *take(long count) {
        float *taken = base == nullptr ? nullptr : base + used;
        used += (count + 15) / 16 * 16;
        return taken;
    }
};

}

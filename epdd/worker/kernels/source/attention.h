// Attention of single rows to keys and values that lie one after another.
#pragma once

#include "products.h"

namespace {

// Tokens whose scores are computed at once.  Their sums are then joined in order: so the values depend on nothing
// but the sequence itself, and a long sequence keeps all threads busy.
constexpr long SPAN = 512;

// What a span of tokens adds to a head: the weighted sum of its values, of its weights, and the largest score.
struct Part {
    float *values;      // [size], then the two numbers
    long size;

    float &weight() const { return values[size]; }
    float &most() const { return values[size + 1]; }
};

// out[m * stride] += weights[m * SPAN + t] * values[t * size], for V vectors of a value and M heads.
template <int V, int M, class KV>
inline void gather(const KV *values, long size, long count, const float *weights, float *out, long stride) {
    Vector total[M][V] = {};
    for (long t = 0; t < count; t++) {
        Vector value[V];
        for (int i = 0; i < V; i++)
            value[i] = load(values + t * size + i * LANES);
        for (int m = 0; m < M; m++)
            for (int i = 0; i < V; i++)
                total[m][i] += value[i] * weights[m * SPAN + t];
    }
    for (int m = 0; m < M; m++)
        for (int i = 0; i < V; i++)
            store(out + m * stride + i * LANES, total[m][i]);
}

template <int M, class KV>
void gather_all(const KV *values, long size, long count, const float *weights, float *out, long stride) {
    constexpr int V = M * 4 <= matrix_rows(M) * M ? 4 : 2;
    long at = 0;
    for (; at + V * LANES <= size; at += V * LANES)
        gather<V, M>(values + at, size, count, weights, out + at, stride);
    for (; at < size; at += LANES)
        gather<1, M>(values + at, size, count, weights, out + at, stride);
}

template <class KV>
void gather_all(const KV *values, long size, long count, const float *weights, long heads, float *out, long stride) {
    switch (heads) {
    case 1: return gather_all<1>(values, size, count, weights, out, stride);
    case 2: return gather_all<2>(values, size, count, weights, out, stride);
    case 3: return gather_all<3>(values, size, count, weights, out, stride);
    case 4: return gather_all<4>(values, size, count, weights, out, stride);
#if LANES == 16
    case 5: return gather_all<5>(values, size, count, weights, out, stride);
    case 6: return gather_all<6>(values, size, count, weights, out, stride);
    case 7: return gather_all<7>(values, size, count, weights, out, stride);
    case 8: return gather_all<8>(values, size, count, weights, out, stride);
#endif
    }
}

// Scores into weights e^(score - most), padded to whole vectors; their sum and the largest score into the part.
inline void weigh(float *scores, long count, const Part &part) {
    const float most = largest(scores, count);
    for (long t = count; t % LANES; t++)
        scores[t] = -INFINITY;
    Vector total = {};
    for (long t = 0; t < count; t += LANES) {
        const Vector weight = exponential(load(scores + t) - most);
        const Vector real = load(scores + t) != -INFINITY ? weight : Vector{};
        store(scores + t, real);
        total += real;
    }
    part.weight() = sum(total);
    part.most() = most;
}

// The heads of one group of queries (a panel of heads x size, scaled) against `count` tokens, at most SPAN; `parts`
// has `stride` floats a head, `scores` is [heads, SPAN].
template <class KV>
void attend(const KV *keys, const KV *values, long count, const Panel &queries, float *scores, float *parts,
            long stride) {
    const long size = queries.columns;
    product(keys, count, queries, scores, SPAN);
    for (long head = 0; head < queries.rows; head++)
        weigh(scores + head * SPAN, count, Part{parts + head * stride, size});
    for (long head = 0; head < queries.rows; head += GROUP)
        gather_all(values, size, count, scores + head * SPAN, queries.width(head), parts + head * stride, stride);
}

// The first part becomes the whole of `count` parts that lie `stride` floats apart, and its values their mean.
inline void join(const Part &whole, long count, long stride) {
    for (long i = 1; i < count; i++) {
        const Part part{whole.values + i * stride, whole.size};
        const float most = part.most() > whole.most() ? part.most() : whole.most();
        const float old = expf(whole.most() - most), more = expf(part.most() - most);
        for (long at = 0; at < whole.size; at += LANES)
            store(whole.values + at, load(whole.values + at) * old + load(part.values + at) * more);
        whole.weight() = whole.weight() * old + part.weight() * more;
        whole.most() = most;
    }
    for (long at = 0; at < whole.size; at += LANES)
        store(whole.values + at, load(whole.values + at) / whole.weight());
}

}

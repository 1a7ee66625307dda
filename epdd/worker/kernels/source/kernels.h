// A whole decoder layer for few rows in one parallel region, a single product, and what else a CPU's kernels are.
#pragma once

#include "attention.h"
#include "experts.h"
#ifdef AMX
#include "many_rows/flash.h"
#endif

namespace {

// Root mean square norm; put(at, vector) takes the result.
template <class In, class W, class Put>
void normalise(const In *in, const W *weights, long size, float epsilon, Put put) {
    Vector squares = {};
    for (long at = 0; at < size; at += LANES)
        squares += load(in + at) * load(in + at);
    const float scale = 1.0f / sqrtf(sum(squares) / size + epsilon);
    for (long at = 0; at < size; at += LANES)
        put(at, load(in + at) * scale * load(weights + at));
}

// Rotary positions: element i and the one half a head further turn together.
template <class W> void rotate(float *head, const W *cosines, const W *sines, long size) {
    for (long i = 0, j = size / 2; j < size; i++, j++) {
        const float a = head[i], b = head[j];
        head[i] = a * get(cosines + i) - b * get(sines + i);
        head[j] = b * get(cosines + j) + a * get(sines + j);
    }
}

template <class W, class KV> class Step {
  public:
    Step(const Layer &layer, const Rows &rows, const W *cosines, const W *sines, const W *in, W *out)
        : layer(layer), rows(rows), cosines(cosines), sines(sines), in(in), out(out), size(layer.size),
          hidden(layer.o.outputs), inner(layer.gate.outputs), attended(layer.q.outputs),
          mixed(layer.q.outputs + layer.k.outputs + layer.v.outputs), shared(layer.heads / layer.kv_heads),
          part((size + 2 + 15) / 16 * 16) {
        first_span[0] = 0;
        for (long row = 0; row < rows.count; row++)
            first_span[row + 1] = first_span[row] + up(rows.lengths[row], SPAN);
        Memory counted{nullptr};
        place(counted);
        Memory memory{scratch(counted.used)};
        place(memory);
    }

    void run() {
#pragma omp parallel
        {
            const Member member;
            norm(member, in, layer.input_norm);
#pragma omp barrier
            mix(member);
#pragma omp barrier
            keep(member);
#pragma omp barrier
            look(member);
#pragma omp barrier
            unite(member);
#pragma omp barrier
            leave(member);
            if (layer.gate.weights != nullptr) {
#pragma omp barrier
                norm(member, middle, layer.middle_norm);
#pragma omp barrier
                widen(member);
#pragma omp barrier
                narrow(member);
            }
        }
    }

  private:
    typedef typename OperandOf<W>::Type Operand;

    const Layer &layer;
    const Rows &rows;
    const W *cosines, *sines, *in;
    W *out;
    const long size, hidden, inner, attended, mixed, shared;
    const long part;                    // floats of a Part
    long first_span[ROWS_MAX + 1];      // rows' spans of tokens, counted through

    float *normal, *mixture, *queries, *parts, *scores, *seen, *middle, *gates, *ups, *wide, *sums;

    void place(Memory &memory) {
        normal = memory.take(Operand::floats(rows.count, hidden));
        mixture = memory.take(rows.count * mixed);
        queries = memory.take(rows.count * attended);
        parts = memory.take(first_span[rows.count] * layer.heads * part);
        scores = memory.take(omp_get_max_threads() * shared * SPAN);
        seen = memory.take(Operand::floats(rows.count, attended));
        middle = memory.take(rows.count * hidden);
        gates = memory.take(rows.count * inner);
        ups = memory.take(rows.count * inner);
        wide = memory.take(Operand::floats(rows.count, inner));
        sums = memory.take(rows.count * hidden);
    }

    Operand panel(float *data, long columns) const { return {data, columns, rows.count}; }

    template <class In> void norm(Member member, const In *from, const void *weights) {
        const Operand to = panel(normal, hidden);
        const Share share = member.of(rows.count);
        for (long row = share.begin; row < share.end; row++)
            normalise(from + row * hidden, static_cast<const W *>(weights), hidden, layer.epsilon,
                      [&](long at, Vector value) { to.put(row, at, value); });
    }

    // Queries, keys and values side by side.
    void mix(Member member) {
        const Share share = member.of(mixed, UNIT);
        long begin = 0;
        for (const Matrix *matrix : {&layer.q, &layer.k, &layer.v}) {
            Share mine = share;
            mine.begin = mine.begin > begin ? mine.begin - begin : 0;
            mine.end = least(mine.end - begin, matrix->outputs);
            if (mine.begin < mine.end)
                project<W>(*matrix, mine, panel(normal, hidden), mixture + begin, mixed);
            begin += matrix->outputs;
        }
    }

    // Keys and values into the pool, queries into panels of the heads that share a key.
    void keep(Member member) {
        const long units = layer.heads + 2 * layer.kv_heads;
        const Share share = member.of(rows.count * units);
        for (long i = share.begin; i < share.end; i++) {
            const long row = i / units, unit = i % units;
            float *head = mixture + row * mixed + unit * size;
            if (unit < layer.heads) {
                place_head(head, layer.q_norm, row);
                const Panel to{queries + row * attended + unit / shared * shared * size, size, shared};
                for (long at = 0; at < size; at += LANES)
                    to.put(unit % shared, at, load(head + at) * layer.scaling);
            } else if (unit < layer.heads + layer.kv_heads) {
                place_head(head, layer.k_norm, row);
                keep_head(head, layer.keys, unit - layer.heads, row);
            } else {
                keep_head(head, layer.values, unit - layer.heads - layer.kv_heads, row);
            }
        }
    }

    void place_head(float *head, const void *weights, long row) {
        if (weights != nullptr)
            normalise(head, static_cast<const W *>(weights), size, layer.epsilon,
                      [=](long at, Vector value) { store(head + at, value); });
        rotate(head, cosines + row * size, sines + row * size, size);
    }

    void keep_head(const float *head, void *pool, long kv_head, long row) {
        KV *to = static_cast<KV *>(pool) + (kv_head * layer.pool_tokens + rows.slots[row]) * size;
        for (long at = 0; at < size; at += LANES)
            store(to + at, load(head + at));
    }

    void look(Member member) {
        const Share share = member.of(first_span[rows.count] * layer.kv_heads);
        long row = 0;
        for (long i = share.begin; i < share.end; i++) {
            const long span = i / layer.kv_heads, kv_head = i % layer.kv_heads;
            while (span >= first_span[row + 1])
                row++;
            const long token = (span - first_span[row]) * SPAN;
            const long at = (kv_head * layer.pool_tokens + rows.starts[row] + token) * size;
            attend(static_cast<const KV *>(layer.keys) + at, static_cast<const KV *>(layer.values) + at,
                   least(SPAN, rows.lengths[row] - token),
                   Panel{queries + row * attended + kv_head * shared * size, size, shared},
                   scores + member.thread * shared * SPAN, parts + (span * layer.heads + kv_head * shared) * part, part);
        }
    }

    void unite(Member member) {
        const Operand to = panel(seen, attended);
        const Share share = member.of(rows.count * layer.heads);
        for (long i = share.begin; i < share.end; i++) {
            const long row = i / layer.heads, head = i % layer.heads;
            const Part whole{parts + (first_span[row] * layer.heads + head) * part, size};
            join(whole, first_span[row + 1] - first_span[row], layer.heads * part);
            for (long at = 0; at < size; at += LANES)
                to.put(row, head * size + at, load(whole.values + at));
        }
    }

    void leave(Member member) {
        const Share share = member.of(hidden, UNIT);
        project<W>(layer.o, share, panel(seen, attended), middle, hidden);
        for (long row = 0; row < rows.count; row++)
            for (long at = row * hidden + share.begin; at < row * hidden + share.end; at += LANES)
                store(middle + at, load(middle + at) + load(in + at));
        if (layer.gate.weights == nullptr)
            for (long row = 0; row < rows.count; row++)
                for (long at = row * hidden + share.begin; at < row * hidden + share.end; at += LANES)
                    store(out + at, load(middle + at));
    }

    // SwiGLU: gate / (1 + e^-gate) x up.
    void widen(Member member) {
        const Share share = member.of(inner, UNIT);
        project<W>(layer.gate, share, panel(normal, hidden), gates, inner);
        project<W>(layer.up, share, panel(normal, hidden), ups, inner);
        const Operand to = panel(wide, inner);
        for (long row = 0; row < rows.count; row++)
            for (long at = share.begin; at < share.end; at += LANES) {
                const Vector gate = load(gates + row * inner + at);
                to.put(row, at, gate / (exponential(-gate) + 1.0f) * load(ups + row * inner + at));
            }
    }

    void narrow(Member member) {
        const Share share = member.of(hidden, UNIT);
        project<W>(layer.down, share, panel(wide, inner), sums, hidden);
        for (long row = 0; row < rows.count; row++)
            for (long at = row * hidden + share.begin; at < row * hidden + share.end; at += LANES)
                store(out + at, load(sums + at) + load(middle + at));
    }
};

template <class W> void linear(const Matrix &matrix, const W *in, float *out, long rows) {
    typedef typename OperandOf<W>::Type Operand;
    const Operand panel{scratch(Operand::floats(rows, matrix.inputs)), matrix.inputs, rows};
#pragma omp parallel
    {
        const Member member;
        const Share mine = member.of(rows);
        for (long row = mine.begin; row < mine.end; row++)
            for (long at = 0; at < matrix.inputs; at += LANES)
                panel.put(row, at, load(in + row * matrix.inputs + at));
#pragma omp barrier
        project<W>(matrix, member.of(matrix.outputs, UNIT), panel, out, matrix.outputs);
    }
}

template <class W>
void layer_of(const Layer &layer, const Rows &rows, const void *cosines, const void *sines, const void *in, void *out) {
    const W *angles[2] = {static_cast<const W *>(cosines), static_cast<const W *>(sines)};
    if (layer.half_cache)
        Step<W, bfloat16>(layer, rows, angles[0], angles[1], static_cast<const W *>(in), static_cast<W *>(out)).run();
    else
        Step<W, float>(layer, rows, angles[0], angles[1], static_cast<const W *>(in), static_cast<W *>(out)).run();
}

void any_linear(const Matrix &matrix, bool half, const void *in, float *out, long rows) {
    if (half)
        linear(matrix, static_cast<const bfloat16 *>(in), out, rows);
    else
        linear(matrix, static_cast<const float *>(in), out, rows);
}

void any_layer(const Layer &layer, const Rows &rows, const void *cosines, const void *sines, const void *in,
               void *out) {
    (layer.half_weights ? layer_of<bfloat16> : layer_of<float>)(layer, rows, cosines, sines, in, out);
}

#ifdef AMX
bool gemm(const Matrix &matrix, const float *in, float *out, long rows, Activation activation) {
    return Gemm(matrix, in, out, rows, activation).run();
}

bool flash(const Heads &heads) { return Flash(heads).run(); }
#else
constexpr bool (*gemm)(const Matrix &, const float *, float *, long, Activation) = nullptr;
constexpr bool (*flash)(const Heads &) = nullptr;
#endif

}

extern const Kernels KERNELS = {any_linear, any_layer, experts, gemm, flash};

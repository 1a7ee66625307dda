// A mixture of experts for few rows: the matrices of each expert are read once, for all rows that chose it, and those of
// no other.
#pragma once

#include "operands.h"

namespace {

template <class W> class Mixture {
  public:
    Mixture(const Experts &experts, const Choices &choices, const W *in, float *out)
        : experts(experts), choices(choices), in(in), out(out), hidden(experts.hidden), inner(experts.inner) {
        Memory counted{nullptr};
        place(counted);
        Memory memory{scratch(counted.used)};
        place(memory);
    }

    void run() {
#pragma omp parallel
        {
            const Member member;
            gather(member);
#pragma omp barrier
            widen(member);
#pragma omp barrier
            narrow(member);
#pragma omp barrier
            sum(member);
        }
    }

  private:
    typedef typename OperandOf<W>::Type Operand;

    const Experts &experts;
    const Choices &choices;
    const W *in;
    float *out;
    const long hidden, inner;
    float *gates, *ups, *sums;

    void place(Memory &memory) {
        for (long i = 0; i < choices.group_count; i++) {
            Group &group = choices.groups[i];
            group.normal = memory.take(Operand::floats(group.count, hidden));
            group.wide = memory.take(Operand::floats(group.count, inner));
        }
        gates = memory.take(choices.pair_count * inner);
        ups = memory.take(choices.pair_count * inner);
        sums = memory.take(choices.pair_count * hidden);
    }

    void gather(Member member) {
        const Share share = member.of(choices.pair_count);
        for (long i = share.begin; i < share.end; i++) {
            const Group &group = choices.groups[choices.pairs[i].group];
            const Operand to{group.normal, hidden, group.count};
            for (long at = 0; at < hidden; at += LANES)
                to.put(i - group.first, at, load(in + choices.pairs[i].row * hidden + at));
        }
    }

    // This thread's part of the outputs of all groups: call(group, its share of the outputs).
    template <class Call> void split(Member member, long outputs, Call call) const {
        const long units = up(outputs, UNIT);
        const Share share = member.of(choices.group_count * units);
        for (long i = share.begin; i < share.end;) {
            const Group &group = choices.groups[i / units];
            const long unit = i % units, end = least(units, unit + share.end - i);
            Share mine = share;
            mine.begin = unit * UNIT;
            mine.end = least(outputs, end * UNIT);
            call(group, mine);
            i += end - unit;
        }
    }

    const W *matrix(const void *all, long size, long index) const { return static_cast<const W *>(all) + index * size; }

    // SwiGLU, as in a dense layer.
    void widen(Member member) {
        split(member, inner, [&](const Group &group, Share share) {
            const Operand from{group.normal, hidden, group.count}, to{group.wide, inner, group.count};
            float *gate = gates + group.first * inner, *up = ups + group.first * inner;
            const long size = inner * hidden;
            project<W>({matrix(experts.gate_up, size, 2 * group.expert), nullptr, inner, hidden}, share, from, gate,
                       inner);
            project<W>({matrix(experts.gate_up, size, 2 * group.expert + 1), nullptr, inner, hidden}, share, from, up,
                       inner);
            for (long row = 0; row < group.count; row++)
                for (long at = share.begin; at < share.end; at += LANES) {
                    const Vector value = load(gate + row * inner + at);
                    to.put(row, at, value / (exponential(-value) + 1.0f) * load(up + row * inner + at));
                }
        });
    }

    void narrow(Member member) {
        split(member, hidden, [&](const Group &group, Share share) {
            const Operand from{group.wide, inner, group.count};
            project<W>({matrix(experts.down, inner * hidden, group.expert), nullptr, hidden, inner}, share, from,
                       sums + group.first * hidden, hidden);
        });
    }

    // In the order of experts, whatever other rows chose.
    void sum(Member member) {
        const Share share = member.of(choices.rows);
        for (long row = share.begin; row < share.end; row++)
            for (long at = 0; at < hidden; at += LANES) {
                Vector total = {};
                for (long i = 0; i < choices.each; i++) {
                    const long pair = choices.of_row[row * choices.each + i];
                    if (pair < 0)
                        break;
                    total += load(sums + pair * hidden + at) * choices.pairs[pair].weight;
                }
                store(out + row * hidden + at, total);
            }
    }
};

void experts(const Experts &all, const Choices &choices, const void *in, float *out) {
    if (all.half_weights)
        Mixture<bfloat16>(all, choices, static_cast<const bfloat16 *>(in), out).run();
    else
        Mixture<float>(all, choices, static_cast<const float *>(in), out).run();
}

}

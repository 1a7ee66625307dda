// Attention within segments of rows, in float32 by AMX: keys and values pass block by block under a running softmax
// (FlashAttention, arXiv 2205.14135).
#pragma once

#include "gemm.h"

namespace {

constexpr long QUERIES = 4;             // blocks of EDGE queries, while keys and values pass
constexpr long KEYS = 2;                // blocks of EDGE keys between two looks at the largest score
constexpr long HELD_FLOATS = 4 << 20;   // of operands of some heads at a time, and up to one head more

constexpr long NEAR_FLOATS = 384 << 10;     // of a segment's operands that stay in the second-level cache

class Flash {
  public:
    explicit Flash(const Heads &heads)
        : heads(heads), depth(up(heads.size, EDGE)), pairs((heads.size + 15) / EDGE), lone(heads.size > pairs * EDGE) {
        for (long i = 0; i < heads.segments; i++) {
            blocks += up(heads.lengths[i], EDGE);
            longest = heads.lengths[i] > longest ? heads.lengths[i] : longest;
        }
    }

    // Whether there was memory for it.
    bool run() const {
        const long threads = omp_get_max_threads(), own = Work::floats(*this), one = up(longest, EDGE) * block_size();
        // A thread's own segments and heads where they are small and enough; otherwise all work on the same heads.
        const bool apart = one <= NEAR_FLOATS && heads.count * heads.segments >= threads;
        const long all = blocks * block_size(), together = least(heads.count, HELD_FLOATS / all + 1);
        float *memory = large_scratch(apart ? threads * (own + one) : threads * own + together * all);
        if (memory == nullptr)
            return false;
#pragma omp parallel
        {
            const Member member;
            const Tiles tiles(whole_tiles());
            const Work work(*this, memory + member.thread * own);
            if (apart)
                alone(member, work, memory + threads * own + member.thread * one);
            else
                for (long head = 0; head < heads.count; head += together)
                    jointly(member, work, head, least(heads.count, head + together), memory + threads * own);
        }
        return true;
    }

  private:
    static constexpr long LONE_STEP = PARTS * TILE_HALVES;
    struct Work;

    // Rows that attend to one another in a head, and where their operands lie: keys, queries and values.
    struct Segment {
        long head, start, length, blocks;
        bfloat16 *operands;
    };

    const Heads &heads;
    const long depth;               // steps of a score
    const long pairs, lone;         // of 16 elements of a value: two tiles beside one another, and one that is left
    long blocks = 0, longest = 0;   // of EDGE rows in all segments; rows of a segment

    // Floats of a block's operands in a head.
    long block_size() const { return (2 * depth * STEP + pairs * STEP + lone * LONE_STEP) / 2; }

    // What is done for each `unit` blocks of each segment of a head: work(segment, row); the operands lie in order.
    template <class Do> void each(long head, float *operands, long unit, Do work) const {
        for (long i = 0, start = 0; i < heads.segments; start += heads.lengths[i++]) {
            const Segment segment{head, start, heads.lengths[i], up(heads.lengths[i], EDGE),
                                  reinterpret_cast<bfloat16 *>(operands)};
            for (long row = 0; row < segment.length; row += unit * EDGE)
                work(segment, row);
            operands += segment.blocks * block_size();
        }
    }

    void alone(Member member, const Work &work, float *operands) const {
        long count = 0;
        for (long head = 0; head < heads.count; head++)
            each(head, operands, longest, [&](Segment segment, long) {
                if (count++ % member.threads != member.thread)
                    return;
                segment.operands = reinterpret_cast<bfloat16 *>(operands);
                for (long row = 0; row < segment.length; row += EDGE)
                    put(segment, row);
                for (long row = 0; row < segment.length; row += QUERIES * EDGE)
                    work.attend(segment, row);
            });
    }

    void jointly(Member member, const Work &work, long first, long end, float *operands) const {
        const auto share = [&](long unit, auto &&what) {
            long count = 0;
            for (long head = first; head < end; head++)
                each(head, operands + (head - first) * blocks * block_size(), unit,
                     [&](const Segment &segment, long row) {
                         if (count++ % member.threads == member.thread)
                             what(segment, row);
                     });
        };
        share(1, [&](const Segment &segment, long row) { put(segment, row); });
#pragma omp barrier
        share(QUERIES, [&](const Segment &segment, long row) { work.attend(segment, row); });
#pragma omp barrier
    }

    // A block's queries to the right, its keys and values to the left.  Values lie by element: there keys are what is
    // summed over.
    void put(const Segment &segment, long first) const {
        const long row = segment.start + first, count = least(EDGE, segment.length - first), block = first / EDGE;
        const long at = segment.head * heads.size;
        put_right(heads.queries + row * heads.query_stride + at, heads.query_stride, count, heads.size, heads.scaling,
                  queries(segment, block));
        put_left(heads.keys + row * heads.key_stride + at, heads.key_stride, count, heads.size, keys(segment, block));
        const float *from = heads.values + row * heads.value_stride + at;
        for (long element = 0; element < heads.size; element += 16) {
            const __mmask16 there = lanes(heads.size - element);
            __m512i lines[2][16] = {};
            for (long key = 0; key < count; key++)
                lines[key / 16][key % 16] = _mm512_castps_si512(
                    _mm512_maskz_loadu_ps(there, from + key * heads.value_stride + element));
            transpose(lines[0]);
            transpose(lines[1]);
            const long pair = element / EDGE, part_size = pair < pairs ? 2 * TILE_HALVES : TILE_HALVES;
            bfloat16 *to = values(segment, pair, block) + element % EDGE / 16 * TILE_HALVES;
            for (long line = 0; line < 16; line++) {
                __m512i parts[PARTS];
                split(_mm512_castsi512_ps(lines[0][line]), _mm512_castsi512_ps(lines[1][line]), parts);
                for (int p = 0; p < PARTS; p++)
                    _mm512_store_si512(to + p * part_size + line * EDGE, parts[p]);
            }
        }
    }

    bfloat16 *keys(const Segment &segment, long block) const { return segment.operands + block * depth * STEP; }
    bfloat16 *queries(const Segment &segment, long block) const { return keys(segment, segment.blocks + block); }

    // 32 elements of a block's values, or the last 16; the next block's follow.
    bfloat16 *values(const Segment &segment, long pair, long block) const {
        return keys(segment, 2 * segment.blocks) + pair * segment.blocks * STEP
               + block * (pair < pairs ? STEP : LONE_STEP);
    }

    // Floats of a block of queries' sums.
    long sums_size() const { return (pairs + lone) * BLOCK_SUMS; }

    // Sums times a factor for each query.
    void scale(float *sums, const Vector *factors) const {
        for (long tile = 0; tile < 4 * pairs + 2 * lone; tile++, sums += 256)
            for (long at = 0; at < 256; at += LANES)
                store(sums + at, load(sums + at) * factors[tile % 2]);
    }

    // What becomes of a block of queries' scores of some keys: weights, while the tiles compute other products.
    struct Weighing {
        float *scores;              // [key block, left tile, half of the queries, key, query]
        bfloat16 *weights;          // to the right
        long pairs;                 // of keys, for each half
        Vector largest[2], shrink[2], sums[2] = {};
        bool shrinks = false;       // whether what was summed before has to
        long done = 0;

        float *line(long key, long half) const { return scores + key / 16 * 512 + half * 256 + key % 16 * LANES; }

        // Finds the largest scores of all keys so far, of which `most` has those before; `left` keys are there.
        void look(long blocks, long left, float *most, float *total) {
            pairs = blocks * EDGE / 2;
            for (long half = 0; half < 2; half++, most += LANES, total += LANES) {
                for (long key = left; key < blocks * EDGE; key++)
                    store(line(key, half), Vector{} - INFINITY);
                const __m512 before = load(most);
                __m512 high = before;
                for (long key = 0; key < blocks * EDGE; key++)
                    high = _mm512_max_ps(_mm512_load_ps(line(key, half)), high);
                largest[half] = high;
                shrink[half] = exponential(load(most) - largest[half]);
                shrinks = shrinks || _mm512_cmp_ps_mask(before, high, _CMP_NEQ_UQ) != 0;
                store(most, largest[half]);
                store(total, load(total) * shrink[half]);
            }
        }

        // The next two keys' weights, if any are left.
        void operator()() {
            if (done == 2 * pairs)
                return;
            const long half = done & 1, key = done++ & ~1L;
            const Vector even = exponential(load(line(key, half)) - largest[half]);
            const Vector odd = exponential(load(line(key + 1, half)) - largest[half]);
            sums[half] += even + odd;
            __m512i parts[PARTS];
            split_pairs(even, odd, parts);
            bfloat16 *to = weights + key / EDGE * STEP + half * TILE_HALVES + key % EDGE / 2 * EDGE;
            for (int p = 0; p < PARTS; p++)
                _mm512_store_si512(to + p * 2 * TILE_HALVES, parts[p]);
        }

        void end(float *total) {
            while (done < 2 * pairs)
                (*this)();
            for (long half = 0; half < 2; half++)
                store(total + half * LANES, load(total + half * LANES) + sums[half]);
        }
    };

    // A thread's own memory, and what it does there.
    struct Work {
        const Flash &flash;
        bfloat16 *weights[2];
        float *scores[2], *sums, *most, *total;

        static long floats(const Flash &flash) {
            return QUERIES * (flash.sums_size() + 2 * EDGE) + 2 * KEYS * (STEP / 2 + BLOCK_SUMS);
        }

        Work(const Flash &flash, float *memory) : flash(flash) {
            const auto take = [&](long count) { return (memory += count) - count; };
            for (int i = 0; i < 2; i++) {
                weights[i] = reinterpret_cast<bfloat16 *>(take(KEYS * STEP / 2));
                scores[i] = take(KEYS * BLOCK_SUMS);
            }
            sums = take(QUERIES * flash.sums_size());
            most = take(QUERIES * EDGE);
            total = take(QUERIES * EDGE);
        }

        // Blocks of queries take turns, so that a block's scores, another's weights and a third one's sums are made at
        // the same time.
        void attend(const Segment &segment, long row) const {
            const long count = least(QUERIES, segment.blocks - row / EDGE);
            for (long i = 0; i < count * EDGE; i += LANES) {
                store(most + i, Vector{} - INFINITY);
                store(total + i, Vector{});
            }
            const auto key_at = [&](long turn) { return turn / count * KEYS; };
            const auto keys_at = [&](long turn) { return least(KEYS, segment.blocks - key_at(turn)); };
            const auto score = [&](long turn, auto &&meanwhile) {
                for (long j = 0; j < keys_at(turn); j++)
                    multiply<2>(flash.keys(segment, key_at(turn) + j),
                                flash.queries(segment, row / EDGE + turn % count), flash.depth,
                                scores[turn % 2] + j * BLOCK_SUMS, true, [&] { meanwhile(); });
            };
            Weighing weighings[2];
            const auto add = [&](long turn, auto &&meanwhile) {
                float *of = sums + turn % count * flash.sums_size();
                const bool begin = turn < count;
                if (!begin && weighings[turn % 2].shrinks)
                    flash.scale(of, weighings[turn % 2].shrink);
                for (long pair = 0; pair < flash.pairs; pair++)
                    multiply<2>(flash.values(segment, pair, key_at(turn)), weights[turn % 2], keys_at(turn),
                                of + pair * BLOCK_SUMS, begin, [&] { meanwhile(); });
                if (flash.lone)
                    multiply<1>(flash.values(segment, flash.pairs, key_at(turn)), weights[turn % 2], keys_at(turn),
                                of + flash.pairs * BLOCK_SUMS, begin, [&] { meanwhile(); });
            };
            const long turns = up(segment.blocks, KEYS) * count;
            score(0, [] {});
            for (long turn = 0; turn < turns; turn++) {
                const long i = turn % count * EDGE;
                Weighing &weighing = weighings[turn % 2];
                weighing = {scores[turn % 2], weights[turn % 2]};
                weighing.look(keys_at(turn), segment.length - key_at(turn) * EDGE, most + i, total + i);
                if (turn + 1 < turns)
                    score(turn + 1, weighing);
                if (turn > 0)
                    add(turn - 1, weighing);
                weighing.end(total + i);
            }
            add(turns - 1, [] {});
            for (long i = 0; i < count; i++)
                finish(segment, row, i);
        }

        // A block of queries' means to their place.
        void finish(const Segment &segment, long first, long i) const {
            const Heads &heads = flash.heads;
            const long width = heads.count * heads.size, row = first + i * EDGE;
            for (long half = 0; half < 2; half++) {
                const Vector share = 1.0f / load(total + i * EDGE + half * LANES);
                float *to = heads.out + (segment.start + row + half * 16) * width + segment.head * heads.size;
                for (long element = 0; element < heads.size; element += 16) {
                    const float *tile = sums + i * flash.sums_size() + (element / 16 * 2 + half) * 256;
                    const __mmask16 there = lanes(heads.size - element);
                    __m512i lines[16];
                    for (long at = 0; at < 16; at++)
                        lines[at] = _mm512_castps_si512(load(tile + at * LANES) * share);
                    transpose(lines);
                    for (long at = 0; at < least(16, segment.length - row - half * 16); at++)
                        _mm512_mask_storeu_ps(to + at * width + element, there, _mm512_castsi512_ps(lines[at]));
                }
            }
        }
    };
};

}

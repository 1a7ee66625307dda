// Which rows chose which expert.  Compiled for any CPU: templates of the standard library that were compiled for one set
// of instructions would be linked into the code of all others.

#include <vector>

#include "library.h"

void mix_experts(const Kernels &kernels, const Experts &experts, const long *chosen, const float *weights, long rows,
                 long each, const void *in, float *out) {
    const auto known = [&](long i) { return chosen[i] >= 0 && chosen[i] < experts.count; };
    std::vector<long> counts(experts.count, 0), group_of(experts.count), of_row(rows * each, -1), found(rows, 0);
    for (long i = 0; i < rows * each; i++)
        if (known(i))
            counts[chosen[i]]++;
    std::vector<Group> groups;
    long first = 0;
    for (long expert = 0; expert < experts.count; expert++)
        if (counts[expert]) {
            group_of[expert] = groups.size();
            groups.push_back({expert, first, 0, nullptr, nullptr});
            first += counts[expert];
        }
    std::vector<Pair> pairs(first);
    for (long i = 0; i < rows * each; i++)
        if (known(i)) {
            Group &group = groups[group_of[chosen[i]]];
            pairs[group.first + group.count++] = {i / each, group_of[chosen[i]], weights[i]};
        }
    for (long i = 0; i < first; i++)
        of_row[pairs[i].row * each + found[pairs[i].row]++] = i;
    const Choices choices = {rows, each, long(groups.size()), first, groups.data(), pairs.data(), of_row.data()};
    kernels.experts(experts, choices, in, out);
}

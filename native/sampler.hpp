// From a row of logits to a token: penalties, bias, mask, temperature, top-k, top-p, min-p, and logprobs of the raw
// distribution. The semantics are those of runtime/sampling.py, its twin in NumPy.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.hpp"
#include "simd.hpp"

namespace tricorn::TRICORN_ISA {

// A number in [0, 1) that depends on (seed, position) alone: two rounds of the splitmix64 finalizer (Steele, Lea, Flood
// 2014).
inline float uniform(uint64_t seed, int32_t position) {
    auto mix = [](uint64_t z) {
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    };
    uint64_t z = mix(seed + 0x9E3779B97F4A7C15ull * (static_cast<uint64_t>(static_cast<int64_t>(position)) + 1));
    z = mix(z + (seed << 32 | seed >> 32));
    return static_cast<float>(z >> 40) * 0x1p-24f;
}

struct Candidate {
    float value;
    int32_t id;
};
struct Better {  // the higher value, then the lower id
    bool operator()(Candidate a, Candidate b) const { return a.value > b.value || (a.value == b.value && a.id < b.id); }
};

inline F tail_load(const float* p, int count, F otherwise) {
    if (count >= lanes) return load(p);
    float values[lanes];
    store(values, otherwise);
    std::memcpy(values, p, sizeof(float) * static_cast<size_t>(count));
    return load(values);
}

inline float largest_of(const float* x, int n) {
    F m = set(-INFINITY);
    for (int i = 0; i < n; i += lanes) m = max(m, tail_load(x + i, n - i, set(-INFINITY)));
    return max_lanes(m);
}

inline int32_t first_equal(const float* x, int n, float value) {
    for (int i = 0; i < n; ++i)
        if (x[i] == value) return i;
    return -1;
}

inline double log_sum_exp(const float* x, int n, float top) {
    double total = 0;
    for (int i = 0; i < n; i += 1024) {  // float lanes within a stretch, double across
        F sum = zero();
        for (int j = i; j < least(n, i + 1024); j += lanes)
            sum = sum + select(between(0, n - j), exp(tail_load(x + j, n - j, set(-INFINITY)) - set(top)), zero());
        total += static_cast<double>(sum_lanes(sum));
    }
    return static_cast<double>(top) + std::log(total);
}

inline void report(const float* logits, int n, int32_t id, int wanted, Sampled& out) {
    const float top = largest_of(logits, n);
    const double normalizer = log_sum_exp(logits, n, top);
    out.logprob = static_cast<float>(static_cast<double>(logits[id]) - normalizer);
    int rank = 1;
    for (int i = 0; i < n; ++i) rank += logits[i] > logits[id] || (logits[i] == logits[id] && i < id);
    out.rank = rank;
    if (wanted == 0) return;
    std::vector<Candidate> best;  // a heap whose front is the worst of the best
    for (int i = 0; i < n; ++i) {
        Candidate c{logits[i], i};
        if (static_cast<int>(best.size()) < wanted) {
            best.push_back(c);
            std::push_heap(best.begin(), best.end(), Better());
        } else if (Better()(c, best.front())) {
            std::pop_heap(best.begin(), best.end(), Better());
            best.back() = c;
            std::push_heap(best.begin(), best.end(), Better());
        }
    }
    std::sort(best.begin(), best.end(), Better());
    for (int i = 0; i < static_cast<int>(best.size()); ++i) {
        out.top_ids[i] = best[static_cast<size_t>(i)].id;
        out.top_logprobs[i] = static_cast<float>(static_cast<double>(best[static_cast<size_t>(i)].value) - normalizer);
    }
}

inline void penalize(const SampleRow& row, float* x, std::vector<int32_t>& counts) {
    // counts[id]: bit 30 marks "seen", the low bits count occurrences in the output; zero again at the end.
    constexpr int32_t seen = 1 << 30;
    for (int i = 0; i < row.history_count; ++i) {
        int32_t& c = counts[static_cast<size_t>(row.history[i])];
        c |= seen;
        if (i >= row.history_prompt) ++c;
    }
    for (int i = 0; i < row.history_count; ++i) {
        int32_t& c = counts[static_cast<size_t>(row.history[i])];
        if (c == 0) continue;  // done already
        const int32_t in_output = c & ~seen;
        float& l = x[row.history[i]];
        l = l > 0 ? l / row.repetition : l * row.repetition;
        l = l - row.frequency * static_cast<float>(in_output);
        if (in_output > 0) l = l - row.presence;
        c = 0;
    }
}

// Draws from weights in the given order: the first whose running sum exceeds u times the total.
template <class Weight>
int draw(int n, float u, Weight weight) {
    double total = 0;
    for (int i = 0; i < n; ++i) total += static_cast<double>(weight(i));
    const double target = static_cast<double>(u) * total;
    double running = 0;
    int last = 0;
    for (int i = 0; i < n; ++i) {
        const double w = static_cast<double>(weight(i));
        if (w <= 0) continue;
        running += w;
        last = i;
        if (running > target) return i;
    }
    return last;
}

inline int32_t choose(const SampleRow& row, const float* x, int n, std::vector<float>& weights,
                      std::vector<Candidate>& kept) {
    const float top = largest_of(x, n);
    if (!(top > -INFINITY)) return -1;  // nothing is allowed
    if (row.temperature <= 1e-5f || row.top_k == 1) return first_equal(x, n, top);

    const float u = uniform(row.seed, row.position);
    weights.resize(static_cast<size_t>(n) + lanes);
    const F inverse = set(1.0f / row.temperature), subtract = set(top);
    for (int i = 0; i < n; i += lanes) {
        const F distance = (tail_load(x + i, n - i, set(-INFINITY)) - subtract) * inverse;
        // e^-87 is the floor of exp: what lies below it has no chance at all
        F w = exp(distance) - set(1.7e-38f);
        store(weights.data() + i, max(w, zero()));
    }
    if (top == x[0]) weights[0] = greatest(weights[0], 1.0f);
    const bool cuts = row.top_k > 0 && row.top_k < n;
    const float floor = row.min_p;  // the largest weight is 1
    if (!cuts && row.top_p >= 1)
        return draw(n, u, [&](int i) {
            const float w = weights[static_cast<size_t>(i)];
            return w >= floor ? w : 0.0f;
        });

    kept.clear();
    for (int i = 0; i < n; ++i)
        if (weights[static_cast<size_t>(i)] > 0) kept.push_back({x[i], i});
    auto weight = [&](size_t i) { return weights[static_cast<size_t>(kept[i].id)]; };
    if (cuts) {
        const size_t most = least(kept.size(), static_cast<size_t>(row.top_k));
        std::nth_element(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(most), kept.end(), Better());
        kept.resize(most);
        std::sort(kept.begin(), kept.end(), Better());
    }
    double total = 0;
    for (size_t i = 0; i < kept.size(); ++i) total += static_cast<double>(weight(i));
    size_t count = kept.size();
    if (row.top_p < 1) {  // sort only as far as the mass asks for
        double cumulative = 0;
        size_t sorted = cuts ? kept.size() : 0;
        count = 0;
        while (count < kept.size()) {
            if (count == sorted) {
                const size_t until = least(kept.size(), sorted == 0 ? size_t{64} : sorted * 4);
                std::partial_sort(kept.begin() + static_cast<std::ptrdiff_t>(sorted),
                                  kept.begin() + static_cast<std::ptrdiff_t>(until), kept.end(), Better());
                sorted = until;
            }
            cumulative += static_cast<double>(weight(count++));
            if (cumulative >= static_cast<double>(row.top_p) * total) break;
        }
    }
    while (count > 1 && weight(count - 1) < floor) --count;
    return kept[static_cast<size_t>(
                    draw(static_cast<int>(count), u, [&](int i) { return weight(static_cast<size_t>(i)); }))]
        .id;
}

Sampled sample(const SampleRow& row, const float* logits, int vocabulary, int32_t* top_ids, float* top_logprobs) {
    static thread_local std::vector<float> work, weights;
    static thread_local std::vector<int32_t> counts;
    static thread_local std::vector<Candidate> kept;

    Sampled out{row.target, 0.0f, 0, top_ids, top_logprobs};
    if (row.target < 0) {
        const float* x = logits;
        if (row.history_count > 0 || row.bias_count > 0 || row.mask) {
            work.assign(logits, logits + vocabulary);
            if (row.history_count > 0) {
                counts.resize(static_cast<size_t>(vocabulary));
                penalize(row, work.data(), counts);
            }
            for (int i = 0; i < row.bias_count; ++i) work[static_cast<size_t>(row.bias_ids[i])] += row.bias_values[i];
            if (row.mask)
                for (int i = 0; i < vocabulary; ++i)
                    if (!(row.mask[i / 32] >> (i % 32) & 1)) work[static_cast<size_t>(i)] = -INFINITY;
            x = work.data();
        }
        out.id = choose(row, x, vocabulary, weights, kept);
    }
    if (row.logprobs >= 0 && out.id >= 0) report(logits, vocabulary, out.id, row.logprobs, out);
    return out;
}

}  // namespace tricorn::TRICORN_ISA

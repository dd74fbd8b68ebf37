#include "machine.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <numeric>

#include "executor.hpp"
#include "pool.hpp"

namespace tricorn {

namespace {

// Best of several rounds, in units per second: `work` does its part on every member and returns the units done.
double best_rate(Pool& pool, const std::function<double(int)>& work) {
    double best = 0;
    std::vector<double> done(static_cast<size_t>(pool.size()));
    for (int round = 0; round < 7; ++round) {
        const auto begin = std::chrono::steady_clock::now();
        pool.run([&](int member) { done[static_cast<size_t>(member)] = work(member); });
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        best = std::max(best, std::accumulate(done.begin(), done.end(), 0.0) / seconds);
    }
    return best;
}

std::vector<double> measure(const Kernels& kernels, int threads) {
    Pool pool(threads);
    pin(0, threads);
    constexpr size_t bytes = size_t{256} << 20;  // of each thread: far beyond the caches
    Memory memory(bytes * static_cast<size_t>(threads));
    const auto part = [&](int member) { return memory.data() + bytes * static_cast<size_t>(member); };
    pool.run([&](int member) { std::fill_n(part(member), bytes, uint8_t{1}); });
    const double read = best_rate(pool, [&](int member) { return kernels.read(part(member), bytes); });
    const auto peak = [&](Peak kind) { return best_rate(pool, [&](int) { return kernels.peak(kind); }) / 1e9; };
    return {read / 1e9, peak(Peak::int8), peak(Peak::bf16), peak(Peak::fp32)};
}

}  // namespace

std::vector<double> measure_machine(const Kernels& kernels, int threads) {
    std::vector<double> rates;
    std::thread([&] { rates = measure(kernels, threads); }).join();  // in a thread of its own, since it is pinned
    return rates;
}

}  // namespace tricorn

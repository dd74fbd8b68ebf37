// The peak rates of the arithmetic that kernels are made of: independent chains of one word each, nothing loaded.
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

namespace tricorn::TRICORN_ISA {

template <class T>
TRICORN_INLINE void keep(T& value) {  // the compiler must believe that somebody looks at it
    asm volatile("" : "+m"(value));
}

template <class Accumulator, class Next>
TRICORN_INLINE void chains(int repeats, Accumulator start, Next next) {
    constexpr int count = 12;
    Accumulator acc[count];
    for (auto& a : acc) a = start;
    for (int i = 0; i < repeats; ++i) {
#pragma GCC unroll 12
        for (auto& a : acc) a = next(a);
    }
    for (auto& a : acc) keep(a);
}

double read(const uint8_t* p, size_t bytes) {  // bytes read
    Q a = set_bytes(0), b = a, c = a, d = a;
    for (size_t i = 0; i + 256 <= bytes; i += 256) {
        prefetch(p + i + 4096);
        prefetch(p + i + 4096 + 64);
        prefetch(p + i + 4096 + 128);
        prefetch(p + i + 4096 + 192);
        a = a | load_bytes(p + i);
        b = b | load_bytes(p + i + 64);
        c = c | load_bytes(p + i + 128);
        d = d | load_bytes(p + i + 192);
    }
    a = a | b | c | d;
    keep(a);
    return static_cast<double>(bytes);
}

double peak(Peak kind) {  // operations done
    constexpr int repeats = 1'000'000;
    constexpr double words = 12.0 * repeats * lanes;
    switch (kind) {
        case Peak::int8: {
            Q weights = set_bytes(3);
            int8_t four[4] = {1, -1, 2, -2};
            keep(weights);
            chains(repeats, zero_int(), [&](I a) { return dot_bytes<false>(a, weights, four); });
            return words * 8;
        }
        case Peak::bf16: {
            alignas(64) uint16_t weights[2 * lanes] = {}, pair[2] = {};
            keep(weights);
            chains(repeats, zero(), [&](F a) { return dot_bf16(a, weights, pair); });
            return words * 4;
        }
        case Peak::fp32: {
            F x = set(0.5f);
            keep(x);
            chains(repeats, zero(), [&](F a) { return fma(a, x, x); });
            return words * 2;
        }
    }
    return 0;
}

}  // namespace tricorn::TRICORN_ISA

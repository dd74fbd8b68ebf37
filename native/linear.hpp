// Products of activations with packed weights.
//
// Sixteen output rows are interleaved, so one vector of weights feeds sixteen sums and no horizontal addition is
// needed. A weight is scale * q + offset with q an unsigned integer of 4, 5, 6 or 8 bits, so a group of 32 contributes
//     scale_w * scale_a * (q . a)  +  offset_w * scale_a * sum(a)
// where q . a is an exact integer: eight dot products of four bytes, and a ninth with the rest of the group's outlier.
// Groups are added in ascending order, whatever the tile: a sum depends on its own row alone.
#pragma once

#include <type_traits>

#include "kernels.hpp"
#include "simd.hpp"

namespace tricorn::TRICORN_ISA {

constexpr int steps = group / 4;      // dot products of four bytes in a group
constexpr int prefetch_bytes = 4096;  // how far ahead of a few rows' product: measured, into the second cache

TRICORN_INLINE size_t to_line(size_t bytes) {
    return (bytes + 63) / 64 * 64;
}

// Each form: where a block's planes lie, and how a group's weights become vectors q[8], a scale and an offset.
// The planes of a block, in order: scales, offsets, inner scales, inner offsets (padded to a cache line together), then
// the quants.

template <int bits, bool has_offset, int zero_point>
struct Simple {  // one float16 scale (and offset) per group
    static constexpr bool wide = bits == 8, halves = false;
    static constexpr int quant_bytes = 64 * bits;
    const uint8_t *scales, *offsets, *quants;

    TRICORN_INLINE Simple(const uint8_t* block, int columns) {
        size_t plane = size_t{2} * block_rows * static_cast<size_t>(columns / group);
        scales = block;
        offsets = block + plane;
        quants = block + to_line(has_offset ? 2 * plane : plane);
    }
    TRICORN_INLINE F scale(int g) const { return load_f16(reinterpret_cast<const uint16_t*>(scales) + block_rows * g); }
    TRICORN_INLINE F offset(int g, F s) const {
        if constexpr (has_offset)
            return load_f16(reinterpret_cast<const uint16_t*>(offsets) + block_rows * g);
        else
            return s * set(-zero_point);
    }
};

template <int bits, bool has_offset>
struct TwoLevel {  // K-quants: a float16 scale (and offset) per 256 times a small integer per group
    static constexpr bool wide = false, halves = false;
    static constexpr int quant_bytes = 64 * bits;
    const uint8_t *scales, *offsets, *inner_scales, *inner_offsets, *quants;

    TRICORN_INLINE TwoLevel(const uint8_t* block, int columns) {
        size_t groups = static_cast<size_t>(columns / group);
        scales = block;
        offsets = scales + 2 * block_rows * (groups / 8);
        inner_scales = offsets + 2 * block_rows * (groups / 8);
        inner_offsets = inner_scales + block_rows * groups;
        quants = block + to_line(static_cast<size_t>(inner_offsets - block) + block_rows * groups);
    }
    TRICORN_INLINE F scale(int g) const {
        F super = load_f16(reinterpret_cast<const uint16_t*>(scales) + block_rows * (g / 8));
        return super * to_float(load_u8(inner_scales + block_rows * g));
    }
    TRICORN_INLINE F offset(int g, F) const {  // the source subtracts its minimum
        F super = load_f16(reinterpret_cast<const uint16_t*>(offsets) + block_rows * (g / 8));
        return zero() - super * to_float(load_u8(inner_offsets + block_rows * g));
    }
};

struct HalfGroups {  // Q6_K: a float16 scale per 256 times a signed byte per 16, zero point 32
    static constexpr bool wide = false, halves = true;
    static constexpr int bits = 6, quant_bytes = 64 * bits;
    const uint8_t *scales, *inner_scales, *quants;

    TRICORN_INLINE HalfGroups(const uint8_t* block, int columns) {
        size_t groups = static_cast<size_t>(columns / group);
        scales = block;
        inner_scales = scales + 2 * block_rows * (groups / 8);
        quants = block + to_line(static_cast<size_t>(inner_scales - block) + 2 * block_rows * groups);
    }
    TRICORN_INLINE F scale(int g) const {
        return load_f16(reinterpret_cast<const uint16_t*>(scales) + block_rows * (g / 8));
    }
    TRICORN_INLINE I half_scale(int half) const { return load_s8(inner_scales + block_rows * half); }
};

template <int quant_bytes>
TRICORN_INLINE void unpack(const uint8_t* p, Q q[steps]) {
    if constexpr (quant_bytes == 64 * 8) {
        for (int s = 0; s < steps; ++s) q[s] = load_bytes(p + 64 * s);
    } else {
        Q low = set_bytes(15);
        for (int s = 0; s < 4; ++s) {
            Q both = load_bytes(p + 64 * s);
            q[s] = both & low;
            q[s + 4] = shift_right<4>(both) & low;
        }
        if constexpr (quant_bytes == 64 * 5) {
            Q high = load_bytes(p + 256), bit = set_bytes(16);
            q[0] = q[0] | (shift_right<-4>(high) & bit);
            q[1] = q[1] | (shift_right<-3>(high) & bit);
            q[2] = q[2] | (shift_right<-2>(high) & bit);
            q[3] = q[3] | (shift_right<-1>(high) & bit);
            q[4] = q[4] | (high & bit);
            q[5] = q[5] | (shift_right<1>(high) & bit);
            q[6] = q[6] | (shift_right<2>(high) & bit);
            q[7] = q[7] | (shift_right<3>(high) & bit);
        } else if constexpr (quant_bytes == 64 * 6) {
            Q two_bits = set_bytes(48);
            for (int plane = 0; plane < 2; ++plane) {
                Q high = load_bytes(p + 256 + 64 * plane);
                Q* four = q + 4 * plane;
                four[0] = four[0] | (shift_right<-4>(high) & two_bits);
                four[1] = four[1] | (shift_right<-2>(high) & two_bits);
                four[2] = four[2] | (high & two_bits);
                four[3] = four[3] | (shift_right<2>(high) & two_bits);
            }
        }
    }
}

// One column of a packed group, four times in each lane: the outlier's, for whom unpacking to memory would not pay.
template <int quant_bytes>
TRICORN_INLINE Q packed_column(const uint8_t* p, int quad, int byte) {
    if constexpr (quant_bytes == 64 * 8) return spread_byte(load_bytes(p + quad), byte);
    const int step = quad / 64;
    Q q = shift_right_by(spread_byte(load_bytes(p + quad % 256), byte), step / 4 * 4) & set_bytes(15);
    if constexpr (quant_bytes == 64 * 5)
        q = q | shift_right<-4>(shift_right_by(spread_byte(load_bytes(p + 256), byte), step) & set_bytes(1));
    if constexpr (quant_bytes == 64 * 6) {
        const Q plane = spread_byte(load_bytes(p + 256 + step / 4 * 64), byte);
        q = q | shift_right<-4>(shift_right_by(plane, step % 4 * 2) & set_bytes(3));
    }
    return q;
}

// The products of `tokens` rows with one block, to out[token][16]. The rows share a tile.
template <class W, int tokens>
void product_q8(const uint8_t* block, const Activations& in, int row, float* out) {
    constexpr bool few = tokens <= 4;  // memory is the limit then, and latency
    const int groups = in.columns / group;
    const W w(block, in.columns);
    const QuantizedGroup* a = in.quantized(row, 0);
    [[maybe_unused]] const size_t head = size_t(w.quants - block),
                                  head_part = head / size_t(groups);  // at most a line for each group
    [[maybe_unused]] const uint8_t* next_head =
        w.quants + size_t(W::quant_bytes) * size_t(groups);  // that of the block behind this one
    [[maybe_unused]] alignas(64)
        uint8_t quads[64 * steps];  // the group's vectors in memory, to pick the outliers' columns from

    F acc[tokens];
    for (int t = 0; t < tokens; ++t) acc[t] = zero();
    for (int g = 0; g < groups; ++g, a += tile_rows) {
        Q q[steps];
        const uint8_t* quants = w.quants + size_t(W::quant_bytes) * size_t(g);
        unpack<W::quant_bytes>(quants, q);
        if constexpr (few) {
            prefetch(next_head + head_part * size_t(g));
            for (int line = 0; line < W::quant_bytes; line += 64) prefetch(quants + prefetch_bytes + line);
        } else {
            for (int s = 0; s < steps; ++s) store_bytes(quads + 64 * s, q[s]);
        }
        auto outlier_column = [&](const QuantizedGroup& of) {
            if constexpr (few) return packed_column<W::quant_bytes>(quants, of.column_quad, of.column_byte);
            return spread_byte(load_bytes(quads + of.column_quad), of.column_byte);
        };
        const F scale = w.scale(g);
        if constexpr (W::halves) {
            const I half_scales[2] = {w.half_scale(2 * g), w.half_scale(2 * g + 1)};
#pragma GCC unroll 16
            for (int t = 0; t < tokens; ++t) {
                const I rest = dot_bytes<false>(zero_int(), outlier_column(a[t]), a[t].rest);
                I first = set_int(-32 * a[t].half_sum[0]), second = set_int(-32 * a[t].half_sum[1]);
                for (int s = 0; s < steps / 2; ++s) {
                    first = dot_bytes<false>(first, q[s], a[t].values + 4 * s);
                    second = dot_bytes<false>(second, q[s + 4], a[t].values + 4 * s + 16);
                }
                const I rest_scale = w.half_scale(2 * g + a[t].column_quad / 256);
                const I dot = first * half_scales[0] + second * half_scales[1] + rest * rest_scale;
                acc[t] = fma(to_float(dot) * scale, set(a[t].scale), acc[t]);
            }
        } else {
            const F offset = w.offset(g, scale);
#pragma GCC unroll 16
            for (int t = 0; t < tokens; ++t) {
                I even = dot_bytes<W::wide>(zero_int(), outlier_column(a[t]), a[t].rest), odd = zero_int();
                if constexpr (few) {  // integers add in any order: two chains hide the latency
                    for (int s = 0; s < steps; s += 2) {
                        even = dot_bytes<W::wide>(even, q[s], a[t].values + 4 * s);
                        odd = dot_bytes<W::wide>(odd, q[s + 1], a[t].values + 4 * s + 4);
                    }
                    even = even + odd;
                } else {
                    for (int s = 0; s < steps; ++s) even = dot_bytes<W::wide>(even, q[s], a[t].values + 4 * s);
                }
                acc[t] = fma(to_float(even) * scale, set(a[t].scale), acc[t]);
                acc[t] = fma(offset, set(a[t].sum), acc[t]);
            }
        }
    }
    for (int t = 0; t < tokens; ++t) store(out + block_rows * t, acc[t]);
}

struct Float32 {
    static TRICORN_INLINE F at(const uint8_t* block, int k) {
        return load(reinterpret_cast<const float*>(block) + block_rows * k);
    }
};
struct Float16 {
    static TRICORN_INLINE F at(const uint8_t* block, int k) {
        return load_f16(reinterpret_cast<const uint16_t*>(block) + block_rows * k);
    }
};
struct BFloat16;  // in pairs

template <class W, int tokens>
void product_f32(const uint8_t* block, const Activations& in, int row, float* out) {
    const float* a = in.float32(row, 0);
    F acc[tokens];
    for (int t = 0; t < tokens; ++t) acc[t] = zero();
    for (int k = 0; k < in.columns; ++k, a += tile_rows) {
        const F w = W::at(block, k);
#pragma GCC unroll 16
        for (int t = 0; t < tokens; ++t) acc[t] = fma(w, set(a[t]), acc[t]);
    }
    for (int t = 0; t < tokens; ++t) store(out + block_rows * t, acc[t]);
}

template <int tokens>
void product_bf16(const uint8_t* block, const Activations& in, int row, float* out) {
    const uint16_t* w = reinterpret_cast<const uint16_t*>(block);
    const uint16_t* a = in.bfloat16(row, 0);
    F acc[tokens];
    for (int t = 0; t < tokens; ++t) acc[t] = zero();
    for (int k = 0; k < in.columns; k += 2, a += 2 * tile_rows) {
#pragma GCC unroll 16
        for (int t = 0; t < tokens; ++t) acc[t] = dot_bf16(acc[t], w + block_rows * k, a + 2 * t);
    }
    for (int t = 0; t < tokens; ++t) store(out + block_rows * t, acc[t]);
}

template <class W, int tokens>
TRICORN_INLINE void product(const uint8_t* block, const Activations& in, int row, float* out) {
    if constexpr (std::is_same_v<W, BFloat16>)
        product_bf16<tokens>(block, in, row, out);
    else if constexpr (std::is_same_v<W, Float32> || std::is_same_v<W, Float16>)
        product_f32<W, tokens>(block, in, row, out);
    else
        product_q8<W, tokens>(block, in, row, out);
}

#if defined(TRICORN_portable)
constexpr int tile_tokens =
    4;  // sixteen sums fill the registers of AVX-512; fewer machines' have room for more than four
#else
constexpr int tile_tokens = tile_rows;
#endif

template <class W>
void products(const uint8_t* block, const Activations& in, int row, int count, float* out) {
    if (count == tile_tokens) return product<W, tile_tokens>(block, in, row, out);
    int done = 0;
    auto take = [&]<int tokens>() {
        if constexpr (tokens < tile_tokens) {
            if (!(count & tokens)) return;
            product<W, tokens>(block, in, row + done, out + block_rows * done);
            done += tokens;
        }
    };
    take.template operator()<8>();
    take.template operator()<4>();
    take.template operator()<2>();
    take.template operator()<1>();
}

// The products of rows row .. row+count-1 (of one tile) with one block of a matrix, to out[count][16]. The one place
// that knows all forms.
inline void block_product(const Matrix& m, int block_index, const Activations& in, int row, int count, float* out) {
    const uint8_t* block = m.data + m.block_bytes * size_t(block_index);
    switch (m.form) {
        case Form::f32:
            return products<Float32>(block, in, row, count, out);
        case Form::f16:
            return products<Float16>(block, in, row, count, out);
        case Form::bf16:
            return products<BFloat16>(block, in, row, count, out);
        case Form::q4_0:
            return products<Simple<4, false, 8>>(block, in, row, count, out);
        case Form::q4_1:
            return products<Simple<4, true, 0>>(block, in, row, count, out);
        case Form::q5_0:
            return products<Simple<5, false, 16>>(block, in, row, count, out);
        case Form::q5_1:
            return products<Simple<5, true, 0>>(block, in, row, count, out);
        case Form::q8_0:
            return products<Simple<8, false, 128>>(block, in, row, count, out);
        case Form::q4_k:
            return products<TwoLevel<4, true>>(block, in, row, count, out);
        case Form::q5_k:
            return products<TwoLevel<5, true>>(block, in, row, count, out);
        case Form::q6_k:
            return products<HalfGroups>(block, in, row, count, out);
    }
}

void linear(const Linear& op, int first_block, int last_block, int first_row, int last_row) {
    float sums[tile_tokens * block_rows];
    for (int row = first_row; row < last_row;
         row += tile_tokens) {  // a tile of rows stays in the first cache for all blocks
        const int count = least(tile_tokens, last_row - row);
        for (int b = first_block; b < last_block; ++b) {
            block_product(op.weight, b, op.in, row, count, sums);
            for (int t = 0; t < count; ++t) {
                float* at = op.out + op.stride * size_t(row + t) + block_rows * b;
                F sum = load(sums + block_rows * t);
                if (op.bias) sum = sum + load(op.bias + block_rows * b);
                if (op.softcap > 0) sum = set(op.softcap) * tanh(sum / set(op.softcap));
                store(at, op.accumulate ? load(at) + sum : sum);
            }
        }
    }
}

}  // namespace tricorn::TRICORN_ISA

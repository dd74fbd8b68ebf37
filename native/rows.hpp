// Operations on whole rows: quantizing, norms, the embedding, rotary positions, gated activations.
#pragma once

#include "kernels.hpp"
#include "linear.hpp"
#include "simd.hpp"

namespace tricorn::TRICORN_ISA {

// Thirty-two values to int8 with one scale: that of the second largest magnitude, unless the largest would then exceed
// five times 127 steps. What of the largest is above 127 steps goes into four further bytes.
TRICORN_INLINE void quantize_group(F lo, F hi, const Activations& out, int row, int g) {
    constexpr float most = 127.0f, most_outlier = 5 * most;
    const F low = abs(lo), high = abs(hi);
    const float largest = max_lanes(max(low, high));
    const int in_low = first_at_least(low, set(largest)), in_high = first_at_least(high, set(largest));
    const int column = in_low < lanes ? in_low : lanes + in_high;
    const F rest_low = select(between(column, column + 1), zero(), low);
    const F rest_high = select(between(column - lanes, column - lanes + 1), zero(), high);
    const float second = max_lanes(max(rest_low, rest_high));
    const float scale = greatest(second / most, largest / most_outlier);
    const float inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;  // below that all is as good as nothing

    const I a = round_to_int(lo * set(inverse)), b = round_to_int(hi * set(inverse));
    QuantizedGroup& to = *out.quantized(row, g);
    store_s8(to.values, a);
    store_s8(to.values + lanes, b);
    to.half_sum[0] = static_cast<int>(sum_lanes(to_float(a)));
    to.half_sum[1] = static_cast<int>(sum_lanes(to_float(b)));
    to.scale = scale;
    to.sum = scale * static_cast<float>(to.half_sum[0] + to.half_sum[1]);

    float plain[group];
    store(plain, lo);
    store(plain + lanes, hi);
    const int outlier = column & (group - 1);  // nothing equals the largest where a value is not a number
    const int sign = plain[outlier] < 0 ? -1 : 1;
    int left = static_cast<int>(std::nearbyint(largest * inverse)) - 127;
    to.values[outlier] = static_cast<int8_t>(sign * least(127, left + 127));
    to.column_quad = static_cast<uint16_t>(64 * (outlier / 4));
    to.column_byte = static_cast<uint16_t>(64 * (outlier % 4));
    for (int8_t& part : to.rest) {
        const int now = greatest(0, least(127, left));
        part = static_cast<int8_t>(sign * now);
        left -= now;
    }
}

// Group g of a row of activations, in whatever kind they are.
TRICORN_INLINE void put_group(F lo, F hi, const Activations& out, int row, int g) {
    if (out.kind == Kind::q8) return quantize_group(lo, hi, out, row, g);
    float values[group];
    store(values, lo);
    store(values + lanes, hi);
    if (out.kind == Kind::f32) {
        float* to = out.float32(row, group * g);
        for (int i = 0; i < group; ++i) to[tile_rows * i] = values[i];
    } else {
        uint16_t* to = out.bfloat16(row, group * g);
        for (int i = 0; i < group; ++i) to[tile_rows * (i & ~1) + (i & 1)] = float_to_bf16(values[i]);
    }
}

void quantize(const float* in, const Activations& out, int row) {
    for (int g = 0; g < out.columns / group; ++g)
        put_group(load(in + group * g), load(in + group * g + lanes), out, row, g);
}

TRICORN_INLINE float inverse_rms(const float* x, int columns, float epsilon) {
    F squares = zero();
    int i = 0;
    for (; i + lanes <= columns; i += lanes) squares = fma(load(x + i), load(x + i), squares);
    return 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(columns) + epsilon);
}

void norm(const Norm& op, int row) {
    const float* x = op.in + op.stride * size_t(op.rows ? op.rows[row] : row);
    const F inverse = set(inverse_rms(x, op.columns, op.epsilon));
    for (int g = 0; g < op.columns / group; ++g) {
        const int at = group * g;
        F lo = load(x + at) * inverse * load(op.weight + at);
        F hi = load(x + at + lanes) * inverse * load(op.weight + at + lanes);
        if (op.add) {
            float* sum = op.sum + op.sum_stride * size_t(row) + at;
            store(sum, load(sum) + lo);
            store(sum + lanes, load(sum + lanes) + hi);
        } else {
            put_group(lo, hi, op.out, row, g);
        }
    }
}

void gated(const Gated& op, int out_group, int first_row, int last_row) {
    float gate[2][tile_tokens * block_rows], up[2][tile_tokens * block_rows];
    for (int row = first_row; row < last_row; row += tile_tokens) {
        const int count = least(tile_tokens, last_row - row);
        for (int half = 0; half < 2; ++half) {
            block_product(op.gate, 2 * out_group + half, op.in, row, count, gate[half]);
            block_product(op.up, 2 * out_group + half, op.in, row, count, up[half]);
        }
        for (int t = 0; t < count; ++t) {
            F result[2];
            for (int half = 0; half < 2; ++half) {
                const F g = load(gate[half] + block_rows * t);
                result[half] = (op.function == Gate::silu ? silu(g) : gelu_tanh(g)) * load(up[half] + block_rows * t);
            }
            put_group(result[0], result[1], op.out, row + t, out_group);
        }
    }
}

// One row of a packed matrix as floats, times `scale`. Rows are strided through their block, so this is scalar work.
template <class W>
void unpack_row(const uint8_t* block, int columns, int lane, float factor, float* out) {
    const W w(block, columns);
    for (int g = 0; g < columns / group; ++g) {
        Q q[steps];
        unpack<W::quant_bytes>(w.quants + size_t(W::quant_bytes) * size_t(g), q);
        float scale[2][lanes], offset[2][lanes];
        for (int half = 0; half < 2; ++half) {
            if constexpr (W::halves) {
                F s = w.scale(g) * to_float(w.half_scale(2 * g + half));
                store(scale[half], s);
                store(offset[half], s * set(-32));
            } else {
                store(scale[half], w.scale(g));
                store(offset[half], w.offset(g, w.scale(g)));
            }
        }
        for (int s = 0; s < steps; ++s) {
            uint8_t bytes[64];
            std::memcpy(bytes, &q[s], 64);
            for (int b = 0; b < 4; ++b) {
                const int half = s >= steps / 2;
                const float value = scale[half][lane] * static_cast<float>(bytes[4 * lane + b]) + offset[half][lane];
                out[group * g + 4 * s + b] = value * factor;
            }
        }
    }
}

void embed(const Matrix& m, int32_t id, float factor, float* out) {
    const uint8_t* block = m.data + m.block_bytes * size_t(id / block_rows);
    const int lane = id % block_rows;
    const uint16_t* words = reinterpret_cast<const uint16_t*>(block);
    switch (m.form) {
        case Form::q4_0:
            return unpack_row<Simple<4, false, 8>>(block, m.columns, lane, factor, out);
        case Form::q4_1:
            return unpack_row<Simple<4, true, 0>>(block, m.columns, lane, factor, out);
        case Form::q5_0:
            return unpack_row<Simple<5, false, 16>>(block, m.columns, lane, factor, out);
        case Form::q5_1:
            return unpack_row<Simple<5, true, 0>>(block, m.columns, lane, factor, out);
        case Form::q8_0:
            return unpack_row<Simple<8, false, 128>>(block, m.columns, lane, factor, out);
        case Form::q4_k:
            return unpack_row<TwoLevel<4, true>>(block, m.columns, lane, factor, out);
        case Form::q5_k:
            return unpack_row<TwoLevel<5, true>>(block, m.columns, lane, factor, out);
        case Form::q6_k:
            return unpack_row<HalfGroups>(block, m.columns, lane, factor, out);
        case Form::f32:
            for (int k = 0; k < m.columns; ++k)
                out[k] = reinterpret_cast<const float*>(block)[block_rows * k + lane] * factor;
            return;
        case Form::f16:
            for (int k = 0; k < m.columns; ++k) {
                float values[lanes];
                store(values, load_f16(words + block_rows * k));
                out[k] = values[lane] * factor;
            }
            return;
        case Form::bf16:
            for (int k = 0; k < m.columns; ++k)
                out[k] = bf16_to_float(words[block_rows * (k & ~1) + 2 * lane + (k & 1)]) * factor;
            return;
    }
}

}  // namespace tricorn::TRICORN_ISA

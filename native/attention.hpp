// Attention over pages, and the writing of them.
//
// K lies transposed in its page ([head_dim][16 tokens]), so sixteen scores are sixteen lanes; V lies as it is, so an
// output vector is sixteen lanes too. The keys of a row are taken in chunks of 512 aligned to position 0: scores, their
// maximum, e^(s - max), the sum, and the weighted values of a chunk are complete before it is merged with the chunks
// before it, in order. A row's result is thus a function of its own position, whoever shares the tile, the batch or the
// thread.
#pragma once

#include "kernels.hpp"
#include "rows.hpp"
#include "simd.hpp"

namespace tricorn::TRICORN_ISA {

// What is stored stays finite, so that a page handed on cannot spoil its next owner's sums: what is no number becomes
// the largest.
TRICORN_INLINE F finite(F a, float most) {
    return max(min(a, set(most)), set(-most));
}

template <class Element>
struct Lanes;
template <>
struct Lanes<float> {
    static TRICORN_INLINE F get(const float* p) { return load(p); }
    static TRICORN_INLINE void put(float* p, F a) { store(p, finite(a, 3.4028235e38f)); }
};
struct Half {
    uint16_t bits;
};
struct Brain {
    uint16_t bits;
};
template <>
struct Lanes<Half> {
    static TRICORN_INLINE F get(const Half* p) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }
    static TRICORN_INLINE void put(Half* p, F a) { store_f16(reinterpret_cast<uint16_t*>(p), finite(a, 65504.0f)); }
};
template <>
struct Lanes<Brain> {
    static TRICORN_INLINE F get(const Brain* p) { return load_bf16(reinterpret_cast<const uint16_t*>(p)); }
    static TRICORN_INLINE void put(Brain* p, F a) {
        float values[lanes];
        store(values, finite(a, 3.3895314e38f));
        for (int i = 0; i < lanes; ++i) p[i].bits = float_to_bf16(values[i]);
    }
};

template <class Element>
TRICORN_INLINE Element* head_in_page(const Pages& pool, int32_t page, int layer, int value, int head) {
    return reinterpret_cast<Element*>(pool.at(layer, page)) +
           (value * pool.kv_heads + head) * pool.head_dim * page_tokens;
}

// One head of one row: norm (when there is one), then the rotation of its halves. `tail` handles halves that no vector
// divides.
TRICORN_INLINE void norm_and_rotate(float* x, int dim, const float* weight, float epsilon, const float* cosine,
                                    const float* sine) {
    if (weight) {
        const F inverse = set(inverse_rms(x, dim, epsilon));
        for (int i = 0; i < dim; i += lanes) store(x + i, load(x + i) * inverse * load(weight + i));
    }
    const int half = dim / 2;
    int i = 0;
    for (; i + lanes <= half; i += lanes) {
        const F a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
        store(x + i, fma(a, c, zero() - b * s));
        store(x + half + i, fma(b, c, a * s));
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] - b * sine[i];
        x[half + i] = b * cosine[i] + a * sine[i];
    }
}

template <class Element>
void rope_store_as(const RopeStore& op, const Batch& batch, const Pages& pool, int row) {
    const int dim = pool.head_dim, kv_heads = pool.kv_heads;
    float* q = op.qkv + op.stride * size_t(row);
    float* k = q + op.heads * dim;
    float* v = k + kv_heads * dim;
    const float* cosine = op.cosine + size_t(row) * size_t(dim / 2);
    const float* sine = op.sine + size_t(row) * size_t(dim / 2);
    for (int h = 0; h < op.heads; ++h) norm_and_rotate(q + h * dim, dim, op.q_norm, op.epsilon, cosine, sine);
    for (int h = 0; h < kv_heads; ++h) norm_and_rotate(k + h * dim, dim, op.k_norm, op.epsilon, cosine, sine);

    const int position = batch.positions[row], slot = position % page_tokens;
    const int32_t page = batch.pages[batch.page_start[batch.sequence[row]] + position / page_tokens];
    for (int h = 0; h < kv_heads; ++h) {
        Element* keys = head_in_page<Element>(pool, page, op.layer, 0, h);
        Element* values = head_in_page<Element>(pool, page, op.layer, 1, h) + slot * dim;
        for (int i = 0; i < dim; i += lanes) {
            Element column[lanes];
            Lanes<Element>::put(column, load(k + h * dim + i));
            for (int j = 0; j < lanes; ++j) keys[(i + j) * page_tokens + slot] = column[j];
            Lanes<Element>::put(values + i, load(v + h * dim + i));
        }
    }
}

void rope_store(const RopeStore& op, const Batch& batch, const Pages& pool, int row) {
    switch (pool.type) {
        case Cache::f32:
            return rope_store_as<float>(op, batch, pool, row);
        case Cache::f16:
            return rope_store_as<Half>(op, batch, pool, row);
        case Cache::bf16:
            return rope_store_as<Brain>(op, batch, pool, row);
    }
}

constexpr int max_head_dim = 512;
constexpr int ahead = 4;  // pages fetched before they are needed

template <class Element>
TRICORN_INLINE void fetch_page(const Element* head, int dim) {  // one head's part of a page
    const char* bytes = reinterpret_cast<const char*>(head);
    for (size_t line = 0; line < sizeof(Element) * size_t(dim * page_tokens); line += 64) prefetch(bytes + line);
}

struct Scratch {  // of one tile
    float q[max_pairs * max_head_dim];
    float scores[max_pairs * chunk_tokens];
    float partial[max_pairs * max_head_dim];
    float out[max_pairs * max_head_dim];
};

// Scores of `pairs` queries against `pages` pages: each score sums over head_dim in ascending order.
template <class Element, int pairs, int pages>
TRICORN_INLINE void score_pages(const float* q, int dim, const Element* const* keys, float* scores) {
    F acc[pages][pairs];
    for (int g = 0; g < pages; ++g)
        for (int p = 0; p < pairs; ++p) acc[g][p] = zero();
    for (int d = 0; d < dim; ++d) {
#pragma GCC unroll 4
        for (int g = 0; g < pages; ++g) {
            const F k = Lanes<Element>::get(keys[g] + d * page_tokens);
#pragma GCC unroll 8
            for (int p = 0; p < pairs; ++p) acc[g][p] = fma(k, set(q[p * dim + d]), acc[g][p]);
        }
    }
    for (int g = 0; g < pages; ++g)
        for (int p = 0; p < pairs; ++p) store(scores + p * chunk_tokens + g * page_tokens, acc[g][p]);
}

// out[pair] = sum over the chunk's tokens, ascending, of weight * V, for `vectors` vectors of the head at a time.
template <class Element, int pairs, int vectors>
TRICORN_INLINE void weigh_values(const float* weights, int first_page, int last_page, const Element* const* values,
                                 int dim, int d, bool far, float* out) {
    F acc[pairs][vectors];
    for (int p = 0; p < pairs; ++p)
        for (int i = 0; i < vectors; ++i) acc[p][i] = zero();
    for (int page = first_page; page < last_page; ++page) {
        if (far && page + ahead < last_page) fetch_page(values[page + ahead], dim);
        for (int token = 0; token < page_tokens; ++token) {
            F v[vectors];
            for (int i = 0; i < vectors; ++i) v[i] = Lanes<Element>::get(values[page] + token * dim + d + lanes * i);
#pragma GCC unroll 8
            for (int p = 0; p < pairs; ++p) {
                const F w = set(weights[p * chunk_tokens + page * page_tokens + token]);
                for (int i = 0; i < vectors; ++i) acc[p][i] = fma(w, v[i], acc[p][i]);
            }
        }
    }
    for (int p = 0; p < pairs; ++p)
        for (int i = 0; i < vectors; ++i) store(out + p * dim + d + lanes * i, acc[p][i]);
}

template <class Element, int pairs>
void attention_pairs(const Attention& op, const Batch& batch, const Pages& pool, const AttentionTile& tile) {
    static thread_local Scratch scratch;
    const int dim = pool.head_dim;
    const int32_t* table = batch.pages + batch.page_start[tile.sequence];
    int low[pairs], high[pairs];  // each pair sees positions low .. high-1
    float top[pairs], total[pairs];
    bool begun[pairs] = {};
    int from = 1 << 30, to = 0;
    for (int p = 0; p < pairs; ++p) {
        const int row = tile.first + p / tile.heads, head = tile.head + p % tile.heads;
        const float* q = op.qkv + op.stride * size_t(row) + head * dim;
        for (int d = 0; d < dim; d += lanes) store(scratch.q + p * dim + d, load(q + d) * set(op.scale));
        high[p] = batch.positions[row] + 1;
        low[p] = op.window ? greatest(0, high[p] - op.window) : 0;
        from = least(from, low[p]);
        to = greatest(to, high[p]);
        top[p] = total[p] = 0;
    }

    for (int chunk = from / chunk_tokens * chunk_tokens; chunk < to; chunk += chunk_tokens) {
        const int first_page = greatest(0, from - chunk) / page_tokens;
        const int last_page = (least(to - chunk, chunk_tokens) + page_tokens - 1) / page_tokens;
        const Element *keys[chunk_tokens / page_tokens], *values[chunk_tokens / page_tokens];
        for (int page = first_page; page < last_page; ++page) {
            keys[page] = head_in_page<Element>(pool, table[chunk / page_tokens + page], op.layer, 0, tile.kv_head);
            values[page] = head_in_page<Element>(pool, table[chunk / page_tokens + page], op.layer, 1, tile.kv_head);
        }
        constexpr int side = pairs <= 2   ? 4
                             : pairs <= 4 ? 2
                                          : 1;  // pages scored side by side: enough chains to hide the latency
        const bool far = tile.count == 1;       // one row of a sequence: its pages come from memory, one after another
        if (far)
            for (int i = first_page; i < least(last_page, first_page + ahead); ++i) fetch_page(keys[i], dim);
        int page = first_page;
        auto score = [&]<int count>() {
            if (far)
                for (int i = page + ahead; i < page + ahead + count;
                     ++i) {  // after the last keys come the first values
                    if (i < last_page)
                        fetch_page(keys[i], dim);
                    else if (first_page + i - last_page < last_page)
                        fetch_page(values[first_page + i - last_page], dim);
                }
            score_pages<Element, pairs, count>(scratch.q, dim, keys + page, scratch.scores + page * page_tokens);
            page += count;
        };
        while (page + side <= last_page) score.template operator()<side>();
        while (page < last_page) score.template operator()<1>();

        float chunk_top[pairs], chunk_total[pairs];
        for (int p = 0; p < pairs; ++p) {
            float* scores = scratch.scores + p * chunk_tokens;
            const F nothing = set(-INFINITY);
            F largest = nothing;
            for (page = first_page; page < last_page; ++page) {
                const int at = chunk + page * page_tokens;
                F s = load(scores + page * page_tokens);
                if (op.softcap > 0) s = set(op.softcap) * tanh(s / set(op.softcap));
                s = select(between(low[p] - at, high[p] - at), s, nothing);
                store(scores + page * page_tokens, s);
                largest = max(largest, s);
            }
            chunk_top[p] = max_lanes(largest);
            const F subtract = set(chunk_top[p]);
            F sum = zero();
            for (page = first_page; page < last_page; ++page) {
                const int at = chunk + page * page_tokens;
                F e = exp(load(scores + page * page_tokens) - subtract);
                e = select(between(low[p] - at, high[p] - at), e, zero());
                store(scores + page * page_tokens, e);
                sum = sum + e;
            }
            chunk_total[p] = sum_lanes(sum);
        }

        int d = 0;
        constexpr int wide = pairs <= 4 ? 4 : 2;
        for (; d + lanes * wide <= dim; d += lanes * wide)
            weigh_values<Element, pairs, wide>(scratch.scores, first_page, last_page, values, dim, d, far && d == 0,
                                               scratch.partial);
        for (; d < dim; d += lanes)
            weigh_values<Element, pairs, 1>(scratch.scores, first_page, last_page, values, dim, d, far && d == 0,
                                            scratch.partial);

        for (int p = 0; p < pairs; ++p) {
            if (high[p] <= chunk || low[p] >= chunk + chunk_tokens) continue;  // nothing of this chunk is this pair's
            float *out = scratch.out + p * dim, *partial = scratch.partial + p * dim;
            if (!begun[p]) {
                begun[p] = true;
                top[p] = chunk_top[p];
                total[p] = chunk_total[p];
                for (d = 0; d < dim; d += lanes) store(out + d, load(partial + d));
                continue;
            }
            const float higher = greatest(top[p], chunk_top[p]);
            const F before = exp(set(top[p] - higher)), now = exp(set(chunk_top[p] - higher));
            float weights[2][lanes];
            store(weights[0], before);
            store(weights[1], now);
            total[p] = total[p] * weights[0][0] + chunk_total[p] * weights[1][0];
            top[p] = higher;
            for (d = 0; d < dim; d += lanes) store(out + d, fma(load(partial + d), now, load(out + d) * before));
        }
    }

    for (int p = 0; p < pairs; ++p) {
        const int row = tile.first + p / tile.heads, head = tile.head + p % tile.heads;
        const F inverse = set(1.0f / total[p]);
        for (int d = 0; d < dim; d += group) {
            F lo = load(scratch.out + p * dim + d) * inverse, hi = load(scratch.out + p * dim + d + lanes) * inverse;
            put_group(lo, hi, op.out, row, (head * dim + d) / group);
        }
    }
}

template <class Element>
void attention_as(const Attention& op, const Batch& batch, const Pages& pool, const AttentionTile& tile) {
    switch (tile.count * tile.heads) {
        case 1:
            return attention_pairs<Element, 1>(op, batch, pool, tile);
        case 2:
            return attention_pairs<Element, 2>(op, batch, pool, tile);
        case 3:
            return attention_pairs<Element, 3>(op, batch, pool, tile);
        case 4:
            return attention_pairs<Element, 4>(op, batch, pool, tile);
        case 5:
            return attention_pairs<Element, 5>(op, batch, pool, tile);
        case 6:
            return attention_pairs<Element, 6>(op, batch, pool, tile);
        case 7:
            return attention_pairs<Element, 7>(op, batch, pool, tile);
        case 8:
            return attention_pairs<Element, 8>(op, batch, pool, tile);
    }
}

void attention(const Attention& op, const Batch& batch, const Pages& pool, const AttentionTile& tile) {
    switch (pool.type) {
        case Cache::f32:
            return attention_as<float>(op, batch, pool, tile);
        case Cache::f16:
            return attention_as<Half>(op, batch, pool, tile);
        case Cache::bf16:
            return attention_as<Brain>(op, batch, pool, tile);
    }
}

}  // namespace tricorn::TRICORN_ISA

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

constexpr int block_pairs = 6;  // pairs whose sums are in registers together
static_assert(max_pairs % block_pairs == 0);

struct Scratch {  // of one tile
    float q[max_pairs * max_head_dim];
    float scores[max_pairs * chunk_tokens];
    float partial[max_pairs * max_head_dim];
    float out[max_pairs * max_head_dim];
    float page[2 * page_tokens * max_head_dim];
};

// Runs `body` with blocks of pairs whose sizes are known when it is compiled: body.operator()<pairs>(first pair).
template <int pairs = block_pairs, class Body>
TRICORN_INLINE void each_block(int count, Body body, int first = 0) {
    for (; first + pairs <= count; first += pairs) body.template operator()<pairs>(first);
    if constexpr (pairs > 1)
        if (first < count) each_block<pairs - 1>(count, body, first);
}

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

// Adds to out[pair] the page's tokens, ascending, of weight * V, for `vectors` vectors of the head.
template <class Element, int pairs, int vectors>
TRICORN_INLINE void weigh_page(const float* weights, const Element* values, int dim, float* out) {
    F acc[pairs][vectors];
    for (int p = 0; p < pairs; ++p)
        for (int i = 0; i < vectors; ++i) acc[p][i] = load(out + p * dim + lanes * i);
    for (int token = 0; token < page_tokens; ++token) {
        F v[vectors];
        for (int i = 0; i < vectors; ++i) v[i] = Lanes<Element>::get(values + token * dim + lanes * i);
#pragma GCC unroll 8
        for (int p = 0; p < pairs; ++p) {
            const F w = set(weights[p * chunk_tokens + token]);
            for (int i = 0; i < vectors; ++i) acc[p][i] = fma(w, v[i], acc[p][i]);
        }
    }
    for (int p = 0; p < pairs; ++p)
        for (int i = 0; i < vectors; ++i) store(out + p * dim + lanes * i, acc[p][i]);
}

template <class Element, int pairs>
TRICORN_INLINE void weigh_page(const float* weights, const Element* values, int dim, float* out) {
    int d = 0;
    for (; d + lanes * 4 <= dim; d += lanes * 4) weigh_page<Element, pairs, 4>(weights, values + d, dim, out + d);
    for (; d < dim; d += lanes) weigh_page<Element, pairs, 1>(weights, values + d, dim, out + d);
}

// A page's keys or values of one head as floats, once for all pairs of a tile.
template <class Element>
TRICORN_INLINE const float* widen(const Element* head, int dim, float* page) {
    for (int i = 0; i < dim * page_tokens; i += lanes) store(page + i, Lanes<Element>::get(head + i));
    return page;
}

// The part of a chunk that a tile sees: pages first .. last-1, its keys and its values.
template <class Element>
struct Part {
    int first, last;
    const Element *keys[chunk_tokens / page_tokens], *values[chunk_tokens / page_tokens];
};

// One row of a sequence: its pages come from memory, one after another, so they are fetched ahead and read once.
template <class Element>
void score_row(const Part<Element>& part, int pairs, int dim, Scratch& scratch) {
    for (int i = part.first; i < least(part.last, part.first + ahead); ++i) fetch_page(part.keys[i], dim);
    auto fetch = [&](int page) {  // after the last keys come the first values
        if (page < part.last)
            fetch_page(part.keys[page], dim);
        else if (part.first + page - part.last < part.last)
            fetch_page(part.values[part.first + page - part.last], dim);
    };
    each_block(pairs, [&]<int count>(int pair) {
        constexpr int side = count <= 2 ? 4 : 2;  // pages side by side: enough chains to hide the latency
        const float* q = scratch.q + pair * dim;
        float* scores = scratch.scores + pair * chunk_tokens;
        int page = part.first;
        for (; page + side <= part.last; page += side) {
            if (pair == 0)
                for (int i = 0; i < side; ++i) fetch(page + ahead + i);
            score_pages<Element, count, side>(q, dim, part.keys + page, scores + page * page_tokens);
        }
        for (; page < part.last; ++page) {
            if (pair == 0) fetch(page + ahead);
            score_pages<Element, count, 1>(q, dim, part.keys + page, scores + page * page_tokens);
        }
    });
}

template <class Element>
void weigh_row(const Part<Element>& part, int pairs, int dim, Scratch& scratch) {
    for (int page = part.first; page < part.last; ++page) {
        if (page + ahead < part.last) fetch_page(part.values[page + ahead], dim);
        each_block(pairs, [&]<int count>(int pair) {
            weigh_page<Element, count>(scratch.scores + pair * chunk_tokens + page * page_tokens, part.values[page],
                                       dim, scratch.partial + pair * dim);
        });
    }
}

// Several rows: each page is made floats once, and then is near for all of them.
template <class Element>
void score_rows(const Part<Element>& part, int pairs, int dim, Scratch& scratch) {
    for (int page = part.first; page < part.last;) {
        const bool two = page + 2 <= part.last;
        const float* wide[2] = {widen(part.keys[page], dim, scratch.page), nullptr};
        if (two) wide[1] = widen(part.keys[page + 1], dim, scratch.page + page_tokens * dim);
        each_block(pairs, [&]<int count>(int pair) {
            const float* q = scratch.q + pair * dim;
            float* scores = scratch.scores + pair * chunk_tokens + page * page_tokens;
            if (two)
                score_pages<float, count, 2>(q, dim, wide, scores);
            else
                score_pages<float, count, 1>(q, dim, wide, scores);
        });
        page += two ? 2 : 1;
    }
}

template <class Element>
void weigh_rows(const Part<Element>& part, int pairs, int dim, Scratch& scratch) {
    for (int page = part.first; page < part.last; ++page) {
        const float* wide = widen(part.values[page], dim, scratch.page);
        each_block(pairs, [&]<int count>(int pair) {
            weigh_page<float, count>(scratch.scores + pair * chunk_tokens + page * page_tokens, wide, dim,
                                     scratch.partial + pair * dim);
        });
    }
}

struct Softmax {    // of one pair so far
    int low, high;  // it sees positions low .. high-1
    float top, total;
    bool begun;
};

// Turns a chunk's scores into weights e^(s - max), 0 where the pair sees nothing; gives their maximum and their sum.
TRICORN_INLINE void weights_of(float* scores, const Softmax& pair, int chunk, int first_page, int last_page,
                               float softcap, float& top, float& total) {
    const F nothing = set(-INFINITY);
    F largest = nothing;
    for (int page = first_page; page < last_page; ++page) {
        const int at = chunk + page * page_tokens;
        F s = load(scores + page * page_tokens);
        if (softcap > 0) s = set(softcap) * tanh(s / set(softcap));
        s = select(between(pair.low - at, pair.high - at), s, nothing);
        store(scores + page * page_tokens, s);
        largest = max(largest, s);
    }
    top = max_lanes(largest);
    const F subtract = set(top);
    F sum = zero();
    for (int page = first_page; page < last_page; ++page) {
        const int at = chunk + page * page_tokens;
        F e = exp(load(scores + page * page_tokens) - subtract);
        e = select(between(pair.low - at, pair.high - at), e, zero());
        store(scores + page * page_tokens, e);
        sum = sum + e;
    }
    total = sum_lanes(sum);
}

// Merges a chunk's weighted values with those of the chunks before it.
TRICORN_INLINE void merge(Softmax& pair, float chunk_top, float chunk_total, const float* partial, int dim,
                          float* out) {
    if (!pair.begun) {
        pair.begun = true;
        pair.top = chunk_top;
        pair.total = chunk_total;
        for (int d = 0; d < dim; d += lanes) store(out + d, load(partial + d));
        return;
    }
    const float higher = greatest(pair.top, chunk_top);
    const F before = exp(set(pair.top - higher)), now = exp(set(chunk_top - higher));
    float weights[2][lanes];
    store(weights[0], before);
    store(weights[1], now);
    pair.total = pair.total * weights[0][0] + chunk_total * weights[1][0];
    pair.top = higher;
    for (int d = 0; d < dim; d += lanes) store(out + d, fma(load(partial + d), now, load(out + d) * before));
}

template <class Element>
void attention_as(const Attention& op, const Batch& batch, const Pages& pool, const AttentionTile& tile) {
    static thread_local Scratch scratch;
    const int dim = pool.head_dim, pairs = tile.count * tile.heads;
    const int32_t* table = batch.pages + batch.page_start[tile.sequence];
    Softmax softmax[max_pairs];
    int from = 1 << 30, to = 0;
    for (int p = 0; p < pairs; ++p) {
        const int row = tile.first + p / tile.heads, head = tile.head + p % tile.heads;
        const float* q = op.qkv + op.stride * size_t(row) + head * dim;
        for (int d = 0; d < dim; d += lanes) store(scratch.q + p * dim + d, load(q + d) * set(op.scale));
        const int high = batch.positions[row] + 1, low = op.window ? greatest(0, high - op.window) : 0;
        softmax[p] = {low, high, 0, 0, false};
        from = least(from, low);
        to = greatest(to, high);
    }

    for (int chunk = from / chunk_tokens * chunk_tokens; chunk < to; chunk += chunk_tokens) {
        Part<Element> part;
        part.first = greatest(0, from - chunk) / page_tokens;
        part.last = (least(to - chunk, chunk_tokens) + page_tokens - 1) / page_tokens;
        for (int page = part.first; page < part.last; ++page) {
            const int32_t place = table[chunk / page_tokens + page];
            part.keys[page] = head_in_page<Element>(pool, place, op.layer, 0, tile.kv_head);
            part.values[page] = head_in_page<Element>(pool, place, op.layer, 1, tile.kv_head);
        }
        (tile.count == 1 ? score_row<Element> : score_rows<Element>)(part, pairs, dim, scratch);
        float top[max_pairs], total[max_pairs];
        for (int p = 0; p < pairs; ++p)
            weights_of(scratch.scores + p * chunk_tokens, softmax[p], chunk, part.first, part.last, op.softcap, top[p],
                       total[p]);
        for (int i = 0; i < pairs * dim; i += lanes) store(scratch.partial + i, zero());
        (tile.count == 1 ? weigh_row<Element> : weigh_rows<Element>)(part, pairs, dim, scratch);
        for (int p = 0; p < pairs; ++p)
            if (softmax[p].high > chunk && softmax[p].low < chunk + chunk_tokens)  // something of it is this pair's
                merge(softmax[p], top[p], total[p], scratch.partial + p * dim, dim, scratch.out + p * dim);
    }

    for (int p = 0; p < pairs; ++p) {
        const int row = tile.first + p / tile.heads, head = tile.head + p % tile.heads;
        const F inverse = set(1.0f / softmax[p].total);
        for (int d = 0; d < dim; d += group) {
            F lo = load(scratch.out + p * dim + d) * inverse, hi = load(scratch.out + p * dim + d + lanes) * inverse;
            put_group(lo, hi, op.out, row, (head * dim + d) / group);
        }
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

// What the plan executor asks of an instruction set: plain structs and a table of functions.
//
// Every function computes some rows or tiles of one operation, alone, reading only its inputs: how the work is cut up
// and who does it never changes a bit of what is computed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tricorn {

constexpr int page_tokens = 16;    // tokens in a page of the KV cache
constexpr int group = 32;          // values that share one scale
constexpr int block_rows = 16;     // output rows interleaved in one block of packed weights
constexpr int chunk_tokens = 512;  // attention sums its keys in chunks of this many, aligned to position 0
constexpr int max_pairs = 24;      // (token, head) pairs that attention works on side by side

// The packed forms, one for each source type: see docs/engine-file.md for the layout of a block.
enum class Form : int32_t { f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k };

struct Matrix {
    Form form;
    int rows, columns;    // as the model has them; packed rows are padded to whole blocks
    const uint8_t* data;  // blocks of 16 rows, one after another
    size_t block_bytes;
};

// Activations that meet a matrix, in the type that the matrix's form calls for. Sixteen rows are interleaved group by
// group (column by column, for floats), so that a kernel finds all that a tile needs at fixed distances from one
// pointer.
enum class Kind : int32_t { f32, bf16, q8 };

constexpr int tile_rows = 16;

// Thirty-two columns of a row as integers with one scale. The value of largest magnitude may exceed 127 steps: four
// further bytes hold what its own byte leaves out, so that one value does not force its coarse scale on the other 31.
struct alignas(64) QuantizedGroup {
    int8_t values[group];
    float scale, sum;     // sum: scale * sum of the integers
    int32_t half_sum[2];  // sum of each half's integers
    uint16_t column_quad,
        column_byte;  // the outlier's column, as byte offsets: 64 * (column / 4) and 64 * (column % 4)
    int8_t rest[4];
};

struct Activations {
    Kind kind;
    int columns;
    uint8_t* data;

    QuantizedGroup* quantized(int row, int g) const {
        const size_t tile = static_cast<size_t>(row / tile_rows) * static_cast<size_t>(columns / group);
        return reinterpret_cast<QuantizedGroup*>(data) + (tile + static_cast<size_t>(g)) * tile_rows + row % tile_rows;
    }
    float* float32(int row, int column) const {
        const size_t tile = static_cast<size_t>(row / tile_rows) * static_cast<size_t>(columns);
        return reinterpret_cast<float*>(data) + (tile + static_cast<size_t>(column)) * tile_rows + row % tile_rows;
    }
    uint16_t* bfloat16(int row, int column) const {  // column even: pairs of columns lie together
        const size_t tile = static_cast<size_t>(row / tile_rows) * static_cast<size_t>(columns);
        return reinterpret_cast<uint16_t*>(data) + (tile + static_cast<size_t>(column)) * tile_rows +
               row % tile_rows * 2;
    }
};

struct Linear {  // out[row][column] (+)= in . weight + bias
    Matrix weight;
    Activations in;
    float* out;
    size_t stride;      // floats between rows of out
    const float* bias;  // [columns padded to blocks] or null
    bool accumulate;
    float softcap;  // 0: none
};

enum class Gate : int32_t { silu, gelu_tanh };

struct Gated {  // out = gate(in . gate weight) * (in . up weight)
    Matrix gate, up;
    Activations in, out;
    Gate function;
};

struct Norm {  // in / rms(in) * weight, to activations or added to a float row
    const float* in;
    size_t stride;
    const float* weight;
    int columns;
    float epsilon;
    const int32_t* rows;  // input row of each output row, or null for the same
    bool add;             // true: `sum` += the result; false: `out` = the result
    float* sum;
    size_t sum_stride;
    Activations out;
};

enum class Cache : int32_t { f32, f16, bf16 };

// The pool, layer by layer, so that the pages of a layer are neighbours. In a layer a page holds K then V, each of them
// head by head, K as [head_dim][16 tokens], V as [16 tokens][head_dim].
struct Pages {
    Cache type;
    uint8_t* data;
    int count;
    size_t page_bytes;  // of one layer
    int kv_heads, head_dim;
    uint8_t* at(int layer, int32_t page) const {
        return data +
               (static_cast<size_t>(layer) * static_cast<size_t>(count) + static_cast<size_t>(page)) * page_bytes;
    }
};

struct Batch {  // the step, as the kernels see it
    int sequences, tokens;
    const int32_t* ids;         // [tokens]
    const int32_t* positions;   // [tokens]
    const int32_t* sequence;    // [tokens] sequence of each row
    const int32_t* row_start;   // [sequences + 1]
    const int32_t* page_start;  // [sequences + 1]
    const int32_t* pages;
};

struct RopeStore {  // norm and rotate q and k in place, write k and v into the pages
    float* qkv;
    size_t stride;
    int heads, layer;
    const float* q_norm;  // [head_dim] or null
    const float* k_norm;
    float epsilon;
    const float* cosine;  // [tokens][head_dim / 2]
    const float* sine;
};

struct AttentionTile {  // rows first .. first+count-1 of one sequence, one kv head, query heads head .. head+heads-1
    int32_t sequence, first, count, kv_head, head, heads;
};

struct Attention {
    const float* qkv;
    size_t stride;
    int heads, layer, window;
    float scale, softcap;
    Activations out;
};

struct SampleRow {  // one row of Sampling (runtime/step.py)
    int32_t target;
    float temperature;
    int32_t top_k;
    float top_p, min_p, repetition, presence, frequency;
    uint64_t seed;
    int32_t position, logprobs;
    int bias_count, history_count, history_prompt;
    const int32_t* bias_ids;
    const float* bias_values;
    const int32_t* history;
    const uint32_t* mask;  // or null
};

struct Sampled {
    int32_t id;
    float logprob;
    int32_t rank;
    int32_t* top_ids;  // [logprobs]
    float* top_logprobs;
};

enum class Peak { int8, bf16, fp32 };

struct Kernels {
    const char* name;
    void (*embed)(const Matrix&, int32_t id, float scale, float* out);
    void (*norm)(const Norm&, int row);
    void (*linear)(const Linear&, int first_block, int last_block, int first_row, int last_row);
    void (*gated)(const Gated&, int out_group, int first_row, int last_row);
    void (*rope_store)(const RopeStore&, const Batch&, const Pages&, int row);
    void (*attention)(const Attention&, const Batch&, const Pages&, const AttentionTile&);
    void (*quantize)(const float* in, const Activations& out, int row);
    Sampled (*sample)(const SampleRow&, const float* logits, int vocabulary, int32_t* top_ids, float* top_logprobs);
    double (*read)(const uint8_t*, size_t bytes);  // reads memory and returns the bytes read
    double (*peak)(Peak);                          // runs a loop of that arithmetic and returns the operations done
};

const Kernels& kernels_portable();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();

}  // namespace tricorn

// Runs a compiled plan: owns the page pool and the activation buffers, and executes submitted steps one after another,
// each as one parallel region.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels.hpp"
#include "pool.hpp"

namespace tricorn {

// Zeroed memory straight from the system, on huge pages where it gives them.
class Memory {
  public:
    explicit Memory(size_t bytes);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    uint8_t* data() const { return data_; }

  private:
    uint8_t* data_;
    size_t bytes_;
};

struct Buffer {        // a named value of the plan; buffers with the same slot are never alive together
    bool activations;  // false: plain float rows
    Kind kind;
    int columns;
    bool sampled;  // one row per sampled row instead of one per token
    int slot;
};

struct Segment {  // part of a merged product: a matrix and the column of `out` where its rows begin
    Matrix weight;
    int column;
};

struct Op {
    enum Type { norm, linear, gated, rope_store, attention, quantize } type;
    int in = -1, out = -1;          // buffers
    std::vector<Segment> segments;  // linear: side by side; gated: gate, up
    const float* weight = nullptr;  // norm
    const float* bias = nullptr;    // linear
    const float* q_norm = nullptr;  // rope_store
    const float* k_norm = nullptr;
    float epsilon = 0, scale = 0, softcap = 0;
    bool add = false, gather = false;
    Gate gate = Gate::silu;
    int layer = 0, heads = 0, window = 0, rope = 0;
};

struct Rope {
    std::vector<float> inverse_frequencies;
    float factor;
};

struct Plan {
    Matrix embedding;
    float embedding_scale;
    int residual, logits;  // buffers
    std::vector<Buffer> buffers;
    std::vector<Op> ops;
    std::vector<Rope> ropes;
    int layers, heads, kv_heads, head_dim, vocabulary;
};

struct Limits {
    int threads, pages, max_tokens, max_rows;
    Cache cache;
};

// Which ids may be sampled: bit masks of the width of the vocabulary, and for each row which one counts, or -1.
struct Masks {
    std::vector<int32_t> index;
    std::vector<uint32_t> words;
};

// Sampling of all rows of a step, as in runtime/step.py.
struct SamplingColumns {
    std::vector<int32_t> rows, target, top_k, position, logprobs;
    std::vector<float> temperature, top_p, min_p, repetition, presence, frequency;
    std::vector<uint64_t> seed;
    std::vector<int32_t> bias_start, bias_ids, history_start, history_ids, history_prompt;
    std::vector<float> bias_values;
    Masks masks;
    bool masks_follow = false;  // the masks come by put_masks while the step runs; it does not sample before
};

struct Step {
    std::vector<int32_t> ids, positions, row_start, page_start, pages, copies;
    std::vector<int32_t> hidden;  // token rows whose last hidden state, normed, is wanted
    SamplingColumns sampling;
};

struct Result {
    std::vector<int32_t> ids, rank, top_ids;
    std::vector<float> logprob, top_logprobs;
    std::vector<float> hidden;  // [rows of `hidden`][width of the model]
    int alternatives = 0;
};

class Executor {
  public:
    Executor(const Kernels& kernels, Plan plan, Limits limits);
    ~Executor();

    // Queues a step and returns its ticket; std::invalid_argument names what is wrong with it.
    int64_t submit(Step step);
    // Hands over the masks of a step that said they would follow.
    void put_masks(int64_t ticket, Masks masks);
    // Waits for a ticket; each can be taken once.
    Result wait(int64_t ticket);

    const Plan& plan() const { return plan_; }
    size_t width() const { return stride(plan_.residual); }
    const Limits& limits() const { return limits_; }
    size_t page_bytes() const { return pages_.page_bytes * static_cast<size_t>(plan_.layers); }
    // A page's bytes, layer after layer, out of the pool and into it; `bytes` has page_bytes() of them. May be called
    // while steps run, for pages that none of them writes (or, when writing, names).
    void read_page(int page, uint8_t* bytes) const;
    void write_page(int page, const uint8_t* bytes);
    // Seconds spent so far: in the beginning of steps, in each operation of the plan, in sampling.
    std::vector<double> seconds();
    // The logits of the last step, [rows][vocabulary]; only while no step is under way.
    std::vector<float> last_logits(size_t& rows) const;

  private:
    struct Angles {  // rotary, of the step's rows
        std::vector<float> cosine, sine;
    };

    void check(const Step& step) const;
    void check(const Masks& masks, size_t rows) const;
    void drive();
    Masks await_masks(int64_t ticket);
    void resolve(Step& step) const;
    void prepare(const Step& step);
    Result execute(int64_t ticket, Step& step, Pool& pool);
    void begin_row(int row);
    void run(const Op& op, Share& share, int members, Result& result);
    void sample_row(int row, const SamplingColumns& columns, Result& result);

    const Buffer& buffer(int index) const { return plan_.buffers[static_cast<size_t>(index)]; }
    size_t stride(int index) const { return static_cast<size_t>(buffer(index).columns); }
    uint8_t* memory(int index) const { return slots_[static_cast<size_t>(buffer(index).slot)]->data(); }
    float* floats(int index, int row = 0) const {
        return reinterpret_cast<float*>(memory(index)) + stride(index) * static_cast<size_t>(row);
    }
    Activations activations(int index) const { return {buffer(index).kind, buffer(index).columns, memory(index)}; }
    size_t mask_words() const { return static_cast<size_t>(plan_.vocabulary + 31) / 32; }
    int rows_of(int index) const {
        return buffer(index).sampled ? static_cast<int>(sampled_rows_.size()) : batch_.tokens;
    }

    const Kernels& kernels_;
    const Plan plan_;
    const Limits limits_;
    std::vector<std::unique_ptr<Memory>> slots_;
    std::unique_ptr<Memory> pool_memory_;
    Pages pages_;

    // of the step under way
    Batch batch_{};
    std::vector<int32_t> sequence_, sampled_rows_, hidden_rows_;
    std::vector<AttentionTile> tiles_;
    std::vector<Angles> angles_;
    std::vector<Share> shares_;
    std::vector<int32_t> last_ids_;
    std::vector<double> step_seconds_;  // per phase, of this step

    std::mutex mutex_;
    std::condition_variable arrived_, finished_, masked_;
    std::deque<std::pair<int64_t, Step>> queue_;
    std::map<int64_t, Result> results_;
    std::map<int64_t, size_t> due_;   // rows of the steps whose masks have not come
    std::map<int64_t, Masks> masks_;  // that have come, until they are used
    std::vector<double> seconds_;
    int64_t next_ticket_ = 0;
    int last_rows_submitted_ = 0;
    bool stopping_ = false;
    std::thread driver_;
};

}  // namespace tricorn

#include "executor.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

namespace tricorn {

namespace {

constexpr int rows_in_task = 64;  // token rows of one task of a product

int blocks_of(const Matrix& m) {
    return (m.rows + block_rows - 1) / block_rows;
}
int divide_up(int a, int b) {
    return (a + b - 1) / b;
}
size_t size(int n) {
    return static_cast<size_t>(n);
}

size_t row_bytes(const Buffer& b) {
    const size_t columns = size(b.columns);
    if (!b.activations || b.kind == Kind::f32) return 4 * columns;
    return b.kind == Kind::bf16 ? 2 * columns : columns / group * sizeof(QuantizedGroup);
}

int element_bytes(Cache type) {
    return type == Cache::f32 ? 4 : 2;
}

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(std::string("invalid step: ") + what);
}

}  // namespace

Memory::Memory(size_t bytes) : bytes_(std::max<size_t>(bytes, 1)) {
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    madvise(p, bytes_, MADV_HUGEPAGE);  // a wish: refused on some systems, without harm
    data_ = static_cast<uint8_t*>(p);
}

Memory::~Memory() {
    munmap(data_, bytes_);
}

Executor::Executor(const Kernels& kernels, Plan plan, Limits limits)
    : kernels_(kernels),
      plan_(std::move(plan)),
      limits_(limits),
      shares_(plan_.ops.size() + 3),
      step_seconds_(plan_.ops.size() + 2),
      seconds_(plan_.ops.size() + 2) {
    std::vector<size_t> slot_bytes;
    for (const Buffer& b : plan_.buffers) {
        slot_bytes.resize(std::max(slot_bytes.size(), size(b.slot) + 1));
        const int rows = b.sampled ? limits_.max_rows : limits_.max_tokens;
        const size_t bytes = row_bytes(b) * size(divide_up(rows, tile_rows) * tile_rows);
        slot_bytes[size(b.slot)] = std::max(slot_bytes[size(b.slot)], bytes);
    }
    for (size_t bytes : slot_bytes) slots_.push_back(std::make_unique<Memory>(bytes));

    const size_t head_bytes = size(plan_.head_dim) * page_tokens * size(element_bytes(limits_.cache));
    pages_ = {limits_.cache,  nullptr,       limits_.pages, head_bytes * size(plan_.kv_heads) * 2,
              plan_.kv_heads, plan_.head_dim};
    pool_memory_ = std::make_unique<Memory>(pages_.page_bytes * size(limits_.pages) * size(plan_.layers));
    pages_.data = pool_memory_->data();

    for (const Rope& rope : plan_.ropes) {
        const size_t angles = rope.inverse_frequencies.size() * size(limits_.max_tokens);
        angles_.push_back({std::vector<float>(angles), std::vector<float>(angles)});
    }
    driver_ = std::thread([this] { drive(); });
}

Executor::~Executor() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    arrived_.notify_all();
    masked_.notify_all();
    driver_.join();
}

int64_t Executor::submit(Step step) {
    check(step);
    std::lock_guard lock(mutex_);
    last_rows_submitted_ = static_cast<int>(step.sampling.rows.size());
    if (step.sampling.masks_follow) due_[next_ticket_] = step.sampling.rows.size();
    queue_.emplace_back(next_ticket_, std::move(step));
    arrived_.notify_one();
    return next_ticket_++;
}

void Executor::put_masks(int64_t ticket, Masks masks) {
    std::lock_guard lock(mutex_);
    const auto due = due_.find(ticket);
    if (due == due_.end()) throw std::invalid_argument("no masks are due for this step");
    check(masks, due->second);
    due_.erase(due);
    masks_.emplace(ticket, std::move(masks));
    masked_.notify_all();
}

Masks Executor::await_masks(int64_t ticket) {
    std::unique_lock lock(mutex_);
    masked_.wait(lock, [&] { return stopping_ || masks_.contains(ticket); });
    return stopping_ ? Masks{} : std::move(masks_.extract(ticket).mapped());
}

Result Executor::wait(int64_t ticket) {
    std::unique_lock lock(mutex_);
    if (ticket < 0 || ticket >= next_ticket_) throw std::invalid_argument("no such step");
    finished_.wait(lock, [&] { return results_.contains(ticket); });
    return std::move(results_.extract(ticket).mapped());
}

void Executor::read_page(int page, uint8_t* bytes) const {
    if (page < 0 || page >= limits_.pages) throw std::invalid_argument("no such page");
    for (int layer = 0; layer < plan_.layers; ++layer)
        std::memcpy(bytes + size(layer) * pages_.page_bytes, pages_.at(layer, page), pages_.page_bytes);
}

void Executor::write_page(int page, const uint8_t* bytes) {
    if (page < 0 || page >= limits_.pages) throw std::invalid_argument("no such page");
    for (int layer = 0; layer < plan_.layers; ++layer)
        std::memcpy(pages_.at(layer, page), bytes + size(layer) * pages_.page_bytes, pages_.page_bytes);
}

std::vector<double> Executor::seconds() {
    std::lock_guard lock(mutex_);
    return seconds_;
}

std::vector<float> Executor::last_logits(size_t& rows) const {
    rows = sampled_rows_.size();
    std::vector<float> all;
    for (size_t row = 0; row < rows; ++row) {
        const float* logits = floats(plan_.logits, static_cast<int>(row));
        all.insert(all.end(), logits, logits + plan_.vocabulary);
    }
    return all;
}

// A step comes from our own scheduler; it is checked all the same, since a wrong index here would be a write to foreign
// memory.
void Executor::check(const Step& step) const {
    const int tokens = static_cast<int>(step.ids.size());
    require(tokens > 0 && tokens <= limits_.max_tokens, "number of tokens");
    require(step.positions.size() == step.ids.size(), "positions");
    require(step.row_start.size() >= 2 && step.page_start.size() == step.row_start.size(), "row or page starts");
    require(step.row_start.front() == 0 && step.row_start.back() == tokens, "row starts");
    require(step.page_start.front() == 0 && size(step.page_start.back()) == step.pages.size(), "page starts");
    require(step.copies.size() % 2 == 0, "copies");
    for (int32_t id : step.ids) require(id < plan_.vocabulary && id >= -last_rows_submitted_, "token id");
    for (const auto* list : {&step.pages, &step.copies})
        for (int32_t page : *list) require(page >= 0 && page < limits_.pages, "page id");
    for (size_t s = 0; s + 1 < step.row_start.size(); ++s) {
        require(step.row_start[s] < step.row_start[s + 1] && step.page_start[s] <= step.page_start[s + 1],
                "starts in order");
        const int covered = (step.page_start[s + 1] - step.page_start[s]) * page_tokens;
        for (int32_t row = step.row_start[s]; row < step.row_start[s + 1]; ++row)
            require(step.positions[size(row)] >= 0 && step.positions[size(row)] < covered,
                    "position beyond its page table");
    }
    const SamplingColumns& c = step.sampling;
    const size_t rows = c.rows.size();
    require(rows <= size(limits_.max_rows), "number of sampled rows");
    for (int32_t row : c.rows) require(row >= 0 && row < tokens, "sampled row");
    require(step.hidden.size() <= step.ids.size(), "number of hidden rows");
    for (int32_t row : step.hidden) require(row >= 0 && row < tokens, "hidden row");
    for (const auto* column : {&c.target, &c.top_k, &c.position, &c.logprobs, &c.history_prompt})
        require(column->size() == rows, "sampling column");
    for (const auto* column : {&c.temperature, &c.top_p, &c.min_p, &c.repetition, &c.presence, &c.frequency})
        require(column->size() == rows, "sampling column");
    require(c.seed.size() == rows && c.bias_ids.size() == c.bias_values.size(), "sampling column");
    for (const auto& [start, ids] :
         {std::pair(&c.bias_start, &c.bias_ids), std::pair(&c.history_start, &c.history_ids)}) {
        require(start->size() == rows + 1 && start->front() == 0 && size(start->back()) == ids->size(), "list starts");
        require(std::is_sorted(start->begin(), start->end()), "list starts in order");
    }
    for (int32_t id : c.bias_ids) require(id >= 0 && id < plan_.vocabulary, "biased id");
    for (int32_t id : c.history_ids) require(id < plan_.vocabulary && id >= -last_rows_submitted_, "id in history");
    for (int32_t id : c.target) require(id < plan_.vocabulary, "target");
    for (int32_t n : c.logprobs) require(n <= plan_.vocabulary && n <= 1024, "logprobs");
    if (!c.masks_follow) check(c.masks, rows);
}

void Executor::check(const Masks& masks, size_t rows) const {
    require(masks.index.size() == rows, "sampling column");
    require(masks.words.size() % mask_words() == 0, "mask width");
    for (int32_t i : masks.index) require(i < 0 || size(i + 1) * mask_words() <= masks.words.size(), "mask index");
}

void Executor::drive() {
    Pool pool(limits_.threads);
    pin(0, limits_.threads);
    for (;;) {
        std::pair<int64_t, Step> next;
        {
            std::unique_lock lock(mutex_);
            arrived_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
            if (stopping_) return;
            next = std::move(queue_.front());
            queue_.pop_front();
        }
        Result result = execute(next.first, next.second, pool);
        {
            std::lock_guard lock(mutex_);
            for (size_t i = 0; i < seconds_.size(); ++i) seconds_[i] += step_seconds_[i];
            results_.emplace(next.first, std::move(result));
        }
        finished_.notify_all();
    }
}

// Puts the ids that the previous step sampled where this one refers to them.
void Executor::resolve(Step& step) const {
    auto fill = [&](std::vector<int32_t>& ids) {
        for (int32_t& id : ids)
            if (id < 0) id = std::max(0, last_ids_[size(-1 - id)]);
    };
    fill(step.ids);
    fill(step.sampling.history_ids);
}

void Executor::prepare(const Step& step) {
    const int sequences = static_cast<int>(step.row_start.size()) - 1;
    sequence_.resize(step.ids.size());
    tiles_.clear();
    const int per_head = plan_.heads / plan_.kv_heads;
    const int heads = std::min(per_head, max_pairs), rows = std::max(1, max_pairs / heads);
    for (int s = 0; s < sequences; ++s) {
        for (int row = step.row_start[size(s)]; row < step.row_start[size(s) + 1]; ++row) sequence_[size(row)] = s;
        for (int kv_head = 0; kv_head < plan_.kv_heads; ++kv_head)  // what follows each other reads the same pages
            for (int row = step.row_start[size(s)]; row < step.row_start[size(s) + 1]; row += rows)
                for (int head = 0; head < per_head; head += heads)
                    tiles_.push_back({s, row, std::min(rows, step.row_start[size(s) + 1] - row), kv_head,
                                      kv_head * per_head + head, std::min(heads, per_head - head)});
    }
    sampled_rows_ = step.sampling.rows;
    hidden_rows_ = step.hidden;
    batch_ = {sequences,
              static_cast<int>(step.ids.size()),
              step.ids.data(),
              step.positions.data(),
              sequence_.data(),
              step.row_start.data(),
              step.page_start.data(),
              step.pages.data()};
    for (Share& share : shares_) share.reset();
}

Result Executor::execute(int64_t ticket, Step& step, Pool& pool) {
    resolve(step);
    prepare(step);
    SamplingColumns& columns = step.sampling;
    const int rows = static_cast<int>(columns.rows.size());
    Result result;
    for (int32_t n : columns.logprobs) result.alternatives = std::max(result.alternatives, n);
    result.ids.resize(size(rows));
    result.rank.resize(size(rows));
    result.logprob.resize(size(rows));
    result.top_ids.assign(size(rows) * size(result.alternatives), -1);
    result.top_logprobs.assign(size(rows) * size(result.alternatives), -INFINITY);
    result.hidden.assign(step.hidden.size() * width(), 0.0f);

    const int copies = static_cast<int>(step.copies.size() / 2), members = pool.size();
    const size_t ops = plan_.ops.size();
    pool.run([&](int member) {
        auto last = std::chrono::steady_clock::now();
        auto finish_phase = [&](size_t phase) {
            pool.barrier().wait();
            if (member != 0) return;
            const auto now = std::chrono::steady_clock::now();
            step_seconds_[phase] = std::chrono::duration<double>(now - last).count();
            last = now;
        };
        if (copies > 0) {
            shares_[ops].each(copies * plan_.layers, members, [&](int i) {
                const int layer = i % plan_.layers;
                const size_t copy = size(i / plan_.layers);
                std::memcpy(pages_.at(layer, step.copies[2 * copy + 1]), pages_.at(layer, step.copies[2 * copy]),
                            pages_.page_bytes);
            });
        }
        shares_[ops + 1].each(batch_.tokens, members, [&](int row) { begin_row(row); });
        finish_phase(0);
        for (size_t i = 0; i < ops; ++i) {
            run(plan_.ops[i], shares_[i], members, result);
            finish_phase(i + 1);
        }
        if (columns.masks_follow) {
            if (member == 0) columns.masks = await_masks(ticket);
            pool.barrier().wait();
        }
        shares_[ops + 2].each(rows, members, [&](int row) { sample_row(row, columns, result); });
        finish_phase(ops + 1);
    });
    last_ids_ = result.ids;
    return result;
}

void Executor::begin_row(int row) {
    kernels_.embed(plan_.embedding, batch_.ids[row], plan_.embedding_scale, floats(plan_.residual, row));
    for (size_t r = 0; r < plan_.ropes.size(); ++r) {
        const Rope& rope = plan_.ropes[r];
        const size_t half = rope.inverse_frequencies.size();
        for (size_t i = 0; i < half; ++i) {  // the angle is a float32 product, as in the models' own code
            const double angle =
                static_cast<double>(static_cast<float>(batch_.positions[row]) * rope.inverse_frequencies[i]);
            angles_[r].cosine[size(row) * half + i] = static_cast<float>(std::cos(angle)) * rope.factor;
            angles_[r].sine[size(row) * half + i] = static_cast<float>(std::sin(angle)) * rope.factor;
        }
    }
}

// This member's share of one operation.
void Executor::run(const Op& op, Share& share, int members, Result& result) {
    const int rows = rows_of(op.in);
    const int chunks = divide_up(rows, rows_in_task);
    auto row_range = [&](int task, auto f) {
        const int first = task % chunks * rows_in_task;
        f(task / chunks, first, std::min(first + rows_in_task, rows));
    };
    switch (op.type) {
        case Op::norm: {
            Norm n{};
            n.in = floats(op.in);
            n.stride = stride(op.in);
            n.weight = op.weight;
            n.columns = buffer(op.in).columns;
            n.epsilon = op.epsilon;
            n.rows = op.gather ? sampled_rows_.data() : nullptr;
            n.add = op.add;
            if (op.add) {
                n.sum = floats(op.out);
                n.sum_stride = stride(op.out);
            } else {
                n.out = activations(op.out);
            }
            if (!op.gather) return share.each(rows_of(op.out), members, [&](int row) { kernels_.norm(n, row); });
            // the last norm: of the rows that are sampled, and as plain numbers of those that were asked for
            Norm hidden = n;
            hidden.rows = hidden_rows_.data();
            hidden.add = true;
            hidden.sum = result.hidden.data();
            hidden.sum_stride = width();
            const int sampled = rows_of(op.out);
            return share.each(sampled + static_cast<int>(hidden_rows_.size()), members, [&](int row) {
                row < sampled ? kernels_.norm(n, row) : kernels_.norm(hidden, row - sampled);
            });
        }
        case Op::linear: {
            constexpr int blocks_in_task = 2;
            int tasks = 0;
            for (const Segment& s : op.segments) tasks += divide_up(blocks_of(s.weight), blocks_in_task) * chunks;
            return share.each(tasks, members, [&](int task) {
                const Segment* s = op.segments.data();
                for (int own; task >= (own = divide_up(blocks_of(s->weight), blocks_in_task) * chunks); ++s)
                    task -= own;
                const float* bias = op.bias ? op.bias + s->column : nullptr;
                const Linear l{s->weight, activations(op.in), floats(op.out) + s->column, stride(op.out), bias,
                               op.add,    op.softcap};
                row_range(task, [&](int pair, int first, int last) {
                    const int block = pair * blocks_in_task;
                    kernels_.linear(l, block, std::min(block + blocks_in_task, blocks_of(s->weight)), first, last);
                });
            });
        }
        case Op::gated: {
            const Gated g{op.segments[0].weight, op.segments[1].weight, activations(op.in), activations(op.out),
                          op.gate};
            return share.each(buffer(op.out).columns / group * chunks, members, [&](int task) {
                row_range(task, [&](int out_group, int first, int last) { kernels_.gated(g, out_group, first, last); });
            });
        }
        case Op::rope_store: {
            const Angles& angles = angles_[size(op.rope)];
            const RopeStore r{floats(op.in), stride(op.in),        op.heads,          op.layer, op.q_norm, op.k_norm,
                              op.epsilon,    angles.cosine.data(), angles.sine.data()};
            const int run = rows < rows_in_task
                                ? 1
                                : page_tokens;  // neighbours write to the same lines of a page: one thread's work
            return share.each(divide_up(rows, run), members, [&](int task) {
                const int end = std::min((task + 1) * run, rows);
                for (int row = task * run; row < end; ++row) kernels_.rope_store(r, batch_, pages_, row);
            });
        }
        case Op::attention: {
            const Attention a{floats(op.in), stride(op.in), op.heads,   op.layer,
                              op.window,     op.scale,      op.softcap, activations(op.out)};
            return share.each(static_cast<int>(tiles_.size()), members,
                              [&](int i) { kernels_.attention(a, batch_, pages_, tiles_[size(i)]); });
        }
        case Op::quantize: {
            const Activations out = activations(op.out);
            return share.each(rows, members, [&](int row) { kernels_.quantize(floats(op.in, row), out, row); });
        }
    }
}

void Executor::sample_row(int row, const SamplingColumns& c, Result& result) {
    const size_t r = size(row);
    SampleRow s{};
    s.target = c.target[r];
    s.temperature = c.temperature[r];
    s.top_k = c.top_k[r];
    s.top_p = c.top_p[r];
    s.min_p = c.min_p[r];
    s.repetition = c.repetition[r];
    s.presence = c.presence[r];
    s.frequency = c.frequency[r];
    s.seed = c.seed[r];
    s.position = c.position[r];
    s.logprobs = c.logprobs[r];
    s.bias_count = c.bias_start[r + 1] - c.bias_start[r];
    s.bias_ids = c.bias_ids.data() + c.bias_start[r];
    s.bias_values = c.bias_values.data() + c.bias_start[r];
    s.history_count = c.history_start[r + 1] - c.history_start[r];
    s.history = c.history_ids.data() + c.history_start[r];
    s.history_prompt = c.history_prompt[r];
    const bool masked = r < c.masks.index.size() && c.masks.index[r] >= 0;  // none when the executor is stopping
    s.mask = masked ? c.masks.words.data() + size(c.masks.index[r]) * mask_words() : nullptr;
    const size_t at = r * size(result.alternatives);
    const Sampled out = kernels_.sample(s, floats(plan_.logits, row), plan_.vocabulary, result.top_ids.data() + at,
                                        result.top_logprobs.data() + at);
    result.ids[r] = out.id;
    result.rank[r] = out.rank;
    result.logprob[r] = out.logprob;
}

}  // namespace tricorn

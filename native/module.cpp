// The extension module: plans and steps from Python's arrays into the executor, results back.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "executor.hpp"
#include "machine.hpp"

namespace nb = nanobind;

namespace tricorn {
namespace {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
std::vector<T> copy(const nb::object& holder, const char* name) {
    const auto array = nb::cast<Array<T>>(holder.attr(name));
    return std::vector<T>(array.data(), array.data() + array.shape(0));
}

template <class T>
std::vector<T> copy_matrix(const nb::object& holder, const char* name) {
    const auto array = nb::cast<nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>>(holder.attr(name));
    return std::vector<T>(array.data(), array.data() + array.shape(0) * array.shape(1));
}

template <class T>
T get(const nb::dict& d, const char* key, T otherwise) {
    return d.contains(key) ? nb::cast<T>(d[key]) : otherwise;
}

template <class T>
nb::object give(std::vector<T>&& v, std::initializer_list<size_t> shape) {  // an array that owns the vector
    auto* kept = new std::vector<T>(std::move(v));
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T>(kept->data(), shape, owner));
}

template <class E>
E named(const std::string& name, std::initializer_list<std::pair<const char*, E>> names) {
    for (const auto& [key, value] : names)
        if (name == key) return value;
    throw std::invalid_argument("unknown name in plan: " + name);
}

Form form_of(const std::string& s) {
    return named<Form>(s, {{"F32", Form::f32},
                           {"F16", Form::f16},
                           {"BF16", Form::bf16},
                           {"Q4_0", Form::q4_0},
                           {"Q4_1", Form::q4_1},
                           {"Q5_0", Form::q5_0},
                           {"Q5_1", Form::q5_1},
                           {"Q8_0", Form::q8_0},
                           {"Q4_K", Form::q4_k},
                           {"Q5_K", Form::q5_k},
                           {"Q6_K", Form::q6_k}});
}

// The bytes of a block of 16 rows: its scales and offsets padded to a line, then the quants.
size_t block_bytes_of(Form form, size_t columns) {
    const size_t groups = columns / group, supers = columns / 256;
    auto block = [&](size_t planes, size_t bits) { return (planes * block_rows + 63) / 64 * 64 + groups * 64 * bits; };
    switch (form) {
        case Form::f32:
            return 4 * block_rows * columns;
        case Form::f16:
        case Form::bf16:
            return 2 * block_rows * columns;
        case Form::q4_0:
            return block(2 * groups, 4);
        case Form::q4_1:
            return block(4 * groups, 4);
        case Form::q5_0:
            return block(2 * groups, 5);
        case Form::q5_1:
            return block(4 * groups, 5);
        case Form::q8_0:
            return block(2 * groups, 8);
        case Form::q4_k:
            return block(4 * supers + 2 * groups, 4);
        case Form::q5_k:
            return block(4 * supers + 2 * groups, 5);
        case Form::q6_k:
            return block(2 * supers + 2 * groups, 6);
    }
    return 0;
}

// Tensors of a plan, by name, in the mapped file.
class Tensors {
  public:
    Tensors(const uint8_t* base, size_t bytes, const nb::list& list) : base_(base), bytes_(bytes) {
        for (nb::handle h : list) {
            const auto d = nb::cast<nb::dict>(h);
            entries_[nb::cast<std::string>(d["name"])] = d;
        }
    }
    Matrix matrix(const std::string& name) const {
        const nb::dict& d = at(name);
        const size_t block_bytes = nb::cast<size_t>(d["block_bytes"]);
        Matrix m{form_of(nb::cast<std::string>(d["type"])), nb::cast<int>(d["rows"]), nb::cast<int>(d["columns"]),
                 nullptr, block_bytes};
        const bool sound = m.rows > 0 && m.columns > 0 && m.columns % group == 0 &&
                           block_bytes == block_bytes_of(m.form, static_cast<size_t>(m.columns));
        if (!sound) throw std::invalid_argument("a tensor of impossible shape: " + name);
        const size_t blocks = static_cast<size_t>((m.rows + block_rows - 1) / block_rows);
        m.data = data(d, blocks * block_bytes);
        return m;
    }
    const float* vector(const nb::dict& op, const char* key) const {
        if (!op.contains(key) || op[key].is_none()) return nullptr;
        const nb::dict& d = at(nb::cast<std::string>(op[key]));
        return reinterpret_cast<const float*>(data(d, 4 * nb::cast<size_t>(d["columns"])));
    }

  private:
    const nb::dict& at(const std::string& name) const {
        const auto found = entries_.find(name);
        if (found == entries_.end())
            throw std::invalid_argument("the plan names a tensor that the file lacks: " + name);
        return found->second;
    }
    const uint8_t* data(const nb::dict& d, size_t needed) const {
        const size_t offset = nb::cast<size_t>(d["offset"]);
        if (offset % 64 || offset > bytes_ || bytes_ - offset < needed)
            throw std::invalid_argument("a tensor lies outside the file");
        return base_ + offset;
    }
    const uint8_t* base_;
    size_t bytes_;
    std::unordered_map<std::string, nb::dict> entries_;
};

Op make_op(const nb::dict& d, const Tensors& tensors) {
    Op op{};
    op.type = named<Op::Type>(nb::cast<std::string>(d["op"]), {{"norm", Op::norm},
                                                               {"linear", Op::linear},
                                                               {"gated", Op::gated},
                                                               {"rope_store", Op::rope_store},
                                                               {"attention", Op::attention},
                                                               {"quantize", Op::quantize}});
    op.in = nb::cast<int>(d["in"]);
    op.out = get(d, "out", op.in);
    if (d.contains("segments"))
        for (nb::handle h : nb::object(d["segments"])) {
            const auto segment = nb::cast<nb::dict>(h);
            op.segments.push_back(
                {tensors.matrix(nb::cast<std::string>(segment["weight"])), get(segment, "column", 0)});
        }
    op.weight = tensors.vector(d, "weight");
    op.bias = tensors.vector(d, "bias");
    op.q_norm = tensors.vector(d, "q_norm");
    op.k_norm = tensors.vector(d, "k_norm");
    op.epsilon = get(d, "epsilon", 0.0f);
    op.scale = get(d, "scale", 0.0f);
    op.softcap = get(d, "softcap", 0.0f);
    op.add = get(d, "add", false);
    op.gather = get(d, "gather", false);
    op.gate = named<Gate>(get(d, "gate", std::string("silu")), {{"silu", Gate::silu}, {"gelu_tanh", Gate::gelu_tanh}});
    op.layer = get(d, "layer", 0);
    op.heads = get(d, "heads", 0);
    op.window = get(d, "window", 0);
    op.rope = get(d, "rope", 0);
    return op;
}

Plan make_plan(const nb::dict& d, const Tensors& tensors) {
    Plan plan{};
    plan.embedding = tensors.matrix(nb::cast<std::string>(d["embedding"]));
    plan.embedding_scale = nb::cast<float>(d["embedding_scale"]);
    plan.residual = nb::cast<int>(d["residual"]);
    plan.logits = nb::cast<int>(d["logits"]);
    for (nb::handle h : nb::object(d["buffers"])) {
        const auto b = nb::cast<nb::dict>(h);
        const auto kind = nb::cast<std::string>(b["kind"]);
        Buffer buffer{};
        buffer.activations = kind != "rows";
        buffer.kind =
            named<Kind>(kind, {{"rows", Kind::f32}, {"f32", Kind::f32}, {"bf16", Kind::bf16}, {"q8", Kind::q8}});
        buffer.columns = nb::cast<int>(b["columns"]);
        buffer.sampled = nb::cast<bool>(b["sampled"]);
        buffer.slot = nb::cast<int>(b["slot"]);
        plan.buffers.push_back(buffer);
    }
    for (nb::handle h : nb::object(d["ops"])) plan.ops.push_back(make_op(nb::cast<nb::dict>(h), tensors));
    for (nb::handle h : nb::object(d["ropes"])) {
        const auto r = nb::cast<nb::dict>(h);
        plan.ropes.push_back({nb::cast<std::vector<float>>(r["inv_freq"]), nb::cast<float>(r["factor"])});
    }
    const int buffers = static_cast<int>(plan.buffers.size());
    auto known = [&](int index) {
        return index >= 0 && index < buffers && plan.buffers[static_cast<size_t>(index)].slot >= 0;
    };
    bool sound = known(plan.residual) && known(plan.logits);
    for (const Op& op : plan.ops) sound = sound && known(op.in) && known(op.out);
    if (!sound) throw std::invalid_argument("the plan names a buffer that it does not have");
    plan.layers = nb::cast<int>(d["layers"]);
    plan.heads = nb::cast<int>(d["heads"]);
    plan.kv_heads = nb::cast<int>(d["kv_heads"]);
    plan.head_dim = nb::cast<int>(d["head_dim"]);
    plan.vocabulary = nb::cast<int>(d["vocab"]);
    return plan;
}

const Kernels& kernels_named(const std::string& isa) {
#if defined(TRICORN_HAS_avx512)
    if (isa == "avx512") return kernels_avx512();
    if (isa == "avx2") return kernels_avx2();
#endif
    if (isa == "portable") return kernels_portable();
    throw std::invalid_argument("unknown instruction set: " + isa);
}

// The instruction sets this processor can run, best first.
std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
#if defined(TRICORN_HAS_avx512)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
        __builtin_cpu_supports("avx512bf16"))
        names.emplace_back("avx512");
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) names.emplace_back("avx2");
#endif
    names.emplace_back("portable");
    return names;
}

class PyExecutor {
  public:
    PyExecutor(nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> file, const nb::list& tensors,
               const nb::dict& plan, const std::string& isa, int threads, int pages, int max_tokens, int max_rows,
               const std::string& cache)
        : file_(file),
          executor_(kernels_named(isa), make_plan(plan, Tensors(file.data(), file.shape(0), tensors)),
                    {threads, pages, max_tokens, max_rows,
                     named<Cache>(cache, {{"f32", Cache::f32}, {"f16", Cache::f16}, {"bf16", Cache::bf16}})}) {}

    int64_t submit(const nb::object& s) {
        Step step;
        step.ids = copy<int32_t>(s, "token_ids");
        step.positions = copy<int32_t>(s, "positions");
        step.row_start = copy<int32_t>(s, "row_start");
        step.page_start = copy<int32_t>(s, "page_start");
        step.pages = copy<int32_t>(s, "pages");
        step.copies = copy_matrix<int32_t>(s, "copies");
        step.hidden = copy<int32_t>(s, "hidden");
        const nb::object c = s.attr("sampling");
        SamplingColumns& to = step.sampling;
        to.rows = copy<int32_t>(c, "rows");
        to.target = copy<int32_t>(c, "target");
        to.temperature = copy<float>(c, "temperature");
        to.top_k = copy<int32_t>(c, "top_k");
        to.top_p = copy<float>(c, "top_p");
        to.min_p = copy<float>(c, "min_p");
        to.repetition = copy<float>(c, "repetition");
        to.presence = copy<float>(c, "presence");
        to.frequency = copy<float>(c, "frequency");
        to.seed = copy<uint64_t>(c, "seed");
        to.position = copy<int32_t>(c, "position");
        to.logprobs = copy<int32_t>(c, "logprobs");
        to.bias_start = copy<int32_t>(c, "bias_start");
        to.bias_ids = copy<int32_t>(c, "bias_ids");
        to.bias_values = copy<float>(c, "bias_values");
        to.history_start = copy<int32_t>(c, "history_start");
        to.history_ids = copy<int32_t>(c, "history_ids");
        to.history_prompt = copy<int32_t>(c, "history_prompt");
        to.masks_follow = nb::cast<bool>(c.attr("masks_follow"));
        if (!to.masks_follow) to.masks = {copy<int32_t>(c, "mask_index"), copy_matrix<uint32_t>(c, "mask")};
        nb::gil_scoped_release unlocked;
        return executor_.submit(std::move(step));
    }

    void put_masks(int64_t ticket, const Array<int32_t>& index,
                   const nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& mask) {
        Masks masks{{index.data(), index.data() + index.size()}, {mask.data(), mask.data() + mask.size()}};
        nb::gil_scoped_release unlocked;
        executor_.put_masks(ticket, std::move(masks));
    }

    // (ids, logprob, rank, top_ids, top_logprobs, hidden)
    nb::tuple wait(int64_t ticket) {
        Result r;
        {
            nb::gil_scoped_release unlocked;
            r = executor_.wait(ticket);
        }
        const size_t rows = r.ids.size(), n = static_cast<size_t>(r.alternatives);
        const size_t width = executor_.width(), hidden = r.hidden.size() / width;
        return nb::make_tuple(give(std::move(r.ids), {rows}), give(std::move(r.logprob), {rows}),
                              give(std::move(r.rank), {rows}), give(std::move(r.top_ids), {rows, n}),
                              give(std::move(r.top_logprobs), {rows, n}), give(std::move(r.hidden), {hidden, width}));
    }

    size_t page_bytes() const { return executor_.page_bytes(); }
    nb::object read_page(int page) {
        std::vector<uint8_t> bytes(executor_.page_bytes());
        {
            nb::gil_scoped_release unlocked;
            executor_.read_page(page, bytes.data());
        }
        return give(std::move(bytes), {executor_.page_bytes()});
    }
    void write_page(int page, const Array<uint8_t>& data) {
        if (data.shape(0) != executor_.page_bytes())
            throw std::invalid_argument("a page is " + std::to_string(executor_.page_bytes()) + " bytes, not " +
                                        std::to_string(data.shape(0)));
        nb::gil_scoped_release unlocked;
        executor_.write_page(page, data.data());
    }
    std::vector<double> seconds() { return executor_.seconds(); }
    nb::object last_logits() {
        size_t rows = 0;
        std::vector<float> logits = executor_.last_logits(rows);
        return give(std::move(logits), {rows, static_cast<size_t>(executor_.plan().vocabulary)});
    }

  private:
    nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> file_;  // keeps the mapping alive
    Executor executor_;
};

}  // namespace
}  // namespace tricorn

NB_MODULE(_native, m) {
    using namespace tricorn;
    m.doc() = "Tricorn's native side: kernels, thread pool, plan executor, sampler.";
    m.def("instruction_sets", &instruction_sets, "The instruction sets this processor can run, best first.");
    m.def(
        "measure_machine",
        [](const std::string& isa, int threads) { return measure_machine(kernels_named(isa), threads); },
        nb::arg("isa"), nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>(),
        "Measured rates with `threads` threads: [read GB/s, int8 Gop/s, bf16 Gflop/s, fp32 Gflop/s].");
    nb::class_<PyExecutor>(m, "Executor")
        .def(nb::init<nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>, const nb::list&,
                      const nb::dict&, const std::string&, int, int, int, int, const std::string&>(),
             nb::arg("file"), nb::arg("tensors"), nb::arg("plan"), nb::arg("isa"), nb::arg("threads"), nb::arg("pages"),
             nb::arg("max_tokens"), nb::arg("max_rows"), nb::arg("cache"))
        .def("submit", &PyExecutor::submit, nb::arg("step"))
        .def("put_masks", &PyExecutor::put_masks, nb::arg("ticket"), nb::arg("index"), nb::arg("mask"))
        .def("wait", &PyExecutor::wait, nb::arg("ticket"))
        .def("seconds", &PyExecutor::seconds)
        .def("last_logits", &PyExecutor::last_logits)
        .def("read_page", &PyExecutor::read_page, nb::arg("page"))
        .def("write_page", &PyExecutor::write_page, nb::arg("page"), nb::arg("data"))
        .def_prop_ro("page_bytes", &PyExecutor::page_bytes);
}

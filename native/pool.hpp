// A persistent team of threads that run one function together, with a barrier and shared work inside it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace tricorn {

// Waits for a value to change: spins a while, then sleeps.
class Signal {
  public:
    int now() const { return value_.load(std::memory_order_acquire); }
    void open() {
        value_.fetch_add(1, std::memory_order_release);
        value_.notify_all();
    }
    void wait(int seen) const;

  private:
    alignas(64) std::atomic<int> value_{0};
};

class Barrier {
  public:
    explicit Barrier(int members) : members_(members) {}
    void wait() {
        const int seen = gate_.now();
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members_) {
            arrived_.store(0, std::memory_order_relaxed);
            gate_.open();
        } else {
            gate_.wait(seen);
        }
    }

  private:
    const int members_;
    alignas(64) std::atomic<int> arrived_{0};
    Signal gate_;
};

// Tasks 0 .. count-1 handed out in shrinking runs, so that a thread the system has put aside delays the others by one
// small run at most.
class Share {
  public:
    void reset() { next_.store(0, std::memory_order_relaxed); }
    template <class Function>
    void each(int count, int members, Function f) {
        int begin = next_.load(std::memory_order_relaxed);
        while (begin < count) {
            const int run = std::max(1, (count - begin) / (2 * members));
            if (!next_.compare_exchange_weak(begin, begin + run, std::memory_order_relaxed)) continue;
            for (int i = begin; i < begin + run; ++i) f(i);
            begin = next_.load(std::memory_order_relaxed);
        }
    }

  private:
    alignas(64) std::atomic<int> next_{0};
};

class Pool {
  public:
    explicit Pool(int members);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return members_; }
    Barrier& barrier() { return barrier_; }

    // Runs f(member) on every member, the caller being member 0; returns when all are done.
    void run(const std::function<void(int)>& f);

  private:
    void work(int member);

    const int members_;
    Barrier barrier_, finish_;
    Signal start_;
    const std::function<void(int)>* job_ = nullptr;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

// Binds the calling thread to the member-th of the processors this process may use, when there are enough of them for
// all members.
void pin(int member, int members);

}  // namespace tricorn

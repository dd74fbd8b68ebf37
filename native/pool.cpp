#include "pool.hpp"

#include <pthread.h>
#include <sched.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tricorn {

namespace {

constexpr int spins =
    4000;  // some tens of microseconds: longer than a barrier takes, shorter than an idle user notices

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

}  // namespace

void Signal::wait(int seen) const {
    for (int i = 0; i < spins; ++i) {
        if (now() != seen) return;
        relax();
    }
    while (now() == seen) value_.wait(seen, std::memory_order_acquire);
}

Pool::Pool(int members) : members_(members), barrier_(members), finish_(members) {
    for (int member = 1; member < members; ++member) threads_.emplace_back([this, member] { work(member); });
}

Pool::~Pool() {
    stopping_ = true;
    start_.open();
    for (std::thread& t : threads_) t.join();
}

void Pool::run(const std::function<void(int)>& f) {
    job_ = &f;
    start_.open();
    f(0);
    finish_.wait();
}

void Pool::work(int member) {
    pin(member, members_);
    int seen = 0;
    for (;;) {
        start_.wait(seen);
        ++seen;
        if (stopping_) return;
        (*job_)(member);
        finish_.wait();
    }
}

void pin(int member, int members) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < members) return;
    for (int cpu = 0, index = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &allowed) || index++ != member) continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        pthread_setaffinity_np(pthread_self(), sizeof one, &one);
        return;
    }
}

}  // namespace tricorn

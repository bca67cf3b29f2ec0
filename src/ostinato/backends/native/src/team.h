// The thread team: one job at a time, run by the caller and by threads that sleep while there is none.
//
// A job is one function that every member runs with its number; inside it members synchronise at barriers, so a job is
// a series of phases, each shared out by outputs. The caller is member 0. A member that waits at a barrier spins for a
// while, which costs 50 ns if all members are running, and then sleeps: by design no phase lasts that long, but the
// system may preempt a core. team_size.h decides from these sleeps how many members take part in a job. Results do not
// depend on the number of members.
//
// The thread that holds the owner mutex runs jobs: any thread may acquire it, one at a time, and the loop hands it over
// between two steps if another thread waits. The mutex is robust: if its holder dies, the members waiting at a barrier
// detect this and leave the job, and the next caller finds the team complete.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <memory>
#include <pthread.h>
#include <sched.h>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "team_size.h"

namespace team {

constexpr int64_t SPIN_NS = 100'000;           // how long a waiting member spins before it sleeps
constexpr int64_t SPIN_CONTENDED_NS = 20'000;  // ... while a neighbour may need its core
constexpr int64_t LOOK_AGAIN_NS = 20'000'000;  // how long it sleeps before it checks whether its caller is alive

inline int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");  // `yield` does nothing on most cores
#endif
}

// Sleep while the word is `seen`, for so long at most.
inline void sleep_on(std::atomic<uint32_t>& word, uint32_t seen, int64_t most_ns) {
#if defined(__linux__)
    timespec most{most_ns / 1'000'000'000, most_ns % 1'000'000'000};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, &most, nullptr, 0);
#else
    int64_t nap_ns = most_ns < 200'000 ? most_ns : 200'000;
    if (word.load(std::memory_order_acquire) == seen) std::this_thread::sleep_for(std::chrono::nanoseconds(nap_ns));
#endif
}

inline void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

struct Abandoned {};  // thrown at a barrier whose caller has died, and caught where the member began

class Team;
struct Member {  // a job's argument: its number, and the number of members
    Team* team;
    int me, n;

    void barrier();
    void share(int64_t n_parts, int& first, int& last) const {
        first = int(n_parts * me / n);
        last = int(n_parts * (me + 1) / n);
    }
    template <class F>
    void each(int n_parts, F work) const {  // work(part) for each of this member's
        int first, last;
        share(n_parts, first, last);
        for (int part = first; part < last; part++) work(part);
    }
};

using Job = void (*)(void* what, Member& member);

class Team {
 public:
    explicit Team(int n_members) : n_(n_members < 1 ? 1 : n_members), active_(n_), size_(n_), calls_(new Call[n_]) {
        pthread_mutexattr_t attributes;
        pthread_mutexattr_init(&attributes);
#if defined(__linux__)
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
#endif
        pthread_mutex_init(&owner_, &attributes);
        pthread_mutexattr_destroy(&attributes);
        try {
            for (int me = 1; me < n_; me++) threads_.emplace_back([this, me] { run_thread(me); });
        } catch (...) {  // the system refused a thread: end those already started first
            dismiss();
            throw;
        }
    }

    ~Team() { dismiss(); }  // no thread may be in a job or waiting for the team

    int size() const { return n_; }
    int active() const { return active_; }
    int n_trials() const { return size_.n_trials(); }

    // --- ownership of the team ---

    void acquire() {
        int found = passing_.load() == PASSED ? EBUSY : pthread_mutex_trylock(&owner_);
        if (!is_ours(found)) {
            n_asking_.fetch_add(1);
            while (!is_ours(found = passing_.load() == PASSED ? wait_until_back() : lock_soon())) {
                int no_request = 0;  // the request was dropped because this thread was not scheduled in time: ask again
                n_asking_.compare_exchange_strong(no_request, 1);
            }
            one_asks_less();
        }
        taken(found);
        uint32_t offered = OFFERED;
        if (passing_.compare_exchange_strong(offered, PASSED)) wake_all(passing_);
    }

    void release() { pthread_mutex_unlock(&owner_); }

    // Whether a thread waits for the team.
    bool is_asked() const { return n_asking_.load() != 0; }

    // Let one waiting thread own the team, if there is one; returns when this thread owns it again. Threads that ask
    // meanwhile wait until then. If no thread takes it, the one that asked has died or is not scheduled: its request is
    // dropped until it asks again.
    void hand_over() {
        if (n_asking_.load() == 0) return;
        const int64_t until = now_ns() + LOOK_AGAIN_NS;
        passing_.store(OFFERED);
        pthread_mutex_unlock(&owner_);
        while (passing_.load() == OFFERED && now_ns() < until) sleep_on(passing_, OFFERED, LOOK_AGAIN_NS / 20);
        taken(pthread_mutex_lock(&owner_));
        if (passing_.exchange(NOT_PASSING) == OFFERED) n_asking_.store(0);
        wake_all(passing_);
    }

    // --- a job: called by the thread that owns the team ---

    // Jobs of one function and one number of rows do the same amount of work.
    void run(Job job, void* what, int n_rows) {
        const int64_t began = now_ns();
        job_ = job, what_ = what;
        here_.store(0, std::memory_order_relaxed);
        const int n = active_ = size_.next();
        spin_ns_.store(size_.is_contended() ? SPIN_CONTENDED_NS : SPIN_NS, std::memory_order_relaxed);
        for (int me = 1; me < n; me++) call(me, calls_[me].number.load(std::memory_order_relaxed) + 1);
        Member caller{this, 0, n};
        job(what, caller);
        caller.barrier();  // all members have left the job
        const int64_t slept = n > 1 ? slept_ns_.exchange(0) / (n - 1) : 0, ended = now_ns();
        size_.job_ended({reinterpret_cast<uintptr_t>(job), n_rows}, ended, ended - began, slept);
    }

    void barrier(Member& member) {
        if (member.n == 1) return;
        const uint32_t phase = phase_.load(std::memory_order_acquire);
        if (here_.fetch_add(1, std::memory_order_acq_rel) == member.n - 1) {
            here_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1);
            if (sleepers_.load()) wake_all(phase_);
        } else {
            wait_for(member, phase);
        }
    }

 private:
    struct alignas(64) Call {  // one for each thread: a number that changes when there is a job for it
        std::atomic<uint32_t> number{0};
        std::atomic<uint32_t> left{0};  // the number of the last job that it has left
        std::atomic<bool> asleep{false};
    };

    void dismiss() {
        closing_.store(true);
        for (int me = 1; me < n_; me++) call(me, calls_[me].number.load() + 1);
        for (auto& thread : threads_) thread.join();
        pthread_mutex_destroy(&owner_);
    }

    static bool is_ours(int found) { return found == 0 || found == EOWNERDEAD; }

    // Acquires the owner mutex if it becomes free soon.
    int lock_soon() {
#if defined(__linux__)
        timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += LOOK_AGAIN_NS;
        until.tv_sec += until.tv_nsec / 1'000'000'000;
        until.tv_nsec %= 1'000'000'000;
        return pthread_mutex_timedlock(&owner_, &until);
#else
        const int64_t until = now_ns() + LOOK_AGAIN_NS;
        int found = pthread_mutex_trylock(&owner_);
        for (; !is_ours(found) && now_ns() < until; found = pthread_mutex_trylock(&owner_))
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        return found;
#endif
    }

    // While ownership returns to the thread that handed it over, no other thread takes it, unless that thread is late.
    int wait_until_back() {
        sleep_on(passing_, PASSED, LOOK_AGAIN_NS);
        const bool is_late = passing_.load() == PASSED;
        const int found = pthread_mutex_trylock(&owner_);
        if (is_late && is_ours(found)) passing_.store(NOT_PASSING);
        return found;
    }

    void one_asks_less() {  // but never below 0: the request may have been dropped
        int n = n_asking_.load();
        while (n > 0 && !n_asking_.compare_exchange_weak(n, n - 1)) {}
    }

    void call(int me, uint32_t number) {
        Call& mine = calls_[me];
        mine.number.store(number);
        if (mine.asleep.load()) wake_all(mine.number);
    }

    void run_thread(int me) {
        Call& mine = calls_[me];
        for (uint32_t seen = 0;;) {
            spin_while(mine.number, seen, now_ns());
            while (mine.number.load() == seen) {
                mine.asleep.store(true);
                if (mine.number.load() == seen) sleep_on(mine.number, seen, INT64_C(3'600'000'000'000));
                mine.asleep.store(false);
            }
            seen = mine.number.load();
            if (closing_.load()) return;
            Member member{this, me, active_};
            try {
                job_(what_, member);
                member.barrier();
            } catch (const Abandoned&) {
            }
            mine.left.store(seen, std::memory_order_release);
        }
    }

    void wait_for(Member& member, uint32_t phase) {
        const int64_t arrived = now_ns();
        if (!spin_while(phase_, phase, arrived)) return;
        while (phase_.load() == phase) {
            sleepers_.fetch_add(1);
            if (phase_.load() == phase) sleep_on(phase_, phase, LOOK_AGAIN_NS);
            sleepers_.fetch_sub(1);
            if (phase_.load() != phase) break;
            if (member.me != 0 && caller_died(phase)) throw Abandoned{};
        }
        slept_ns_.fetch_add(now_ns() - arrived, std::memory_order_relaxed);
    }

    // Spin while the word is `seen`, for spin_ns_ at most; whether it still is.
    bool spin_while(const std::atomic<uint32_t>& word, uint32_t seen, int64_t began) {
        const int64_t until = began + spin_ns_.load(std::memory_order_relaxed);
        do {
            for (int i = 0; i < 64; i++, relax())
                if (word.load(std::memory_order_acquire) != seen) return false;
        } while (now_ns() < until);
        return true;
    }

    // --- a caller that died ---

    bool caller_died(uint32_t phase) {
        if (abandoned_.load()) return true;
        const int found = pthread_mutex_trylock(&owner_);
        if (!is_ours(found)) return false;
        if (found == EOWNERDEAD) recover();
        // Free, or its holder is dead: the job is abandoned, unless it ended at this moment.
        const bool died = phase_.load() == phase;
        if (died) abandoned_.store(true);
        pthread_mutex_unlock(&owner_);
        return died;
    }

    // This thread owns the team now; the previous owner may have died.
    void taken(int found) {
        if (found == EOWNERDEAD) recover();
        if (abandoned_.load()) tidy();
    }

    void recover() {
#if defined(__linux__)
        pthread_mutex_consistent(&owner_);
#endif
        abandoned_.store(true);
    }

    void tidy() {  // by the new owner, before its first job: wait until every member has left the old one
        // A member that was woken for the old job but has not been scheduled yet would join the next one.
        for (int me = 1; me < n_; me++)
            while (calls_[me].left.load(std::memory_order_acquire) != calls_[me].number.load())
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
        here_.store(0);
        abandoned_.store(false);
    }

    const int n_;
    int active_;
    TeamSize size_;
    std::unique_ptr<Call[]> calls_;
    std::vector<std::thread> threads_;
    Job job_ = nullptr;
    void* what_ = nullptr;
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<int> here_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> closing_{false}, abandoned_{false};
    pthread_mutex_t owner_;
    std::atomic<int> n_asking_{0};
    enum Passing : uint32_t { NOT_PASSING, OFFERED, PASSED };
    std::atomic<uint32_t> passing_{NOT_PASSING};
    std::atomic<int64_t> slept_ns_{0};  // at the barriers of this job, all members together
    std::atomic<int64_t> spin_ns_{SPIN_NS};
};

inline void Member::barrier() { team->barrier(*this); }

}  // namespace team

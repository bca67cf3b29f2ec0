// The loop: a decode step for every live slot, a chunk of prompts or of other texts, and the loop that repeats steps
// from step boundary to step boundary. One way through the model serves both (forward_pass.h).
#pragma once

#include <atomic>
#include <unistd.h>

#include "forward_pass.h"
#include "plan.h"
#include "sampler.h"
#include "step_boundary.h"
#include "team.h"

namespace loop {

// At most this long between two wakes of the host while only tokens were produced.
constexpr long long WAKE_INTERVAL_NS = 16'000'000;

// Held for a few copies: slots of one grammar share its kept masks. A member that does not get it soon does without
// them.
struct SpinLock {
    std::atomic_flag held = ATOMIC_FLAG_INIT;
    bool lock() {
        for (int i = 0; i < 4096; i++, team::relax())
            if (!held.test_and_set(std::memory_order_acquire)) return true;
        return false;
    }
    void unlock() { held.clear(std::memory_order_release); }
};

struct Loop : ForwardPass {
    team::Team team;
    SpinLock kept_masks;

    explicit Loop(const Plan& p) : ForwardPass(p), team(p.n_threads) {}

    void step(team::Member& m) {
        through(m);
        head(m, plan.logits);
        for (int row = m.me; row < n_rows; row += m.n) {
            const int slot = slot_of(row);
            if (TABLE_grammar(plan.view)[slot] && !find_allowed(plan.view, slot, kept_masks)) {
                TABLE_mask_ready(plan.view)[slot] = 0;
                continue;
            }
            sample_row(plan.view, plan.logits + size_t(row) * plan.head.rows, row, slot, false, plan.n_tokens,
                       own[m.me].sampler);
        }
    }

    void first(team::Member& m) {
        memcpy(residual(m, 0), plan.last + size_t(first_slot) * plan.hidden, plan.hidden * sizeof(float));
        head(m, first_logits);
        if (m.me == 0) sample_row(plan.view, first_logits, 0, first_slot, true, plan.n_tokens, own[0].sampler);
    }

    void chunk(team::Member& m) {
        through(m);
        if (outputs->n > 0) give_outputs(m);
    }

    template <void (Loop::*JOB)(team::Member&)>
    void run() {
        team.run([](void* loop, team::Member& m) { (static_cast<Loop*>(loop)->*JOB)(m); }, this, n_rows);
    }

    // A step boundary, then steps while the boundary returns true. A thread that waits for the team gets it between two
    // steps.
    void run_loop() {
        team.acquire();
        bool may_wait = true;
        for (;;) {
            const uint32_t seen = n_published.load();  // before the inbox is read: what comes later ends the wait
            const int next = pass_boundary(may_wait);
            if (next == ENDED) break;
            may_wait = next == STEP || wait_for_host(seen);
            if (next != STEP) continue;
            if (team.is_asked()) wake_host();  // or tokens would wait for the other thread's job
            team.hand_over();
            run_step();
        }
        team.release();
    }

    // The host has published an entry, or asks the loop to end.
    void host_published() {
        n_published.fetch_add(1);
        if (awaits_host.load()) team::wake_all(n_published);
    }

    // Sleep until the host publishes something, and leave the team to others meanwhile; false after the deadline.
    bool wait_for_host(uint32_t seen) {
        const long long until = now_ns() + MASK_DEADLINE_NS;
        team.release();
        awaits_host.store(true);
        for (long long now = now_ns(); n_published.load() == seen && now < until; now = now_ns())
            team::sleep_on(n_published, seen, until - now);
        awaits_host.store(false);
        team.acquire();
        return n_published.load() != seen;
    }

    void run_one_step() {
        team.acquire();
        run_step();
        pass_boundary();
        wake_host();
        team.release();
    }

    // Write the rows of these parts to their pages and compute the requested outputs.
    void run_chunk(const Part* of, int n, const int* ids, const int* segments_of_ids, const Outputs* wanted) {
        team.acquire();
        is_chunk = true;
        parts = of, n_parts = n, tokens = ids, segments = segments_of_ids, outputs = wanted;
        place_rows();
        run<&Loop::chunk>();
        team.release();
    }

    // The first token of a slot, from the last row of its prompt, by its staged admission.
    void run_first(int slot) {
        team.acquire();
        is_chunk = true;
        n_rows = 1, first_slot = slot;
        run<&Loop::first>();
        team.release();
    }

    void run_step() {
        n_rows = *TABLE_n_rows(plan.view);
        is_chunk = false;
        if (n_rows > 0) run<&Loop::step>();
    }

    // The host takes a core that the team computes on, so while there are only tokens it is woken now and then; at once
    // for all else: a slot that came, ended or waits, and the end of the loop.
    int pass_boundary(bool may_wait = false) {
        const int n_before = *TABLE_n_rows(plan.view);
        const long long now = now_ns();
        const int next = run_boundary(plan.view, plan.hash, plan.epoch, now, may_wait);
        const int n_after = *TABLE_n_rows(plan.view);
        const bool only_tokens = next == STEP && n_after == n_before && n_after == load(word_at(plan.view, WORD_LIVE));
        wake_pending = true;
        if (!only_tokens || now - last_wake_ns >= WAKE_INTERVAL_NS) wake_host(now);
        return next;
    }

    void wake_host() {
        if (wake_pending) wake_host(now_ns());
    }

    // If the pipe is full, the host is woken already.
    void wake_host(long long now) {
        const unsigned long long one = 1;
        last_wake_ns = now, wake_pending = false;
        if (plan.wake >= 0 && ::write(plan.wake, &one, sizeof one) < 0) return;
    }

    enum Next { ENDED, STEP, AWAIT };  // what `run_boundary` returns
    long long last_wake_ns = 0;
    bool wake_pending = false;
    std::atomic<uint32_t> n_published{0};
    std::atomic<bool> awaits_host{false};
};

}  // namespace loop

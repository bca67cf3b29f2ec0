// Jobs for a thread team, as tests ask for them; everything returns numbers.
#include <csignal>

#include "team.h"

using team::Member;
using team::Team;

namespace {

struct Phases {  // every member counts itself in each phase, and looks at the count behind the barrier
    int n_phases;
    std::vector<std::atomic<int>> counts;
    std::atomic<int> wrong{0};
    explicit Phases(int n) : n_phases(n), counts(n) {}
};

void count_phases(void* what, Member& m) {
    auto& job = *static_cast<Phases*>(what);
    for (int phase = 0; phase < job.n_phases; phase++) {
        job.counts[phase]++;
        m.barrier();
        if (job.counts[phase] != m.n) job.wrong++;
        if (phase + 1 < job.n_phases && job.counts[phase + 1] > m.n) job.wrong++;
    }
}

void die_in_the_middle(void*, Member& m) {
    m.barrier();
    if (m.me == 0) pthread_exit(nullptr);
    m.barrier();
}

void keep_waiting(void* what, Member& m) {  // the last member is late, as if another process had its core
    if (m.me == m.n - 1 && m.n == m.team->size()) {
        const int64_t until = team::now_ns() + *static_cast<int*>(what) * int64_t(1000);
        while (team::now_ns() < until) sched_yield();
    }
    m.barrier();
}

std::atomic<int> n_steps{0};

void one_step(void* what, Member& m) {
    if (m.me == 0) {
        const int64_t until = team::now_ns() + *static_cast<int*>(what) * int64_t(1000);
        while (team::now_ns() < until) team::relax();
        n_steps++;
    }
    m.barrier();
}

// A thread whose core is taken away: a signal holds it until `core_back`.
std::atomic<bool> core_taken{false}, core_back{false};

void hold(int) {
    core_taken = true;
    while (!core_back) sched_yield();
}

void pause_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

}  // namespace

extern "C" {

void* team_new(int n) { return new Team(n); }
void team_free(void* t) { delete static_cast<Team*>(t); }
int team_active(void* t) { return static_cast<Team*>(t)->active(); }
int team_trials(void* t) { return static_cast<Team*>(t)->n_trials(); }

// How often a member was let through a barrier too early, over so many jobs.
int team_wrong(void* t, int n_jobs, int n_phases) {
    Team& mine = *static_cast<Team*>(t);
    int wrong = 0;
    mine.acquire();
    for (int i = 0; i < n_jobs; i++) {
        Phases job(n_phases);
        mine.run(count_phases, &job, 1);
        wrong += job.wrong;
    }
    mine.release();
    return wrong;
}

// A thread takes the turn, and dies: in the middle of a job, or between two.
void team_caller_dies(void* t, int in_a_job) {
    Team& mine = *static_cast<Team*>(t);
    std::thread([&] {
        mine.acquire();
        if (in_a_job) mine.run(die_in_the_middle, nullptr, 1);
        pthread_exit(nullptr);
    }).join();
}

void team_keep_waiting(void* t, int n_jobs, int late_us) {
    Team& mine = *static_cast<Team*>(t);
    mine.acquire();
    for (int i = 0; i < n_jobs; i++) mine.run(keep_waiting, &late_us, 1);
    mine.release();
}

// Runs steps, and hands ownership of the team to a waiting thread between them.
void team_play(void* t, int n, int step_us) {
    Team& mine = *static_cast<Team*>(t);
    mine.acquire();
    n_steps = 0;
    for (int i = 0; i < n; i++) {
        mine.hand_over();
        mine.run(one_step, &step_us, 1);
    }
    mine.release();
}

// How many steps the playing thread has run before this thread owns the team.
int team_steps_until_turn(void* t) {
    Team& mine = *static_cast<Team*>(t);
    const int before = n_steps;
    mine.acquire();
    const int passed = n_steps - before;
    mine.release();
    return passed;
}

int team_steps() { return n_steps; }

// A thread waits for ownership, has no core while it is offered, and has one again: how many steps pass until it owns
// the team; `most` if its request was forgotten.
int team_steps_after_a_missed_offer(void* t, int most) {
    Team& mine = *static_cast<Team*>(t);
    core_taken = core_back = false;
    struct sigaction holding {}, before {};
    holding.sa_handler = hold;
    sigaction(SIGUSR2, &holding, &before);
    std::atomic<bool> has_it{false};
    mine.acquire();
    std::thread waiter([&] {
        mine.acquire();
        has_it = true;
        mine.release();
    });
    pause_ms(5);  // it has asked by now
    pthread_kill(waiter.native_handle(), SIGUSR2);
    while (!core_taken) pause_ms(1);
    mine.hand_over();
    core_back = true;
    int steps = 0;
    for (; steps < most && !has_it; steps++) {
        pause_ms(1);
        mine.hand_over();
    }
    mine.release();
    waiter.join();
    sigaction(SIGUSR2, &before, nullptr);
    return steps;
}

// How often the turn is passed until all of so many waiters have had it once.
int team_passes_for(void* t, int n_waiters) {
    Team& mine = *static_cast<Team*>(t);
    std::atomic<int> n_served{0};
    std::vector<std::thread> waiters;
    mine.acquire();
    for (int i = 0; i < n_waiters; i++)
        waiters.emplace_back([&] {
            mine.acquire();
            n_served++;
            mine.release();
        });
    pause_ms(10);  // they have asked by now
    int passes = 0;
    for (; n_served < n_waiters && passes < 1000; passes++) mine.hand_over();
    mine.release();
    for (auto& waiter : waiters) waiter.join();
    return passes;
}

// The thread that ownership is handed to dies with it: how often a member then passes a barrier too early.
int team_wrong_after_a_passed_turn_died(void* t) {
    Team& mine = *static_cast<Team*>(t);
    mine.acquire();
    std::thread dying([&] {
        mine.acquire();
        pthread_exit(nullptr);
    });
    pause_ms(5);
    mine.hand_over();
    Phases job(20);
    mine.run(count_phases, &job, 1);
    mine.release();
    dying.join();
    return job.wrong;
}

}

// Jobs for a thread team, as tests ask for them; everything returns numbers.
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

void keep_waiting(void* what, Member& m) {  // the last member is late, as if its core were somebody else's
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

}  // namespace

extern "C" {

void* team_new(int n) { return new Team(n); }
void team_free(void* t) { delete static_cast<Team*>(t); }
int team_active(void* t) { return static_cast<Team*>(t)->active(); }
int team_rests(void* t) { return static_cast<Team*>(t)->n_rests(); }

// How often a member was let through a barrier too early, over so many jobs.
int team_wrong(void* t, int n_jobs, int n_phases) {
    Team& mine = *static_cast<Team*>(t);
    int wrong = 0;
    mine.take_turn();
    for (int i = 0; i < n_jobs; i++) {
        Phases job(n_phases);
        mine.run(count_phases, &job);
        wrong += job.wrong;
    }
    mine.give_turn();
    return wrong;
}

// A thread takes the turn, and dies: in the middle of a job, or between two.
void team_caller_dies(void* t, int in_a_job) {
    Team& mine = *static_cast<Team*>(t);
    std::thread([&] {
        mine.take_turn();
        if (in_a_job) mine.run(die_in_the_middle, nullptr);
        pthread_exit(nullptr);
    }).join();
}

void team_keep_waiting(void* t, int n_jobs, int late_us) {
    Team& mine = *static_cast<Team*>(t);
    mine.take_turn();
    for (int i = 0; i < n_jobs; i++) mine.run(keep_waiting, &late_us);
    mine.give_turn();
}

// Steps, with the turn passed between them to whoever waits.
void team_play(void* t, int n, int step_us) {
    Team& mine = *static_cast<Team*>(t);
    mine.take_turn();
    n_steps = 0;
    for (int i = 0; i < n; i++) {
        mine.pass_turn();
        mine.run(one_step, &step_us);
    }
    mine.give_turn();
}

// How many steps of whoever plays passed until this caller had the turn.
int team_steps_until_turn(void* t) {
    Team& mine = *static_cast<Team*>(t);
    const int before = n_steps;
    mine.take_turn();
    const int passed = n_steps - before;
    mine.give_turn();
    return passed;
}

int team_steps() { return n_steps; }

}

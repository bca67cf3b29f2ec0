// How many members of a team take part in the next job. Decisions only: no clock, no threads, one caller at a time.
//
// On a machine of its own a team is fastest with all members. Beside other busy processes it is not: a job waits at
// every barrier for the member whose core was taken, and fewer members can be several times faster. How many are best
// depends on the neighbours, and they change, so it is measured, over jobs that do the same work:
//
//   watch   Members report how long they slept at barriers. While that is a small share of the jobs' time, all take
//           part, and nothing is tried.
//   trial   Otherwise other sizes run for a window each, and the least time of a job decides.
//   pause   The next trial may begin after a pause: the longer the more the last one cost, and twice as long as before
//           if it changed nothing. With less than all members every pause ends in a trial, whether members slept or
//           not: this is how a team finds that its neighbours have ended.
//   doubt   If jobs become much slower than in the trial, and slower than with fewer members, the next trial begins at
//           once: a neighbour came in the pause, or the trial was misled. The system favours threads that have slept,
//           so more members than before are fast at first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#ifndef TEAM_IS_FIXED
#define TEAM_IS_FIXED 0  // for measurements: -DTEAM_IS_FIXED=1 in OSTINATO_CPU_FLAGS, and all members take part always
#endif

namespace team {

constexpr int64_t WINDOW_NS = 50'000'000;        // several of the system's time slices
constexpr int64_t POOR_WINDOW_NS = 10'000'000;   // for a size with which jobs take twice as long as with another
constexpr int64_t STALE_NS = 200'000'000;        // without a job of its kind: they are rare, or have ended
constexpr double SLEPT_SHARE = 0.15;             // of the jobs' time, at barriers: then a trial may gain something
constexpr double BETTER = 0.95;                  // of the time of a job: what another size must reach to be taken
constexpr double MUCH_SLOWER = 1.5;              // than in the trial: then its result may be doubted
constexpr int PAUSE_PER_COST = 30;               // trials cost 3 % of the time, or less
constexpr int LONGEST_TRIAL = 34;                // windows: the present size, 31 halvings, one more and one less
constexpr int64_t PAUSE_NS = 200'000'000, LONGEST_PAUSE_NS = 3'200'000'000;

struct Kind {  // jobs of one kind do the same work
    uintptr_t job = 0;
    int n_rows = 0;
    bool operator==(const Kind& other) const { return job == other.job && n_rows == other.n_rows; }
};

class TeamSize {
 public:
    explicit TeamSize(int n_members) : n_(n_members), windows_{{n_members}} {
        windows_.reserve(LONGEST_TRIAL);  // no memory is asked for while the loop decodes
    }

    int next() const { return windows_[at_].size; }
    bool is_contended() const { return is_trial() || windows_[0].size < n_; }
    int n_trials() const { return n_trials_; }

    // A job of next() members has ended; `slept_ns` is how long a member slept at its barriers, on average.
    void job_ended(Kind kind, int64_t now_ns, int64_t took_ns, int64_t slept_ns) {
        if (n_ == 1 || TEAM_IS_FIXED) return;
        if (now_ns - took_ns >= stale_ns_) {
            if (is_trial()) next_trial_ns_ = now_ns + PAUSE_NS;  // it is given up
            watch(kind);
        }
        if (!(kind == kind_)) return;
        stale_ns_ = now_ns + STALE_NS;
        Window& window = windows_[at_];
        window.took_ns += took_ns, window.slept_ns += slept_ns, window.n_jobs++;
        const bool is_poor = is_trial() && window.job_ns() > 2 * best().job_ns();
        if (window.took_ns < (is_poor ? POOR_WINDOW_NS : WINDOW_NS)) return;
        if (is_trial()) {
            if (++at_ == windows_.size()) end_trial(now_ns);
        } else if (may_gain(now_ns)) {
            begin_trial();
        } else if (!is_held_up()) {
            watch(kind);
        }
    }

 private:
    struct Window {
        int size;
        int64_t took_ns = 0, slept_ns = 0;
        int n_jobs = 0;
        double job_ns() const { return double(took_ns) / n_jobs; }
        double cost_ns(const Window& other) const { return double(took_ns) - n_jobs * other.job_ns(); }
    };

    bool is_trial() const { return at_ > 0; }
    bool is_held_up() const {
        return windows_[0].size < n_ || windows_[0].slept_ns > SLEPT_SHARE * windows_[0].took_ns;
    }
    bool may_gain(int64_t now_ns) const {
        const bool is_doubted = kind_ == tried_ && windows_[0].job_ns() > doubted_ns_;
        return is_held_up() && (now_ns >= next_trial_ns_ || is_doubted);
    }

    // A new window of the present size.
    void watch(Kind kind) {
        windows_.resize(1, {0});
        windows_[0] = {windows_[0].size};
        at_ = 0;
        kind_ = kind;
    }

    // After the present size, whose window is the whole pause: all members, half of them, a quarter and so on, and one
    // more and one less than at present.
    void begin_trial() {
        const int now = windows_[0].size;
        auto add = [&](int size) {
            auto is_it = [&](const Window& window) { return window.size == size; };
            if (size >= 1 && std::none_of(windows_.begin(), windows_.end(), is_it)) windows_.push_back({size});
        };
        for (int size = n_; size > 0; size /= 2) add(size);
        add(std::min(now + 1, n_));
        add(now - 1);
        at_ = 1;
        n_trials_++;
    }

    // Of the windows that have ended: the least time of a job. A size close to the present one does not replace it.
    const Window& best() const {
        size_t best = 0;
        for (size_t i = 1; i < at_; i++)
            if (windows_[i].job_ns() < windows_[best].job_ns() * (best == 0 ? BETTER : 1)) best = i;
        return windows_[best];
    }

    void end_trial(int64_t now_ns) {
        const Window before = windows_[0], taken = best();
        double cost_ns = std::min(before.cost_ns(taken), double(WINDOW_NS));  // its window is longer than a trial
        for (size_t i = 1; i < windows_.size(); i++) cost_ns += windows_[i].cost_ns(taken);
        double fewer_ns = 1e18;
        for (const Window& window : windows_)
            if (window.size < taken.size) fewer_ns = std::min(fewer_ns, window.job_ns());
        tried_ = kind_;
        doubted_ns_ = std::max(fewer_ns, MUCH_SLOWER * taken.job_ns());
        const int64_t longer_ns = taken.size == before.size ? 2 * pause_ns_ : 0;
        pause_ns_ = std::clamp(std::max(int64_t(PAUSE_PER_COST * cost_ns), longer_ns), PAUSE_NS, LONGEST_PAUSE_NS);
        next_trial_ns_ = now_ns + pause_ns_;
        windows_[0].size = taken.size;
        watch(kind_);
    }

    const int n_;
    std::vector<Window> windows_;  // of the present size, and of those that a trial compares it with
    size_t at_ = 0;                // the window of the next job
    Kind kind_;                    // of the jobs that windows count
    int64_t stale_ns_ = 0;         // when they are given up
    int64_t pause_ns_ = 0, next_trial_ns_ = 0;
    int n_trials_ = 0;
    Kind tried_;             // the kind of the last trial, and
    double doubted_ns_ = 0;  // what its jobs may take before the result is doubted
};

}  // namespace team

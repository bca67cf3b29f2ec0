// The size of a team with a clock that the test sets.
#include "team_size.h"

using team::TeamSize;

extern "C" {

void* size_new(int n) { return new TeamSize(n); }
void size_free(void* s) { delete static_cast<TeamSize*>(s); }
int size_next(void* s) { return static_cast<TeamSize*>(s)->next(); }
int size_trials(void* s) { return static_cast<TeamSize*>(s)->n_trials(); }
void size_job_ended(void* s, int job, int n_rows, int64_t now_ns, int64_t took_ns, int64_t slept_ns) {
    static_cast<TeamSize*>(s)->job_ended({uintptr_t(job), n_rows}, now_ns, took_ns, slept_ns);
}

}

// step_boundary.h on the CPU, with its sizes as constants as a GPU has them, for tests. The CPU's loop has them in
// words.
#include "step_boundary.h"

extern "C" int boundary_at(
    char* table, char* admissions, char* rings, int* grammars, unsigned long long plan_hash, unsigned long long epoch, long long now
) {
    return run_boundary(View{table, admissions, rings, grammars}, plan_hash, epoch, now);
}

extern "C" int step_boundary(
    char* table, char* admissions, char* rings, int* grammars, unsigned long long plan_hash, unsigned long long epoch
) {
    return run_boundary(View{table, admissions, rings, grammars}, plan_hash, epoch, now_ns());
}

// The border on the CPU, as C that Python and a native loop can call. See border.h.
#include "border.h"

extern "C" int border_at(
    char* table, char* seats, char* rings, unsigned long long plan_hash, unsigned long long epoch, long long now
) {
    return run_border(View{table, seats, rings}, plan_hash, epoch, now);
}

extern "C" int border(
    char* table, char* seats, char* rings, unsigned long long plan_hash, unsigned long long epoch
) {
    return run_border(View{table, seats, rings}, plan_hash, epoch, now_ns());
}

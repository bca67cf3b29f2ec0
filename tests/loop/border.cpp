// border.h on the CPU, with its sizes as constants as a GPU has them, for tests. The CPU's loop has them in words.
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

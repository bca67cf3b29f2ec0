// A mark between two nodes of a step: adds the time since the last mark to one place of `spent` (E-63).
//
// The clock is the one that the whole chip shares, because two marks may run on different multiprocessors. The first
// mark of all has none before it, and adds nothing.

extern "C" __global__ void stamp(unsigned long long *last, unsigned long long *spent) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (*last != 0) {
        *spent += now - *last;
    }
    *last = now;
}

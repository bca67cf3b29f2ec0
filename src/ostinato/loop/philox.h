// Philox 4x32 with ten rounds, as backends/torch/ops/philox.py: a number of 24 bits from (seed, position).
#pragma once

#if !defined(DEVICE)  // else by the including file, as in the tape's machine.h
#define DEVICE static inline
#define NOT_UNROLLED
#endif

DEVICE unsigned random_24(unsigned long long seed, unsigned long long position) {
    unsigned c0 = (unsigned)position, c1 = (unsigned)(position >> 32), c2 = 0, c3 = 0;
    unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
    NOT_UNROLLED
    for (int round = 0; round < 10; ++round) {
        const unsigned long long first = c0 * 0xD2511F53ull, second = c2 * 0xCD9E8D57ull;
        const unsigned upper = (unsigned)(second >> 32) ^ c1 ^ k0, lower = (unsigned)(first >> 32) ^ c3 ^ k1;
        c0 = upper;
        c1 = (unsigned)second;
        c2 = lower;
        c3 = (unsigned)first;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0 >> 8;
}

// The plain read loop that decoding is compared with: each pass reads and sums every byte of some planes.
//
// Each thread reads its share of every plane, one plane after the other, without waiting for the others. Decoding reads
// the same bytes and cannot be faster, so tokens per second over passes per second is its share of the possible speed.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "tiles_c.h"

namespace read_loop {

struct Plane {
    const unsigned char* bytes;
    int64_t n_bytes;
};

inline uint64_t sum(const unsigned char* at, int64_t n_bytes) {
    uint64_t sums[32] = {};  // so many that no addition waits for the one before it
    int64_t n_whole = n_bytes / sizeof(sums);
    for (int64_t i = 0; i < n_whole; i++) {
        uint64_t words[32];
        std::memcpy(words, at + i * sizeof(sums), sizeof(sums));
        for (int k = 0; k < 32; k++) sums[k] += words[k];
    }
    uint64_t total = 0;
    for (int k = 0; k < 32; k++) total += sums[k];
    for (int64_t i = n_whole * sizeof(sums); i < n_bytes; i++) total += at[i];
    return total;
}

inline uint64_t share(const Plane* planes, int n_planes, int member, int n_members, int n_passes) {
    uint64_t total = 0;
    for (int pass = 0; pass < n_passes; pass++) {
        for (int p = 0; p < n_planes; p++) {
            int64_t first = planes[p].n_bytes * member / n_members, last = planes[p].n_bytes * (member + 1) / n_members;
            total += sum(planes[p].bytes + first, last - first);
        }
    }
    return total;
}

}  // namespace read_loop

// A number that depends on every byte, so that no compiler leaves the reading out.
extern "C" uint64_t ostinato_read(const read_loop::Plane* planes, int n_planes, int n_threads, int n_passes) {
    std::vector<uint64_t> totals(n_threads);
    share_out(n_threads, n_threads, [&](int first, int last) {
        for (int member = first; member < last; member++)
            totals[member] = read_loop::share(planes, n_planes, member, n_threads, n_passes);
    });
    uint64_t total = 0;
    for (uint64_t one : totals) total += one;
    return total;
}

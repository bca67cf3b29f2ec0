// Which accesses of two threads are in no order: the happens-before relation of a run, by vector clocks.
//
// A program that is compiled with -fsanitize=thread calls `__tsan_read4` and its companions before each access; they are
// defined here, and the library of that sanitizer is not linked, since its threads are the system's. What orders
// accesses is what PTX says: syncs of a warp, of compute warps and of a block, gates, and a release that is acquired.
// Shuffles, votes and products of a warp order nothing, and neither do tags of hand-offs. Accesses to one place by two
// threads race unless they are ordered, both read, or both are strong (relaxed loads and stores, atomic additions). Two
// that write the same value are let pass: a thread that is ordered behind both reads that value.
//
// Each place remembers its last write and its last few readers, so a race with an older reader may be missed; another
// seed sees it. Accesses of single bytes are not watched.
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace emulator {

#define GRANULE 2        // bytes that are watched together
#define READERS 4        // that a place remembers
#define PAGE_GRANULES 2048
#define MOST_RACES 64    // that are told

typedef std::vector<u32> Clock;
typedef std::shared_ptr<const Clock> SharedClock;

// What a thread knows of all others, which many share after a sync, and its own time, which grows with each release.
struct Times {
    SharedClock known;
    u32 own = 1;
};

struct Access {
    u32 fiber = ~0u, time = 0;
    int code = 0;  // in the program's library
    bool strong = false;
};

struct Granule {
    Access write;
    Access reads[READERS];
};

struct Races {
    std::vector<Times> times;                        // by fiber
    std::unordered_map<const void*, SharedClock> published;  // by a place that was released, or a gate
    std::unordered_map<u64, std::unique_ptr<Granule[]>> pages;
    u64 last_page = ~0ull;
    Granule* last = nullptr;
    std::set<std::pair<int, int>> known;             // pairs of code that are in `told` already
    std::vector<std::string> told;
    struct Doubt {
        Access before, now;
        u64 address;
        unsigned short was;
    };
    std::vector<Doubt> doubts;  // second writes that are about to be made: of what, is known at the next access
    u32 turn = 0;
    const char* library;  // where it begins

    Races(int n_fibers, const char* library) : times(n_fibers), library(library) {
        const SharedClock none = std::make_shared<Clock>(n_fibers, 0u);
        for (Times& one : times) one.known = none;
    }

    // What a fiber's releases make known.
    SharedClock all_of(int fiber) {
        Times& own = times[fiber];
        auto made = std::make_shared<Clock>(*own.known);
        (*made)[fiber] = own.own;
        return made;
    }
    static SharedClock joined(const SharedClock& a, const SharedClock& b) {
        if (!a || a == b) return b;
        if (!b) return a;
        auto made = std::make_shared<Clock>(*a);
        for (size_t i = 0; i < made->size(); ++i) (*made)[i] = std::max((*made)[i], (*b)[i]);
        return made;
    }

    void release(int fiber, const void* place, bool with_others) {
        const SharedClock own = all_of(fiber);
        SharedClock& there = published[place];
        there = with_others ? joined(there, own) : own;
        ++times[fiber].own;
    }
    void acquire(int fiber, const void* place) {
        const auto found = published.find(place);
        if (found != published.end()) times[fiber].known = joined(times[fiber].known, found->second);
    }
    void learn(const void* place, const SharedClock& clock) { published[place] = joined(published[place], clock); }

    void meet(const std::vector<int>& fibers) {
        std::set<const Clock*> seen;
        auto made = std::make_shared<Clock>(*times[fibers[0]].known);
        for (int fiber : fibers) {
            const SharedClock& theirs = times[fiber].known;
            if (!seen.insert(theirs.get()).second) continue;
            for (size_t i = 0; i < made->size(); ++i) (*made)[i] = std::max((*made)[i], (*theirs)[i]);
        }
        for (int fiber : fibers) (*made)[fiber] = times[fiber].own;
        for (int fiber : fibers) {
            times[fiber].known = made;
            ++times[fiber].own;
        }
    }

    Granule& granule(u64 address) {
        const u64 number = address / GRANULE, page = number / PAGE_GRANULES;
        if (page != last_page) {
            auto& found = pages[page];
            if (!found) found = std::make_unique<Granule[]>(PAGE_GRANULES);
            last = found.get();
            last_page = page;
        }
        return last[number % PAGE_GRANULES];
    }

    bool ordered(const Access& before, int fiber) const {
        return before.fiber == ~0u || (int)before.fiber == fiber || (*times[fiber].known)[before.fiber] >= before.time;
    }
    void check(const Access& before, const Access& now, const char* what, u64 address) {
        if (!ordered(before, (int)now.fiber) && !(before.strong && now.strong)) tell(before, now, what, address);
    }
    void tell(const Access& before, const Access& now, const char* what, u64 address) {
        if (!known.insert({before.code, now.code}).second || told.size() >= MOST_RACES) return;
        char text[200];
        snprintf(
            text, sizeof text, "%s at %#llx: thread %u of the grid (code +%#x), then thread %u (code +%#x)", what,
            address, before.fiber, before.code, now.fiber, now.code
        );
        told.push_back(text);
    }

    void settle_doubts() {
        for (const Doubt& one : doubts) {
            unsigned short is;
            memcpy(&is, (const void*)one.address, GRANULE);
            if (is != one.was) tell(one.before, one.now, "written twice", one.address);
        }
        doubts.clear();
    }

    void access(int fiber, const void* place, size_t bytes, bool writes, bool strong, int code) {
        settle_doubts();
        if (bytes < GRANULE) return;
        const Access now{(u32)fiber, times[fiber].own, code, strong};
        for (u64 address = (u64)place; address < (u64)place + bytes; address += GRANULE) {
            Granule& g = granule(address);
            if (!writes) check(g.write, now, "written, then read", address);
            if (writes) {
                if (!ordered(g.write, fiber) && !(g.write.strong && strong)) {
                    Doubt made{g.write, now, address, 0};
                    memcpy(&made.was, (const void*)address, GRANULE);
                    doubts.push_back(made);
                }
                for (Access& read : g.reads) {
                    check(read, now, "read, then written", address);
                    read = Access{};
                }
                g.write = now;
            } else {
                Access* to = &g.reads[++turn % READERS];
                for (Access& read : g.reads) {
                    if (read.fiber == now.fiber) to = &read;
                }
                *to = now;
            }
        }
    }
};

}  // namespace emulator

// The machine that `machine_cpu.h` tells of: fibers, what is under way between them, and who runs next.
#include "machine.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <map>
#include <string>
#include <vector>

#include "races_cpu.h"

namespace emulator {

enum { ENDED, DEADLOCK, TOO_LONG, MISUSED, RACED };  // how a run ends

#define MAX_PENDING 96          // puts on their way
#define IDLE_NS 20000000000LL  // no thread outside lets a grid wait for so long
#if defined(__x86_64__)
#define GUARD_BYTES 4096
#else
#define GUARD_BYTES 65536
#endif

// --- switching stacks ---

#if defined(__x86_64__)
struct Stack {
    void* at;
};
// Only what a called function must keep is kept: everything else is the caller's, who must not know what is in here,
// or would take the registers that it sees untouched for kept.
#if defined(__clang__)
#define OPAQUE noinline
#else
#define OPAQUE noipa
#endif
__attribute__((naked, OPAQUE)) static void switch_stacks([[maybe_unused]] Stack* from, [[maybe_unused]] Stack* to) {
    __asm__(
        "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n"
        "movq (%rsi), %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
        "popq %rcx\n"
        "jmp *%rcx\n"  // a ret would go where another fiber came from, the processor thinks
    );
}
static void prepare_stack(Stack& stack, char* memory, int bytes, void (*entry)()) {
    u64* top = (u64*)(memory + bytes) - 1;
    top[0] = 0;            // where entry would return to
    *--top = (u64)entry;   // at entry the stack is 8 past a multiple of 16, as after a call
    for (int i = 0; i < 6; ++i) *--top = 0;
    stack.at = top;
}
#else
struct Stack {
    ucontext_t context;
};
static void switch_stacks(Stack* from, Stack* to) { swapcontext(&from->context, &to->context); }
static void prepare_stack(Stack& stack, char* memory, int bytes, void (*entry)()) {
    getcontext(&stack.context);
    stack.context.uc_stack.ss_sp = memory;
    stack.context.uc_stack.ss_size = bytes;
    stack.context.uc_link = nullptr;
    makecontext(&stack.context, entry, 0);
}
#endif

// Memory that ends at a page without access rights; `low` puts that page before it, where a stack overflows.
struct Guarded {
    char* mapped = nullptr;
    size_t mapped_bytes = 0;
    char* memory = nullptr;

    void make(size_t bytes, bool low) {
        const size_t whole = (bytes + GUARD_BYTES - 1) / GUARD_BYTES * GUARD_BYTES;
        mapped_bytes = whole + GUARD_BYTES;
        mapped = (char*)mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) {
            perror("the emulator has no memory");
            abort();
        }
        mprotect(low ? mapped : mapped + whole, GUARD_BYTES, PROT_NONE);
        memory = low ? mapped + GUARD_BYTES : mapped + whole - bytes;
    }
    void free() { munmap(mapped, mapped_bytes); }
};

// --- what there is ---

// A run of bytes on its way to shared memory.
struct Part {
    char* to;
    const char* from;
    int bytes;
};

struct Fiber {
    Stack stack;
    Guarded memory;
    int block, thread, lane, warp;  // `warp` counts through the grid
    bool done;
    int n_pending;         // puts on their way
    u64 block_synced;      // the moment of the last sync of compute warps or block that it passed
    u64 warp_synced;
    const u64* looked_at;  // the last place, and what was there
    u64 looked_like;
    int n_loads;
    std::vector<Part> copied;  // by copy_16_bytes, since its last arrival for them
    Site site;             // where it waits, or waited last
};

// What a lane brings to a meeting of its warp, and what it takes from it.
struct Box {
    u64 in;
    int number;
    u64 out;
    void* c;
    u32 a[4], b[2];
};

struct Warp {
    u32 ready, visit;  // lanes that can go on; of those, who has not been seen since the warp was picked
    int turn;          // the lane that this visit began with
    int place;         // among the runnable, or -1
    u64 asleep_until;
    u32 streak;        // polls since it last did anything that others could see
    u32 arrived;       // lanes at the meeting
    Site site;
    Box box[32];
};

struct Barrier {
    std::vector<int> waiting;
};

struct Block {
    Barrier barriers[2];
    Guarded shared;
    int n_done;
    u64 asleep_until;
};

// What a gate is told of once all of it is there: by its bytes, or as one arrival.
struct Copy {
    std::vector<Part> parts;  // that are not there yet
    int bytes, block;         // bytes: that the gate was announced, or 0
    Gate* gate;
    SharedClock asked;        // what was before it, where races are watched for
};

struct Pending {
    u64* place;
    u64 value;
    int fiber;
    u64 moment;
};

struct Emulator {
    void (*program)(const void*);
    const void* argument;
    int n_blocks, n_threads, n_fibers, n_warps, n_done;
    int shared_bytes;
    Stack outside;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<Block> blocks;
    std::vector<int> runnable;  // warps with ready lanes
    std::vector<Copy> copies;
    Pending pending[MAX_PENDING];
    int n_pending;
    Fiber* current;
    u64 dice, moment, events;
    u64 yields, lands, arrives, sleeps;  // chances in 65536, drawn from the seed
    int idle, idle_rounds;
    bool progressed;
    long long limit_ns, progressed_ns;
    int ended;
    std::string report;
    std::unique_ptr<Races> races;  // where they are watched for
};

static thread_local Emulator* now = nullptr;
static thread_local std::string last_report;
static thread_local double limit_s = 120;
static thread_local bool watches_next = false;

static inline int number_of(const Emulator& e, const Fiber& f) { return (int)(&f - e.fibers.data()); }

// Of runs before: a stack costs three calls of the system to make.
struct Stacks {
    std::vector<Guarded> kept;

    Guarded take() {
        Guarded stack;
        if (kept.empty()) {
            stack.make(STACK_BYTES, true);
        } else {
            stack = kept.back();
            kept.pop_back();
        }
        return stack;
    }
    ~Stacks() {
        for (Guarded& stack : kept) stack.free();
    }
};
static thread_local Stacks stacks;

static inline u32 roll(Emulator& e) {
    u64 x = e.dice;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    e.dice = x;
    return (u32)(x * 0x2545F4914F6CDD1Dull >> 32);
}
static inline u32 below(Emulator& e, u32 n) { return (u32)((u64)roll(e) * n >> 32); }
static inline bool chance(Emulator& e, u64 of_65536) { return (roll(e) & 65535) < of_65536; }

static inline long long clock_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// --- who is there, for a report ---

static std::string told(const Site& site) {
    if (site.what == nullptr) return "not begun";
    const char* name = strrchr(site.file, '/');
    return std::string(site.what) + " (" + (name ? name + 1 : site.file) + ":" + std::to_string(site.line) + ")";
}

static std::string who_waits(const Emulator& e) {
    std::map<std::string, std::pair<int, int>> groups;  // how many, and the first thread
    int n_done = 0;
    for (const Fiber& f : e.fibers) {
        if (f.done) {
            ++n_done;
            continue;
        }
        const bool ready = e.warps[f.warp].ready >> f.lane & 1;
        std::string key = "block " + std::to_string(f.block) + (ready ? ": polls, last at " : ": waits at ");
        auto found = groups.emplace(key + told(f.site), std::make_pair(0, f.thread)).first;
        ++found->second.first;
    }
    std::string text;
    for (auto& group : groups) {
        text += "  " + group.first + ", " + std::to_string(group.second.first) + " threads, the first is ";
        text += std::to_string(group.second.second) + "\n";
    }
    return text + "  " + std::to_string(n_done) + " threads have ended\n";
}

[[noreturn]] static void end_run(Emulator& e, int how, const std::string& why) {
    e.ended = how;
    e.report = why + "\n" + who_waits(e);
    switch_stacks(&e.current->stack, &e.outside);
    abort();
}

[[noreturn]] static void misused(const Site& site, const std::string& why) {
    Emulator& e = *now;
    end_run(e, MISUSED, "block " + std::to_string(e.current->block) + ", thread " + std::to_string(e.current->thread) +
                          ", at " + told(site) + ": " + why);
}
void misused(const Site& site, const char* why) { misused(site, std::string(why)); }

// --- gates: the word holds parity, arrivals wanted and missing, bytes announced and not arrived ---

struct GateWord {
    u64 parity : 1, wanted : 15, missing : 15, bytes : 32, unmade : 1;
};
static_assert(sizeof(GateWord) == 8, "a gate is one word");

static inline GateWord gate_word(const Gate* gate) {
    GateWord w;
    memcpy(&w, &gate->word, 8);
    return w;
}
static inline void gate_set(Gate* gate, GateWord w) {
    if (w.missing == 0 && w.bytes == 0) {
        w.parity ^= 1;
        w.missing = w.wanted;
    }
    memcpy(&gate->word, &w, 8);
}

// --- what is under way: copies and puts ---

// Something happened that others can see.
static inline void progress(Emulator& e) {
    e.idle = e.idle_rounds = 0;
    e.progressed = true;
    e.warps[e.current->warp].streak = 0;
}

// The next piece of some copy lands, in any order among copies and their parts; its gate hears of it only when all are
// there.
static void land(Emulator& e) {
    const u32 i = below(e, (u32)e.copies.size());
    Copy& copy = e.copies[i];
    if (!copy.parts.empty()) {
        for (u32 n = 1 + below(e, (u32)copy.parts.size()); n > 0; --n) {
            Part& part = copy.parts[below(e, (u32)copy.parts.size())];
            const int piece = part.bytes <= 512 ? part.bytes : 16 * (int)(1 + below(e, (u32)(part.bytes / 16)));
            memcpy(part.to, part.from, piece);
            part = {part.to + piece, part.from + piece, part.bytes - piece};
            if (part.bytes > 0) continue;
            part = copy.parts.back();
            copy.parts.pop_back();
        }
        return;
    }
    GateWord w = gate_word(copy.gate);
    if (copy.bytes > 0) w.bytes = (u32)((u32)w.bytes - (u32)copy.bytes);
    else w.missing -= 1;
    gate_set(copy.gate, w);
    if (e.races) e.races->learn(copy.gate, copy.asked);
    if (i + 1 < e.copies.size()) e.copies[i] = std::move(e.copies.back());
    e.copies.pop_back();
    progress(e);
}

static inline void arrive(Emulator& e, int i) {
    Pending& p = e.pending[i];
    __atomic_store_n(p.place, p.value, __ATOMIC_RELEASE);
    --e.fibers[p.fiber].n_pending;
    p = e.pending[--e.n_pending];
}

static inline Pending* own_pending(Emulator& e, const u64* place) {
    if (e.current->n_pending == 0) return nullptr;
    const int fiber = (int)(e.current - e.fibers.data());
    for (int i = 0; i < e.n_pending; ++i) {
        if (e.pending[i].fiber == fiber && e.pending[i].place == place) return &e.pending[i];
    }
    return nullptr;
}

// Everything that a release by this fiber has to make seen.
static void arrive_before(Emulator& e, const Fiber& f) {
    for (int i = e.n_pending - 1; i >= 0; --i) {
        const Pending& p = e.pending[i];
        const Fiber& owner = e.fibers[p.fiber];
        const bool own = &owner == &f;
        const bool of_block = owner.block == f.block && p.moment < f.block_synced;
        const bool of_warp = owner.warp == f.warp && p.moment < f.warp_synced;
        if (own || of_block || of_warp) arrive(e, i);
    }
}

// --- who runs next ---

static inline void make_ready(Emulator& e, int warp, u32 lanes) {
    Warp& w = e.warps[warp];
    if (w.place < 0) {
        w.place = (int)e.runnable.size();
        e.runnable.push_back(warp);
    }
    w.ready |= lanes;
}
static inline void make_waiting(Emulator& e, int warp, u32 lanes) {
    Warp& w = e.warps[warp];
    w.ready &= ~lanes;
    w.visit &= ~lanes;
    if (w.ready == 0 && w.place >= 0) {
        e.runnable[w.place] = e.runnable.back();
        e.warps[e.runnable[w.place]].place = w.place;
        e.runnable.pop_back();
        w.place = -1;
    }
}

// Every warp only polls: it waits for a put, a copy, or a thread outside the emulator, which may need this core.
static void let_others_work(Emulator& e) {
    e.idle = 0;
    if (e.n_pending + e.copies.size() > 0) {
        for (int i = e.n_pending / 2; i >= 0 && e.n_pending > 0; --i) arrive(e, (int)below(e, (u32)e.n_pending));
        for (int i = (int)e.copies.size(); i > 0 && !e.copies.empty(); --i) land(e);
    } else if (++e.idle_rounds < 64) {
        sched_yield();
    } else {
        usleep(50);
    }
}

static void check_clock(Emulator& e) {
    const long long now_ns = clock_ns();
    if (e.progressed) e.progressed_ns = now_ns;
    e.progressed = false;
    if (now_ns > e.limit_ns) end_run(e, TOO_LONG, "the run has outlasted its limit");
    if (now_ns > e.progressed_ns + IDLE_NS) end_run(e, TOO_LONG, "for long everybody has only polled");
}

UNCHECKED static int pick_warp(Emulator& e) {
    for (int tries = 0;; ++tries) {
        ++e.events;
        if (!e.copies.empty() && chance(e, e.lands)) land(e);
        if (e.n_pending > 0 && chance(e, e.arrives)) arrive(e, (int)below(e, (u32)e.n_pending));
        if (e.events % 4096 == 0) check_clock(e);
        if (e.runnable.empty()) {
            if (!e.copies.empty()) {
                land(e);  // every copy lands before the run ends or a deadlock is reported
                continue;
            }
            if (e.n_done == e.n_fibers) {
                switch_stacks(&e.current->stack, &e.outside);
                abort();
            }
            end_run(e, DEADLOCK, "no thread can go on");
        }
        const int picked = e.runnable[below(e, (u32)e.runnable.size())];
        Warp& w = e.warps[picked];
        Block& b = e.blocks[e.fibers[picked * 32].block];
        if (chance(e, e.sleeps)) w.asleep_until = e.events + below(e, 64 * (u32)e.n_warps);
        if (chance(e, e.sleeps / 16)) b.asleep_until = e.events + below(e, 256 * (u32)e.n_warps);
        if (tries < 4 * e.n_warps && (w.asleep_until > e.events || b.asleep_until > e.events)) continue;
        return picked;
    }
}

// The current fiber stops here; it is ready or waits, as its warp knows.
UNCHECKED static void next(Emulator& e) {
    Fiber* from = e.current;
    int warp = from->warp;
    Warp* w = &e.warps[warp];
    if (w->visit == 0) {
        warp = pick_warp(e);
        w = &e.warps[warp];
        w->visit = w->ready;
        w->turn = (int)(roll(e) & 31);
    }
    const u32 turned = w->visit >> w->turn | w->visit << ((32 - w->turn) & 31);
    const int lane = (__builtin_ctz(turned) + w->turn) & 31;
    w->visit &= ~(1u << lane);
    Fiber* to = &e.fibers[warp * 32 + lane];
    if (to == from) return;
    e.current = to;
    switch_stacks(&from->stack, &to->stack);
}

// A moment at which others may have been faster.
void maybe_pass(const Site& site) {
    Emulator& e = *now;
    e.current->site = site;
    if (chance(e, e.yields)) next(e);
}

void poll(const Site& site) {
    Emulator& e = *now;
    e.current->site = site;
    if (++e.idle > e.n_fibers) let_others_work(e);
    Warp& w = e.warps[e.current->warp];
    ++w.streak;
    // Who has polled long is asked more rarely, or those that poll would take all the time of those that work.
    if (w.visit == 0) w.asleep_until = max(w.asleep_until, e.events + min<u64>(w.streak / 32, 32) * e.n_warps);
    next(e);
}

static inline void wait_here(Emulator& e, const Site& site) {
    Fiber& f = *e.current;
    f.site = site;
    make_waiting(e, f.warp, 1u << f.lane);
    next(e);
}

// --- meetings ---

// All lanes of the warp: the last to come computes for all.
template <class Compute>
static inline Box& meet(const Site& site, const Box& brought, Compute compute) {
    Emulator& e = *now;
    Fiber& f = *e.current;
    Warp& w = e.warps[f.warp];
    if (w.arrived == 0) {
        w.site = site;
    } else if (w.site.line != site.line || strcmp(w.site.what, site.what) != 0 || strcmp(w.site.file, site.file) != 0) {
        misused(site, "other lanes of the warp are at " + told(w.site));
    }
    Box& box = w.box[f.lane];
    box = brought;
    w.arrived |= 1u << f.lane;
    if (w.arrived != 0xFFFFFFFFu) {
        wait_here(e, site);
        return box;
    }
    w.arrived = 0;
    f.site = site;
    compute(w, e);
    make_ready(e, f.warp, 0xFFFFFFFFu);
    w.visit = ~(1u << f.lane);
    return box;
}

void sync(int number, int n_threads, const Site& site) {
    Emulator& e = *now;
    Fiber& f = *e.current;
    Barrier& barrier = e.blocks[f.block].barriers[number];
    if (n_threads > e.n_threads) misused(site, "there are not so many threads in a block");
    barrier.waiting.push_back((int)(&f - e.fibers.data()));
    if ((int)barrier.waiting.size() < n_threads) {
        wait_here(e, site);
        return;
    }
    ++e.moment;
    if (e.races) e.races->meet(barrier.waiting);
    for (int i : barrier.waiting) {
        Fiber& other = e.fibers[i];
        other.block_synced = e.moment;
        make_ready(e, other.warp, 1u << other.lane);
    }
    barrier.waiting.clear();
    f.site = site;
    next(e);
}

// --- memory that is not there, and traps of the sanitizer: told as everything else is ---

static void on_fault(int signal, siginfo_t* info, [[maybe_unused]] void* given) {
    Emulator* e = now;
    if (e == nullptr) {  // not ours: as if we were not there
        ::signal(signal, SIG_DFL);
        return;
    }
    sigset_t faults;
    sigemptyset(&faults);
    sigaddset(&faults, signal);
    pthread_sigmask(SIG_UNBLOCK, &faults, nullptr);  // since this never returns
    const Fiber& f = *e->current;
    char text[400];
    const char* address = (const char*)info->si_addr;
    const char* what = signal == SIGILL ? "a trap: not aligned, out of an array, or shifted too far"
                       : signal == SIGFPE ? "divided by zero"
                       : address >= f.memory.mapped && address < f.memory.memory ? "the stack is full"
                                                                                 : "no such memory";
    void* code = nullptr;
#if defined(__x86_64__)
    code = (void*)((ucontext_t*)given)->uc_mcontext.gregs[REG_RIP];
#endif
    Dl_info library{};
    dladdr(code, &library);
    snprintf(
        text, sizeof text, "block %d, thread %d: %s (address %p, code +%#llx), after %s", f.block, f.thread, what,
        (const void*)address, (u64)code - (u64)library.dli_fbase, told(f.site).c_str()
    );
    end_run(*e, MISUSED, text);
}

// One handler for all grids that run at this moment, and for each thread a stack to handle a full stack on.
struct Faults {
    static const int n_signals = 4;
    stack_t before{};
    char* memory = (char*)malloc(64 * 1024);

    static pthread_mutex_t& lock() {
        static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
        return one;
    }
    static int signal_of(int i) {
        const int all[n_signals] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
        return all[i];
    }
    static struct sigaction* others() {
        static struct sigaction actions[n_signals];
        return actions;
    }
    static int& n_running() {
        static int n = 0;
        return n;
    }

    Faults() {
        stack_t own{};
        own.ss_sp = memory;
        own.ss_size = 64 * 1024;
        sigaltstack(&own, &before);
        pthread_mutex_lock(&lock());
        if (n_running()++ == 0) {
            struct sigaction action{};
            action.sa_sigaction = on_fault;
            action.sa_flags = SA_SIGINFO | SA_ONSTACK;
            for (int i = 0; i < n_signals; ++i) sigaction(signal_of(i), &action, &others()[i]);
        }
        pthread_mutex_unlock(&lock());
    }
    ~Faults() {
        pthread_mutex_lock(&lock());
        if (--n_running() == 0) {
            for (int i = 0; i < n_signals; ++i) sigaction(signal_of(i), &others()[i], nullptr);
        }
        pthread_mutex_unlock(&lock());
        sigaltstack(&before, nullptr);
        free(memory);
    }
};

// --- the grid ---

static void begin_fiber() {
    Emulator& e = *now;
    e.program(e.argument);
    Fiber& f = *e.current;
    if (!f.copied.empty()) end_run(e, MISUSED, "block " + std::to_string(f.block) + " ends before its copies");
    f.done = true;
    ++e.n_done;
    if (++e.blocks[f.block].n_done == e.n_threads) {
        for (const Copy& copy : e.copies) {
            if (copy.block != f.block) continue;
            end_run(e, MISUSED, "block " + std::to_string(f.block) + " ends before its copies");
        }
    }
    make_waiting(e, f.warp, 1u << f.lane);
    progress(e);
    next(e);
    abort();
}

int run(
    void (*program)(const void*), const void* argument, int n_blocks, int n_threads, int shared_bytes, u64 seed
) {
    if (n_threads % 32 != 0 || n_threads < 32 || n_blocks < 1 || now != nullptr) {
        last_report = "no whole warps, no blocks, or a grid within a grid";
        return MISUSED;
    }
    Emulator e{};
    e.program = program;
    e.argument = argument;
    e.n_blocks = n_blocks;
    e.n_threads = n_threads;
    e.n_fibers = n_blocks * n_threads;
    e.n_warps = e.n_fibers / 32;
    e.shared_bytes = shared_bytes;
    e.dice = (seed + 1) * 0x9E3779B97F4A7C15ull | 1;
    for (int i = 0; i < 8; ++i) roll(e);
    e.yields = 1u << (8 + below(e, 6));     // 1 in 256 .. 1 in 8
    e.lands = 1u << (9 + below(e, 7));      // 1 in 128 .. 1 in 2
    e.arrives = 1u << (10 + below(e, 6));   // 1 in 64 .. 1 in 2
    e.sleeps = 1u << below(e, 10);          // 1 in 65536 .. 1 in 128
    e.progressed_ns = clock_ns();
    e.limit_ns = e.progressed_ns + (long long)(limit_s * 1e9);
    if (watches_next) {
        Dl_info library{};
        dladdr((const void*)program, &library);
        e.races = std::make_unique<Races>(e.n_fibers, (const char*)library.dli_fbase);
    }
    watches_next = false;

    e.blocks.resize(n_blocks);
    for (Block& b : e.blocks) {
        const size_t bytes = (size_t)(shared_bytes > 0 ? shared_bytes + 127 : 128) / 128 * 128;
        b.shared.make(bytes, false);
        memset(b.shared.memory, 0xFF, bytes);  // not a number, of any kind
    }
    e.warps.resize(e.n_warps);
    for (Warp& w : e.warps) w.place = -1;
    e.fibers.resize(e.n_fibers);
    for (int i = 0; i < e.n_fibers; ++i) {
        Fiber& f = e.fibers[i];
        f.block = i / n_threads;
        f.thread = i % n_threads;
        f.warp = i / 32;
        f.lane = i % 32;
        f.memory = stacks.take();
        // Stacks that all ended at the same place of a page would share a few lines of the cache.
        prepare_stack(f.stack, f.memory.memory, STACK_BYTES - i * 7 % 64 * 64, begin_fiber);
        make_ready(e, f.warp, 1u << f.lane);
    }

    {
        Faults told_by_us;
        now = &e;
        e.current = &e.fibers[below(e, (u32)e.n_fibers)];
        switch_stacks(&e.outside, &e.current->stack);
        now = nullptr;
    }

    for (int i = e.n_pending - 1; i >= 0; --i) arrive(e, i);
    for (Block& b : e.blocks) b.shared.free();
    for (Fiber& f : e.fibers) stacks.kept.push_back(f.memory);
    if (e.races) e.races->settle_doubts();
    if (e.races && !e.races->told.empty()) {
        e.ended = RACED;
        for (const std::string& race : e.races->told) e.report += race + "\n";
    }
    last_report = e.report;
    return e.ended;
}

// --- accesses, where they are watched ---

void watch() { watches_next = true; }

static inline void watched(const void* place, size_t bytes, bool writes, bool strong, const void* code) {
    Emulator* e = now;
    if (e == nullptr || !e->races) return;
    const Fiber& f = *e->current;
    if ((const char*)place >= f.memory.memory && (const char*)place < f.memory.memory + STACK_BYTES) return;
    const int at = (int)((const char*)code - e->races->library);
    e->races->access(number_of(*e, f), place, bytes, writes, strong, at);
}
void strong(const void* place, int bytes, bool writes, const void* code) {
    watched(place, (size_t)bytes, writes, true, code);
}
void released(const void* place, bool with_others) {
    if (now->races) now->races->release(number_of(*now, *now->current), place, with_others);
}
void acquired(const void* place) {
    if (now->races) now->races->acquire(number_of(*now, *now->current), place);
}

// --- tables for numbers ---

static inline float half_to_float(u16 h) {
    const u32 sign = (u32)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    u32 bits;
    if (exponent == 31) bits = sign | 0x7F800000u | fraction << 13;
    else if (exponent != 0) bits = sign | (exponent + 112) << 23 | fraction << 13;
    else {
        const float small = (float)fraction * 5.9604644775390625e-08f;  // 2^-24
        memcpy(&bits, &small, 4);
        bits |= sign;
    }
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
struct HalfTable {
    float of[65536];
    HalfTable() {
        for (int i = 0; i < 65536; ++i) of[i] = half_to_float((u16)i);
    }
};
static const HalfTable halves;
const float* const half_table = halves.of;

// c [16, 8] += a [16, k] b [k, 8], as 32 lanes hold them; `wide` is number i of a register.
template <int n_columns, int per_register, class T, class Wide>
UNCHECKED static inline void multiply(Warp& w, Wide wide) {
    T a[16][n_columns], b[n_columns][8], c[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const Box& box = w.box[lane];
        const int g = lane / 4, q = lane % 4;
        for (int r = 0; r < 4; ++r) {
            for (int i = 0; i < per_register; ++i) {
                a[g + 8 * (r & 1)][per_register * q + i + n_columns / 2 * (r >> 1)] = wide(box.a[r], i);
            }
        }
        for (int r = 0; r < 2; ++r) {
            for (int i = 0; i < per_register; ++i) b[per_register * q + i + n_columns / 2 * r][g] = wide(box.b[r], i);
        }
        const T* own = (const T*)box.c;
        for (int r = 0; r < 4; ++r) c[g + 8 * (r >> 1)][2 * q + (r & 1)] = own[r];
    }
    for (int i = 0; i < 16; ++i) {
        T sum[8];
        for (int j = 0; j < 8; ++j) sum[j] = c[i][j];
        for (int k = 0; k < n_columns; ++k) {
            const T factor = a[i][k];
            for (int j = 0; j < 8; ++j) sum[j] += factor * b[k][j];
        }
        for (int j = 0; j < 8; ++j) c[i][j] = sum[j];
    }
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, q = lane % 4;
        T* own = (T*)w.box[lane].c;
        for (int r = 0; r < 4; ++r) own[r] = c[g + 8 * (r >> 1)][2 * q + (r & 1)];
    }
}

}  // namespace emulator

// What went wrong in the last run of this thread, and how long a run may take.
extern "C" const char* emulator_report() { return emulator::last_report.c_str(); }
extern "C" void emulator_limit(double seconds) { emulator::limit_s = seconds; }

// --- the names of machine.h ---

int thread() { return emulator::now->current->thread; }
int block() { return emulator::now->current->block; }
char* shared_memory() { return emulator::now->blocks[emulator::now->current->block].shared.memory; }

void sync_block(OF_CALLER) { emulator::sync(0, emulator::now->n_threads, HERE("sync_block")); }
void sync_warp(OF_CALLER) {
    emulator::meet(HERE("sync_warp"), {}, [](emulator::Warp& w, emulator::Emulator& e) {
        ++e.moment;
        const int first = (int)(&w - e.warps.data()) * 32;
        for (int i = 0; i < 32; ++i) e.fibers[first + i].warp_synced = e.moment;
        if (!e.races) return;
        std::vector<int> lanes(32);
        for (int i = 0; i < 32; ++i) lanes[i] = first + i;
        e.races->meet(lanes);
    });
}

namespace emulator {
u64 shuffled(const Site& site, u64 value, int number, bool is_mask) {
    Box brought{};
    brought.in = value;
    brought.number = number;
    return meet(site, brought, [is_mask](Warp& w, Emulator&) {
        for (int lane = 0; lane < 32; ++lane) {
            const int given = w.box[lane].number & 31;
            w.box[lane].out = w.box[is_mask ? lane ^ given : given].in;
        }
    }).out;
}
}  // namespace emulator

u32 votes(bool vote, OF_CALLER) {
    emulator::Box brought{};
    brought.in = vote;
    return (u32)emulator::meet(HERE("votes"), brought, [](emulator::Warp& w, emulator::Emulator&) {
        u64 all = 0;
        for (int lane = 0; lane < 32; ++lane) all |= w.box[lane].in << lane;
        for (int lane = 0; lane < 32; ++lane) w.box[lane].out = all;
    }).out;
}

void gate_init(Gate* gate, int arrivals) {
    emulator::GateWord w{};
    w.wanted = w.missing = arrivals;
    memcpy(&gate->word, &w, 8);
}

namespace emulator {
static inline GateWord ready_gate(const Gate* gate, const Site& site) {
    const char* shared = now->blocks[now->current->block].shared.memory;
    if ((const char*)gate < shared || (const char*)gate >= shared + now->shared_bytes) {
        misused(site, "the gate is not in the block's shared memory");
    }
    const GateWord w = gate_word(gate);
    if (w.unmade || w.wanted == 0 || w.missing > w.wanted) misused(site, "the gate was not made by gate_init");
    return w;
}
void arrive_at(Gate* gate, int bytes, const Site& site) {
    maybe_pass(site);
    GateWord w = ready_gate(gate, site);
    if (w.missing == 0) misused(site, "more arrivals at a gate than it was made for");
    w.bytes = (u32)((u32)w.bytes + (u32)bytes);
    w.missing -= 1;
    gate_set(gate, w);
    released(gate, true);
    progress(*now);
}
}  // namespace emulator

bool gate_passed(Gate* gate, int phase, OF_CALLER) {
    emulator::maybe_pass(HERE("gate_passed"));
    bool passed = (int)emulator::ready_gate(gate, HERE("gate_passed")).parity != (phase & 1);
    if (!passed) {
        emulator::poll(HERE("gate_passed"));
        passed = (int)emulator::gate_word(gate).parity != (phase & 1);
    }
    if (passed) emulator::acquired(gate);
    return passed;
}

namespace emulator {
// What a copy is ordered behind, by the time that its gate hears of it: its own writes too.
static SharedClock asked_now(Emulator& e) { return e.races ? e.races->all_of(number_of(e, *e.current)) : SharedClock(); }

// From here on a read of the bytes is too early, or too late.
static Part asked_for(void* shared_to, const void* from, int bytes, const Site& site) {
    const char* shared = now->blocks[now->current->block].shared.memory;
    if (bytes <= 0 || bytes % 16 != 0 || (u64)shared_to % 16 != 0 || (u64)from % 16 != 0) {
        misused(site, "not 16-byte aligned, or not so many bytes");
    }
    if ((char*)shared_to < shared || (char*)shared_to + bytes > shared + now->shared_bytes) {
        misused(site, "the copy does not lie in the block's shared memory");
    }
    memset(shared_to, 0xFF, bytes);
    watched(shared_to, (size_t)bytes, true, false, __builtin_return_address(0));
    return {(char*)shared_to, (const char*)from, bytes};
}
}  // namespace emulator

void bulk_copy(void* shared_to, const void* from, int bytes, Gate* gate, OF_CALLER) {
    const emulator::Site site = HERE("bulk_copy");
    emulator::Emulator& e = *emulator::now;
    const emulator::Part part = emulator::asked_for(shared_to, from, bytes, site);
    emulator::ready_gate(gate, site);
    e.copies.push_back({{part}, bytes, e.current->block, gate, emulator::asked_now(e)});
    emulator::maybe_pass(site);
}

void copy_16_bytes(void* shared_to, const void* from, OF_CALLER) {
    const emulator::Site site = HERE("copy_16_bytes");
    emulator::Fiber& f = *emulator::now->current;
    f.copied.push_back(emulator::asked_for(shared_to, from, 16, site));
    emulator::maybe_pass(site);
}
void gate_arrive_copied(Gate* gate, OF_CALLER) {
    const emulator::Site site = HERE("gate_arrive_copied");
    emulator::Emulator& e = *emulator::now;
    emulator::ready_gate(gate, site);
    int on_their_way = 0;
    for (const emulator::Copy& copy : e.copies) on_their_way += copy.gate == gate && copy.bytes == 0;
    if (on_their_way >= (int)emulator::gate_word(gate).missing) {
        emulator::misused(site, "more arrivals at a gate than it was made for");
    }
    e.copies.push_back({std::move(e.current->copied), 0, e.current->block, gate, emulator::asked_now(e)});
    e.current->copied.clear();
    emulator::maybe_pass(site);
}

namespace emulator {
template <int n_columns, int per_register, class T, class Wide>
static inline void multiply_together(const Site& site, T* c, const uint4& a, u32 b0, u32 b1, Wide wide) {
    Box brought{};
    brought.c = c;
    brought.a[0] = a.x, brought.a[1] = a.y, brought.a[2] = a.z, brought.a[3] = a.w;
    brought.b[0] = b0, brought.b[1] = b1;
    meet(site, brought, [wide](Warp& w, Emulator&) { multiply<n_columns, per_register, T>(w, wide); });
}
}  // namespace emulator

void multiply_bf16(float c[4], const uint4& a, u32 b0, u32 b1, OF_CALLER) {
    emulator::multiply_together<16, 2>(HERE("multiply_bf16"), c, a, b0, b1, [](u32 word, int i) UNCHECKED {
        return float_of(i ? word & 0xFFFF0000u : word << 16);
    });
}
void multiply_f16(float c[4], const uint4& a, u32 b0, u32 b1, OF_CALLER) {
    emulator::multiply_together<16, 2>(HERE("multiply_f16"), c, a, b0, b1, [](u32 word, int i) UNCHECKED {
        return emulator::half_table[word >> 16 * i & 65535];
    });
}
void multiply_s8(int c[4], const uint4& a, u32 b0, u32 b1, OF_CALLER) {
    emulator::multiply_together<32, 4>(HERE("multiply_s8"), c, a, b0, b1, [](u32 word, int i) UNCHECKED {
        return (int)(signed char)(word >> 8 * i);
    });
}

void put(u64* place, u32 value, u32 tag, OF_CALLER) {
    emulator::Emulator& e = *emulator::now;
    if ((u64)place % 8 != 0) emulator::misused(HERE("put"), "not 8-byte aligned");
    emulator::progress(e);
    if (emulator::Pending* earlier = emulator::own_pending(e, place)) emulator::arrive(e, (int)(earlier - e.pending));
    if (e.n_pending == MAX_PENDING) emulator::arrive(e, (int)emulator::below(e, MAX_PENDING));
    const int fiber = (int)(e.current - e.fibers.data());
    e.pending[e.n_pending++] = {place, (u64)tag << 32 | value, fiber, e.moment};
    ++e.current->n_pending;
    emulator::maybe_pass(HERE("put"));
}

namespace emulator {
static inline u64 seen_now(const u64* place, const Site& site) {
    maybe_pass(site);
    if (const Pending* own = own_pending(*now, place)) return own->value;
    return __atomic_load_n(place, __ATOMIC_ACQUIRE);
}
// Who sees the same at the same place again is polling, and so may be who looks and looks.
static inline u64 seen(const u64* place, const Site& site) {
    Fiber& f = *now->current;
    u64 value = seen_now(place, site);
    if ((f.looked_at == place && f.looked_like == value) || ++f.n_loads % 64 == 0) {
        poll(site);
        value = seen_now(place, site);
    }
    f.looked_at = place;
    f.looked_like = value;
    return value;
}
}  // namespace emulator

u64 load_acquire(const u64* place, OF_CALLER) {
    const u64 value = load_relaxed(place, FROM_CALLER);
    emulator::acquired(place);
    return value;
}
u64 load_relaxed(const u64* place, OF_CALLER) {
    if ((u64)place % 8 != 0) emulator::misused(HERE("look"), "not 8-byte aligned");
    return emulator::seen(place, HERE("look"));
}
void load_two_relaxed(const u64* place, u64 out[2], OF_CALLER) {
    if ((u64)place % 16 != 0) emulator::misused(HERE("look_two"), "not 16-byte aligned");
    out[0] = emulator::seen(place, HERE("look_two"));
    out[1] = emulator::seen_now(place + 1, HERE("look_two"));
}
void store_release(u64* place, u64 value, OF_CALLER) {
    emulator::Emulator& e = *emulator::now;
    emulator::maybe_pass(HERE("raise"));
    emulator::arrive_before(e, *e.current);
    emulator::released(place, false);
    __atomic_store_n(place, value, __ATOMIC_RELEASE);
    emulator::progress(e);
}

long long timer_ns() { return emulator::clock_ns(); }

// --- what a program calls that is compiled with -fsanitize=thread; the atomic ones are words of host and device ---

#define WATCHED(name, writes, bytes)                                                                   \
    extern "C" void __tsan_##name(const void* place) {                                                 \
        emulator::watched(place, bytes, writes, false, __builtin_return_address(0));                   \
    }
#define WATCHED_BOTH(bytes)                                                                            \
    WATCHED(read##bytes, false, bytes)                                                                 \
    WATCHED(write##bytes, true, bytes)                                                                 \
    WATCHED(unaligned_read##bytes, false, bytes)                                                       \
    WATCHED(unaligned_write##bytes, true, bytes)
WATCHED_BOTH(1)
WATCHED_BOTH(2)
WATCHED_BOTH(4)
WATCHED_BOTH(8)
WATCHED_BOTH(16)
extern "C" void __tsan_read_range(const void* place, size_t bytes) {
    emulator::watched(place, bytes, false, false, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(const void* place, size_t bytes) {
    emulator::watched(place, bytes, true, false, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" long long __tsan_atomic64_load(const volatile long long* place, int) {
    return __atomic_load_n(place, __ATOMIC_ACQUIRE);
}
extern "C" void __tsan_atomic64_store(volatile long long* place, long long value, int) {
    __atomic_store_n(place, value, __ATOMIC_RELEASE);
}
extern "C" void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

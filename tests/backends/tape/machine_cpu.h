// The machine of the tape on a CPU: every thread of the grid is a fiber, and one thread of the system runs them all.
//
// A fiber runs until it waits, polls or meets others; then a random one goes on, by a seed. Whatever the card may do
// in any order is done in a random order here: copies land in pieces and late (and what they overwrite is rubbish from
// the moment they are asked for), puts of a thread overtake each other, warps fall asleep. A deadlock is
// reported with the place where each thread waits. Not emulated: plain stores are seen at once and in order, and there
// is no L1 that keeps old values.
//
// Here are the names; `machine_cpu.cpp` is the machine, compiled once for all programs. Included by machine.h alone,
// after the types that both machines have.
#pragma once
#include <math.h>
#include <string.h>

struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

#define DEVICE static inline
#define FUNCTION static inline
#define CONSTANT_TABLE static const
#define MEMBER inline
#define APART [[maybe_unused]] static
#define SHARED_BY_BLOCK static thread_local  // one for all blocks: for what only one block does
#define UNROLL
#define NOT_UNROLLED
#define FIRST_CHECK 4
#define POLLS_PER_CHECK 16
#define KERNEL(name, Argument, argument, n_threads)                                                               \
    static void name##_of(const Argument& argument);                                                              \
    static void name##_thread(const void* given) { name##_of(*(const Argument*)given); }                          \
    extern "C" int name##_on_cpu(const Argument* given, int n_blocks, int shared_bytes, u64 seed) {               \
        WATCH();                                                                                                  \
        return emulator::run(name##_thread, given, n_blocks, n_threads, shared_bytes, seed);                      \
    }                                                                                                             \
    static void name##_of([[maybe_unused]] const Argument& argument)

DEVICE void give_registers() {}
DEVICE void take_registers() {}

// Where a primitive was called, for the report: the last parameters of everything that may wait.
#define CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define OF_CALLER const char *file, int line  // the same, where it is defined
#define FROM_CALLER file, line  // handed on
#define UNCHECKED __attribute__((no_sanitize("undefined")))  // ours, and often
#define UNWATCHED __attribute__((no_sanitize("thread"), noinline, unused)) static  // tells of its accesses itself
#define CODE __builtin_return_address(0)
#if defined(WATCH_RACES)
#define WATCH() emulator::watch()
#else
#define WATCH()
#endif
#define HERE(what) emulator::Site{what, FROM_CALLER}
#define STACK_BYTES (64 * 1024)

template <class T>
static inline T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
static inline T max(T a, T b) {
    return a < b ? b : a;
}

namespace emulator {

struct Site {
    const char* what;
    const char* file;
    int line;
};

int run(void (*program)(const void*), const void* argument, int n_blocks, int n_threads, int shared_bytes, u64 seed);
[[noreturn]] void misused(const Site& site, const char* why);
void maybe_pass(const Site& site);  // a moment at which others may have been faster
void poll(const Site& site);
void sync(int number, int n_threads, const Site& site);
u64 shuffled(const Site& site, u64 value, int number, bool is_mask);
void arrive_at(Gate* gate, int bytes, const Site& site);
// For a program that is watched for races (races_cpu.h): a strong access, a release of a place (with what others have
// released there, or in their place), an acquisition.
void watch();
void strong(const void* place, int bytes, bool writes, const void* code);
void released(const void* place, bool with_others);
void acquired(const void* place);
extern const float* const half_table;  // every float16, by its bits

}  // namespace emulator

// --- the names of machine.h ---

int thread();
int block();
char* shared_memory();
DEVICE int thread_anew() { return thread(); }

void sync_block(CALLER);
DEVICE void sync_compute_warps(CALLER) { emulator::sync(1, N_COMPUTE_WARPS * 32, HERE("sync_compute_warps")); }
void sync_warp(CALLER);

namespace emulator {
template <class T>
static inline T shuffled_as(const Site& site, T value, int number, bool is_mask) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves words");
    u64 word = 0;
    memcpy(&word, &value, sizeof(T));
    word = shuffled(site, word, number, is_mask);
    memcpy(&value, &word, sizeof(T));
    return value;
}
}  // namespace emulator

template <class T>
static inline T shuffle_xor(T value, int mask, CALLER) {
    return emulator::shuffled_as(HERE("shuffle_xor"), value, mask, true);
}
template <class T>
static inline T shuffle(T value, int lane, CALLER) {
    return emulator::shuffled_as(HERE("shuffle"), value, lane, false);
}
u32 votes(bool vote, CALLER);

void gate_init(Gate* gate, int arrivals);
DEVICE void gate_init_fence() {}
DEVICE void gate_expect(Gate* gate, int bytes, CALLER) { emulator::arrive_at(gate, bytes, HERE("gate_expect")); }
DEVICE void gate_arrive(Gate* gate, CALLER) { emulator::arrive_at(gate, 0, HERE("gate_arrive")); }
bool gate_passed(Gate* gate, int phase, CALLER);
void bulk_copy(void* shared_to, const void* from, int bytes, Gate* gate, CALLER);
void copy_16_bytes(void* shared_to, const void* from, CALLER);
void gate_arrive_copied(Gate* gate, CALLER);

void multiply_bf16(float c[4], const uint4& a, u32 b0, u32 b1, CALLER);
void multiply_f16(float c[4], const uint4& a, u32 b0, u32 b1, CALLER);
void multiply_s8(int c[4], const uint4& a, u32 b0, u32 b1, CALLER);

DEVICE float float_of(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
DEVICE u32 bits_of(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}

DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
    const u64 bytes = (u64)b << 32 | a;
    u32 made = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 choice = selector >> 4 * i & 15, byte = (u32)(bytes >> 8 * (choice & 7)) & 255;
        made |= (choice & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return made;
}
DEVICE int lowest_bit(u32 word) { return __builtin_ffs((int)word) - 1; }

void put(u64* place, u32 value, u32 tag, CALLER);
u64 load_relaxed(const u64* place, CALLER);
void load_two_relaxed(const u64* place, u64 out[2], CALLER);
void store_release(u64* place, u64 value, CALLER);
u64 load_acquire(const u64* place, CALLER);

namespace emulator {
template <class T>
UNWATCHED T fresh(const T* place, const Site& site) {
    maybe_pass(site);
    if ((u64)place % sizeof(T) != 0) misused(site, "the place is not aligned");
    strong(place, sizeof(T), false, CODE);
    return *(const volatile T*)place;
}
}  // namespace emulator
DEVICE u32 load_fresh(const u32* place, CALLER) { return emulator::fresh(place, HERE("load_fresh")); }
DEVICE int load_fresh(const int* place, CALLER) { return emulator::fresh(place, HERE("load_fresh")); }
DEVICE float load_fresh(const float* place, CALLER) { return emulator::fresh(place, HERE("load_fresh")); }
DEVICE u64 load_fresh(const u64* place, CALLER) { return load_relaxed(place, file, line); }
DEVICE u16 load_fresh(const u16* place, CALLER) { return emulator::fresh(place, HERE("load_fresh")); }
UNWATCHED uint2 load_fresh(const uint2* place, CALLER) {
    emulator::maybe_pass(HERE("load_fresh"));
    emulator::strong(place, sizeof(uint2), false, CODE);
    if ((u64)place % 8 != 0) emulator::misused(HERE("load_fresh"), "the place is not aligned");
    const volatile u32* words = (const volatile u32*)place;
    return {words[0], words[1]};
}
UNWATCHED uint4 load_fresh(const uint4* place, CALLER) {
    emulator::maybe_pass(HERE("load_fresh"));
    emulator::strong(place, sizeof(uint4), false, CODE);
    if ((u64)place % 16 != 0) emulator::misused(HERE("load_fresh"), "the place is not aligned");
    const volatile u32* words = (const volatile u32*)place;
    return {words[0], words[1], words[2], words[3]};
}
UNWATCHED void store_fresh(u32* place, u32 value) {
    emulator::strong(place, 4, true, CODE);
    __atomic_store_n(place, value, __ATOMIC_RELEASE);
}

DEVICE int round_to_int(float value) { return (int)lrintf(value); }
DEVICE u16 to_bf16(float value) {
    const u32 bits = bits_of(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
    return (u16)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}
DEVICE u16 to_f16(float value) {
    const u32 bits = bits_of(value), size = bits & 0x7FFFFFFFu;
    const u16 sign = (u16)(bits >> 16 & 0x8000);
    if (size > 0x7F800000u) return 0x7FFF;
    if (size >= 0x477FF000u) return sign | 0x7C00;  // 65520 and more round to infinity
    if (size < 0x38800000u) return sign | (u16)lrintf(fabsf(value) * 16777216.0f);  // subnormal: multiples of 2^-24
    return sign | (u16)((size - 0x38000000u + 0xFFFu + (size >> 13 & 1)) >> 13);
}
DEVICE float from_f16(u16 bits) { return emulator::half_table[bits]; }
DEVICE u32 pair_bf16(float low, float high) { return (u32)to_bf16(high) << 16 | to_bf16(low); }
DEVICE u32 multiply_pair_bf16(u32 a, u32 b) {
    return pair_bf16(float_of(a << 16) * float_of(b << 16), float_of(a & 0xFFFF0000u) * float_of(b & 0xFFFF0000u));
}
DEVICE u32 pair_f16(float low, float high) { return (u32)to_f16(high) << 16 | to_f16(low); }

DEVICE float exp2_fast(float value) { return exp2f(value); }
DEVICE float rsqrt_fast(float value) { return 1.0f / sqrtf(value); }
DEVICE float log_float(float value) { return logf(value); }
DEVICE float erf_float(float value) { return erff(value); }
DEVICE double log_exact(double value) { return log(value); }
DEVICE double exp_exact(double value) { return exp(value); }
DEVICE void sincos_exact(float angle, float& sine, float& cosine) {
    sine = sinf(angle);
    cosine = cosf(angle);
}

DEVICE float rounded_product(float a, float b) {
    volatile float product = a * b;
    return product;
}
DEVICE float rounded_sum(float a, float b) { return a + b; }
DEVICE float rounded_quotient(float a, float b) { return a / b; }

UNWATCHED u32 atomic_add_shared(u32* place, u32 value, CALLER) {
    emulator::maybe_pass(HERE("atomic_add_shared"));
    emulator::strong(place, 4, true, CODE);
    const u32 before = *place;
    *place = before + value;
    return before;
}

long long timer_ns();
DEVICE void relax(CALLER) { emulator::poll(HERE("relax")); }
DEVICE void nap(CALLER) { emulator::poll(HERE("nap")); }

// --- what loop/step_masks.h needs of a GPU ---

#define VOTES(vote) votes(vote)
#define POPULATION(word) __builtin_popcount(word)
#define ADD_SHARED(place, value) atomic_add_shared((u32*)(place), (u32)(value))
UNWATCHED void lower(int* place, int value, CALLER) {
    emulator::maybe_pass(HERE("lower"));
    emulator::strong(place, 4, true, CODE);
    if (value < *place) *place = value;
}
#define LOWER(place, value) lower(place, value)
UNWATCHED int add_in_order(int* place, int value, CALLER) {
    emulator::maybe_pass(HERE("add_in_order"));
    emulator::acquired(place);
    emulator::strong(place, 4, true, CODE);
    emulator::released(place, true);
    const int before = *place;
    *place = before + value;
    return before;
}
UNWATCHED bool try_lock(int* lock, CALLER) {
    emulator::maybe_pass(HERE("try_lock"));
    emulator::acquired(lock);
    emulator::strong(lock, 4, true, CODE);
    const bool was_free = *lock == 0;
    *lock = 1;
    return was_free;
}
UNWATCHED void unlock(int* lock) {
    emulator::strong(lock, 4, true, CODE);
    emulator::released(lock, false);
    *lock = 0;
}

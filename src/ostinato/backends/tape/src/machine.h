// The machine layer of the tape: a named function for every instruction that C++ cannot express, for two machines.
//
// On CUDA a name is an instruction or two. On the CPU the same names come from `machine_cpu.h`, an emulator that lives
// with the tests and runs the very source that the card runs. Nothing else of the tape asks which machine this is.
//
// Constants come from `shape.h`. Two of them say what only some chips have, since sm_90: BULK_COPIES, the copy engine
// and gates that count bytes, and MOVE_REGISTERS, warps that reallocate registers. Everything else needs sm_80.
#pragma once
#include "shape.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// An mbarrier in shared memory: a phase ends when so many have arrived, and all bytes that were announced.
struct Gate {
    u64 word;
};

#if defined(__CUDACC__)

#define DEVICE static __device__ __forceinline__
#define FUNCTION static __device__         // large ones, called from few places: the compiler decides
#define CONSTANT_TABLE static __constant__ const
#define MEMBER __device__ __forceinline__  // of a struct, where `static` would mean something else
#define APART static __device__ __noinline__  // code that is there once, however many call it
#define SHARED_BY_BLOCK __shared__         // a variable of a function that all threads of a block have together
#define UNROLL _Pragma("unroll")
#define NOT_UNROLLED _Pragma("unroll 1")
#define KERNEL(name, Argument, argument, n_threads) \
    extern "C" __global__ void __launch_bounds__(n_threads, 1) name(const __grid_constant__ Argument argument)

// The call site, for an emulator's report; on the card there is none.
#define CALLER
#define FROM_CALLER

#define EVERY_LANE 0xFFFFFFFFu

// A function that is one instruction: of its arguments alone, or a load, which is made again whenever it is asked for.
#define INSTRUCTION(Out, name, arguments, text, out, ...) \
    DEVICE Out name arguments {                           \
        Out made;                                         \
        asm(text : out(made) : __VA_ARGS__);              \
        return made;                                      \
    }
#define LOAD(Out, name, text, out)                                     \
    DEVICE Out name(const Out* place) {                                \
        Out value;                                                     \
        asm volatile(text : out(value) : "l"(place) : "memory");       \
        return value;                                                  \
    }

// --- who and where ---

DEVICE int thread() { return (int)threadIdx.x; }
DEVICE int block() { return (int)blockIdx.x; }

DEVICE char* shared_memory() {
    extern __shared__ __align__(128) char all_shared_memory[];
    return all_shared_memory;
}

// --- registers ---

// With MOVE_REGISTERS, each of the block's 384 threads has 168 registers at launch; then groups of four warps reallocate
// them, so that the compute warps have enough and do not spill. 128 * 56 + 256 * 224 is the same total. Without it, a
// block has one loader warp, and each of its 288 threads has at most 168: one of the four partitions has three warps.
DEVICE void give_registers() {
    if (MOVE_REGISTERS) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
}
DEVICE void take_registers() {
    if (MOVE_REGISTERS) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
}

// Reads the thread's number again, so that values derived from it are computed where they are used. Otherwise the
// compiler hoists them all out of the loop and, since registers are few, spills them to local memory.
DEVICE int thread_anew() {
    int number;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(number));
    return number;
}

// --- together: all lanes of a warp, all compute warps, all threads of a block ---

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_compute_warps() { asm volatile("bar.sync 1, %0;" : : "n"(N_COMPUTE_WARPS * 32) : "memory"); }
DEVICE void sync_warp() { __syncwarp(); }

template <class T>
DEVICE T shuffle_xor(T value, int mask) {
    return __shfl_xor_sync(EVERY_LANE, value, mask);
}
template <class T>
DEVICE T shuffle(T value, int lane) {
    return __shfl_sync(EVERY_LANE, value, lane);
}
DEVICE u32 votes(bool vote) { return __ballot_sync(EVERY_LANE, vote); }

// --- gates, and the copies that pass them ---

DEVICE u32 shared_address(const void* place) { return (u32)__cvta_generic_to_shared(place); }

DEVICE void gate_init(Gate* gate, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(gate)), "r"(arrivals) : "memory");
}
// After the last gate_init, before the sync after which others use the gates: the copy engine must see them too.
DEVICE void gate_init_fence() {
    if (!BULK_COPIES) return;
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}
// One arrival, and so many bytes to come.
DEVICE void gate_expect(Gate* gate, int bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(shared_address(gate)), "r"(bytes) : "memory"
    );
}
DEVICE void gate_arrive(Gate* gate) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(shared_address(gate)) : "memory");
}
// Whether the phase of this parity has ended; the thread may wait for a while to see it end. Chips with bulk copies let
// it sleep; on others it asks again and again, as long as a poll should take (see BoundedWait).
#define GATE_TEST(how)                                                 \
    asm volatile(                                                      \
        "{\n"                                                          \
        ".reg .pred p;\n"                                              \
        "mbarrier." how ".parity.shared::cta.b64 p, [%1], %2;\n"       \
        "selp.u32 %0, 1, 0, p;\n"                                      \
        "}"                                                            \
        : "=r"(passed)                                                 \
        : "r"(shared_address(gate)), "r"(phase)                        \
        : "memory"                                                     \
    )
#define TESTS_PER_POLL 32
DEVICE bool gate_passed(Gate* gate, int phase) {
    u32 passed = 0;
    if (BULK_COPIES) {
        GATE_TEST("try_wait");
    } else {
        NOT_UNROLLED
        for (int i = 0; i < TESTS_PER_POLL && !passed; i++) GATE_TEST("test_wait");
    }
    return passed != 0;
}

// What a tape reads is not read again before the whole tape has passed, so it is the first to leave L2.
DEVICE u64 first_to_leave() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// From global to shared memory, by the copy engine: both 16-byte aligned, a multiple of 16 bytes.
DEVICE void bulk_copy(void* shared_to, const void* from, int bytes, Gate* gate) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        :
        : "r"(shared_address(shared_to)), "l"(from), "r"(bytes), "r"(shared_address(gate)), "l"(first_to_leave())
        : "memory"
    );
}
// From global to shared memory, 16 aligned bytes, while the thread goes on.
DEVICE void copy_16_bytes(void* shared_to, const void* from) {
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
        :
        : "r"(shared_address(shared_to)), "l"(from), "l"(first_to_leave())
        : "memory"
    );
}
// One arrival, once all bytes that this thread has asked for by copy_16_bytes are there.
DEVICE void gate_arrive_copied(Gate* gate) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(shared_address(gate)) : "memory");
}

// --- products of a warp: c += a b, fragments as the tensor cores hold them ---

#define MULTIPLY(name, Sum, sum, shape)                                                                          \
    DEVICE void name(Sum c[4], const uint4& a, u32 b0, u32 b1) {                                                 \
        asm volatile(                                                                                            \
            "mma.sync.aligned." shape " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                   \
            : sum(c[0]), sum(c[1]), sum(c[2]), sum(c[3])                                                         \
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1)                                           \
        );                                                                                                       \
    }
MULTIPLY(multiply_bf16, float, "+f", "m16n8k16.row.col.f32.bf16.bf16.f32")
MULTIPLY(multiply_f16, float, "+f", "m16n8k16.row.col.f32.f16.f16.f32")
MULTIPLY(multiply_s8, int, "+r", "m16n8k32.row.col.s32.s8.s8.s32")

// --- words of bytes and bits ---

INSTRUCTION(u32, permute_bytes, (u32 a, u32 b, u32 selector), "prmt.b32 %0, %1, %2, %3;", "=r", "r"(a), "r"(b), "r"(selector))
DEVICE int lowest_bit(u32 word) { return __ffs((int)word) - 1; }  // -1: none

// --- between blocks; never through L1, which is not coherent ---

// Value and tag arrive together; two puts arrive in any order.
DEVICE void put(u64* place, u32 value, u32 tag) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" : : "l"(place), "l"((u64)tag << 32 | value) : "memory");
}
LOAD(u64, load_relaxed, "ld.relaxed.gpu.global.b64 %0, [%1];", "=l")
// Two neighbours, 16-byte aligned; each is whole, the two need not be of one moment.
DEVICE void load_two_relaxed(const u64* place, u64 out[2]) {
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(out[0]), "=l"(out[1]) : "l"(place) : "memory");
}
// A thread that reads the value by `load_acquire` sees what this thread wrote before, and what other threads of its
// block wrote before a sync that it has passed.
DEVICE void store_release(u64* place, u64 value) {
    asm volatile("st.release.gpu.global.b64 [%0], %1;" : : "l"(place), "l"(value) : "memory");
}
LOAD(u64, load_acquire, "ld.acquire.gpu.global.b64 %0, [%1];", "=l")

LOAD(u32, load_fresh, "ld.relaxed.gpu.global.b32 %0, [%1];", "=r")
DEVICE int load_fresh(const int* place) { return (int)load_fresh((const u32*)place); }
DEVICE float load_fresh(const float* place) { return __uint_as_float(load_fresh((const u32*)place)); }
DEVICE u64 load_fresh(const u64* place) { return load_relaxed(place); }
DEVICE u16 load_fresh(const u16* place) {
    u16 value;
    asm volatile("ld.relaxed.gpu.global.b16 %0, [%1];" : "=h"(value) : "l"(place) : "memory");
    return value;
}
DEVICE uint2 load_fresh(const uint2* place) {
    uint2 value;
    asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(place) : "memory");
    return value;
}
DEVICE uint4 load_fresh(const uint4* place) {
    uint4 value;
    asm volatile(
        "ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
        : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
        : "l"(place)
        : "memory"
    );
    return value;
}
DEVICE void store_fresh(u32* place, u32 value) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" : : "l"(place), "r"(value) : "memory");
}

// --- numbers; narrow ones are rounded to the nearest, ties to even ---

DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
DEVICE int round_to_int(float value) { return __float2int_rn(value); }

INSTRUCTION(u32, pair_bf16, (float low, float high), "cvt.rn.bf16x2.f32 %0, %1, %2;", "=r", "f"(high), "f"(low))
INSTRUCTION(u32, pair_f16, (float low, float high), "cvt.rn.f16x2.f32 %0, %1, %2;", "=r", "f"(high), "f"(low))
// The sum with two of -0 is the product, with its sign where that is 0: sm_80 has no plain product.
INSTRUCTION(u32, multiply_pair_bf16, (u32 a, u32 b), "fma.rn.bf16x2 %0, %1, %2, %3;", "=r", "r"(a), "r"(b), "r"(0x80008000u))
INSTRUCTION(u16, to_bf16, (float value), "cvt.rn.bf16.f32 %0, %1;", "=h", "f"(value))
INSTRUCTION(u16, to_f16, (float value), "cvt.rn.f16.f32 %0, %1;", "=h", "f"(value))
INSTRUCTION(float, from_f16, (u16 bits), "cvt.f32.f16 %0, %1;", "=f", "h"(bits))
INSTRUCTION(float, exp2_fast, (float value), "ex2.approx.ftz.f32 %0, %1;", "=f", "f"(value))
INSTRUCTION(float, rsqrt_fast, (float value), "rsqrt.approx.ftz.f32 %0, %1;", "=f", "f"(value))

DEVICE float log_float(float value) { return logf(value); }
DEVICE float erf_float(float value) { return erff(value); }
DEVICE double log_exact(double value) { return log(value); }
DEVICE double exp_exact(double value) { return exp(value); }
DEVICE void sincos_exact(float angle, float& sine, float& cosine) { sincosf(angle, &sine, &cosine); }

// --- rounded one by one: a multiplication is not fused with the addition behind it ---

DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }
DEVICE float rounded_sum(float a, float b) { return __fadd_rn(a, b); }
DEVICE float rounded_quotient(float a, float b) { return __fdiv_rn(a, b); }

// --- shared memory, by many at once; what was there before ---

DEVICE u32 atomic_add_shared(u32* place, u32 value) { return atomicAdd(place, value); }

// --- time ---

DEVICE long long timer_ns() {
    long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
DEVICE void relax() {}
DEVICE void nap() { __nanosleep(2000); }  // while a loop waits for the host
#define FIRST_CHECK 16
#define POLLS_PER_CHECK 256

#else
#include "machine_cpu.h"
#endif

DEVICE void words_of(const uint4& four, u32 words[4]) {
    words[0] = four.x;
    words[1] = four.y;
    words[2] = four.z;
    words[3] = four.w;
}

// A pair of 16-bit numbers and products of them: bfloat16, or float16.
template <bool BF16>
DEVICE u32 pair_as(float low, float high) {
    return BF16 ? pair_bf16(low, high) : pair_f16(low, high);
}
template <bool BF16>
DEVICE void split_as(u32 pair, float& low, float& high) {
    low = BF16 ? float_of(pair << 16) : from_f16((u16)pair);
    high = BF16 ? float_of(pair & 0xFFFF0000u) : from_f16((u16)(pair >> 16));
}
template <bool BF16>
DEVICE void multiply_as(float c[4], const uint4& a, u32 b0, u32 b1) {
    if (BF16) multiply_bf16(c, a, b0, b1);
    else multiply_f16(c, a, b0, b1);
}

// A wait with a deadline: for (BoundedWait w(tape.state); !arrived && w.keep_waiting();) { load again; }
//
// After FIRST_CHECK polls, then after every POLLS_PER_CHECK, it reads the clock and `abort`, which any thread sets when
// its wait has outlasted DEADLINE_NS. From then on no thread waits: the step runs to its end on undefined values, and
// the step boundary reports the fault. A normal wait ends before the first check, which is a load of one address by
// all waiting threads.
struct BoundedWait {
    u32* abort;
    int polls;
    long long begun;  // 0: the clock has not been read yet

    template <class State>
    MEMBER explicit BoundedWait(State* state) : abort(&state->abort), polls(0), begun(0) {}

    MEMBER bool keep_waiting(CALLER) {
        relax(FROM_CALLER);
        if (++polls != FIRST_CHECK && polls % POLLS_PER_CHECK != 0) return true;
        if (load_fresh(abort) != 0) return false;
        const long long now = timer_ns();
        if (begun == 0) begun = now;
        if (now - begun <= DEADLINE_NS) return true;
        store_fresh(abort, 1);
        return false;
    }
};

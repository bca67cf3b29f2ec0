// Every name of machine.h once, so that each is compiled for the card and run on the CPU.
#include "machine.h"

struct State {
    u32 abort;
};

struct Everything {
    u64* places;       // 64 words, 16-byte aligned
    const char* from;  // 256 bytes, 16-byte aligned
    float* numbers;    // 32
    State* state;
};

DEVICE void meet(const Everything& all, u32 word, Gate* gate, char* landed) {
    float sums[4] = {0, 0, 0, 0};
    int counts[4] = {0, 0, 0, 0};
    const uint4 a{word, word, word, word};
    multiply_bf16(sums, a, word, word);
    multiply_f16(sums, a, word, word);
    multiply_s8(counts, a, word, word);
    sync_warp();
    const u32 said = votes(thread() & 1);
    const u32 mixed = shuffle_xor(word, 1) + shuffle(word, 3);
    const u64 wide = shuffle_xor((u64)word << 32, 4);
    const int bits = lowest_bit(said);
    if (thread() == 0) {
        if (BULK_COPIES) {
            gate_expect(gate, 256);
            bulk_copy(landed, all.from, 256, gate);
        } else {
            for (int at = 0; at < 256; at += 16) copy_16_bytes(landed + at, all.from + at);
            gate_arrive_copied(gate);
        }
        gate_arrive(gate);
    }
    for (BoundedWait w(all.state); !gate_passed(gate, 0) && w.keep_waiting();) {
    }
    sync_compute_warps();
    const float sum = sums[1] + (float)(counts[0] + counts[3] + bits) + (float)mixed + (float)wide;
    all.numbers[thread()] = sum + (float)landed[thread()];
}

DEVICE void tell(const Everything& all, u32 word) {
    u64 two[2];
    put(all.places + 2, word, 7);
    load_two_relaxed(all.places + 2, two);
    for (BoundedWait w(all.state); load_relaxed(all.places + 2) >> 32 != 7 && w.keep_waiting();) {
    }
    const uint4 four = load_fresh((const uint4*)all.places);
    const u32 loaded = load_fresh((const u32*)all.places) + (u32)load_fresh((const int*)all.places) + four.w;
    const float number = load_fresh((const float*)all.from) + (float)load_fresh(all.places) + (float)two[1];
    store_fresh((u32*)(all.places + 5), loaded + bits_of(number));
    store_release(all.places + 4, word + load_acquire(all.places + 4));
}

DEVICE void count(const Everything& all, u32 word) {
    const u32 low = permute_bytes(word, ~word, 0x5140);
    float a, b, c, d, sine, cosine;
    split_as<true>(multiply_pair_bf16(pair_bf16(float_of(low), float_of(word)), low), a, b);
    split_as<false>(pair_f16(a, b), c, d);
    sincos_exact(a, sine, cosine);
    const float narrow = (float)to_bf16(c) + from_f16(to_f16(d)) + sine + cosine;
    const float fast = exp2_fast(a) + rsqrt_fast(b);
    const double exact = log_exact(a) + exp_exact(b);
    const int whole = round_to_int(c);
    const float alone = rounded_sum(rounded_product(a, b), rounded_quotient(c, d));
    all.numbers[thread()] += alone + narrow + fast + (float)exact + (float)whole + (float)(timer_ns() & 1);
}

DEVICE void share(const Everything& all, u32* sum) {
    atomic_add_shared(sum, 1u);
    relax();
    sync_block();
    all.places[8] = *sum;
}

KERNEL(every_primitive, Everything, all, N_COMPUTE_WARPS * 32 + 32) {
    SHARED_BY_BLOCK u32 together;
    Gate* gate = (Gate*)shared_memory();
    u32* sum = (u32*)(shared_memory() + 64);
    if (thread() == 0) {
        gate_init(gate, 2);
        gate_init_fence();
        together = 3;
        *sum = 0;
    }
    sync_block();
    const u32 word = (u32)(block() + thread()) * 0x01010101u + together;
    if (thread() < N_COMPUTE_WARPS * 32) {
        meet(all, word, gate, shared_memory() + 128);
        tell(all, word);
        count(all, word);
    }
    share(all, sum);
}

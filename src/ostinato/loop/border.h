// The border between two steps: commit what the step chose, take the inbox, pause and wake, go on or end.
//
// The same phases as the twin, loop/border.py, over the same bytes: `layout.h` is emitted by Python, with the sizes of
// one engine as constants or, for an object that serves any engine, as words that the view carries. One body serves
// two machines. On CUDA it is one block: slots, rows and the words of an entry are shared out over its threads, with
// SYNC between the phases. On the CPU there is one thread, and SYNC is nothing. Whoever wants other machinery defines
// THREAD and its companions before including this file.
//
// Bound by latency: one trip over PCIe for the control words, one more for each 8 inbox entries, a few for the seat of
// an admission, and the fence before the words are published. Nothing is computed; so each thread loads what it needs
// before it stores anything, since a load behind a store waits for it.
#pragma once
#include "layout.h"

#if defined(THREAD)  // somebody else's machinery
#elif defined(__CUDACC__)
#define THREAD ((int)threadIdx.x)
#define N_THREADS ((int)blockDim.x)
#define SYNC() __syncthreads()
#define SHARED __shared__
#define BORDER_FN static __device__
#define BORDER_TABLE static __constant__ const
#define UNROLLED _Pragma("unroll")
#else
#define THREAD 0
#define N_THREADS 1
#define SYNC()
#define SHARED
#define BORDER_FN static inline
#define BORDER_TABLE static const
#define UNROLLED
#endif

#define FOR_EACH(i, n) for (int i = THREAD; i < (n); i += N_THREADS)
#define ONE if (THREAD == 0)

// --- words that host and loop tell each other; the other side may be at work at this moment ---

#if defined(__CUDACC__)
BORDER_FN long long load(const long long* word) {
    long long value;
    asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}
BORDER_FN void store(long long* word, long long value) {
    asm volatile("st.relaxed.sys.global.b64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
}
// Whoever sees a word stored after this sees everything written before it, by any thread of the block.
BORDER_FN void fence() { asm volatile("fence.acq_rel.sys;" : : : "memory"); }
BORDER_FN long long now_ns() {
    long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
#else
#include <time.h>
BORDER_FN long long load(const long long* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
BORDER_FN void store(long long* word, long long value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
BORDER_FN void fence() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
BORDER_FN long long now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}
#endif

// --- what one border keeps while it runs ---

#define GOES_ON (-1)         // no End
#define ENTRIES_AT_ONCE 8    // inbox entries fetched in one trip: a word for each of 128 threads
#define WORDS_AT_ONCE 16     // of a copy, by each thread
#define GRANT_PAGES (INBOX_WORDS - INBOX_WORD_PAGES)

// What to do with an inbox entry: one of InboxKind, or one of these.
#define VERDICT_IGNORE 0     // meant for somebody who has left
#define VERDICT_LEAVE (-1)   // no room to answer it: the next border takes it
#define VERDICT_FAULT (-2)   // no host of ours writes this

struct Desk {
    long long words[N_WORDS];  // as they were when the border began
    long long head;            // of the outbox, with what this border has written
    long long tail;            // of the inbox, with what this border has taken
    long long now;
    int entries[ENTRIES_AT_ONCE * INBOX_WORDS];
    int verdict;
    int ends;                  // an End, or GOES_ON
    int lives[MAX_SLOTS];
    int n_live;
};

struct SeatRow {
    int offset;  // of the field, the same in the seats and in the table
    int words;   // int32 of one slot
};
#if defined(SEAT_ROWS)
BORDER_TABLE SeatRow SEAT_ROW[] = {SEAT_ROWS};
BORDER_FN SeatRow seat_row(const View&, int field) { return SEAT_ROW[field]; }
#else
BORDER_FN SeatRow seat_row(const View& view, int field) {
    return {(int)SEAT_PLACES(view)[field], (int)SEAT_WORDS(view)[field]};
}
#endif

BORDER_FN long long* word_at(const View& view, int word) { return RING_words(view) + word * WORD_STRIDE; }
BORDER_FN bool seated(int state) { return state == SLOT_STATE_LIVE || state == SLOT_STATE_PAUSED; }
BORDER_FN long long room(const Desk& desk, [[maybe_unused]] const View& view) {
    return OUTBOX_ENTRIES(view) - (desk.head - desk.words[WORD_OUTBOX_TAIL]);
}

// By all threads together. Many loads are on their way before the first is stored, so that a seat costs few trips.
BORDER_FN void copy_words(int* to, const int* from, int n) {
    for (int begin = THREAD; begin < n; begin += WORDS_AT_ONCE * N_THREADS) {
        int held[WORDS_AT_ONCE];
        UNROLLED for (int k = 0; k < WORDS_AT_ONCE; ++k) {
            const int i = begin + k * N_THREADS;
            held[k] = i < n ? from[i] : 0;
        }
        UNROLLED for (int k = 0; k < WORDS_AT_ONCE; ++k) {
            const int i = begin + k * N_THREADS;
            if (i < n) to[i] = held[k];
        }
    }
}

// --- an entry in the outbox, and a token for a slot: one thread each ---

struct alignas(16) FourWords {
    int words[4];
};

struct alignas(16) OutboxEntry {
    int words[OUTBOX_WORDS];
};

BORDER_FN void write_entry(const View& view, long long head, const OutboxEntry& entry) {
    FourWords* place = (FourWords*)(RING_outbox(view) + head % OUTBOX_ENTRIES(view) * OUTBOX_WORDS);
    UNROLLED for (int i = 0; i < OUTBOX_WORDS / 4; ++i) {  // wide stores: each is a message over PCIe
        const int* four = entry.words + 4 * i;
        place[i] = FourWords{{four[0], four[1], four[2], four[3]}};
    }
}

BORDER_FN OutboxEntry entry_of(int slot, int generation, int token, int position, int finish, long long now) {
    OutboxEntry entry;
    entry.words[OUTBOX_WORD_SLOT] = slot;
    entry.words[OUTBOX_WORD_GENERATION] = generation;
    entry.words[OUTBOX_WORD_TOKEN] = token;
    entry.words[OUTBOX_WORD_POSITION] = position;
    entry.words[OUTBOX_WORD_FINISH] = finish;
    entry.words[OUTBOX_WORD_LOGPROB] = 0;
    entry.words[OUTBOX_WORD_TIME] = (int)now;
    entry.words[OUTBOX_WORD_TIME + 1] = (int)(now >> 32);
    return entry;
}

// Make a choice the token of a slot that has made `made` before; `position` is the token's own place.
BORDER_FN void commit(
    const View& view, long long head, long long now, int slot, int token, int logprob_bits, int position, int made
) {
    const int left = TABLE_left(view)[slot] - 1;
    const int generation = TABLE_generation(view)[slot];
    const int n_stop = TABLE_n_stop(view)[slot];
    const bool constrained = TABLE_constrained(view)[slot];
    const bool counted = TABLE_penalised(view)[slot] && token >= 0 && token < VOCAB(view);
    bool stops = false;
    UNROLLED for (int i = 0; i < MAX_STOP_IDS; ++i) {
        stops |= (TABLE_stop_ids(view)[slot * MAX_STOP_IDS + i] == token) & (i < n_stop);
    }
    const int finish = stops ? FINISH_STOP : left <= 0 ? FINISH_LENGTH : FINISH_NONE;

    OutboxEntry entry = entry_of(slot, generation, token, position, finish, now);
    entry.words[OUTBOX_WORD_LOGPROB] = logprob_bits;
    write_entry(view, head, entry);
    TABLE_token(view)[slot] = token;
    TABLE_position(view)[slot] = position;
    TABLE_made(view)[slot] = made + 1;
    TABLE_left(view)[slot] = left;
    if (constrained) TABLE_mask_ready(view)[slot] = 0;
    if (finish != FINISH_NONE) TABLE_state(view)[slot] = SLOT_STATE_FINISHED;
    if (counted) TABLE_counts(view)[(long long)slot * VOCAB(view) + token] += 1;
}

// Number i of the most probable tokens of a choice, beside its entry.
BORDER_FN void write_top(const View& view, long long head, int i, const int* ids, const float* logprobs) {
    const long long place = head % OUTBOX_ENTRIES(view) * MAX_TOP + i;
    const int id = ids[i], logprob_bits = ((const int*)logprobs)[i];
    RING_outbox_top_ids(view)[place] = id;
    ((int*)RING_outbox_top_logprobs(view))[place] = logprob_bits;
}

// --- phase 0: is this still what was built? ---

BORDER_FN int drift_of(const View& view, unsigned long long plan_hash, unsigned long long epoch) {
    const unsigned long long plan_hash_now = *TABLE_plan_hash(view), epoch_now = *TABLE_epoch(view);
    return plan_hash_now != plan_hash ? FAULT_PLAN : epoch_now != epoch ? FAULT_EPOCH : FAULT_NONE;
}

// End, and leave everything as it is: nothing that a drifted step made can be believed.
BORDER_FN void refuse(const Desk& desk, const View& view, int fault) {
    *TABLE_n_rows(view) = 0;
    store(word_at(view, WORD_FAULT), fault);
    store(word_at(view, WORD_LIVE), 0);
    store(word_at(view, WORD_GO), 0);
    store(word_at(view, WORD_WHY), END_FAULT);
    fence();
    store(word_at(view, WORD_ENDS), desk.words[WORD_ENDS] + 1);
}

// --- phase 1: the step just run; row r answers at place head + r, whichever thread is first ---

BORDER_FN void commit_step(Desk& desk, const View& view, int n_rows) {
    const long long head = desk.words[WORD_OUTBOX_HEAD];
    FOR_EACH(row, n_rows) {
        const int slot = TABLE_row_slot(view)[row];
        const int token = TABLE_chosen(view)[row], logprob_bits = ((int*)TABLE_chosen_logprob(view))[row];
        const int position = TABLE_position(view)[slot] + 1, made = TABLE_made(view)[slot];
        commit(view, head + row, desk.now, slot, token, logprob_bits, position, made);
    }
    FOR_EACH(i, n_rows * MAX_TOP) {
        int row = i / MAX_TOP;
        if (TABLE_n_logprobs(view)[TABLE_row_slot(view)[row]] > 0) {
            const int* ids = TABLE_top_ids(view) + row * MAX_TOP;
            write_top(view, head + row, i % MAX_TOP, ids, TABLE_top_logprobs(view) + row * MAX_TOP);
        }
    }
    ONE desk.head = head + n_rows;
    SYNC();
}

// --- phase 2: what the host asks ---

BORDER_FN int verdict_of(const Desk& desk, const View& view, const int* entry) {
    const int kind = entry[INBOX_WORD_KIND], slot = entry[INBOX_WORD_SLOT];
    if (kind == INBOX_KIND_STOP) return kind;
    if (kind < INBOX_KIND_ADMIT || kind > INBOX_KIND_MASK || slot < 0 || slot >= N_SLOTS(view)) return VERDICT_FAULT;
    const bool taken = seated(TABLE_state(view)[slot]);
    if (kind == INBOX_KIND_ADMIT) {
        if (taken) return VERDICT_FAULT;
        // One place for each slot stays free, so that whoever is seated can always be told of a cancellation.
        return room(desk, view) <= N_SLOTS(view) ? VERDICT_LEAVE : kind;
    }
    if (kind == INBOX_KIND_GRANT) {
        const int first = entry[INBOX_WORD_FIRST], count = entry[INBOX_WORD_COUNT];
        if (count < 0 || count > GRANT_PAGES || first < 0 || first > MAX_PAGES(view) - count) return VERDICT_FAULT;
    }
    return taken && TABLE_generation(view)[slot] == entry[INBOX_WORD_GENERATION] ? kind : VERDICT_IGNORE;
}

// The whole row at once: nothing of who sat there before is left (E-71). The first token is prefill's choice, and
// the position that came with the seat is its place.
BORDER_FN void admit(Desk& desk, const View& view, int slot) {
    const long long head = desk.head;
    FOR_EACH(field, N_SEAT_FIELDS) {  // the small fields, each by a thread of its own
        const SeatRow row = seat_row(view, field);
        for (int i = 0; row.words <= 2 && i < row.words; ++i) {
            const int at = slot * row.words + i;
            ((int*)(view.table + row.offset))[at] = ((int*)(view.seats + row.offset))[at];
        }
    }
    for (int field = 0; field < N_SEAT_FIELDS; ++field) {  // the long ones, each by all threads
        const SeatRow row = seat_row(view, field);
        const long long at = (long long)slot * row.words;
        if (row.words <= 2) continue;
        copy_words((int*)(view.table + row.offset) + at, (int*)(view.seats + row.offset) + at, row.words);
    }
    SYNC();
    if (TABLE_penalised(view)[slot]) {
        FOR_EACH(token, VOCAB(view)) TABLE_counts(view)[(long long)slot * VOCAB(view) + token] = 0;
    }
    if (TABLE_n_logprobs(view)[slot] > 0) {
        const int* ids = TABLE_first_top_ids(view) + slot * MAX_TOP;
        FOR_EACH(i, MAX_TOP) write_top(view, head, i, ids, TABLE_first_top_logprobs(view) + slot * MAX_TOP);
    }
    SYNC();
    ONE {
        TABLE_mask_ready(view)[slot] = 1;
        TABLE_state(view)[slot] = SLOT_STATE_LIVE;
        const int token = TABLE_first_token(view)[slot], logprob_bits = ((int*)TABLE_first_logprob(view))[slot];
        commit(view, head, desk.now, slot, token, logprob_bits, TABLE_position(view)[slot], 0);
        desk.head = head + 1;
    }
}

BORDER_FN void cancel(Desk& desk, const View& view, int slot) {
    ONE {
        const int generation = TABLE_generation(view)[slot], position = TABLE_position(view)[slot];
        write_entry(view, desk.head, entry_of(slot, generation, -1, position, FINISH_CANCELLED, desk.now));
        TABLE_state(view)[slot] = SLOT_STATE_FINISHED;
        desk.head += 1;
    }
}

BORDER_FN void grant(const View& view, int slot, const int* entry) {
    const int first = entry[INBOX_WORD_FIRST], count = entry[INBOX_WORD_COUNT];
    FOR_EACH(i, count) TABLE_pages(view)[(long long)slot * MAX_PAGES(view) + first + i] = entry[INBOX_WORD_PAGES + i];
    ONE TABLE_granted(view)[slot] = (first + count) * PAGE_TOKENS(view);
}

BORDER_FN void take_mask(const View& view, int slot) {
    const long long at = (long long)slot * MASK_WORDS(view);
    copy_words(TABLE_mask_bits(view) + at, SEAT_mask_bits(view) + at, MASK_WORDS(view));
    ONE TABLE_mask_ready(view)[slot] = 1;
}

BORDER_FN void take_inbox(Desk& desk, const View& view) {
    const long long begin = desk.words[WORD_INBOX_TAIL], end = desk.words[WORD_INBOX_HEAD];
    bool goes_on = begin <= end && end - begin <= INBOX_ENTRIES(view);
    ONE {
        desk.tail = begin;
        desk.ends = goes_on ? GOES_ON : END_FAULT;
    }
    for (long long at = begin; at < end && goes_on; ++at) {
        const int place = (int)(at - begin) % ENTRIES_AT_ONCE;
        if (place == 0) {
            const long long n = end - at < ENTRIES_AT_ONCE ? end - at : ENTRIES_AT_ONCE;
            FOR_EACH(i, (int)n * INBOX_WORDS) {
                const long long from = (at + i / INBOX_WORDS) % INBOX_ENTRIES(view);
                desk.entries[i] = RING_inbox(view)[from * INBOX_WORDS + i % INBOX_WORDS];
            }
            SYNC();
        }
        const int* entry = desk.entries + place * INBOX_WORDS;
        ONE desk.verdict = verdict_of(desk, view, entry);
        SYNC();
        const int verdict = desk.verdict, slot = entry[INBOX_WORD_SLOT];
        if (verdict == INBOX_KIND_ADMIT) admit(desk, view, slot);
        if (verdict == INBOX_KIND_CANCEL) cancel(desk, view, slot);
        if (verdict == INBOX_KIND_GRANT) grant(view, slot, entry);
        if (verdict == INBOX_KIND_MASK) take_mask(view, slot);
        ONE {
            if (verdict == INBOX_KIND_STOP) desk.ends = END_STOP;
            if (verdict == VERDICT_FAULT) desk.ends = END_FAULT;
            if (verdict != VERDICT_LEAVE && verdict != VERDICT_FAULT) desk.tail = at + 1;
        }
        SYNC();
        goes_on = verdict != INBOX_KIND_STOP && verdict != VERDICT_LEAVE && verdict != VERDICT_FAULT;
    }
}

// --- phases 3 and 4: who is in the next step ---

BORDER_FN void pause_and_wake(Desk& desk, const View& view) {
    FOR_EACH(slot, N_SLOTS(view)) {
        int state = TABLE_state(view)[slot];
        const bool unpaged = TABLE_position(view)[slot] >= TABLE_granted(view)[slot];
        const bool unmasked = (TABLE_constrained(view)[slot] != 0) & !TABLE_mask_ready(view)[slot];
        if (seated(state)) {
            state = unpaged || unmasked ? SLOT_STATE_PAUSED : SLOT_STATE_LIVE;
            TABLE_state(view)[slot] = state;
        }
        desk.lives[slot] = state == SLOT_STATE_LIVE;
    }
    SYNC();
}

BORDER_FN void gather_rows(Desk& desk, const View& view) {
    FOR_EACH(slot, N_SLOTS(view)) {
        int row = 0;
        for (int before = 0; before < slot; ++before) row += desk.lives[before];
        if (desk.lives[slot]) TABLE_row_slot(view)[row] = slot;
        if (slot == N_SLOTS(view) - 1) desk.n_live = row + desk.lives[slot];
    }
    SYNC();
}

// --- phases 5 and 6: go on or end, and say so; one thread ---

BORDER_FN void publish(Desk& desk, const View& view, int stepped) {
    int ends = desk.ends;
    if (ends == GOES_ON) {
        if (room(desk, view) < 2 * N_SLOTS(view)) ends = END_OUTBOX_FULL;
        else if (desk.words[WORD_YIELD]) ends = END_YIELD;
        else if (desk.n_live == 0) ends = END_IDLE;
    }
    desk.ends = ends;
    // A border that ends leaves no rows: the one of the next trigger must not commit this step again.
    *TABLE_n_rows(view) = ends == GOES_ON ? desk.n_live : 0;
    *TABLE_step_ns(view) = desk.now;

    fence();
    store(word_at(view, WORD_OUTBOX_HEAD), desk.head);
    store(word_at(view, WORD_INBOX_TAIL), desk.tail);
    store(word_at(view, WORD_STEPS), desk.words[WORD_STEPS] + stepped);
    store(word_at(view, WORD_LIVE), desk.n_live);
    store(word_at(view, WORD_GO), ends == GOES_ON);
    if (ends == GOES_ON) return;
    if (ends == END_FAULT) store(word_at(view, WORD_FAULT), FAULT_INBOX);
    store(word_at(view, WORD_WHY), ends);
    fence();  // ENDS last: who waits for it finds everything else in place
    store(word_at(view, WORD_ENDS), desk.words[WORD_ENDS] + 1);
}

// Run the border once: 1 if a step follows. Every thread of the one block calls this, and gets the same answer.
BORDER_FN int run_border(const View& view, unsigned long long plan_hash, unsigned long long epoch, long long now) {
    SHARED Desk desk;
    const int n_rows = *TABLE_n_rows(view), drift = drift_of(view, plan_hash, epoch);
    FOR_EACH(word, N_WORDS) desk.words[word] = load(word_at(view, word));  // each its own thread: one trip for all
    ONE desk.now = now;
    SYNC();
    const int fault = desk.words[WORD_FAULT] ? (int)desk.words[WORD_FAULT] : drift;
    if (fault != FAULT_NONE) {
        ONE refuse(desk, view, fault);
        return 0;
    }
    commit_step(desk, view, n_rows);
    take_inbox(desk, view);
    pause_and_wake(desk, view);
    gather_rows(desk, view);
    ONE publish(desk, view, n_rows > 0);
    SYNC();
    return desk.ends == GOES_ON;
}

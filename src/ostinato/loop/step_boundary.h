// The step boundary between steps: commit the sampled tokens, take the inbox, pause and wake slots, continue or end.
//
// The same phases as the twin, loop/step_boundary.py, over the same bytes: `layout.h` is emitted by Python, with the
// sizes of one engine as constants or, for an object that serves any engine, as words that the view carries. One body
// serves two machines. On CUDA it is one block: slots, rows and the words of an entry are shared out over its threads,
// with SYNC between the phases. On the CPU there is one thread, and SYNC is empty. A file that needs other definitions
// of THREAD and its companions defines them before it includes this one.
//
// Bound by latency: one trip over PCIe for the control words, one more for each 8 inbox entries, a few for each
// admission, and the fence before the words are published. The rest is copying, so each thread loads what it
// needs before it stores anything: a load behind a store waits for it.
#pragma once
#include "grammar_step.h"
#include "layout.h"

#if defined(THREAD)  // defined by the including file
#elif defined(__CUDACC__)
#define THREAD ((int)threadIdx.x)
#define N_THREADS ((int)blockDim.x)
#define SYNC() __syncthreads()
#define SHARED __shared__
#define BOUNDARY_FN static __device__
#define BOUNDARY_TABLE static __constant__ const
#define UNROLLED _Pragma("unroll")
#define NAP() __nanosleep(2000)
#else
#define THREAD 0
#define N_THREADS 1
#define SYNC()
#define SHARED
#define BOUNDARY_FN static inline
#define BOUNDARY_TABLE static const
#define UNROLLED
#define NAP()
#endif

#define FOR_EACH(i, n) for (int i = THREAD; i < (n); i += N_THREADS)
#define ONE if (THREAD == 0)

// --- control words, which the host may read and write at the same time ---

#if defined(__CUDACC__)
BOUNDARY_FN long long load(const long long* word) {
    long long value;
    asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}
BOUNDARY_FN void store(long long* word, long long value) {
    asm volatile("st.relaxed.sys.global.b64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
}
// A reader that sees a word stored after this fence sees everything written before it, by any thread of the block.
BOUNDARY_FN void fence() { asm volatile("fence.acq_rel.sys;" : : : "memory"); }
BOUNDARY_FN long long now_ns() {
    long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
#else
#include <time.h>
BOUNDARY_FN long long load(const long long* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
BOUNDARY_FN void store(long long* word, long long value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
BOUNDARY_FN void fence() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
BOUNDARY_FN long long now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}
#endif

// --- state of one step boundary while it runs ---

#define CONTINUE (-1)         // no End
#define AWAIT_MASK (-2)       // no End either: no slot can step before the host has sent a mask
#define ENTRIES_AT_ONCE 8    // inbox entries fetched in one trip: a word for each of 128 threads
#define WORDS_AT_ONCE 16     // of a copy, by each thread
#define GRANT_PAGES (INBOX_WORDS - INBOX_WORD_PAGES)

// What to do with an inbox entry: one of InboxKind, or one of these.
#define VERDICT_IGNORE 0     // its sequence has left the slot
#define VERDICT_DEFER (-1)   // no room in the outbox for its answer: the next step boundary takes it
#define VERDICT_FAULT (-2)   // `HostSide` never writes such an entry

struct BoundaryState {
    long long words[N_WORDS];  // as they were when the step boundary began
    long long head;            // of the outbox, with what this step boundary has written
    long long tail;            // of the inbox, with what this step boundary has taken
    long long now;
    int entries[ENTRIES_AT_ONCE * INBOX_WORDS];
    int verdict;
    int ends;                  // an End, CONTINUE or AWAIT_MASK
    int live[MAX_SLOTS];
    int n_live;
};

struct AdmissionRow {
    int offset;  // of the field, the same in the admissions and in the table
    int words;   // int32 of one slot
};
#if defined(ADMISSION_ROWS)
BOUNDARY_TABLE AdmissionRow ADMISSION_ROW[] = {ADMISSION_ROWS};
BOUNDARY_FN AdmissionRow admission_row(const View&, int field) { return ADMISSION_ROW[field]; }
#else
BOUNDARY_FN AdmissionRow admission_row(const View& view, int field) {
    return {(int)ADMISSION_PLACES(view)[field], (int)ADMISSION_WORDS(view)[field]};
}
#endif

BOUNDARY_FN long long* word_at(const View& view, int word) { return RING_words(view) + word * WORD_STRIDE; }
BOUNDARY_FN bool is_occupied(int state) { return state == SLOT_STATE_LIVE || state == SLOT_STATE_PAUSED; }
BOUNDARY_FN long long room(const BoundaryState& boundary, [[maybe_unused]] const View& view) {
    return OUTBOX_ENTRIES(view) - (boundary.head - boundary.words[WORD_OUTBOX_TAIL]);
}

// By all threads together. Each thread issues many loads before its first store, so an admission costs few trips.
BOUNDARY_FN void copy_words(int* to, const int* from, int n) {
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

BOUNDARY_FN void write_entry(const View& view, long long head, const OutboxEntry& entry) {
    FourWords* place = (FourWords*)(RING_outbox(view) + head % OUTBOX_ENTRIES(view) * OUTBOX_WORDS);
    UNROLLED for (int i = 0; i < OUTBOX_WORDS / 4; ++i) {  // wide stores: each is a message over PCIe
        const int* four = entry.words + 4 * i;
        place[i] = FourWords{{four[0], four[1], four[2], four[3]}};
    }
}

BOUNDARY_FN OutboxEntry entry_of(int slot, int generation, int token, int position, int finish, long long now) {
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

// Make the sampled token the next one of a slot that has made `made` before; `position` is the token's own. Token -1
// ends the slot: its grammar allows none.
BOUNDARY_FN void commit(
    const View& view, long long head, long long now, int slot, int token, int logprob_bits, int position, int made
) {
    const int left = TABLE_left(view)[slot] - 1;
    const int generation = TABLE_generation(view)[slot];
    const int n_stop = TABLE_n_stop(view)[slot];
    const bool has_grammar = TABLE_grammar(view)[slot], penalised = TABLE_penalised(view)[slot];
    const bool waits = TABLE_constrained(view)[slot] && !has_grammar;
    bool stops = false;
    UNROLLED for (int i = 0; i < MAX_STOP_IDS; ++i) {
        stops |= (TABLE_stop_ids(view)[slot * MAX_STOP_IDS + i] == token) & (i < n_stop);
    }
    int finish = token < 0 ? FINISH_GRAMMAR : stops ? FINISH_STOP : left <= 0 ? FINISH_LENGTH : FINISH_NONE;
    if (has_grammar && finish == FINISH_NONE && !follow_grammar(view, slot, token)) finish = FINISH_GRAMMAR, token = -1;

    OutboxEntry entry = entry_of(slot, generation, token, position, finish, now);
    entry.words[OUTBOX_WORD_LOGPROB] = logprob_bits;
    write_entry(view, head, entry);
    TABLE_token(view)[slot] = token;
    TABLE_position(view)[slot] = position;
    TABLE_made(view)[slot] = made + 1;
    TABLE_left(view)[slot] = left;
    if (waits) TABLE_mask_ready(view)[slot] = 0;
    if (finish != FINISH_NONE) TABLE_state(view)[slot] = SLOT_STATE_FINISHED;
    const bool counted = penalised && token >= 0 && token < VOCAB(view);
    if (counted) TABLE_counts(view)[(long long)slot * VOCAB(view) + token] += 1;
}

// Write number i of the most probable tokens beside the entry of the sampled one.
BOUNDARY_FN void write_top(const View& view, long long head, int i, const int* ids, const float* logprobs) {
    const long long place = head % OUTBOX_ENTRIES(view) * MAX_TOP + i;
    const int id = ids[i], logprob_bits = ((const int*)logprobs)[i];
    RING_outbox_top_ids(view)[place] = id;
    ((int*)RING_outbox_top_logprobs(view))[place] = logprob_bits;
}

// --- phase 0: check plan and epoch ---

BOUNDARY_FN int drift_of(const View& view, unsigned long long plan_hash, unsigned long long epoch) {
    const unsigned long long plan_hash_now = *TABLE_plan_hash(view), epoch_now = *TABLE_epoch(view);
    return plan_hash_now != plan_hash ? FAULT_PLAN : epoch_now != epoch ? FAULT_EPOCH : FAULT_NONE;
}

// End with a fault and commit nothing: after a drift the step's results must not be used.
BOUNDARY_FN void refuse(const BoundaryState& boundary, const View& view, int fault) {
    *TABLE_n_rows(view) = 0;
    store(word_at(view, WORD_FAULT), fault);
    store(word_at(view, WORD_LIVE), 0);
    store(word_at(view, WORD_GO), 0);
    store(word_at(view, WORD_WHY), END_FAULT);
    fence();
    store(word_at(view, WORD_ENDS), boundary.words[WORD_ENDS] + 1);
}

// --- phase 1: commit the step; row r writes outbox place head + r, in any order of the threads ---

BOUNDARY_FN void commit_step(BoundaryState& boundary, const View& view, int n_rows) {
    const long long head = boundary.words[WORD_OUTBOX_HEAD];
    FOR_EACH(row, n_rows) {
        const int slot = TABLE_row_slot(view)[row];
        const int chosen = TABLE_chosen(view)[row], bits = ((int*)TABLE_chosen_logprob(view))[row];
        const int position = TABLE_position(view)[slot] + 1, made = TABLE_made(view)[slot];
        const bool none = allows_none(view, slot);
        commit(view, head + row, boundary.now, slot, none ? -1 : chosen, none ? 0 : bits, position, made);
    }
    FOR_EACH(i, n_rows * MAX_TOP) {
        const int row = i / MAX_TOP, slot = TABLE_row_slot(view)[row];
        if (TABLE_n_logprobs(view)[slot] > 0 && !allows_none(view, slot)) {
            const int* ids = TABLE_top_ids(view) + row * MAX_TOP;
            write_top(view, head + row, i % MAX_TOP, ids, TABLE_top_logprobs(view) + row * MAX_TOP);
        }
    }
    ONE boundary.head = head + n_rows;
    SYNC();
}

// --- phase 2: take the inbox ---

BOUNDARY_FN int verdict_of(const BoundaryState& boundary, const View& view, const int* entry) {
    const int kind = entry[INBOX_WORD_KIND], slot = entry[INBOX_WORD_SLOT];
    if (kind == INBOX_KIND_STOP) return kind;
    if (kind < INBOX_KIND_ADMIT || kind > INBOX_KIND_MASK || slot < 0 || slot >= N_SLOTS(view)) return VERDICT_FAULT;
    const bool taken = is_occupied(TABLE_state(view)[slot]);
    if (kind == INBOX_KIND_ADMIT) {
        if (taken) return VERDICT_FAULT;
        // One outbox place per slot stays free, so that the end of a cancelled sequence can always be written.
        return room(boundary, view) <= N_SLOTS(view) ? VERDICT_DEFER : kind;
    }
    if (kind == INBOX_KIND_GRANT) {
        const int first = entry[INBOX_WORD_FIRST], count = entry[INBOX_WORD_COUNT];
        if (count < 0 || count > GRANT_PAGES || first < 0 || first > MAX_PAGES(view) - count) return VERDICT_FAULT;
    }
    return taken && TABLE_generation(view)[slot] == entry[INBOX_WORD_GENERATION] ? kind : VERDICT_IGNORE;
}

// Copy the slot's whole row, so that nothing of its previous sequence is left (E-71). Prefill has sampled the first
// token, and the admission carries its position.
BOUNDARY_FN void admit(BoundaryState& boundary, const View& view, int slot) {
    const long long head = boundary.head;
    FOR_EACH(field, N_ADMISSION_FIELDS) {  // the short fields, one thread each
        const AdmissionRow row = admission_row(view, field);
        for (int i = 0; row.words <= 2 && i < row.words; ++i) {
            const int at = slot * row.words + i;
            ((int*)(view.table + row.offset))[at] = ((int*)(view.admissions + row.offset))[at];
        }
    }
    for (int field = 0; field < N_ADMISSION_FIELDS; ++field) {  // the long fields, all threads each
        const AdmissionRow row = admission_row(view, field);
        const long long at = (long long)slot * row.words;
        if (row.words <= 2) continue;
        copy_words((int*)(view.table + row.offset) + at, (int*)(view.admissions + row.offset) + at, row.words);
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
        commit(view, head, boundary.now, slot, token, logprob_bits, TABLE_position(view)[slot], 0);
        boundary.head = head + 1;
    }
}

BOUNDARY_FN void cancel(BoundaryState& boundary, const View& view, int slot) {
    ONE {
        const int generation = TABLE_generation(view)[slot], position = TABLE_position(view)[slot];
        write_entry(view, boundary.head, entry_of(slot, generation, -1, position, FINISH_CANCELLED, boundary.now));
        TABLE_state(view)[slot] = SLOT_STATE_FINISHED;
        boundary.head += 1;
    }
}

BOUNDARY_FN void grant(const View& view, int slot, const int* entry) {
    const int first = entry[INBOX_WORD_FIRST], count = entry[INBOX_WORD_COUNT];
    // Of the layers that see everything: the pages of windowed layers are all granted with the admission.
    int* const table = PAGE_TABLE(view, slot, 0);
    FOR_EACH(i, count) table[first + i] = entry[INBOX_WORD_PAGES + i];
    ONE TABLE_granted(view)[slot] = (first + count) * PAGE_TOKENS(view);
}

BOUNDARY_FN void take_mask(const View& view, int slot) {
    const long long at = (long long)slot * MASK_WORDS(view);
    View admission = view;  // an admission has its fields at the places that the table has
    admission.table = view.admissions;
    copy_words(TABLE_mask_bits(view) + at, TABLE_mask_bits(admission) + at, MASK_WORDS(view));
    ONE TABLE_mask_ready(view)[slot] = 1;
}

BOUNDARY_FN void take_inbox(BoundaryState& boundary, const View& view) {
    const long long begin = boundary.words[WORD_INBOX_TAIL], end = boundary.words[WORD_INBOX_HEAD];
    bool goes_on = begin <= end && end - begin <= INBOX_ENTRIES(view);
    ONE {
        boundary.tail = begin;
        boundary.ends = goes_on ? CONTINUE : (int)END_FAULT;
    }
    for (long long at = begin; at < end && goes_on; ++at) {
        const int place = (int)(at - begin) % ENTRIES_AT_ONCE;
        if (place == 0) {
            const long long n = end - at < ENTRIES_AT_ONCE ? end - at : ENTRIES_AT_ONCE;
            FOR_EACH(i, (int)n * INBOX_WORDS) {
                const long long from = (at + i / INBOX_WORDS) % INBOX_ENTRIES(view);
                boundary.entries[i] = RING_inbox(view)[from * INBOX_WORDS + i % INBOX_WORDS];
            }
            SYNC();
        }
        const int* entry = boundary.entries + place * INBOX_WORDS;
        ONE boundary.verdict = verdict_of(boundary, view, entry);
        SYNC();
        const int verdict = boundary.verdict, slot = entry[INBOX_WORD_SLOT];
        if (verdict == INBOX_KIND_ADMIT) admit(boundary, view, slot);
        if (verdict == INBOX_KIND_CANCEL) cancel(boundary, view, slot);
        if (verdict == INBOX_KIND_GRANT) grant(view, slot, entry);
        if (verdict == INBOX_KIND_MASK) take_mask(view, slot);
        ONE {
            if (verdict == INBOX_KIND_STOP) boundary.ends = END_STOP;
            if (verdict == VERDICT_FAULT) boundary.ends = END_FAULT;
            if (verdict != VERDICT_DEFER && verdict != VERDICT_FAULT) boundary.tail = at + 1;
        }
        SYNC();
        goes_on = verdict != INBOX_KIND_STOP && verdict != VERDICT_DEFER && verdict != VERDICT_FAULT;
    }
}

// --- phases 3 and 4: which slots are in the next step ---

BOUNDARY_FN void pause_and_wake(BoundaryState& boundary, const View& view) {
    FOR_EACH(slot, N_SLOTS(view)) {
        int state = TABLE_state(view)[slot];
        const bool unpaged = TABLE_position(view)[slot] >= TABLE_granted(view)[slot];
        const bool unmasked = (TABLE_constrained(view)[slot] != 0) & !TABLE_mask_ready(view)[slot];  // no grammar's
        if (is_occupied(state)) {
            state = unpaged || unmasked ? SLOT_STATE_PAUSED : SLOT_STATE_LIVE;
            TABLE_state(view)[slot] = state;
        }
        boundary.live[slot] = state == SLOT_STATE_LIVE;
    }
    SYNC();
}

BOUNDARY_FN void gather_rows(BoundaryState& boundary, const View& view) {
    FOR_EACH(slot, N_SLOTS(view)) {
        int row = 0;
        for (int before = 0; before < slot; ++before) row += boundary.live[before];
        if (boundary.live[slot]) TABLE_row_slot(view)[row] = slot;
        if (slot == N_SLOTS(view) - 1) boundary.n_live = row + boundary.live[slot];
    }
    SYNC();
}

#if defined(MASKS_BY_BLOCKS)
// --- phase 5: which rows have a mask that is kept; `step_masks.h` finds the others ---

// Here and not where masks are found: one block looks while none writes. The clock counts steps. `step_masks.h` copies
// kept masks before it keeps others, so none is overwritten while it is read.
BOUNDARY_FN void find_kept_masks(const BoundaryState& boundary, const View& view, int clock) {
    ONE *TABLE_finds_masks(view) = 0;
    SYNC();
    FOR_EACH(row, boundary.n_live) {
        const int slot = TABLE_row_slot(view)[row];
        if (!TABLE_grammar(view)[slot]) continue;
        TABLE_kept_mask(view)[slot] = -1;
        TABLE_mask_lowest(view)[slot] = position_in_grammar(view, slot)[grammar::POSITION_DEPTH];
        kept_masks_of(automaton_of(view, slot))[grammar::KEPT_CLOCK] = clock;
        *TABLE_finds_masks(view) = 1;
    }
    SYNC();
    if (!*TABLE_finds_masks(view)) return;  // the same for all threads
    const int* vocabulary = vocabulary_of(view);
    FOR_EACH(i, boundary.n_live * MOST_KEPT_MASKS) {
        const int slot = TABLE_row_slot(view)[i / MOST_KEPT_MASKS], place = i % MOST_KEPT_MASKS;
        if (!TABLE_grammar(view)[slot]) continue;
        const int* automaton = automaton_of(view, slot);
        int* kept = kept_masks_of(automaton);
        if (place >= kept[grammar::KEPT_N]) continue;
        if (!grammar::is_mask_of(automaton, vocabulary, kept, place, position_in_grammar(view, slot))) continue;
        grammar::kept_mask(kept, place)[grammar::MASK_USED] = clock;
        TABLE_kept_mask(view)[slot] = place;  // of two equal masks, either
    }
    SYNC();
}
#endif

// --- phases 6 and 7: continue or end, and publish the words; one thread ---

// Whether a slot could step if it had its mask.
BOUNDARY_FN bool awaits_mask(const View& view) {
    bool awaits = false;
    for (int slot = 0; slot < N_SLOTS(view); ++slot) {
        awaits |= TABLE_state(view)[slot] == SLOT_STATE_PAUSED && TABLE_position(view)[slot] < TABLE_granted(view)[slot];
    }
    return awaits;
}

BOUNDARY_FN void publish(BoundaryState& boundary, const View& view, int stepped, bool may_wait) {
    int ends = boundary.ends;
    if (ends == CONTINUE) {
        if (room(boundary, view) < 2 * N_SLOTS(view)) ends = END_OUTBOX_FULL;
        else if (boundary.words[WORD_YIELD]) ends = END_YIELD;
        else if (boundary.n_live == 0) ends = may_wait && awaits_mask(view) ? AWAIT_MASK : (int)END_IDLE;
    }
    boundary.ends = ends;
    // A step boundary that ends clears the rows: the first one of the next trigger must not commit this step again.
    *TABLE_n_rows(view) = ends == CONTINUE ? boundary.n_live : 0;
    *TABLE_step_ns(view) = boundary.now;

    fence();
    store(word_at(view, WORD_OUTBOX_HEAD), boundary.head);
    store(word_at(view, WORD_INBOX_TAIL), boundary.tail);
    store(word_at(view, WORD_STEPS), boundary.words[WORD_STEPS] + stepped);
    store(word_at(view, WORD_LIVE), boundary.n_live);
    store(word_at(view, WORD_GO), ends == CONTINUE);
    if (ends == CONTINUE || ends == AWAIT_MASK) return;
    if (ends == END_FAULT) store(word_at(view, WORD_FAULT), FAULT_INBOX);
    store(word_at(view, WORD_WHY), ends);
    fence();  // ENDS last: a reader that sees it change finds all other words written
    store(word_at(view, WORD_ENDS), boundary.words[WORD_ENDS] + 1);
}

// Run the step boundary once: 1 if a step follows. Every thread of the one block calls this, and gets the same answer.
// `may_wait`: a loop whose slots all wait for masks does not end; 2 says that it is to wait for the host.
BOUNDARY_FN int run_boundary(
    const View& view, unsigned long long plan_hash, unsigned long long epoch, long long now, bool may_wait = false
) {
    SHARED BoundaryState boundary;
    const int n_rows = *TABLE_n_rows(view), drift = drift_of(view, plan_hash, epoch);
    FOR_EACH(word, N_WORDS) boundary.words[word] = load(word_at(view, word));  // one thread per word: one trip for all
    ONE boundary.now = now;
    SYNC();
    const int fault = boundary.words[WORD_FAULT] ? (int)boundary.words[WORD_FAULT] : drift;
    if (fault != FAULT_NONE) {
        ONE refuse(boundary, view, fault);
        return 0;
    }
    commit_step(boundary, view, n_rows);
    take_inbox(boundary, view);
    pause_and_wake(boundary, view);
    gather_rows(boundary, view);
#if defined(MASKS_BY_BLOCKS)
    find_kept_masks(boundary, view, (int)boundary.words[WORD_STEPS] + (n_rows > 0));
#endif
    ONE publish(boundary, view, n_rows > 0, may_wait);
    SYNC();
    return boundary.ends == CONTINUE ? 1 : boundary.ends == AWAIT_MASK ? 2 : 0;
}

// The same for a loop that polls: while all its slots wait for masks of the host, it looks at the inbox again, until the
// deadline. 1 if a step follows.
BOUNDARY_FN int await_boundary(const View& view, unsigned long long plan_hash, unsigned long long epoch) {
    const long long begun = now_ns();
    for (long long now = begun;; now = now_ns()) {
        const int next = run_boundary(view, plan_hash, epoch, now, now - begun < MASK_DEADLINE_NS);
        if (next != 2) return next;
        NAP();
    }
}

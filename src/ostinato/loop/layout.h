// Emitted by loop/layout.py; edit there.
#pragma once
#define INBOX_WORDS 16
#define OUTBOX_WORDS 8
#define WORD_STRIDE 8
#define MAX_STOP_IDS 16
#define MAX_LOGIT_BIAS 512
#define MAX_TOP 20
#define GRAMMAR_POSITION_WORDS 131
#define MOST_KEPT_MASKS 64
#define MASK_DEADLINE_NS 250000000LL
#define N_WORDS 11
#define N_ADMISSION_FIELDS 30
enum { SLOT_STATE_FREE = 0, SLOT_STATE_LIVE = 1, SLOT_STATE_PAUSED = 2, SLOT_STATE_FINISHED = 3 };
enum { FINISH_NONE = 0, FINISH_STOP = 1, FINISH_LENGTH = 2, FINISH_CANCELLED = 3, FINISH_GRAMMAR = 4 };
enum { INBOX_KIND_ADMIT = 1, INBOX_KIND_CANCEL = 2, INBOX_KIND_GRANT = 3, INBOX_KIND_MASK = 4, INBOX_KIND_STOP = 5 };
enum { INBOX_WORD_KIND = 0, INBOX_WORD_SLOT = 1, INBOX_WORD_GENERATION = 2, INBOX_WORD_COUNT = 3, INBOX_WORD_FIRST = 4,
    INBOX_WORD_PAGES = 5 };
enum { OUTBOX_WORD_SLOT = 0, OUTBOX_WORD_GENERATION = 1, OUTBOX_WORD_TOKEN = 2, OUTBOX_WORD_POSITION = 3,
    OUTBOX_WORD_FINISH = 4, OUTBOX_WORD_LOGPROB = 5, OUTBOX_WORD_TIME = 6 };
enum { WORD_INBOX_HEAD = 0, WORD_OUTBOX_TAIL = 1, WORD_YIELD = 2, WORD_INBOX_TAIL = 3, WORD_OUTBOX_HEAD = 4, WORD_STEPS
    = 5, WORD_LIVE = 6, WORD_FAULT = 7, WORD_GO = 8, WORD_ENDS = 9, WORD_WHY = 10 };
enum { FAULT_NONE = 0, FAULT_PLAN = 1, FAULT_EPOCH = 2, FAULT_INBOX = 3, FAULT_STUCK = 4 };
enum { END_IDLE = 0, END_YIELD = 1, END_OUTBOX_FULL = 2, END_STOP = 3, END_FAULT = 4 };
#define MAX_SLOTS 64
struct View {
    char *table, *admissions, *rings;
    const long long* layout;
    int* grammars;  // the grammar memory
};
#define LAYOUT_MARK 1166122667  // layout[0]: the words are those of this header
#define N_SLOTS(view) ((int)(view).layout[1])
#define MAX_PAGES(view) ((int)(view).layout[2])
#define N_GROUPS(view) ((int)(view).layout[3])
#define VOCAB(view) ((int)(view).layout[4])
#define MASK_WORDS(view) ((int)(view).layout[5])
#define INBOX_ENTRIES(view) ((int)(view).layout[6])
#define OUTBOX_ENTRIES(view) ((int)(view).layout[7])
#define PAGE_TOKENS(view) ((int)(view).layout[8])
#define ADMISSION_PLACES(view) ((view).layout + 9)  // of each field in turn
#define TABLE_generation(view) ((int*)((view).table + (view).layout[9]))
#define TABLE_position(view) ((int*)((view).table + (view).layout[10]))
#define TABLE_left(view) ((int*)((view).table + (view).layout[11]))
#define TABLE_granted(view) ((int*)((view).table + (view).layout[12]))
#define TABLE_min_tokens(view) ((int*)((view).table + (view).layout[13]))
#define TABLE_rope_set(view) ((int*)((view).table + (view).layout[14]))
#define TABLE_top_k(view) ((int*)((view).table + (view).layout[15]))
#define TABLE_n_logprobs(view) ((int*)((view).table + (view).layout[16]))
#define TABLE_n_stop(view) ((int*)((view).table + (view).layout[17]))
#define TABLE_n_bias(view) ((int*)((view).table + (view).layout[18]))
#define TABLE_constrained(view) ((int*)((view).table + (view).layout[19]))
#define TABLE_grammar(view) ((int*)((view).table + (view).layout[20]))
#define TABLE_n_ends(view) ((int*)((view).table + (view).layout[21]))
#define TABLE_ends_from(view) ((int*)((view).table + (view).layout[22]))
#define TABLE_ends_ignored(view) ((int*)((view).table + (view).layout[23]))
#define TABLE_penalised(view) ((int*)((view).table + (view).layout[24]))
#define TABLE_temperature(view) ((float*)((view).table + (view).layout[25]))
#define TABLE_top_p(view) ((float*)((view).table + (view).layout[26]))
#define TABLE_min_p(view) ((float*)((view).table + (view).layout[27]))
#define TABLE_repetition(view) ((float*)((view).table + (view).layout[28]))
#define TABLE_presence(view) ((float*)((view).table + (view).layout[29]))
#define TABLE_frequency(view) ((float*)((view).table + (view).layout[30]))
#define TABLE_seed(view) ((long long*)((view).table + (view).layout[31]))
#define TABLE_stop_ids(view) ((int*)((view).table + (view).layout[32]))
#define TABLE_bias_ids(view) ((int*)((view).table + (view).layout[33]))
#define TABLE_bias_values(view) ((float*)((view).table + (view).layout[34]))
#define TABLE_grammar_position(view) ((int*)((view).table + (view).layout[35]))
#define TABLE_pages(view) ((int*)((view).table + (view).layout[36]))
#define TABLE_prompt_bits(view) ((int*)((view).table + (view).layout[37]))
#define TABLE_mask_bits(view) ((int*)((view).table + (view).layout[38]))
#define TABLE_state(view) ((int*)((view).table + (view).layout[39]))
#define TABLE_token(view) ((int*)((view).table + (view).layout[40]))
#define TABLE_made(view) ((int*)((view).table + (view).layout[41]))
#define TABLE_mask_ready(view) ((int*)((view).table + (view).layout[42]))
#define TABLE_kept_mask(view) ((int*)((view).table + (view).layout[43]))
#define TABLE_mask_lowest(view) ((int*)((view).table + (view).layout[44]))
#define TABLE_mask_parts(view) ((int*)((view).table + (view).layout[45]))
#define TABLE_finds_masks(view) ((int*)((view).table + (view).layout[46]))
#define TABLE_counts(view) ((int*)((view).table + (view).layout[47]))
#define TABLE_n_rows(view) ((int*)((view).table + (view).layout[48]))
#define TABLE_row_slot(view) ((int*)((view).table + (view).layout[49]))
#define TABLE_chosen(view) ((int*)((view).table + (view).layout[50]))
#define TABLE_chosen_logprob(view) ((float*)((view).table + (view).layout[51]))
#define TABLE_top_ids(view) ((int*)((view).table + (view).layout[52]))
#define TABLE_top_logprobs(view) ((float*)((view).table + (view).layout[53]))
#define TABLE_first_token(view) ((int*)((view).table + (view).layout[54]))
#define TABLE_first_logprob(view) ((float*)((view).table + (view).layout[55]))
#define TABLE_first_top_ids(view) ((int*)((view).table + (view).layout[56]))
#define TABLE_first_top_logprobs(view) ((float*)((view).table + (view).layout[57]))
#define TABLE_plan_hash(view) ((long long*)((view).table + (view).layout[58]))
#define TABLE_epoch(view) ((long long*)((view).table + (view).layout[59]))
#define TABLE_step_ns(view) ((long long*)((view).table + (view).layout[60]))
#define RING_words(view) ((long long*)((view).rings + (view).layout[61]))
#define RING_inbox(view) ((int*)((view).rings + (view).layout[62]))
#define RING_outbox(view) ((int*)((view).rings + (view).layout[63]))
#define RING_outbox_top_ids(view) ((int*)((view).rings + (view).layout[64]))
#define RING_outbox_top_logprobs(view) ((float*)((view).rings + (view).layout[65]))
#define PAGE_TABLE(view, slot, group) (TABLE_pages(view) + ((long long)(slot) * N_GROUPS(view) + (group)) * MAX_PAGES(view))
#define ADMISSION_WORDS(view) ((view).layout + 66)  // int32 of one slot, of each field in turn

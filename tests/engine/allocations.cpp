// Preloaded by a test: counts what one library asks of the allocator, by where the call returns to.
#include <atomic>
#include <cstddef>
#include <new>

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

static std::atomic<const char*> begin{nullptr}, end{nullptr};
static std::atomic<long> n_calls{0};

void allocations_of(const char* first, const char* behind) { begin = first, end = behind; }
long allocations() { return n_calls; }
}

static inline void note(const void* from) {
    if (begin.load() <= from && from < end.load()) n_calls++;
}

#define FROM __builtin_return_address(0)

extern "C" {
void* malloc(size_t n) { return note(FROM), __libc_malloc(n); }
void* calloc(size_t n, size_t each) { return note(FROM), __libc_calloc(n, each); }
void* realloc(void* old, size_t n) { return note(FROM), __libc_realloc(old, n); }
void* memalign(size_t to, size_t n) { return note(FROM), __libc_memalign(to, n); }
void* aligned_alloc(size_t to, size_t n) { return note(FROM), __libc_memalign(to, n); }
int posix_memalign(void** out, size_t to, size_t n) {
    note(FROM);
    *out = __libc_memalign(to, n);
    return *out ? 0 : 12;  // ENOMEM
}
}

void* operator new(size_t n) { return note(FROM), __libc_malloc(n); }
void* operator new[](size_t n) { return note(FROM), __libc_malloc(n); }
void* operator new(size_t n, std::align_val_t to) { return note(FROM), __libc_memalign(size_t(to), n); }
void* operator new[](size_t n, std::align_val_t to) { return note(FROM), __libc_memalign(size_t(to), n); }

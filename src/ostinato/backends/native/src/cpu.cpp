// The native CPU library: the loop and what Python calls; products are a translation unit of their own (products.cpp).
#include "tiles_c.h"
#include "read.h"
#include "loop_c.h"

// The compiler that made this object, for `ostinato doctor`.
extern "C" const char* ostinato_compiler() {
#if defined(MADE_BY_ZIG)
    return "zig, which is Clang " __clang_version__;
#elif defined(__clang__)
    return "Clang " __clang_version__;
#else
    return "GCC " __VERSION__;
#endif
}

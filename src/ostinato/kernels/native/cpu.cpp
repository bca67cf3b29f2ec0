// The native CPU library: one translation unit, and what Python calls of it.
#include "border_c.h"
#include "sampler_c.h"
#include "tiles_c.h"
#include "read.h"
#include "loop_c.h"

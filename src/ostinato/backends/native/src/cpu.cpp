// The native CPU library: the loop and what Python calls; products are a translation unit of their own (products.cpp).
#include "step_boundary_c.h"
#include "sampler_c.h"
#include "tiles_c.h"
#include "read.h"
#include "loop_c.h"

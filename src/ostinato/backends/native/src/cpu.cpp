// The native CPU library: the loop and what Python calls; products are a translation unit of their own (products.cpp).
#include "tiles_c.h"
#include "read.h"
#include "loop_c.h"

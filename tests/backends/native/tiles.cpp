// The sizes of a matrix's planes in tiles, for tests.
#include "tiles.h"

extern "C" void planes_of(int type, int rows, int cols, long long* out) {
    size_t bytes[3];
    tile_bytes(type, cols, bytes);
    for (int i = 0; i < 3; i++) out[i] = (long long)(bytes[i] * tiles_in(rows));
}

// Integer products of 16 rows of activations on the tile unit of Intel's CPUs (AMX), for products.cpp.
//
// An unpacked block of a tile is what the unit takes as its second operand: eight rows of 64 bytes, four columns of 16
// outputs in each. The first operand is the same block of 16 rows of activations, loaded from where they lie.
// Scales change every 32 columns, so an instruction sums that many, and the sums go through memory to the
// registers where blocks are added. The integers are exact, and the floats are rounded as in `quantised_tile`: no bit
// differs from AVX-512's.
//
// A tile's blocks are unpacked once for all rows. The products of a block are issued AHEAD blocks before its sums are
// added, on registers that take turns: sums that the unit has just stored are slow to load again. A block of 16 rows
// takes 36 ns (8 bits) and 50 ns (wide) of which the unit alone takes 10 and 21, at 2.6 GHz (docs/lab/amx.md); with
// AVX-512 alone it takes 58 and 91.

constexpr int UNIT_ROWS = 16;
constexpr int UNIT_BLOCKS = 48;  // unpacked at once: 24 kB, half of the first cache
constexpr int AHEAD = 2;

// Registers of the unit, in two sets that take turns: sums of the coarse and of the fine plane, rows of activations, and
// weights.
constexpr int COARSE = 0, FINE = 1, ROWS = 2, WEIGHTS = 3, UNIT_SETS = 2, UNIT_SET = 4;
constexpr int N_UNIT_REGISTERS = UNIT_SETS * UNIT_SET, UNIT_REGISTER_BYTES = 1024;

// What LDTILECFG reads: rows and bytes of a row for each register.
struct alignas(64) UnitShapes {
    unsigned char palette, start_row, reserved[14];
    unsigned short row_bytes[16];
    unsigned char rows[16];
};

#if AMX_EMULATED  // the same operations in plain C++, so that any AVX-512 CPU can test the code around them

static thread_local UnitShapes unit_shapes;
static thread_local unsigned char unit_registers[N_UNIT_REGISTERS][UNIT_ROWS][64];

static inline void configure_unit(const UnitShapes& shapes) { unit_shapes = shapes; }
static inline void release_unit() { unit_shapes.palette = 0; }
template <int R> static inline void unit_load(const void* from, long stride) {
    for (int row = 0; row < unit_shapes.rows[R]; row++)
        memcpy(unit_registers[R][row], static_cast<const char*>(from) + row * stride, unit_shapes.row_bytes[R]);
}
template <int R> static inline void unit_store(void* to, long stride) {
    for (int row = 0; row < unit_shapes.rows[R]; row++)
        memcpy(static_cast<char*>(to) + row * stride, unit_registers[R][row], unit_shapes.row_bytes[R]);
}
template <int R> static inline void unit_zero() { memset(unit_registers[R], 0, UNIT_REGISTER_BYTES); }
template <int SUMS, int ROWS, int WEIGHTS> static inline void unit_dot() {
    for (int row = 0; row < unit_shapes.rows[SUMS]; row++)
        for (int n = 0; n < LANES; n++) {
            int sum;
            memcpy(&sum, &unit_registers[SUMS][row][4 * n], 4);
            for (int k = 0; k < unit_shapes.row_bytes[ROWS]; k++)
                sum += static_cast<signed char>(unit_registers[ROWS][row][k]) *
                       unit_registers[WEIGHTS][k / 4][4 * n + k % 4];
            memcpy(&unit_registers[SUMS][row][4 * n], &sum, 4);
        }
}

#else  // as assembly: no header of intrinsics is needed, and compilers never use these registers on their own

static inline void configure_unit(const UnitShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
static inline void release_unit() { asm volatile("tilerelease"); }
template <int R> static inline void unit_load(const void* from, long stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(R) : "memory");
}
template <int R> static inline void unit_store(void* to, long stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(R) : "memory");
}
template <int R> static inline void unit_zero() { asm volatile("tilezero %%tmm%c0" : : "i"(R)); }
// Signed bytes of ROWS times unsigned bytes of WEIGHTS, added to SUMS.
template <int SUMS, int ROWS, int WEIGHTS> static inline void unit_dot() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ROWS), "i"(WEIGHTS));
}

#endif

// The unit of this thread, with the shapes of our registers, for as long as a value of this class lives.
struct Unit {
    Unit() {
        UnitShapes shapes{};
        shapes.palette = 1;
        for (int i = 0; i < N_UNIT_REGISTERS; i++) {
            shapes.rows[i] = i % UNIT_SET == WEIGHTS ? BLOCK / 4 : UNIT_ROWS;
            shapes.row_bytes[i] = i % UNIT_SET == ROWS ? BLOCK : 64;
        }
        configure_unit(shapes);
    }
    ~Unit() { release_unit(); }  // or the system would save the registers at every switch of threads
    Unit(const Unit&) = delete;
    Unit& operator=(const Unit&) = delete;
};

// Sums of 16 rows for a block: [coarse or fine][row][16 outputs].
struct alignas(64) UnitSums { int of[2][UNIT_ROWS][LANES]; };

// `x`: the first of 16 rows of activations, coarse columns; the fine ones are BLOCK bytes further. `weights`: the same
// columns of the block, unpacked.
template <bool WIDE, int SET>
static inline void unit_products(UnitSums& out, const PartBytes* weights, const signed char* x, long stride) {
    constexpr int first = SET * UNIT_SET;
    unit_load<first + WEIGHTS>(weights, 64);
    unit_load<first + ROWS>(x, stride);
    unit_zero<first + COARSE>();
    unit_dot<first + COARSE, first + ROWS, first + WEIGHTS>();
    if constexpr (WIDE) {
        unit_load<first + ROWS>(x + BLOCK, stride);
        unit_zero<first + FINE>();
        unit_dot<first + FINE, first + ROWS, first + WEIGHTS>();
    }
    unit_store<first + COARSE>(out.of[0], 64);
    if constexpr (WIDE) unit_store<first + FINE>(out.of[1], 64);
}

// What `products` gives for one row: the sums of both planes, without the offset of the quants.
template <int TYPE, bool WIDE> static inline PartInts unit_sum(const UnitSums& sums, int row, int minus) {
    PartInts sum = {_mm512_load_si512(sums.of[0][row])};
    if constexpr (WIDE) sum = add(left<7>(sum), PartInts{_mm512_load_si512(sums.of[1][row])});
    if constexpr (!has_minimum(TYPE)) sum = add(sum, left<offset_bits(TYPE)>(part_ints(minus)));
    return sum;
}

// Some blocks of a tile, unpacked.
struct alignas(64) UnitWeights {
    PartBytes quants[UNIT_BLOCKS][8];
    BlockScales by[UNIT_BLOCKS];
};

// 16 rows, from `row` on, times blocks [first, last) of a tile; added to what `out` has unless the blocks are the first.
template <int TYPE, bool WIDE>
ONE_BODY static void unit_rows(const UnitWeights& weights, const Inputs& in, int row, int first, int last, float* out,
                               long stride, int n) {
    const int n_here = last - first;
    const long plane_stride = in.plane_stride, step_stride = 2L * in.n_blocks, minus_stride = 3L * in.n_blocks;
    const signed char* x = in.planes + row * plane_stride + size_t(first) * (WIDE ? 2 : 1) * BLOCK;
    const float* steps = in.steps + size_t(row) * step_stride + 2 * first;
    const int* minus = in.sums + size_t(row) * minus_stride + 3 * first;
    UnitSums sums[AHEAD + 1];
    Part total[UNIT_ROWS];
#pragma GCC unroll 16
    for (int t = 0; t < UNIT_ROWS; t++)
        total[t] = first == 0 ? part_of(0.0f) : n >= LANES ? load(out + t * stride) : load_some(out + t * stride, n);

    int to = 0, from = 0;
    const auto multiply_block = [&](int b) {
        const signed char* const at = x + b * (WIDE ? 2 : 1) * BLOCK;
        if (b % UNIT_SETS)
            unit_products<WIDE, 1>(sums[to], weights.quants[b], at, plane_stride);
        else
            unit_products<WIDE, 0>(sums[to], weights.quants[b], at, plane_stride);
        to = to == AHEAD ? 0 : to + 1;
    };
    for (int b = 0; b < AHEAD && b < n_here; b++) multiply_block(b);
    for (int b = 0; b < n_here; b++) {
        if (b + AHEAD < n_here) multiply_block(b + AHEAD);
        const BlockScales by = weights.by[b];
        const UnitSums& here = sums[from];
        from = from == AHEAD ? 0 : from + 1;
        const float* step = steps + 2 * b;
        const int* less = minus + 3 * b;
#pragma GCC unroll 16
        for (int t = 0; t < UNIT_ROWS; t++, step += step_stride, less += minus_stride) {
            const PartInts whole = unit_sum<TYPE, WIDE>(here, t, *less);
            add_block<TYPE>(total[t], whole, whole, by, step);
        }
    }
#pragma GCC unroll 16  // or the totals would lie in memory all along
    for (int t = 0; t < UNIT_ROWS; t++) store_part(out + t * stride, total[t], 0, n);
}

// The columns of some blocks of a tile, unpacked.
template <int TYPE>
ONE_BODY static void unit_unpack(UnitWeights& to, const Matrix& w, int tile, int first, int last) {
    size_t bytes[3];
    tile_bytes(w.type, w.cols, bytes);
    const unsigned char* quants = w.quants + tile * bytes[0] + size_t(first) * quant_bytes(TYPE);
    const unsigned char* more = w.more + tile * bytes[2] + size_t(first) * more_bytes(TYPE);
    for (int b = first; b < last; b++) {
        for (int i = 0; i < quant_bytes(TYPE); i += 64) prefetch(quants + TILES_AHEAD + i);
        unpack<TYPE>(to.quants[b - first], quants, more, 0);
        to.by[b - first] = block_scales<TYPE>(w.scales + tile * bytes[1], w.type, b, 0);
        quants += quant_bytes(TYPE);
        more += more_bytes(TYPE);
    }
}

// Tiles [tile_first, tile_last) times all whole groups of 16 rows; how many rows that were.
template <int TYPE, bool WIDE>
ONE_BODY static int unit_multiply(const Matrix& w, const Inputs& in, int n_rows, float* out, long stride,
                                  int tile_first, int tile_last) {
    const int n_done = n_rows / UNIT_ROWS * UNIT_ROWS;
    if (n_done == 0) return 0;
    const Unit unit;
    UnitWeights weights;
    const int rows_near = int((768 << 10) / in.plane_stride / UNIT_ROWS + 1) * UNIT_ROWS;  // stay in the second cache
    for (int from = 0; from < n_done; from += rows_near) {
        const int to = n_done - from < rows_near ? n_done : from + rows_near;
        for (int tile = tile_first; tile < tile_last; tile++)
            for (int first = 0; first < in.n_blocks; first += UNIT_BLOCKS) {
                const int last = in.n_blocks - first < UNIT_BLOCKS ? in.n_blocks : first + UNIT_BLOCKS;
                unit_unpack<TYPE>(weights, w, tile, first, last);
                for (int row = from; row < to; row += UNIT_ROWS)
                    unit_rows<TYPE, WIDE>(weights, in, row, first, last, out + row * stride + long(tile) * LANES,
                                          stride, w.rows - tile * LANES);
            }
    }
    return n_done;
}

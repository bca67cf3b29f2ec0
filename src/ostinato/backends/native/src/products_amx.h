// Integer products of 8 or 16 rows of activations on the tile unit of Intel's CPUs (AMX), for products.cpp.
//
// An unpacked block of a tile is what the unit takes as its second operand: eight rows of 64 bytes, four columns of 16
// outputs in each. The first operand is the same block of 8 or 16 rows of activations, loaded from where they lie.
// Scales change every 32 columns (16 of Q6_K), so an instruction sums that many, and the sums go through memory to the
// registers where blocks are added. The integers are exact, and the floats are rounded as in `quantised_tile`: no bit
// differs from AVX-512's.
//
// The next block's products run while this block's sums are added. Bound by the stores of sums and by the additions:
// the unit itself is idle for more than half of the time, also because it could sum 64 columns at once.

constexpr int UNIT_ROWS = 16, FEW_UNIT_ROWS = 8;

// Registers of the unit: sums and activations of 16 rows and of 8, and the block of weights. There is one register for
// each, so that one configuration serves both numbers of rows.
constexpr int COARSE_16 = 0, FINE_16 = 1, ROWS_16 = 2, MORE_ROWS_16 = 3, WEIGHTS = 4;
constexpr int COARSE_8 = 5, FINE_8 = 6, ROWS_8 = 7;
constexpr int N_UNIT_REGISTERS = 8, UNIT_REGISTER_BYTES = 1024;

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
template <int SUMS, int ROWS, int WEIGHTS> static inline void unit_multiply() {
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
template <int SUMS, int ROWS, int WEIGHTS> static inline void unit_multiply() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ROWS), "i"(WEIGHTS));
}

#endif

// Columns that one instruction sums: those of one scale.
constexpr int unit_columns(int type) { return type == TILE_Q6_K ? 16 : BLOCK; }

// The shapes of the registers for a type, loaded for as long as a value of this class lives.
struct UnitForType {
    explicit UnitForType(int type) {
        const int columns = unit_columns(type);
        UnitShapes shapes{};
        shapes.palette = 1;
        for (int i = 0; i < N_UNIT_REGISTERS; i++) {
            const bool is_rows = i == ROWS_16 || i == MORE_ROWS_16 || i == ROWS_8;
            shapes.rows[i] = i == WEIGHTS ? columns / 4 : i < WEIGHTS ? UNIT_ROWS : FEW_UNIT_ROWS;
            shapes.row_bytes[i] = is_rows ? columns : 64;
        }
        configure_unit(shapes);
    }
    ~UnitForType() { release_unit(); }  // or the system would save the registers at every switch of threads
    UnitForType(const UnitForType&) = delete;
    UnitForType& operator=(const UnitForType&) = delete;
};

// Sums of M rows for one scale of a block: [coarse or fine][row][16 outputs].
template <int M> struct alignas(64) UnitSums { int of[2][M][LANES]; };

// `x`: the first of M rows of activations, coarse columns; the fine ones are BLOCK bytes further. `weights`: their
// columns of the block, unpacked.
template <bool WIDE, int M>
static inline void unit_products(UnitSums<M>& out, const PartBytes* weights, const signed char* x, long stride) {
    constexpr int coarse = M == UNIT_ROWS ? COARSE_16 : COARSE_8, fine = M == UNIT_ROWS ? FINE_16 : FINE_8;
    constexpr int rows = M == UNIT_ROWS ? ROWS_16 : ROWS_8, more_rows = M == UNIT_ROWS ? MORE_ROWS_16 : ROWS_8;
    unit_load<WEIGHTS>(weights, 64);
    unit_load<rows>(x, stride);
    unit_zero<coarse>();
    unit_multiply<coarse, rows, WEIGHTS>();
    if constexpr (WIDE) {
        unit_load<more_rows>(x + BLOCK, stride);
        unit_zero<fine>();
        unit_multiply<fine, more_rows, WEIGHTS>();
    }
    unit_store<coarse>(out.of[0], 64);
    if constexpr (WIDE) unit_store<fine>(out.of[1], 64);
}

// What `products` gives for one row: the sums of both planes, without the offset of the quants.
template <int TYPE, bool WIDE, int M>
static inline PartInts unit_sum(const UnitSums<M>& sums, int row, int minus) {
    PartInts sum = {_mm512_load_si512(sums.of[0][row])};
    if constexpr (WIDE) sum = add(left<7>(sum), PartInts{_mm512_load_si512(sums.of[1][row])});
    if constexpr (!has_minimum(TYPE)) sum = add(sum, left<offset_bits(TYPE)>(part_ints(minus)));
    return sum;
}

// `quantised_tile` for M rows, 8 or 16.
template <int TYPE, bool WIDE, int M>
ONE_BODY static void unit_tile(const Matrix& w, const Inputs& in, int tile, int row, float* out, long stride) {
    constexpr int parts = BLOCK / unit_columns(TYPE);
    const int n_blocks = in.n_blocks, type = w.type;
    const long plane_stride = in.plane_stride, step_stride = 2L * n_blocks, minus_stride = 3L * n_blocks;
    size_t bytes[3];
    tile_bytes(type, w.cols, bytes);
    const unsigned char* quants = w.quants + tile * bytes[0];
    const unsigned char* scales = w.scales + tile * bytes[1];
    const unsigned char* more = w.more + tile * bytes[2];
    const signed char* x = in.planes + row * plane_stride;
    const float* steps = in.steps + size_t(row) * n_blocks * 2;
    const int* minus = in.sums + size_t(row) * n_blocks * 3;
    UnitSums<M> sums[2][parts];
    Part total[M];
#pragma GCC unroll 16
    for (int t = 0; t < M; t++) total[t] = part_of(0.0f);

    const auto multiply_block = [&](int b) {
        alignas(64) PartBytes v[8];
        for (int i = 0; i < quant_bytes(TYPE); i += 64) prefetch(quants + TILES_AHEAD + i);
        unpack<TYPE>(v, quants, more, 0);
        for (int i = 0; i < parts; i++)
            unit_products<WIDE, M>(sums[b % 2][i], v + 4 * i, x + b * (WIDE ? 2 : 1) * BLOCK + 16 * i, plane_stride);
        quants += quant_bytes(TYPE);
        more += more_bytes(TYPE);
    };
    multiply_block(0);
    for (int b = 0; b < n_blocks; b++) {
        if (b + 1 < n_blocks) multiply_block(b + 1);
        const BlockScales by = block_scales<TYPE>(scales, type, b, 0);
        const UnitSums<M>* const here = sums[b % 2];
        const float* step = steps + 2 * b;
        const int* less = minus + 3 * b;
#pragma GCC unroll 16
        for (int t = 0; t < M; t++, step += step_stride, less += minus_stride) {
            const int first = unit_columns(TYPE) == BLOCK ? 0 : 1;
            const PartInts whole = unit_sum<TYPE, WIDE>(here[0], t, less[first]);
            if constexpr (parts == 1)
                add_block<TYPE>(total[t], whole, whole, by, step);
            else
                add_block<TYPE>(total[t], whole, unit_sum<TYPE, WIDE>(here[1], t, less[2]), by, step);
        }
    }
#pragma GCC unroll 16  // or the totals would lie in memory all along
    for (int t = 0; t < M; t++) store_part(out + t * stride, total[t], 0, w.rows - tile * LANES);
}

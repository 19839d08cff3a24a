// Sizes and index maps of one stage. The host sets the NF_ constants; tests/support/stage_layouts.py mirrors the maps.
//
// An image lies in shared memory as rows of pixels, each pixel with C channels, inside a border one pixel wide.
// A chunk is 8 channels (16 bytes). Chunks are swizzled so that 8 neighbouring pixels hit 8 different bank groups.
constexpr int C = NF_CHANNELS, S = NF_SIZE;
constexpr int SPLIT = NF_SPLIT;      // thread blocks that share one image by rows
constexpr int TM = NF_TILES_M;       // tiles of 16 pixels that a warp owns, one below the other
constexpr int TN = NF_TILES_N;       // tiles of 8 output channels that a warp owns
constexpr int RING = NF_RING;        // slices of weights in shared memory
constexpr int STEPS = NF_STEPS;      // (dx, 16 input channels) steps in a slice of weights
constexpr bool RELU_IN = NF_RELU_IN, RELU_OUT = NF_RELU_OUT;
constexpr bool RECOMPUTE = NF_RECOMPUTE;  // the backward pass computes the inner activation again

constexpr int ROWS = S / SPLIT;                    // image rows of one thread block
constexpr int TILE_WIDTH = NF_WGMMA || S < 16 ? 8 : 16;  // pixels of a tile of 16 side by side
constexpr int TILE_ROWS = 16 / TILE_WIDTH, SEGMENTS = S / TILE_WIDTH;
constexpr int PITCH = (S + 2 + 7) / 8 * 8;         // a multiple of 8, so that the swizzle is the same in every row
constexpr int CHUNKS = C / 8, PAIRS = C / 16;      // a pair is two tiles of output channels
constexpr int ROW_BYTES = PITCH * C * 2, BUFFER = (ROWS + 2) * ROW_BYTES;
constexpr int IMAGE = S * S * C, WEIGHT = 9 * C * C;
constexpr int Q = TN / 2, WN = C / 8 / TN, WM = ROWS * S / 16 / TM, WARPS = WM * WN, THREADS = WARPS * 32;
constexpr int STEPS_PER_CONV = 3 * PAIRS, SLICES = STEPS_PER_CONV / STEPS, SLICE_BYTES = STEPS * 3 * 16 * C * 2;
constexpr int SPAN = TILE_ROWS * (TM - 1) + 3;  // input rows that a warp's output rows read
static_assert(RING >= (NF_WGMMA ? 3 : 2), "wgmma reads a slice while the one before it is not released");
static_assert(STEPS_PER_CONV % STEPS == 0, "slices must divide a convolution");
static_assert(WM * TM * 16 == ROWS * S && (ROWS / TILE_ROWS) % TM == 0, "warps must tile the image");

// The scalars of one block of the residual equation, in the order of normfree.kernels.SCALARS.
enum { ALPHA, ENTRY_BIAS, ENTRY_GAIN, BEFORE1, AFTER1, INNER_GAIN, BEFORE2, BETA, A, DELTA, FACTOR, EXIT_GAIN, SCALARS };
// Sums over an image from which the gradients of the scalars follow; see finish_scalars in gradients.cuh.
enum { SUM_U, SUM_UR, SUM_W, SUM_MW, SUM_MWX, SUM_TX, SUM_COUNT = 8 };

// Scalars that the caller promised to be neutral and not to learn. They cost nothing and get no gradient.
constexpr __device__ bool neutral(int scalar) { return NF_NEUTRAL >> scalar & 1; }
// v times a scalar that may be promised to be 1.
template <int SCALAR> DEVICE float times(float v, const float* s) { return neutral(SCALAR) ? v : s[SCALAR] * v; }
// The branch reads g·act(α·x + e), not x itself.
constexpr bool ENTRY = RELU_IN || !neutral(ALPHA) || !neutral(ENTRY_BIAS) || !neutral(ENTRY_GAIN);
// Which sums the gradients of the scalars need.
constexpr bool NEED_PRODUCT = !neutral(FACTOR) || (RELU_OUT && !neutral(EXIT_GAIN));
constexpr bool NEED_U = (!neutral(BEFORE2) || !neutral(BETA) || NEED_PRODUCT);
constexpr bool NEED_UR = (!neutral(BETA) || !neutral(INNER_GAIN) || NEED_PRODUCT);
constexpr bool NEED_W = (!neutral(BEFORE1) || ENTRY);
constexpr bool NEED_MWX = ENTRY;
constexpr bool NEED_TX = (!neutral(A) || NEED_PRODUCT);
constexpr bool NEED_ANY = NEED_U || NEED_UR || NEED_W || NEED_MWX || NEED_TX;

#if NF_STREAM32
typedef float Stream;
#else
typedef bf16 Stream;
#endif
#if NF_SPLIT > 1
#define CLUSTERED __cluster_dims__(NF_SPLIT, 1, 1)
#else
#define CLUSTERED
#endif

constexpr __device__ int at_least_one(int v) { return v < 1 ? 1 : v; }
// Byte offset of a chunk; row and column count from the border.
template <int CHANNELS> DEVICE u32 offset_in(int row, int column, int chunk) {
  constexpr int chunks = CHANNELS / 8;
  int swizzle = (column / at_least_one(8 / chunks)) & (chunks < 8 ? chunks - 1 : 7);
  return ((row * PITCH + column) * chunks + (chunk ^ swizzle)) * 16;
}
DEVICE u32 offset(int row, int column, int chunk) { return offset_in<C>(row, column, chunk); }

// The pixels and channels that a thread owns in the result of a convolution: TM tiles x Q pairs x 2 halves x 4 channels.
struct Owner {
  int warp, lane, wn, row, segment, channel, rank, image;
  DEVICE Owner() {
    warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#if NF_WGMMA  // four warps share 8 x 8 pixels, two rows each
    int place = warp / 4 / WN;
    wn = warp / 4 % WN, segment = place % SEGMENTS, row = place / SEGMENTS * 8 + warp % 4 * 2;
#else
    int place = warp / WN;
    wn = warp % WN, segment = place % SEGMENTS, row = place / SEGMENTS * TM * TILE_ROWS;
#endif
    channel = wn * TN * 8 + (lane & 3) * 4;
    rank = blockIdx.x % SPLIT, image = blockIdx.x / SPLIT;
  }
  DEVICE int row_of(int m, int h) const { return row + m * TILE_ROWS + (TILE_ROWS == 2 ? h : 0); }
  DEVICE int column_of(int h) const { return segment * TILE_WIDTH + (lane >> 2) + (TILE_ROWS == 2 ? 0 : 8 * h); }
  DEVICE int element(int m, int q, int h) const {  // in the image, channels last
    return ((rank * ROWS + row_of(m, h)) * S + column_of(h)) * C + channel + q * 16;
  }
  DEVICE u32 place(int m, int q, int h) const {  // in a buffer in shared memory
    int c = channel + q * 16;
    return offset(row_of(m, h) + 1, column_of(h) + 1, c / 8) + (c & 4) * 2;
  }
};
#define EACH_OWNED                              \
  _Pragma("unroll") for (int m = 0; m < TM; m++) \
  _Pragma("unroll") for (int q = 0; q < Q; q++)  \
  _Pragma("unroll") for (int h = 0; h < 2; h++)
typedef uint2 OwnedBits[TM][Q][2];  // owned values in bfloat16

DEVICE void unpack4(uint2 v, float (&f)[4]) { f[0] = low_of(v.x), f[1] = high_of(v.x), f[2] = low_of(v.y), f[3] = high_of(v.y); }
template <bool RELU> DEVICE uint2 pack4(const float (&f)[4]) {
  if (RELU) return make_uint2(pack2_relu(f[0], f[1]), pack2_relu(f[2], f[3]));
  return make_uint2(pack2(f[0], f[1]), pack2(f[2], f[3]));
}
DEVICE void load_stream(const float* p, float (&f)[4]) {
  float4 v = *(const float4*)p;
  f[0] = v.x, f[1] = v.y, f[2] = v.z, f[3] = v.w;
}
DEVICE void load_stream(const bf16* p, float (&f)[4]) { unpack4(*(const uint2*)p, f); }

// The residual stream, or its gradient, at the owned places: in registers, in its own type.
struct Held {
#if NF_STREAM32
  float values[TM][Q][2][4];
  DEVICE void get(int m, int q, int h, float (&f)[4]) const {
    for (int i = 0; i < 4; i++) f[i] = values[m][q][h][i];
  }
  // Set four values, after a ReLU or where a mask has bits; returns them in bfloat16.
  template <bool RELU> DEVICE uint2 set(int m, int q, int h, const float (&f)[4]) {
    for (int i = 0; i < 4; i++) values[m][q][h][i] = RELU ? fmaxf(f[i], 0.f) : f[i];
    return pack4<RELU>(f);
  }
  DEVICE uint2 set_where(int m, int q, int h, const float (&f)[4], uint2 mask) {
    float v[4] = {mask.x & 0xffffu ? f[0] : 0.f, mask.x >> 16 ? f[1] : 0.f, mask.y & 0xffffu ? f[2] : 0.f, mask.y >> 16 ? f[3] : 0.f};
    return set<false>(m, q, h, v);
  }
  DEVICE void store(float* p, int m, int q, int h) const {
    const float* v = values[m][q][h];
    *(float4*)p = make_float4(v[0], v[1], v[2], v[3]);
  }
#else
  OwnedBits values;
  DEVICE void get(int m, int q, int h, float (&f)[4]) const { unpack4(values[m][q][h], f); }
  template <bool RELU> DEVICE uint2 set(int m, int q, int h, const float (&f)[4]) { return values[m][q][h] = pack4<RELU>(f); }
  DEVICE uint2 set_where(int m, int q, int h, const float (&f)[4], uint2 mask) {
    uint2 v = pack4<false>(f);
    return values[m][q][h] = make_uint2(v.x & mask.x, v.y & mask.y);
  }
  DEVICE void store(bf16* p, int m, int q, int h) const { *(uint2*)p = values[m][q][h]; }
#endif
};

// g·act(α·x + e): the branch's input, before the bias of its first convolution. Gains are positive.
DEVICE uint2 entered(uint2 x, const float* s) {
  if (!ENTRY) return x;
  float f[4];
  unpack4(x, f);
  for (int i = 0; i < 4; i++) {
    float v = neutral(ALPHA) ? f[i] + s[ENTRY_BIAS] : fmaf(s[ALPHA], f[i], s[ENTRY_BIAS]);
    f[i] = times<ENTRY_GAIN>(v, s);
  }
  return pack4<RELU_IN>(f);
}

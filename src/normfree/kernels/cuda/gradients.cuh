// Weight gradients of all convolutions of a stage in one kernel, and the sums that end the backward pass.
//
// The work is a list of items (convolution, image, band of rows). Every thread block takes an equal stretch of the list
// and writes one partial sum per convolution that it touches. A pair (thread block j, convolution k) that meets has the
// number j + k: along the list either j or k grows by one, so numbers are unique, and sums have a fixed order.
constexpr int CT = C < 64 ? C : 64;        // channels of a square that one thread block computes
constexpr int W_TILE_ROWS = S >= 16 ? 1 : 2, W_SEGMENTS = S >= 16 ? S / 16 : 1;  // tiles of 16 pixels, as wide as fits
constexpr int BAND = NF_BAND, BANDS = S / BAND;
constexpr int W_WARPS = C <= 32 ? 8 : 16, W_THREADS = W_WARPS * 32, W_BLOCKS = 16 / W_WARPS;  // thread blocks per multiprocessor
constexpr int GROUPS = (CT / 16) * (CT / 16), PARTS = W_WARPS / GROUPS;  // a group is 16 inputs x 16 outputs x 9 taps
constexpr int PART_TILES = BAND * S / 16 / PARTS;                        // tiles of 16 pixels that a warp sums over
constexpr int RUN = 4; // tiles in one go, one below the other
constexpr int INPUT_BYTES = (BAND + 2) * PITCH * CT * 2, OUTPUT_BYTES = BAND * S * CT * 2;
constexpr int R_THREADS = 288;
constexpr int PARTIAL = WEIGHT + C;  // a weight gradient and the sum of the gradient per output channel
static_assert(PART_TILES % RUN == 0 && PARTS % W_SEGMENTS == 0 || W_SEGMENTS == 1, "warps must tile the band");

struct Items {
  long long total;
  int per_convolution, workers;
  DEVICE Items(int convolutions, int images, int workers)
      : total((long long)convolutions * images * BANDS), per_convolution(images * BANDS), workers(workers) {}
  DEVICE long long begin(int worker) const { return total * worker / workers; }
  // The worker that has an item.
  DEVICE int owner(long long item) const {
    int worker = (int)(item * workers / total);
    while (worker + 1 < workers && begin(worker + 1) <= item) worker++;
    while (worker > 0 && begin(worker) > item) worker--;
    return worker;
  }
  // The sum over the partial results of one convolution, in the order of the workers `first` to `last`.
  DEVICE float4 sum(const float* partials, int convolution, int first, int last, int at) const {
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    const float* p = partials + (size_t)(first + convolution) * PARTIAL + at;
#pragma unroll 4
    for (int worker = first; worker <= last; worker++, p += PARTIAL) {
      if (total < workers && begin(worker) == begin(worker + 1)) continue;  // it had nothing to do
      float4 w = *(const float4*)p;
      v.x += w.x, v.y += w.y, v.z += w.z, v.w += w.w;
    }
    return v;
  }
  DEVICE int first(int convolution) const { return owner((long long)convolution * per_convolution); }
  DEVICE int last(int convolution) const { return owner((long long)(convolution + 1) * per_convolution - 1); }
};

DEVICE u32 output_offset(int row, int column, int chunk) {
  constexpr int chunks = CT / 8;
  return ((row * S + column) * chunks + (chunk ^ ((column / at_least_one(8 / chunks)) & (chunks - 1)))) * 16;
}
// One item of the list, and the way from it to the next.
struct Item {
  int convolution, image, band;
  DEVICE Item(long long number, const Items& items) {
    convolution = (int)(number / items.per_convolution);
    int rest = (int)(number - (long long)convolution * items.per_convolution);
    image = rest / BANDS, band = rest % BANDS;
  }
  DEVICE void advance(int images) {
    if (++band < BANDS) return;
    band = 0;
    if (++image == images) image = 0, convolution++;
  }
};
// The copies of one thread: it always has the same column and chunk, in every STRIDE-th row.
struct Copies {
  static constexpr int PER_ROW = S * CT / 8, STRIDE = W_THREADS / PER_ROW, IN_STEP = STRIDE * PITCH * CT * 2, OUT_STEP = STRIDE * S * CT * 2;
  static_assert(W_THREADS % PER_ROW == 0, "a thread must stay in its column");
  int row, in_element, out_element;
  u32 in_offset, out_offset;
  DEVICE Copies() {  // recomputed per item: a few shifts cost less than registers
    int chunk = threadIdx.x % (CT / 8), column = threadIdx.x / (CT / 8) % S;
    row = threadIdx.x / PER_ROW;
    in_element = ((row - 1) * S + column) * C + chunk * 8 + blockIdx.y / (C / CT) * CT;
    out_element = (row * S + column) * C + chunk * 8 + blockIdx.y % (C / CT) * CT;
    in_offset = offset_in<CT>(row, column + 1, chunk), out_offset = output_offset(row, column, chunk);
  }
  DEVICE bool in_image(int band, int r) const {
    int y = band * BAND + r - 1;
    return y >= 0 && y < S;
  }
  DEVICE void fetch(const Item& item, u32 in, const bf16* input, const bf16* output) const {
    input += item.band * BAND * S * C + in_element, output += item.band * BAND * S * C + out_element;
#pragma unroll
    for (int k = 0; k * STRIDE < BAND + 2; k++) {
      int r = row + k * STRIDE;
      if (r < BAND + 2 && in_image(item.band, r)) copy16(in + in_offset + k * IN_STEP, input + k * STRIDE * S * C);
    }
#pragma unroll
    for (int k = 0; k * STRIDE < BAND; k++)
      if (BAND % STRIDE == 0 || row + k * STRIDE < BAND) copy16(in + INPUT_BYTES + out_offset + k * OUT_STEP, output + k * STRIDE * S * C);
    copy_commit();
  }
  // The border holds minus the bias before the convolution, as in the chain.
  DEVICE void fill_border(const Item& item, u32 in, const float* scalars) const {
    constexpr int chunks = CT / 8, sides = (BAND + 2) * 2;
    float bias = __ldg(scalars + item.convolution / 2 * SCALARS + (item.convolution & 1 ? BEFORE2 : BEFORE1));
    u32 v = pack2(-bias, -bias);
    uint4 border = make_uint4(v, v, v, v);
    for (int i = threadIdx.x; i < (sides + 2 * S) * chunks; i += W_THREADS) {
      int p = i / chunks, r = p >> 1, column = (p & 1) * (S + 1);
      if (p >= sides) {
        r = p - sides < S ? 0 : BAND + 1, column = (p - sides) % S + 1;
        if (in_image(item.band, r)) continue;
      }
      store_shared16(in + offset_in<CT>(r, column, i % chunks), border);
    }
  }
  // Turn the copied stream into the first convolution's input; each thread changes the chunks that it copied.
  DEVICE void enter(const Item& item, u32 in, const float* scalars) const {
    if (!ENTRY || item.convolution & 1) return;
    float s[SCALARS];
    load_scalars(s, scalars + item.convolution / 2 * SCALARS);
#pragma unroll
    for (int k = 0; k * STRIDE < BAND + 2; k++) {
      int r = row + k * STRIDE;
      if (r >= BAND + 2 || !in_image(item.band, r)) continue;
      uint4 v = load_shared16(in + in_offset + k * IN_STEP);
      uint2 low = entered(make_uint2(v.x, v.y), s), high = entered(make_uint2(v.z, v.w), s);
      store_shared16(in + in_offset + k * IN_STEP, make_uint4(low.x, low.y, high.x, high.y));
    }
  }
};

// The sums of one warp: 16 inputs x 16 outputs x 9 taps, and the gradient itself over all pixels.
struct WeightSum {
  float taps[9][2][4], total[4];
  int lane, group, part, inputs, outputs;  // inputs and outputs count in 16 channels
  DEVICE WeightSum() {
    lane = threadIdx.x & 31, group = (threadIdx.x >> 5) / PARTS, part = (threadIdx.x >> 5) % PARTS;
    inputs = group / (CT / 16), outputs = group % (CT / 16);
    clear();
  }
  DEVICE void clear() {
#pragma unroll
    for (int t = 0; t < 9; t++)
#pragma unroll
      for (int i = 0; i < 8; i++) taps[t][i >> 2][i & 3] = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) total[i] = 0.f;
  }
  // The input above, at and below a pixel meets three taps, so its matrices are loaded once for all three.
  DEVICE void add(u32 in, u32 out) {
    // Ones in the upper or lower 8 rows: the totals of both halves then fit one accumulator.
    const u32 one = 0x3f803f80u, upper[4] = {one, 0, one, 0}, lower[4] = {0, one, 0, one};
    int low = lane & 7, second = lane >> 3 & 1, third = lane >> 4;
    int segment = part % W_SEGMENTS, start = part / W_SEGMENTS * PART_TILES * W_TILE_ROWS;
#pragma unroll 1
    for (int run = 0; run < PART_TILES / RUN; run++, start += RUN * W_TILE_ROWS) {
      u32 g[RUN][4];
      int column = segment * 16 + low + (W_TILE_ROWS == 2 ? 0 : second * 8), row = start + (W_TILE_ROWS == 2 ? second : 0);
      u32 at = out + output_offset(row, column, outputs * 2 + third);
#pragma unroll
      for (int j = 0; j < RUN; j++) load_matrices_transposed(at + j * W_TILE_ROWS * S * CT * 2, g[j]);
      if (inputs == 0)
#pragma unroll
        for (int j = 0; j < RUN; j++) multiply(total, upper, g[j][0], g[j][1]), multiply(total, lower, g[j][2], g[j][3]);
      column = segment * 16 + low + (W_TILE_ROWS == 2 ? 0 : third * 8), row = start + (W_TILE_ROWS == 2 ? third : 0);
#pragma unroll
      for (int dx = 0; dx < 3; dx++) {
        at = in + offset_in<CT>(row, column + dx, inputs * 2 + second);
#pragma unroll
        for (int r = 0; r < W_TILE_ROWS * (RUN - 1) + 3; r++) {
          u32 x[4];
          load_matrices_transposed(at + r * PITCH * CT * 2, x);
#pragma unroll
          for (int dy = 0; dy < 3; dy++) {
            if (r < dy || (r - dy) % W_TILE_ROWS || (r - dy) / W_TILE_ROWS >= RUN) continue;
            int j = (r - dy) / W_TILE_ROWS;
            multiply(taps[dy * 3 + dx][0], x, g[j][0], g[j][1]);
            multiply(taps[dy * 3 + dx][1], x, g[j][2], g[j][3]);
          }
        }
      }
    }
  }
  // Write the sum of all warps to a partial result; its order is (group of 16 x 16, tap, half, lane, 4).
  DEVICE void flush(float4* sums, float* partial) {
    int first_in = blockIdx.y / (C / CT) * (CT / 16), first_out = blockIdx.y % (C / CT) * (CT / 16);
    float4* to = (float4*)partial + ((first_in + inputs) * PAIRS + first_out + outputs) * 576 + lane;
    float2* totals = (float2*)(partial + WEIGHT + (first_out + outputs) * 16) + (lane & 3);
    float4* mine = sums + group * 576 + lane;
    float2* mine_totals = (float2*)(sums + GROUPS * 576) + outputs * 8 + (lane & 3);
    bool adds_totals = first_in + inputs == 0 && lane < 4;
#pragma unroll 1
    for (int p = 0; p < PARTS; p++) {  // one after the other, so that the sum is the same every time
      if (part == p) {
        float4* target = p == PARTS - 1 ? to : mine;
        float2* target_totals = p == PARTS - 1 ? totals : mine_totals;
#pragma unroll
        for (int i = 0; i < 18; i++) {
          float* v = taps[i >> 1][i & 1];
          if (p > 0) {
            float4 old = mine[i * 32];
            v[0] += old.x, v[1] += old.y, v[2] += old.z, v[3] += old.w;
          }
          target[i * 32] = make_float4(v[0], v[1], v[2], v[3]);
          asm volatile("" ::: "memory");  // one load at a time, or registers spill
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
          if (adds_totals) {
            float2 w = make_float2(total[2 * n], total[2 * n + 1]);
            if (p > 0) w.x += mine_totals[n * 4].x, w.y += mine_totals[n * 4].y;
            target_totals[n * 4] = w;
          }
      }
      if (PARTS > 1) __syncthreads();
    }
  }
};

// Grid: (workers, squares of channels). Writes partials[worker + convolution].
extern "C" __global__ void __launch_bounds__(W_THREADS, W_BLOCKS)
stage_weights(const bf16* kept, const bf16* inner, const bf16* gradients, const float* scalars, float* partials,
              int convolutions, int images) {
  extern __shared__ __align__(1024) char memory[];
  u32 tiles = shared_address(memory);
  float4* sums = (float4*)(memory + 2 * (INPUT_BYTES + OUTPUT_BYTES));
  Items items(convolutions, images, gridDim.x);
  long long begin = items.begin(blockIdx.x);
  int count = (int)(items.begin(blockIdx.x + 1) - begin);
  if (count == 0) return;
  WeightSum sum;
  Item next(begin, items);
  int stale = 2;  // buffers whose border is of another convolution
  auto fetch = [&](int buffer) {
    const bf16* input = image_of(next.convolution & 1 ? inner : kept, next.convolution / 2, images, next.image);
    const bf16* output = image_of(gradients, next.convolution, images, next.image);
    u32 in = tiles + buffer * (INPUT_BYTES + OUTPUT_BYTES);
    Copies().fetch(next, in, input, output);
    // With one or two bands, a buffer always holds the same band, so its border stays.
    if (BANDS > 2 || stale > 0) Copies().fill_border(next, in, scalars);
    stale--;
  };
  fetch(0);
  for (int i = 0; i < count; i++) {
    u32 in = tiles + (i & 1) * (INPUT_BYTES + OUTPUT_BYTES);
    copy_wait();
    Copies().enter(next, in, scalars);
    __syncthreads();
    int convolution = next.convolution;
    next.advance(images);
    if (next.convolution != convolution) stale = 2;
    if (i + 1 < count) fetch(i + 1 & 1);
    sum.add(in, in + INPUT_BYTES);
    if (i + 1 == count || next.convolution != convolution) {
      sum.flush(sums, partials + (size_t)(blockIdx.x + convolution) * PARTIAL);
      sum.clear();
    }
  }
}

// One 16 x 16 group of a weight gradient, from the partial sums to the order of a convolution's weight. A bias b before a
// convolution adds b times the gradient's sum: the border of the input held -b. The second convolution's gradient was
// taken before β.
DEVICE void finish_weight(const float* partials, const float* scalars, float* weight_gradients, const Items& items) {
  constexpr int LINE = 148;  // 16 inputs x 9 taps, and a gap against bank conflicts
  __shared__ __align__(16) float square[16 * LINE], totals[16];
  int convolution = blockIdx.y, group = blockIdx.x, inputs = group / PAIRS, outputs = group % PAIRS;
  const float* s = scalars + convolution / 2 * SCALARS;
  float scale = convolution & 1 ? s[BETA] : 1.f, bias = s[convolution & 1 ? BEFORE2 : BEFORE1];
  int first = items.first(convolution), last = items.last(convolution);
  if (threadIdx.x < 4)
    *(float4*)(totals + threadIdx.x * 4) = items.sum(partials, convolution, first, last, WEIGHT + outputs * 16 + threadIdx.x * 4);
  __syncthreads();
  for (int i = threadIdx.x; i < 576; i += R_THREADS) {
    float4 v = items.sum(partials, convolution, first, last, (group * 576 + i) * 4);
    int lane = i & 31, n = i >> 5 & 1, tap = i >> 6, output = n * 8 + 2 * (lane & 3), input = lane >> 2;
    float low = totals[output] * bias, high = totals[output + 1] * bias;
    float* to = square + output * LINE + input * 9 + tap;
    to[0] = scale * (v.x + low), to[LINE] = scale * (v.y + high), to[72] = scale * (v.z + low), to[LINE + 72] = scale * (v.w + high);
  }
  __syncthreads();
  float* out = weight_gradients + (size_t)convolution * WEIGHT + (outputs * 16 * C + inputs * 16) * 9;
  for (int i = threadIdx.x; i < 576; i += R_THREADS)
    *(float4*)(out + i / 36 * C * 9 + i % 36 * 4) = *(float4*)(square + i / 36 * LINE + i % 36 * 4);
}

// The gradients of the scalars and of the two biases per channel of one residual block.
//
// With u = conv2ᵀ(dt), w = conv1ᵀ(dz) and t the sum, which is g·p(c·t) afterwards, most gradients are the sums that the
// backward pass made. ⟨dt, conv2(r)⟩ = ⟨u, r⟩ gives β's without conv2(r), and ⟨dt, t⟩ gives those of c and of the gain.
DEVICE void finish_scalars(const float* sums, const float* partials, const float* scalars, const float* biases,
                           float* scalar_gradients, float* bias_gradients, int b, int images, const Items& items) {
  __shared__ __align__(16) float column[256], total[SUM_COUNT], gradient[2][C];
  int thread = threadIdx.x, rows = NEED_ANY ? images * SPLIT * WARPS : 0;
  const float *s = scalars + b * SCALARS, *mine = sums + (size_t)b * rows * SUM_COUNT;
  float v = 0.f;
  for (int row = thread >> 3; row < rows && thread < 256; row += 256) {
    float w[8];  // eight loads in flight
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = row + 32 * j < rows ? mine[(row + 32 * j) * SUM_COUNT + (thread & 7)] : 0.f;
#pragma unroll
    for (int j = 0; j < 8; j++) v += w[j];
  }
  if (thread < 256) column[thread] = v;
  for (int i = thread; i < 2 * C / 4; i += R_THREADS) {
    int which = i / (C / 4), c = i % (C / 4) * 4;
    *(float4*)&gradient[which][c] = items.sum(partials, 2 * b + which, items.first(2 * b + which), items.last(2 * b + which), WEIGHT + c);
  }
  __syncthreads();
  if (thread < SUM_COUNT) {
    v = 0.f;
    for (int i = 0; i < 32; i++) v += column[i * 8 + thread];
    total[thread] = v;
  }
  for (int i = thread; bias_gradients && i < 2 * C; i += R_THREADS)
    bias_gradients[(size_t)b * 2 * C + i] = (i < C ? 1.f : s[BETA]) * gradient[i / C][i % C];
  __syncthreads();
  if (thread) return;
  float after1 = 0.f, delta = 0.f, biased = 0.f;
  for (int c = 0; c < C; c++) {
    after1 += gradient[0][c], delta += gradient[1][c];
    if (biases) biased = fmaf(biases[(size_t)(2 * b + 1) * C + c], gradient[1][c], biased);
  }
  float masked = RELU_IN ? total[SUM_MW] : total[SUM_W];
  float beta = total[SUM_UR] + s[BEFORE2] * total[SUM_U] + biased;
  float product = s[A] * total[SUM_TX] + s[BETA] * beta + s[DELTA] * delta;  // ⟨dt, t⟩
  float* to = scalar_gradients + b * SCALARS;
  auto set = [&](int scalar, float v) { to[scalar] = neutral(scalar) ? 0.f : v; };
  set(ALPHA, s[ENTRY_GAIN] * total[SUM_MWX]);
  set(ENTRY_BIAS, s[ENTRY_GAIN] * masked);
  set(ENTRY_GAIN, s[ALPHA] * total[SUM_MWX] + s[ENTRY_BIAS] * masked);
  set(BEFORE1, total[SUM_W]);
  set(AFTER1, after1);
  set(INNER_GAIN, s[BETA] * total[SUM_UR] / s[INNER_GAIN]);
  set(BEFORE2, s[BETA] * total[SUM_U]);
  set(BETA, beta);
  set(A, total[SUM_TX]);
  set(DELTA, delta);
  set(FACTOR, product / s[FACTOR]);
  set(EXIT_GAIN, RELU_OUT ? product / s[EXIT_GAIN] : 0.f);
}

// Grid: (16 x 16 groups of a weight and one more, convolutions). The last column finishes scalars and biases.
extern "C" __global__ void __launch_bounds__(R_THREADS)
stage_reduce(const float* sums, const float* partials, const float* scalars, const float* biases, float* weight_gradients,
             float* scalar_gradients, float* bias_gradients, int convolutions, int images, int workers) {
  Items items(convolutions, images, workers);
  if (blockIdx.x < PAIRS * PAIRS) {
    if (weight_gradients) finish_weight(partials, scalars, weight_gradients, items);
  } else if (scalar_gradients && !(blockIdx.y & 1)) {
    finish_scalars(sums, partials, scalars, biases, scalar_gradients, bias_gradients, blockIdx.y / 2, images, items);
  }
}

// Weights (convolution, output, input, 3, 3) to the order in which warps read them, and the shifts after convolutions.
//
// Order: dx, 16 inputs, dy, 16 outputs, then 32 times 8 numbers. For the backward pass inputs and outputs are
// swapped and the kernel is flipped. Column g of tile n is channel 4·(g / 2) + 2n + g % 2 of its 16, so that a
// thread's four results are neighbours.
constexpr int P_THREADS = 256;

template <class Weight> DEVICE void store_fragments(bf16* to, Weight weight, int first, int count, int pair_stride, int step_stride) {
  for (int i = threadIdx.x; i < count * 9 * 32; i += P_THREADS) {
    int lane = i & 31, tap = i / 32 % 9, other = i / (32 * 9), dx = tap / 3, dy = tap % 3;
    u32 v[4];
    for (int j = 0; j < 4; j++) {
      // Registers of mma.sync by lanes, or for wgmma matrices of 8 outputs x 8 inputs.
      int n = NF_WGMMA ? lane >> 4 : j >> 1, g = NF_WGMMA ? lane & 7 : lane >> 2;
      int k = NF_WGMMA ? (lane & 8) + 2 * j : 2 * (lane & 3) + 8 * (j & 1), column = 4 * (g >> 1) + 2 * n + (g & 1);
      v[j] = weight(other, k, column, dy, dx) | (u32)weight(other, k + 1, column, dy, dx) << 16;
    }
    // Step (dx, 16 inputs), then dy, then 16 outputs; `first` and `other` are one of each.
    int at = dx * PAIRS * 3 * PAIRS + dy * PAIRS + first * pair_stride + other * step_stride;
    *(uint4*)(to + ((size_t)at * 32 + lane) * 8) = make_uint4(v[0], v[1], v[2], v[3]);
  }
}

// Grid: (convolutions, C / 16). Each thread block reads the weights of 16 outputs once and writes both orders.
extern "C" __global__ void __launch_bounds__(P_THREADS)
stage_pack(const void* weights, int wide, const float* scalars, const float* biases, bf16* forward, bf16* backward, float* shifts) {
  constexpr int LINE = C * 9 + 4;  // the weights of one output, and a gap against bank conflicts
  __shared__ __align__(16) bf16 slab[16 * LINE];
  int convolution = blockIdx.x, q = blockIdx.y;
  size_t from = (size_t)convolution * WEIGHT + q * 16 * C * 9;
  for (int i = threadIdx.x * 4; i < 16 * C * 9; i += P_THREADS * 4) {
    uint2 bits;
    if (wide) {
      float4 v = *(const float4*)((const float*)weights + from + i);
      bits = make_uint2(pack2(v.x, v.y), pack2(v.z, v.w));
    } else {
      bits = *(const uint2*)((const bf16*)weights + from + i);
    }
    *(uint2*)(slab + i / (C * 9) * LINE + i % (C * 9)) = bits;
  }
  __syncthreads();
  auto output_column = [&](int kt, int k, int column, int dy, int dx) { return slab[column * LINE + (kt * 16 + k) * 9 + dy * 3 + dx]; };
  auto input_column = [&](int pair, int k, int column, int dy, int dx) {
    return slab[k * LINE + (pair * 16 + column) * 9 + (2 - dy) * 3 + 2 - dx];
  };
  store_fragments(forward + (size_t)convolution * WEIGHT, output_column, q, PAIRS, 1, 3 * PAIRS);
  if (backward) store_fragments(backward + (size_t)convolution * WEIGHT, input_column, q, PAIRS, 3 * PAIRS, 1);
  // conv(x + b) = conv of x with -b on its border + b times the sum of the weights.
  const float* s = scalars + convolution / 2 * SCALARS;
  for (int c = threadIdx.x >> 5; c < 16; c += P_THREADS / 32) {
    float sum = 0.f;
    for (int i = threadIdx.x & 31; i < 9 * C; i += 32) sum += low_of(slab[c * LINE + i]);
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    size_t at = (size_t)convolution * C + q * 16 + c;
    float bias = biases ? biases[at] : 0.f;
    if (threadIdx.x & 31) continue;
    shifts[at] = convolution & 1 ? s[BETA] * (bias + s[BEFORE2] * sum) + s[DELTA] : bias + s[AFTER1] + s[BEFORE1] * sum;
  }
}

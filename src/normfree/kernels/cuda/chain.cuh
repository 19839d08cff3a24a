// The chain of a stage: all its blocks for one image, forward or backward, without leaving the multiprocessor.

// x' = p(c·(a·x + β·f(e(α·x)) + δ)) for all blocks. `shifts` holds the offset per channel added after each convolution.
// Keeps bfloat16 copies of the stream before each block (and the last output) and of the inner activations.
extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1)
stage_forward(const Stream* x, const char* weights, const float* shifts, const float* scalars, bf16* kept, bf16* kept_inner,
              Stream* out, int blocks, int images) {
  extern __shared__ __align__(1024) char memory[];
  u32 input = shared_address(memory), inner = input + BUFFER;
  Owner own;
  Border border(own.rank);
  Exchange exchange;
  Ring ring;
  auto source = [=](int slice) { return weights + (size_t)slice * SLICE_BYTES; };
  ring.init(inner + BUFFER, 2 * blocks * SLICES);
  exchange.init(inner + BUFFER + RING * (SLICE_BYTES + 16), own.rank);
  barriers_are_ready();
  ring.start(source);
  Held stream;
  float s[SCALARS];
  load_scalars(s, scalars);
  float4 shift1[Q], shift2[Q];
  load_shift(shift1, shifts, own);
  exchange.begin();
  EACH_OWNED {
    float v[4];
    load_stream(image_of(x, 0, images, own.image) + own.element(m, q, h), v);
    uint2 bits = stream.set<false>(m, q, h, v);
    if (kept) *(uint2*)(image_of(kept, 0, images, own.image) + own.element(m, q, h)) = bits;
    exchange.put(input, own, m, q, h, entered(bits, s));
  }
  border.fill(input, neutral(BEFORE1) ? 0.f : -s[BEFORE1]);
  if (neutral(BEFORE2)) border.fill(inner, 0.f);
  exchange.end();
  Sums sum;
  for (int b = 0; b < blocks; b++) {
    start_at(sum, shift1);
    load_shift(shift2, shifts + (size_t)(2 * b + 1) * C, own);
    convolve(input, own, ring, source, sum);
    bf16* keep = kept_inner ? image_of(kept_inner, b, images, own.image) : 0;
    exchange.begin();
    EACH_OWNED {
      float z[4] = RESULT(sum);
      for (int i = 0; i < 4; i++) z[i] = times<INNER_GAIN>(z[i], s);
      uint2 bits = pack4<true>(z);
      exchange.put(inner, own, m, q, h, bits);
      if (keep) *(uint2*)(keep + own.element(m, q, h)) = bits;
    }
    if (!neutral(BEFORE2)) border.fill(inner, -s[BEFORE2]);
    exchange.end();
    float now[SCALARS];
#pragma unroll
    for (int i = BETA; i < SCALARS; i++) now[i] = s[i];
    bool last = b + 1 == blocks;
    if (!last) load_scalars(s, scalars + (size_t)(b + 1) * SCALARS), load_shift(shift1, shifts + (size_t)(2 * b + 2) * C, own);
    start_at_zero(sum);
    convolve(inner, own, ring, source, sum);
    keep = kept && (RELU_OUT || !last) ? image_of(kept, b + 1, images, own.image) : 0;
    exchange.begin();
    EACH_OWNED {
      float y[4] = RESULT(sum), v[4], add[4] = {shift2[q].x, shift2[q].y, shift2[q].z, shift2[q].w};
      stream.get(m, q, h, v);
      for (int i = 0; i < 4; i++) {
        v[i] = neutral(A) ? v[i] + add[i] : fmaf(now[A], v[i], add[i]);
        v[i] = neutral(BETA) ? v[i] + y[i] : fmaf(now[BETA], y[i], v[i]);
        v[i] = times<FACTOR>(v[i], now);
        if (RELU_OUT) v[i] = times<EXIT_GAIN>(v[i], now);
      }
      uint2 bits = stream.set<RELU_OUT>(m, q, h, v);
      if (keep) *(uint2*)(keep + own.element(m, q, h)) = bits;
      if (last) stream.store(image_of(out, 0, images, own.image) + own.element(m, q, h), m, q, h);
      exchange.put(input, own, m, q, h, entered(bits, s));
    }
    if (!neutral(BEFORE1)) border.fill(input, -s[BEFORE1]);
    exchange.end();
  }
  leave();
}

// The sums over a warp of 8 values of each lane: lane 4i holds the i-th. Halves are exchanged, so 9 shuffles do it.
DEVICE float sum8(float (&v)[8], int lane) {
#pragma unroll
  for (int width = 4; width; width >>= 1)
#pragma unroll
    for (int i = 0; i < width; i++) {
      bool upper = lane & (width * 4);
      float send = upper ? v[i] : v[i + width], keep = upper ? v[i + width] : v[i];
      v[i] = keep + __shfl_xor_sync(~0u, send, width * 4);
    }
  v[0] += __shfl_xor_sync(~0u, v[0], 2);
  return v[0] + __shfl_xor_sync(~0u, v[0], 1);
}
// Copy a kept image, with the rows above and below that belong to the neighbours, to a buffer with a border.
DEVICE void fetch_image(u32 buffer, const bf16* image, int rank) {
  for (int i = threadIdx.x; i < (ROWS + 2) * S * CHUNKS; i += THREADS) {
    int row = i / (S * CHUNKS), column = i / CHUNKS % S, y = rank * ROWS + row - 1;
    if (y >= 0 && y < S) copy16(buffer + offset(row, column + 1, i % CHUNKS), image + ((y * S + column) * C + i % CHUNKS * 8));
  }
}
// The branch's view of the copied image; each thread changes the chunks that it copied.
DEVICE void enter_image(u32 buffer, int rank, const float* s) {
  for (int i = threadIdx.x; ENTRY && i < (ROWS + 2) * S * CHUNKS; i += THREADS) {
    int row = i / (S * CHUNKS), column = i / CHUNKS % S, y = rank * ROWS + row - 1;
    if (y < 0 || y >= S) continue;
    u32 at = buffer + offset(row, column + 1, i % CHUNKS);
    uint4 v = load_shared16(at);
    uint2 low = entered(make_uint2(v.x, v.y), s), high = entered(make_uint2(v.z, v.w), s);
    store_shared16(at, make_uint4(low.x, low.y, high.x, high.y));
  }
}
DEVICE uint2 positive4(uint2 v) { return make_uint2(positive2(v.x), positive2(v.y)); }

// Signal gradients from the last block to the first. `kept`, `inner`, `scalars` and the outputs begin at the first
// block of this segment of the stage. Stores the inputs of the weight gradients: gradients[2b] at the result of the first
// convolution, gradients[2b + 1] at the sum, before β. With RECOMPUTE it writes the inner activations, too.
extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1)
stage_backward(const Stream* gradient, const char* weights, const char* forward_weights, const float* shifts,
               const float* scalars, const bf16* kept, bf16* kept_inner, bf16* gradients, Stream* input_gradient,
               float* sums, int blocks, int images) {
  extern __shared__ __align__(1024) char memory[];
  u32 outer = shared_address(memory), middle = outer + BUFFER, again = middle + BUFFER;
  u32 rest = outer + (RECOMPUTE ? 3 : 2) * BUFFER;
  Owner own;
  Border border(own.rank);
  constexpr int convolutions = RECOMPUTE ? 3 : 2;  // of a block
  auto source = [=](int slice) {
    int number = slice / SLICES, block = blocks - 1 - number / convolutions, which = number % convolutions;
    size_t part = slice % SLICES * SLICE_BYTES;
    if (RECOMPUTE && which == 0) return forward_weights + (size_t)2 * block * WEIGHT * 2 + part;
    return weights + (size_t)(2 * block + (which == convolutions - 2)) * WEIGHT * 2 + part;
  };
  Exchange exchange;
  Ring ring;
  ring.init(rest, convolutions * blocks * SLICES);
  exchange.init(rest + RING * (SLICE_BYTES + 16), own.rank);
  barriers_are_ready();
  ring.start(source);
  border.fill(outer, 0.f);
  border.fill(middle, 0.f);
  Held stream;  // the gradient at the sum
  float s[SCALARS];
  load_scalars(s, scalars + (size_t)(blocks - 1) * SCALARS);
  const bf16* output = image_of(kept, blocks, images, own.image);
  exchange.begin();
  EACH_OWNED {
    float g[4];
    load_stream(image_of(gradient, 0, images, own.image) + own.element(m, q, h), g);
    for (int i = 0; i < 4; i++) {
      g[i] = times<FACTOR>(g[i], s);
      if (RELU_OUT) g[i] = times<EXIT_GAIN>(g[i], s);
    }
    uint2 bits;
    if (RELU_OUT) bits = stream.set_where(m, q, h, g, positive4(*(const uint2*)(output + own.element(m, q, h))));
    else bits = stream.set<false>(m, q, h, g);
    exchange.put(outer, own, m, q, h, bits);
    *(uint2*)(image_of(gradients, 2 * blocks - 1, images, own.image) + own.element(m, q, h)) = bits;
  }
  Sums sum;
  OwnedBits saved;  // the inner activation, then the stream's value
  for (int b = blocks - 1; b >= 0; b--) {
    float part[SUM_COUNT] = {};
    const bf16* x = image_of(kept, b, images, own.image);
    if (RECOMPUTE) {
      float4 shift[Q];
      load_shift(shift, shifts + (size_t)2 * b * C, own);
      fetch_image(again, x, own.rank);
      copy_commit();
      border.fill(again, -s[BEFORE1]);
      copy_wait();
      enter_image(again, own.rank, s);
      publish_to_tensor_cores();
      __syncthreads();
      start_at(sum, shift);
      convolve(again, own, ring, source, sum);
      EACH_OWNED {
        float z[4] = RESULT(sum);
        for (int i = 0; i < 4; i++) z[i] = times<INNER_GAIN>(z[i], s);
        saved[m][q][h] = pack4<true>(z);
        *(uint2*)(image_of(kept_inner, b, images, own.image) + own.element(m, q, h)) = saved[m][q][h];
      }
    } else {
      const bf16* inner = image_of(kept_inner, b, images, own.image);
      EACH_OWNED saved[m][q][h] = *(const uint2*)(inner + own.element(m, q, h));
    }
    exchange.end();
    start_at_zero(sum);
    convolve(outer, own, ring, source, sum);
    bf16* to = image_of(gradients, 2 * b, images, own.image);
    float back = neutral(INNER_GAIN) ? s[BETA] : s[INNER_GAIN] * s[BETA];
    exchange.begin();
    EACH_OWNED {
      float u[4] = RESULT(sum), r[4];
      if (NEED_UR) unpack4(saved[m][q][h], r);
      for (int i = 0; i < 4; i++) {
        if (NEED_U) part[SUM_U] += u[i];
        if (NEED_UR) part[SUM_UR] = fmaf(u[i], r[i], part[SUM_UR]);
        if (!neutral(BETA) || !neutral(INNER_GAIN)) u[i] *= back;
      }
      uint2 bits = pack4<false>(u), mask = positive4(saved[m][q][h]);
      bits.x &= mask.x, bits.y &= mask.y;
      exchange.put(middle, own, m, q, h, bits);
      *(uint2*)(to + own.element(m, q, h)) = bits;
    }
    EACH_OWNED saved[m][q][h] = *(const uint2*)(x + own.element(m, q, h));
    exchange.end();
    float now[SCALARS];
#pragma unroll
    for (int i = 0; i < SCALARS; i++) now[i] = s[i];
    float through = now[ALPHA] * now[ENTRY_GAIN];
    if (b) load_scalars(s, scalars + (size_t)(b - 1) * SCALARS);
    start_at_zero(sum);
    convolve(middle, own, ring, source, sum);
    to = b ? image_of(gradients, 2 * b - 1, images, own.image) : 0;
    exchange.begin();
    EACH_OWNED {
      float w[4] = RESULT(sum), v[4], g[4];
      unpack4(saved[m][q][h], v);
      stream.get(m, q, h, g);
      for (int i = 0; i < 4; i++) {
        if (NEED_W) part[SUM_W] += w[i];
        if (NEED_TX) part[SUM_TX] = fmaf(g[i], v[i], part[SUM_TX]);
        if (RELU_IN) w[i] = (neutral(ALPHA) ? v[i] + now[ENTRY_BIAS] : fmaf(now[ALPHA], v[i], now[ENTRY_BIAS])) > 0.f ? w[i] : 0.f;
        if (NEED_W && RELU_IN) part[SUM_MW] += w[i];
        if (NEED_MWX) part[SUM_MWX] = fmaf(w[i], v[i], part[SUM_MWX]);
        g[i] = times<A>(g[i], now);
        g[i] = ENTRY ? fmaf(through, w[i], g[i]) : g[i] + w[i];
        if (b) {
          g[i] = times<FACTOR>(g[i], s);
          if (RELU_OUT) g[i] = times<EXIT_GAIN>(g[i], s);
        }
      }
      uint2 bits;
      if (RELU_OUT && b) bits = stream.set_where(m, q, h, g, positive4(saved[m][q][h]));
      else bits = stream.set<false>(m, q, h, g);
      if (b) *(uint2*)(to + own.element(m, q, h)) = bits;
      if (!b) stream.store(image_of(input_gradient, 0, images, own.image) + own.element(m, q, h), m, q, h);
      exchange.put(outer, own, m, q, h, bits);
    }
    if (NEED_ANY) {
      float total = sum8(part, own.lane);
      size_t row = ((size_t)b * images * SPLIT + blockIdx.x) * WARPS + own.warp;
      if (!(own.lane & 3)) sums[row * SUM_COUNT + (own.lane >> 2)] = total;
    }
  }
  exchange.end();
  leave();
}

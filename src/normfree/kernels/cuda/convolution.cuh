// A 3 x 3 convolution of one image in shared memory, with its weight ring, border and neighbour exchange.

// Weights flow through a ring of slices in shared memory, which one thread refills. A slot is free when every warp of the
// thread block has read it. Thread blocks do not share their loads: another one's copy into this memory would need a
// release of cluster scope by every warp, which costs more than the loads.
struct Ring {
  u32 slots, full, empty;
  int slice, total;
  // Slices that are `ahead` of the one to be released next.
  DEVICE u32 slot(int ahead = 0) const { return slots + (slice + ahead) % RING * SLICE_BYTES; }
  DEVICE void wait(int ahead = 0) const { barrier_wait(full + (slice + ahead) % RING * 8, (slice + ahead) / RING & 1); }

  // Set up the barriers; a barrier of all threads must follow before `start`.
  DEVICE void init(u32 memory, int slices) {
    slots = memory, full = memory + RING * SLICE_BYTES, empty = full + RING * 8, slice = 0, total = slices;
    if (threadIdx.x == 0)
      for (int i = 0; i < RING; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, WARPS);
  }
  template <class Source> DEVICE void start(Source source) {
    if (threadIdx.x == 0)
      for (int i = 0; i < RING && i < total; i++) fetch(i, source(i));
  }
  DEVICE void fetch(int number, const char* from) {
    u32 to = slots + number % RING * SLICE_BYTES, barrier = full + number % RING * 8;
    barrier_expect(barrier, SLICE_BYTES);
    copy_bulk(to, from, SLICE_BYTES, barrier);
  }
  // This warp is done with its slice. Thread 0 then refills the slot before it, which all warps have left: a barrier of all
  // threads lies between two convolutions, and here between two slices of one. wgmma counts the warps instead.
  template <class Source> DEVICE void release(Source source) {
#if NF_WGMMA
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(empty + slice % RING * 8);
#else
    if (SLICES > 1) __syncthreads();
#endif
    int next = slice - 1 + RING;
    if (threadIdx.x == 0 && slice > 0 && next < total) {
#if NF_WGMMA
      barrier_wait(empty + (slice - 1) % RING * 8, (slice - 1) / RING & 1);
#endif
      fetch(next, source(next));
    }
    __syncwarp();
    slice++;
  }
};

// Thread blocks that share an image send each other the rows at their common edge, once per convolution.
// Two barriers alternate: a neighbour that is ahead by one convolution never signals the one still waited for.
struct Exchange {
  u32 barriers;
  int number, rank;
  DEVICE void init(u32 memory, int r) {
    barriers = memory, number = 0, rank = r;
    if (SPLIT > 1 && threadIdx.x == 0) barrier_init(barriers, 1), barrier_init(barriers + 8, 1);
  }
  DEVICE u32 barrier() const { return barriers + (number & 1) * 8; }
  DEVICE void begin() const {
    int neighbours = (rank > 0) + (rank < SPLIT - 1);
    if (SPLIT > 1 && threadIdx.x == 0) barrier_expect(barrier(), neighbours * S * C * 2);
  }
  // Write owned values to a buffer; rows that a neighbour reads go to it, too.
  DEVICE void put(u32 buffer, const Owner& own, int m, int q, int h, uint2 v) const {
    u32 at = buffer + own.place(m, q, h);
    store_shared8(at, v);
    if (SPLIT > 1) {
      int row = own.row_of(m, h), base = cluster_rank() - rank;
      if (row == 0 && rank > 0) store_peer8(at + ROWS * ROW_BYTES, base + rank - 1, v, barrier());
      if (row == ROWS - 1 && rank < SPLIT - 1) store_peer8(at - ROWS * ROW_BYTES, base + rank + 1, v, barrier());
    }
  }
  DEVICE void end() {
    publish_to_tensor_cores();
    __syncthreads();
    if (SPLIT > 1) barrier_wait(barrier(), number >> 1 & 1);
    number++;
  }
};

// A bias b before a convolution adds to pixels, not to the border. The buffers hold the signal without b and -b on the
// border; with b times the sum of the weights after the convolution this is exact.
struct Border {
  static constexpr int SIDES = (ROWS + 2) * 2, COUNT = (SIDES + 2 * S) * CHUNKS, MINE = (COUNT + THREADS - 1) / THREADS;
  u32 places[MINE];
  DEVICE Border(int rank) {
#pragma unroll
    for (int j = 0; j < MINE; j++) {
      int i = threadIdx.x + j * THREADS, p = i / CHUNKS, chunk = i % CHUNKS;
      bool here = i < COUNT;
      int row = p >> 1, column = (p & 1) * (S + 1);
      if (p >= SIDES) {
        bool top = p - SIDES < S;
        row = top ? 0 : ROWS + 1, column = (p - SIDES) % S + 1;
        here = here && rank == (top ? 0 : SPLIT - 1);  // otherwise the neighbour writes this row
      }
      places[j] = here ? offset(row, column, chunk) : ~0u;
    }
  }
  DEVICE void fill(u32 buffer, float value) const {
    u32 v = pack2(value, value);
#pragma unroll
    for (int j = 0; j < MINE; j++)
      if (places[j] != ~0u) store_shared16(buffer + places[j], make_uint4(v, v, v, v));
  }
};

typedef float Sums[TM][TN][4];
// Four neighbouring channels of the result; the order of the packed weights makes them neighbours.
#define RESULT(sum) {sum[m][2 * q][2 * h], sum[m][2 * q][2 * h + 1], sum[m][2 * q + 1][2 * h], sum[m][2 * q + 1][2 * h + 1]}

DEVICE void load_shift(float4 (&shift)[Q], const float* from, const Owner& own) {
#pragma unroll
  for (int q = 0; q < Q; q++) shift[q] = __ldg((const float4*)(from + own.channel + q * 16));
}
DEVICE void start_at(Sums& sum, const float4 (&shift)[Q]) {
#pragma unroll
  for (int m = 0; m < TM; m++)
#pragma unroll
    for (int q = 0; q < Q; q++)
#pragma unroll
      for (int h = 0; h < 4; h += 2)
        sum[m][2 * q][h] = shift[q].x, sum[m][2 * q][h + 1] = shift[q].y, sum[m][2 * q + 1][h] = shift[q].z, sum[m][2 * q + 1][h + 1] = shift[q].w;
}
DEVICE void start_at_zero(Sums& sum) {
#pragma unroll
  for (int i = 0; i < TM * TN * 4; i++) sum[i / (TN * 4)][i / 4 % TN][i % 4] = 0.f;
}

#if NF_WGMMA
// sum += 3 x 3 convolution of the image, for the 8 x 8 pixels and the channels that four warps own. The tensor cores read
// pixels and weights from shared memory; the swizzle of the buffers is one of theirs.
template <class Source> DEVICE void convolve(u32 image, const Owner& own, Ring& ring, Source source, Sums& sum) {
  static_assert(TM == 1 && (C == 32 || C == 64), "a pixel must be as wide as a swizzled row");
  u32 corner = image + ((own.row & ~7) * PITCH + own.segment * 8) * C * 2;
  u64 pixels = matrix_at(corner, 16, ROW_BYTES, C == 64 ? 1 : 2);
#pragma unroll
  for (int slice = 0; slice < SLICES; slice++) {
    ring.wait(slice > 0);
    wgmma_begin();
    u64 weights = matrix_at(ring.slot(slice > 0) + own.wn * TN * 256, 128, 256, 0);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      int step = slice * STEPS + i, dx = step / PAIRS, k = step % PAIRS;
#pragma unroll
      for (int dy = 0; dy < 3; dy++)
        multiply64(sum[0], pixels + ((dy * PITCH + dx) * C * 2 + k * 32 >> 4), weights + ((i * 3 + dy) * PAIRS * 512 >> 4));
    }
    wgmma_commit();
    if (slice > 0) {
      wgmma_wait<1>();
      ring.release(source);
    }
  }
  wgmma_wait<0>();
  ring.release(source);
}
#else
// sum += 3 x 3 convolution of the image, for the pixels and channels that this warp owns.
// One load of input pixels serves up to three output rows, so a step takes all three vertical taps of one dx.
template <class Source> DEVICE void convolve(u32 image, const Owner& own, Ring& ring, Source source, Sums& sum) {
  int pixel = own.lane & 15, half = own.lane >> 4;
  int row = own.row + (TILE_ROWS == 2 ? pixel >> 3 : 0), column = own.segment * TILE_WIDTH + (TILE_ROWS == 2 ? pixel & 7 : pixel);
#pragma unroll(SLICES > 3 ? 1 : SLICES)
  for (int slice = 0; slice < SLICES; slice++) {
    ring.wait();
    u32 weights = ring.slot() + own.wn * Q * 512 + own.lane * 16;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      int step = slice * STEPS + i, dx = step / PAIRS, k = step % PAIRS;
      uint4 b[3][Q];
#pragma unroll
      for (int dy = 0; dy < 3; dy++)
#pragma unroll
        for (int q = 0; q < Q; q++) b[dy][q] = load_shared16(weights + ((i * 3 + dy) * PAIRS + q) * 512);
      u32 at = image + offset(row, column + dx, 2 * k + half);
#pragma unroll
      for (int r = 0; r < SPAN; r++) {
        u32 a[4];
        load_matrices(at + r * ROW_BYTES, a);
#pragma unroll
        for (int dy = 0; dy < 3; dy++) {
          if (r < dy || (r - dy) % TILE_ROWS || (r - dy) / TILE_ROWS >= TM) continue;
          int m = (r - dy) / TILE_ROWS;
#pragma unroll
          for (int q = 0; q < Q; q++) {
            multiply(sum[m][2 * q], a, b[dy][q].x, b[dy][q].y);
            multiply(sum[m][2 * q + 1], a, b[dy][q].z, b[dy][q].w);
          }
        }
      }
    }
    ring.release(source);
  }
}

#endif

DEVICE void load_scalars(float (&s)[SCALARS], const float* from) {
#pragma unroll
  for (int i = 0; i < SCALARS; i++) s[i] = __ldg(from + i);
}
template <class T> DEVICE T* image_of(T* p, size_t number, int images, int image) {
  return p + (number * images + image) * IMAGE;
}
// Barriers are ready in the whole cluster after this.
DEVICE void barriers_are_ready() {
  barrier_init_visible();
  if (SPLIT > 1) cluster_barrier(); else __syncthreads();
}
// A neighbour may still signal this block's barriers, so no block leaves early.
DEVICE void leave() {
  if (SPLIT > 1) cluster_barrier();
}

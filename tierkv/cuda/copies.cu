// Scattered copies. Needs no header; compiled at run time by NVRTC (through CuPy), and by nvcc in the tests.
//
// table[0..n) = to, table[n..2n) = from, table[2n..3n) = bytes. A block takes pieces of CHUNK bytes of one run; `pieces`
// is how many the longest run has. Runs that begin and end on 16 bytes are copied by 16, others by 4 or by 1: nothing is
// touched but what the table says.

typedef long long i64;
typedef unsigned long long u64;

#define CHUNK 16384

template <typename Word>
__device__ void copy_words(char* to, const char* from, i64 bytes) {
  Word* out = (Word*)to;
  const Word* in = (const Word*)from;
  i64 words = bytes / sizeof(Word), step = blockDim.x;
  for (i64 at = threadIdx.x; at < words; at += 4 * step) {
    Word held[4];  // four loads under way at once: over the bus each takes microseconds
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (at + k * step < words) held[k] = in[at + k * step];
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (at + k * step < words) out[at + k * step] = held[k];
  }
}

extern "C" __global__ void copy_runs(const i64* table, i64 n, i64 pieces) {
  for (i64 item = blockIdx.x; item < n * pieces; item += gridDim.x) {
    i64 run = item / pieces, first = (item % pieces) * CHUNK;
    i64 bytes = table[2 * n + run] - first;
    if (bytes <= 0) continue;
    if (bytes > CHUNK) bytes = CHUNK;
    char* to = (char*)table[run] + first;
    const char* from = (const char*)table[n + run] + first;
    u64 ends = (u64)to | (u64)from | (u64)bytes;
    if ((ends & 15) == 0)
      copy_words<uint4>(to, from, bytes);
    else if ((ends & 3) == 0)
      copy_words<unsigned int>(to, from, bytes);
    else
      copy_words<char>(to, from, bytes);
  }
}

// For tests and measurements: a producer that takes its time.
extern "C" __global__ void produce_late(uint4* memory, i64 words, unsigned int value, i64 cycles) {
  i64 until = clock64() + cycles;
  while (clock64() < until) {
  }
  for (i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x; at < words; at += (i64)gridDim.x * blockDim.x)
    memory[at] = make_uint4(value, value, value, value);
}

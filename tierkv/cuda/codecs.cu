// The codecs int8 and fp8_e4m3 of tierkv/codec_scaled.py where the bytes are: the same numbers, bit by bit.
//
// values[rows][tokens][channels], one row for each layer, segment and outer index. Compiled at run time by NVRTC (through
// CuPy), and by nvcc in the tests.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

typedef long long i64;

#define ENDLESS __int_as_float(0x7f800000)
#define WIDTH 4 /* channels of a thread */
#define ACROSS 32
#define DOWN 8 /* a block has ACROSS x DOWN threads */

__device__ inline float widened(float x) { return x; }
__device__ inline float widened(__half x) { return __half2float(x); }
__device__ inline float widened(__nv_bfloat16 x) { return __bfloat162float(x); }

// What was finite stays so, also where its nearest neighbour among the codec's numbers is beyond the end.
__device__ inline float within(float x, float most) { return x != x ? x : fmaxf(-most, fminf(most, x)); }
__device__ inline void narrow(float x, float* to) { *to = within(x, 3.4028234663852886e38f); }
__device__ inline void narrow(float x, __half* to) { *to = __float2half_rn(within(x, 65504.f)); }
__device__ inline void narrow(float x, __nv_bfloat16* to) {
  *to = __float2bfloat16_rn(within(x, 3.3895313892515355e38f));
}

__device__ inline bool is_finite(float x) { return fabsf(x) < ENDLESS; }

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T x[N];
};

// ---- int8: one fp16 scale a channel -----------------------------------------------------------------------------
//
// scales[rows][channels]: 0 stands for a channel of zeros, a NaN for one that is kept as it is (an exception). The second
// pass over a block's channels reads them from the cache: tokens x 128 channels are a few dozen KiB.

template <typename T, int N>
__device__ void int8_encode(const T* values, signed char* quantised, __half* scales, int tokens, int channels) {
  __shared__ float most[DOWN][ACROSS * N + 1];
  int channel = (blockIdx.x * ACROSS + threadIdx.x) * N;
  i64 row = (i64)blockIdx.y * tokens * channels;
  float largest[N];
  for (int k = 0; k < N; k++) largest[k] = 0.f;
  if (channel < channels) {
#pragma unroll 4
    for (int token = threadIdx.y; token < tokens; token += DOWN) {
      Pack<T, N> held = *(const Pack<T, N>*)(values + row + (i64)token * channels + channel);
#pragma unroll
      for (int k = 0; k < N; k++) {
        float x = fabsf(widened(held.x[k]));
        largest[k] = is_finite(x) ? fmaxf(largest[k], x) : ENDLESS;  // a NaN is not finite either
      }
    }
  }
  for (int k = 0; k < N; k++) most[threadIdx.y][threadIdx.x * N + k] = largest[k];
  __syncthreads();
  float step[N];
  for (int k = 0; k < N; k++) {
    for (int other = 0; other < DOWN; other++)
      largest[k] = fmaxf(largest[k], most[other][threadIdx.x * N + k]);
    __half scale = __float2half_ru(__fdiv_rn(largest[k], 127.f));  // up: no value is beyond 127 steps
    bool kept = !is_finite(__half2float(scale));
    step[k] = kept ? 0.f : __half2float(scale);
    if (threadIdx.y == 0 && channel + k < channels)
      scales[(i64)blockIdx.y * channels + channel + k] = kept ? __ushort_as_half(0x7e00) : scale;
  }
  if (channel < channels) {
#pragma unroll 4
    for (int token = threadIdx.y; token < tokens; token += DOWN) {
      i64 at = row + (i64)token * channels + channel;
      Pack<T, N> held = *(const Pack<T, N>*)(values + at);
      Pack<signed char, N> out;
#pragma unroll
      for (int k = 0; k < N; k++) {
        float x = step[k] > 0.f ? rintf(__fdiv_rn(widened(held.x[k]), step[k])) : 0.f;
        out.x[k] = (signed char)fmaxf(-127.f, fminf(127.f, x));
      }
      *(Pack<signed char, N>*)(quantised + at) = out;
    }
  }
}

template <typename T, int N>
__device__ void int8_decode(const signed char* quantised, const __half* scales, T* values, int tokens, int channels) {
  int channel = (blockIdx.x * ACROSS + threadIdx.x) * N;
  if (channel >= channels) return;
  i64 row = (i64)blockIdx.y * tokens * channels;
  float step[N];
  for (int k = 0; k < N; k++) {
    float scale = __half2float(scales[(i64)blockIdx.y * channels + channel + k]);
    step[k] = is_finite(scale) ? scale : 0.f;  // no encoder makes an infinite one; the host's decoder takes it so
  }
#pragma unroll 4
  for (int token = threadIdx.y; token < tokens; token += DOWN) {
    i64 at = row + (i64)token * channels + channel;
    Pack<signed char, N> held = *(const Pack<signed char, N>*)(quantised + at);
    Pack<T, N> out;
#pragma unroll
    for (int k = 0; k < N; k++) narrow((float)held.x[k] * step[k], &out.x[k]);
    *(Pack<T, N>*)(values + at) = out;
  }
}

// ---- fp8_e4m3: a power of two a row -----------------------------------------------------------------------------
//
// Stored is value * 2^-exponent, rounded to nearest even. exponents[rows]: the smallest (not below -100) with which the
// row's largest finite magnitude is at most 448. One block a row; `size` = tokens x channels.

template <typename T, int N>
__device__ void fp8_encode(const T* values, signed char* exponents, unsigned char* stored, i64 size) {
  __shared__ float most[256];
  __shared__ float factor;
  i64 row = (i64)blockIdx.x * size;
  float largest = 0.f;
#pragma unroll 4
  for (i64 at = threadIdx.x * N; at < size; at += blockDim.x * N) {
    Pack<T, N> held = *(const Pack<T, N>*)(values + row + at);
#pragma unroll
    for (int k = 0; k < N; k++) {
      float x = fabsf(widened(held.x[k]));
      if (is_finite(x)) largest = fmaxf(largest, x);
    }
  }
  most[threadIdx.x] = largest;
  __syncthreads();
  for (int half = blockDim.x / 2; half; half /= 2) {
    if (threadIdx.x < half) most[threadIdx.x] = fmaxf(most[threadIdx.x], most[threadIdx.x + half]);
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    int exponent = -100;
    if (most[0] > 0.f) {
      float fraction = frexpf(most[0], &exponent);  // fraction * 2^exponent, fraction in [0.5, 1); 448 = 0.875 * 2^9
      exponent = max(-100, exponent - (fraction <= 0.875f ? 9 : 8));
    }
    exponents[blockIdx.x] = (signed char)exponent;
    factor = ldexpf(1.f, -exponent);
  }
  __syncthreads();
  float by = factor;
#pragma unroll 4
  for (i64 at = threadIdx.x * N; at < size; at += blockDim.x * N) {
    Pack<T, N> held = *(const Pack<T, N>*)(values + row + at);
    Pack<unsigned char, N> out;
#pragma unroll
    for (int k = 0; k < N; k++)
      out.x[k] = __nv_cvt_float_to_fp8(widened(held.x[k]) * by, __NV_SATFINITE, __NV_E4M3);
    *(Pack<unsigned char, N>*)(stored + row + at) = out;
  }
}

template <typename T, int N>
__device__ void fp8_decode(const unsigned char* stored, const signed char* exponents, T* values, i64 size) {
  float by = ldexpf(1.f, exponents[blockIdx.x]);
  i64 row = (i64)blockIdx.x * size;
#pragma unroll 4
  for (i64 at = threadIdx.x * N; at < size; at += blockDim.x * N) {
    Pack<unsigned char, N> held = *(const Pack<unsigned char, N>*)(stored + row + at);
    Pack<T, N> out;
#pragma unroll
    for (int k = 0; k < N; k++)
      narrow(__half2float(__half(__nv_cvt_fp8_to_halfraw(held.x[k], __NV_E4M3))) * by, &out.x[k]);
    *(Pack<T, N>*)(values + row + at) = out;
  }
}

// NAME_4 where channels (int8) or the row's size (fp8) are a multiple of 4, else NAME_1.

#define CODECS(NAME, T, N)                                                                                          \
  extern "C" __global__ void int8_encode_##NAME##_##N(const T* v, signed char* q, __half* s, int t, int c) {        \
    int8_encode<T, N>(v, q, s, t, c);                                                                               \
  }                                                                                                                 \
  extern "C" __global__ void int8_decode_##NAME##_##N(const signed char* q, const __half* s, T* v, int t, int c) {  \
    int8_decode<T, N>(q, s, v, t, c);                                                                               \
  }                                                                                                                 \
  extern "C" __global__ void fp8_encode_##NAME##_##N(const T* v, signed char* e, unsigned char* s, i64 n) {         \
    fp8_encode<T, N>(v, e, s, n);                                                                                   \
  }                                                                                                                 \
  extern "C" __global__ void fp8_decode_##NAME##_##N(const unsigned char* s, const signed char* e, T* v, i64 n) {   \
    fp8_decode<T, N>(s, e, v, n);                                                                                   \
  }

CODECS(float32, float, 1)
CODECS(float32, float, 4)
CODECS(float16, __half, 1)
CODECS(float16, __half, 4)
CODECS(bfloat16, __nv_bfloat16, 1)
CODECS(bfloat16, __nv_bfloat16, 4)

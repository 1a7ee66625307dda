#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define LANES 16
#define KERNELS avx512_kernels
#include "kernels.h"

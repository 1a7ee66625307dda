#pragma GCC target("avx2,fma")
#define LANES 8
#define KERNELS avx2_kernels
#include "kernels.h"

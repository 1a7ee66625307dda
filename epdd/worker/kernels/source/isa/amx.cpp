#include "library.h"
#if __GNUC__ >= 11
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define LANES 16
#define AMX
#define KERNELS amx_kernels
#include "kernels.h"
#else
extern const Kernels amx_kernels = {};
#endif

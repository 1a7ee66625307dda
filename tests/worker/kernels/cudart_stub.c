/* The calls of libcudart that epdd.worker.kernels.cuda makes, over host memory.  A handle is the address and a stamp; the
   address 0xbad is refused, so is memory beyond a gigabyte. */
#include <stdlib.h>
#include <string.h>

typedef struct { char reserved[64]; } handle_t;
static int last_error;
static int fail(int code) { return last_error = code; }

int cudaMalloc(void **address, size_t size) {
    if (size > 1u << 30) return fail(2);
    *address = calloc(1, size);
    return 0;
}
int cudaFree(void *address) { free(address); return 0; }
int cudaIpcGetMemHandle(handle_t *handle, void *address) {
    if (address == (void *)0xbad) return fail(1);
    memset(handle, 7, sizeof *handle);
    memcpy(handle, &address, sizeof address);
    return 0;
}
int cudaIpcOpenMemHandle(void **address, handle_t handle, unsigned flags) {
    if (flags != 1 || handle.reserved[63] != 7) return fail(400);
    memcpy(address, &handle, sizeof *address);
    return 0;
}
int cudaIpcCloseMemHandle(void *address) { return address == (void *)0xbad ? fail(1) : 0; }
int cudaHostRegister(void *address, size_t size, unsigned flags) {
    return address && size == 4096 && flags == 0 ? 0 : fail(712);
}
int cudaMemcpyAsync(void *target, const void *source, size_t size, int kind, void *stream) {
    if (kind != 4 || stream != (void *)0x5eed) return fail(700);
    memcpy(target, source, size);
    return 0;
}
int cudaGetLastError(void) { int code = last_error; last_error = 0; return code; }
const char *cudaGetErrorString(int code) { return code == 400 ? "invalid resource handle" : "some error"; }

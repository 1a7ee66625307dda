/* A libnvidia-ml.so.1 for tests: what the driver would answer is told by environment variables.
 *
 * NVML_STUB       one GPU each: "BUS_ID CPU_MASK;...", the mask in hexadecimal, "-" for it is not supported
 * NVML_STUB_INIT  return code of nvmlInit: 9 is "driver not loaded"
 * NVML_STUB_LOST  index of a GPU that falls off the bus, and the query it does so in: "1 name"
 * NVML_STUB_MIG   index of a GPU that is partitioned
 *
 * GPUs on the same PCI domain are joined by NVLink, others lie across sockets without peer access.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, LOST = 15 };
enum { GPUS_MAX = 16, WORDS_MAX = 16, DIGITS_MAX = 16 * WORDS_MAX };

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_info;
typedef struct { unsigned long long total, free, used; } memory_info;
typedef struct { char bus_id[32]; unsigned long mask[WORDS_MAX]; int has_mask; int lost; } gpu;

static gpu gpus[GPUS_MAX];
static unsigned count;

static int query(gpu *g, const char *name) {
    char query_lost[32] = "";
    int index = -1;
    const char *told = getenv("NVML_STUB_LOST");
    if (told && sscanf(told, "%d %31s", &index, query_lost) == 2 && g == &gpus[index] && !strcmp(name, query_lost))
        g->lost = 1;        /* and stays lost: a GPU does not come back by itself */
    return g->lost ? LOST : OK;
}

/* The last 16 digits are word 0. */
static void read_mask(const char *digits, unsigned long *words) {
    int length = strlen(digits);
    memset(words, 0, WORDS_MAX * sizeof *words);
    for (int i = 0; i < length; i++) {
        char digit[2] = {digits[length - 1 - i], 0};
        words[i / 16] |= strtoul(digit, NULL, 16) << 4 * (i % 16);
    }
}

int nvmlInitWithFlags(unsigned flags) {
    const char *rest = getenv("NVML_STUB"), *code = getenv("NVML_STUB_INIT");
    char mask[DIGITS_MAX + 1];
    int length;
    (void)flags;
    if (code)
        return atoi(code);
    for (count = 0; rest && count < GPUS_MAX; count++, rest += length) {
        gpu *g = &gpus[count];
        if (sscanf(rest, " %31s %256[^;] %n", g->bus_id, mask, &length) != 2)
            break;
        g->lost = 0;
        g->has_mask = strcmp(mask, "-") != 0;
        if (g->has_mask)
            read_mask(mask, g->mask);
        if (rest[length] == ';')
            length++;
    }
    return OK;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
int nvmlDeviceGetCount_v2(unsigned *found) { *found = count; return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu **handle) {
    if (index >= count)
        return INVALID;
    *handle = &gpus[index];
    return query(*handle, "handle");
}

int nvmlDeviceGetPciInfo_v3(gpu *g, pci_info *info) {
    memset(info, 0, sizeof *info);
    strcpy(info->bus_id, g->bus_id);
    return query(g, "pci");
}

int nvmlDeviceGetName(gpu *g, char *name, unsigned size) { snprintf(name, size, "Stub H200"); return query(g, "name"); }

int nvmlDeviceGetUUID(gpu *g, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-%04d", (int)(g - gpus));
    return query(g, "uuid");
}

int nvmlDeviceGetMemoryInfo(gpu *g, memory_info *info) {
    info->total = 141ULL << 30;
    info->used = 1ULL << 30;
    info->free = info->total - info->used;
    return query(g, "memory");
}

int nvmlDeviceGetMigMode(gpu *g, unsigned *current, unsigned *pending) {
    const char *told = getenv("NVML_STUB_MIG");
    *current = *pending = told && g == &gpus[atoi(told)];
    return query(g, "mig");
}

int nvmlDeviceGetCpuAffinity(gpu *g, unsigned words, unsigned long *masks) {
    memset(masks, 0, words * sizeof *masks);
    if (!g->has_mask)
        return NOT_SUPPORTED;
    memcpy(masks, g->mask, (words < WORDS_MAX ? words : WORDS_MAX) * sizeof *masks);
    return query(g, "affinity");
}

static int same_domain(gpu *a, gpu *b) { return !strncmp(a->bus_id, b->bus_id, 8); }

int nvmlDeviceGetTopologyCommonAncestor(gpu *a, gpu *b, unsigned *level) {
    *level = same_domain(a, b) ? 10 : 50;
    return query(a, "links") ? LOST : query(b, "links");
}

int nvmlDeviceGetP2PStatus(gpu *a, gpu *b, unsigned index, unsigned *status) {
    (void)index;
    *status = same_domain(a, b) ? 0 : 5;
    return query(a, "links") ? LOST : query(b, "links");
}

const char *nvmlErrorString(int code) {
    return code == 9 ? "Driver Not Loaded" : code == LOST ? "GPU is lost" : code == NOT_SUPPORTED ? "Not Supported"
        : "Stub error";
}

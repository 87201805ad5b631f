/* A CUDA library that shows the cards whose UUIDs FAKE_CUDA lists, 32 digits each, in that order;
 * it does not start without. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *uuids(void) { return getenv("CUDA_VISIBLE_DEVICES") ? NULL : getenv("FAKE_CUDA"); }

int cuInit(unsigned flags) { return flags || !uuids() ? 100 : 0; }

int cuDeviceGetCount(int *count) {
    *count = strlen(uuids()) / 32;
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return 0;
}

int cuDeviceGetUuid(unsigned char uuid[16], int device) {
    for (int i = 0; i < 16; i++)
        sscanf(uuids() + 32 * device + 2 * i, "%2hhx", &uuid[i]);
    return 0;
}

/* A driver's library that answers from the text file that FAKE_NVML names:
 *   card UUID MINOR UTILIZATION USED_BYTES TOTAL_BYTES MODEL   one line for each card
 *   mig UUID GPU_INSTANCE COMPUTE_INSTANCE USED_BYTES TOTAL_BYTES   an instance of the card above
 *   partitioned      the card above is, though it may have no instance
 *   lost             the card above does not answer
 *   hang             nvmlInit never returns
 *   fail CODE        nvmlInit fails
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST 64
enum { OK = 0, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, SHORT = 7, LOST = 15 };

struct device {
    char uuid[96], model[96];
    unsigned minor, utilization, instance, compute;
    unsigned long long used, total;
    int parent, partitioned, lost;
};
static struct device devices[MOST];
static int count, hangs, fails;

int nvmlInit_v2(void) {
    char line[512];
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    count = hangs = fails = 0;
    int card = -1;
    while (file && fgets(line, sizeof line, file)) {
        struct device *device = &devices[count];
        memset(device, 0, sizeof *device);
        device->parent = -1;
        if (sscanf(line, "card %95s %u %u %llu %llu %95[^\n]", device->uuid, &device->minor,
                   &device->utilization, &device->used, &device->total, device->model) == 6)
            card = count++;
        else if (sscanf(line, "mig %95s %u %u %llu %llu", device->uuid, &device->instance,
                        &device->compute, &device->used, &device->total) == 5) {
            device->parent = card;
            devices[card].partitioned = 1;
            count++;
        } else if (!strncmp(line, "partitioned", 11))
            devices[card].partitioned = 1;
        else if (!strncmp(line, "lost", 4))
            devices[card].lost = 1;
        else if (!strncmp(line, "hang", 4))
            hangs = 1;
        else
            sscanf(line, "fail %d", &fails);
    }
    if (file)
        fclose(file);
    while (hangs)
        pause();
    return fails;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return nvmlInit_v2();
}

int nvmlShutdown(void) { return OK; }

int nvmlDeviceGetCount_v2(unsigned *cards) {
    *cards = 0;
    for (int i = 0; i < count; i++)
        *cards += devices[i].parent < 0;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **device) {
    for (int i = 0; i < count; i++)
        if (devices[i].parent < 0 && index-- == 0) {
            *device = &devices[i];
            return devices[i].lost ? LOST : OK;
        }
    return INVALID;
}

static int text(char *to, unsigned size, const char *from) {
    if (strlen(from) >= size)
        return SHORT;
    strcpy(to, from);
    return OK;
}

int nvmlDeviceGetUUID(struct device *device, char *to, unsigned size) {
    return text(to, size, device->uuid);
}

int nvmlDeviceGetName(struct device *device, char *to, unsigned size) {
    return text(to, size, device->model);
}

int nvmlSystemGetDriverVersion(char *to, unsigned size) { return text(to, size, "580.95.05"); }

struct pci {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(struct device *device, struct pci *pci) {
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", device->minor & 255u);
    return OK;
}

int nvmlDeviceGetMinorNumber(struct device *device, unsigned *minor) {
    *minor = device->minor;
    return device->parent < 0 ? OK : UNSUPPORTED;
}

int nvmlDeviceGetMigMode(struct device *device, unsigned *current, unsigned *pending) {
    *current = *pending = device->partitioned;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned *most) {
    (void)device;
    *most = 7;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, unsigned index, struct device **to) {
    if (index % 2)
        return NOT_FOUND; /* places between instances are empty */
    index /= 2;
    for (int i = 0; i < count; i++)
        if (devices[i].parent == device - devices && index-- == 0) {
            *to = &devices[i];
            return OK;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetGpuInstanceId(struct device *device, unsigned *id) {
    *id = device->instance;
    return OK;
}

int nvmlDeviceGetComputeInstanceId(struct device *device, unsigned *id) {
    *id = device->compute;
    return OK;
}

int nvmlDeviceGetUtilizationRates(struct device *device, unsigned rates[2]) {
    rates[0] = device->utilization;
    rates[1] = 0;
    return device->parent < 0 && !device->partitioned ? OK : UNSUPPORTED;
}

int nvmlDeviceGetMemoryInfo(struct device *device, unsigned long long memory[3]) {
    memory[0] = device->total;
    memory[1] = device->total - device->used;
    memory[2] = device->used;
    return OK;
}

/* A CUDA driver without a GPU: what is launched is written to the file $LAUNCHES, a line each.

   A TMA descriptor, the first of a kernel's parameters, is written out whole; of the others,
   $PARAMETERS in all, the first 32 bits. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NOTHING(name) int name(void) { return 0; }

NOTHING(cuInit)
NOTHING(cuCtxSetCurrent)
NOTHING(cuCtxGetLimit)
NOTHING(cuCtxSetLimit)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuLaunchKernel)
NOTHING(cuModuleUnload)
NOTHING(cuOccupancyMaxActiveClusters)
NOTHING(cuStreamIsCapturing)
NOTHING(cuTensorMapEncodeIm2col)

static int give(int *to, int value) {
  *to = value;
  return 0;
}

static int give_handle(void **to, uintptr_t value) {
  *to = (void *)value;
  return 0;
}

int cuGetErrorString(int error, const char **text) {
  *text = "none";
  return 0;
}
int cuDriverGetVersion(int *version) { return give(version, 13000); }
int cuDeviceGetCount(int *count) { return give(count, 1); }
int cuDeviceGet(int *device, int ordinal) { return give(device, 0); }
int cuDeviceGetAttribute(int *value, int name, int device) { return give(value, 227 << 10); }
int cuCtxGetDevice(int *device) { return give(device, 0); }
int cuCtxGetCurrent(void **context) { return give_handle(context, 1); }
int cuDevicePrimaryCtxRetain(void **context, int device) { return give_handle(context, 1); }
int cuModuleLoadData(void **module, const void *image) { return give_handle(module, 2); }
int cuModuleGetFunction(void **function, void *module, const char *name) { return give_handle(function, 3); }
int cuFuncGetAttribute(int *value, int name, void *function) { return give(value, name == 0 ? 1024 : 0); }
int cuPointerGetAttribute(uint64_t *value, int name, uint64_t address) {
  *value = address;
  return 0;
}

int cuTensorMapEncodeTiled(uint64_t *map, int dtype, uint32_t rank, void *address, const uint64_t *sizes,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill) {
  memset(map, 0, 128);
  map[0] = (uint64_t)address;
  map[1] = dtype;
  map[2] = swizzle;
  map[3] = fill;
  for (uint32_t i = 0; i < rank; i++) map[4 + i] = sizes[i];
  for (uint32_t i = 0; i + 1 < rank; i++) map[8 + i] = strides[i];
  for (uint32_t i = 0; i < rank; i++) map[12 + i] = box[i];
  return 0;
}

struct launch {
  unsigned grid[3], block[3], shared_bytes;
  void *stream;
};

int cuLaunchKernelEx(const struct launch *how, void *function, void **parameters, void **extra) {
  FILE *file = fopen(getenv("LAUNCHES"), "a");
  int count = atoi(getenv("PARAMETERS"));
  fprintf(file, "grid %u %u %u block %u shared %u stream %p function %p:", how->grid[0], how->grid[1], how->grid[2],
          how->block[0], how->shared_bytes, how->stream, function);
  for (int word = 0; word < 16; word++) fprintf(file, " %llx", (unsigned long long)((uint64_t *)parameters[0])[word]);
  for (int i = 1; i < count; i++) fprintf(file, " %x", *(uint32_t *)parameters[i]);
  fprintf(file, "\n");
  return fclose(file);
}

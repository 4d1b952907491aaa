/* Devices, streams, status codes and element types: what every call of the kernel library takes and returns.
 *
 * The library is C: plain structs, plain pointers, opaque handles. It knows nothing of models, files or
 * engines. Three rules hold for every function:
 *   - It returns a status. Anything but MR_OK left outputs undefined and set mr_last_error() for this thread.
 *   - It allocates no memory for results or scratch: where it needs a workspace, a function of the same name
 *     with _workspace_bytes says how much, and the caller brings it, aligned to 256 bytes. Handles (*_create,
 *     mr_device_open) own a few hundred bytes of host memory and say so.
 *   - It never waits for the device unless its name says so (mr_device_synchronize). On a CPU device work is
 *     done when the call returns; on a GPU it is in order on the stream.
 *
 * Pointers are memory of the device unless a comment says host. There is no process-wide state: devices are
 * made and passed, any number of them, several of one GPU among them. A device may be used by one thread at a
 * time; different devices by different threads at once. */
#ifndef MILLRACE_KERNELS_DEVICE_H
#define MILLRACE_KERNELS_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define MR_API
#else
#define MR_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mr_status {
  MR_OK = 0,
  MR_ERROR_INVALID = 1,     /* an argument is wrong: a null pointer, a shape, a stride, an alignment */
  MR_ERROR_UNSUPPORTED = 2, /* well-formed, but this device or build has no kernel for it */
  MR_ERROR_NO_MEMORY = 3,   /* a workspace is too small, or memory ran out */
  MR_ERROR_DEVICE = 4,      /* the driver or the GPU failed, or there is none */
  MR_ERROR_INTERNAL = 5     /* a fault of the library */
} mr_status;

/* What went wrong in the last call of this thread that failed: one line, what was found, what was expected.
 * Never null; valid until the next call of this thread. */
MR_API const char* mr_last_error(void);
/* The name of a status, e.g. "MR_ERROR_INVALID". */
MR_API const char* mr_status_name(mr_status status);
/* The version of the library, "MAJOR.MINOR.PATCH". */
MR_API const char* mr_version(void);

/* How numbers are stored. A quantized type is a block of so many elements in so many bytes (GGUF's layouts,
 * kernels/quant/blocks.h); a row is whole blocks. */
typedef enum mr_dtype {
  MR_F32 = 0,
  MR_F16 = 1,
  MR_BF16 = 2,
  MR_F8_E4M3 = 3, /* one byte each; weights carry a grid of scales, a KV cache a power of two per head */
  MR_Q8_0 = 4,    /* 32 elements in 34 bytes; as a KV cache: int8, an f16 scale per 32 dimensions */
  MR_Q4_0 = 5,
  MR_Q4_1 = 6,
  MR_Q5_0 = 7,
  MR_Q5_1 = 8,
  MR_Q4_K = 9,
  MR_Q5_K = 10,
  MR_Q6_K = 11,
  MR_MXFP4 = 12,       /* 32 elements in 17 bytes, the e8m0 scale first */
  MR_MXFP4_SPLIT = 13, /* 16 bytes of codes per 32 elements here, the e8m0 scales in a grid beside */
  MR_Q4_Z = 14,
  MR_I8 = 100,     /* whole numbers, operands of mr_gemm alone */
  MR_F8_E5M2 = 101 /* one byte each, for gradients: operands of mr_gemm alone */
} mr_dtype;

/* Elements and bytes of one block of a type. */
MR_API mr_status mr_dtype_block(mr_dtype type, int32_t* elements, int32_t* bytes);
/* "q4_k", and back. */
MR_API const char* mr_dtype_name(mr_dtype type);
MR_API mr_status mr_dtype_parse(const char* name, mr_dtype* type);

/* A CUDA stream (cudaStream_t is this very type), or NULL: the default stream of a GPU, nothing on a CPU. */
typedef struct CUstream_st* mr_stream;

typedef struct mr_device mr_device;

typedef struct mr_device_options {
  int32_t threads; /* of a CPU device; 0: one per core this process may use */
  const char* isa; /* of a CPU device: "avx2", "neon_dotprod", ...; NULL: the best this processor runs */
} mr_device_options;

/* Opens "cpu", "cuda" or "cuda:N". `options` may be NULL. The handle owns its threads and is closed with
 * mr_device_close; what was made with it must be destroyed before. */
MR_API mr_status mr_device_open(const char* name, const mr_device_options* options, mr_device** device);
MR_API void mr_device_close(mr_device* device);
/* "cpu, avx512, 16 threads"; host memory that lives as long as the device. */
MR_API const char* mr_device_description(const mr_device* device);
/* Waits for everything on the stream. */
MR_API mr_status mr_device_synchronize(mr_device* device, mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif

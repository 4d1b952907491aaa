/* The kernel library's C API, all of it. */
#ifndef MILLRACE_KERNELS_H
#define MILLRACE_KERNELS_H

#include "millrace/kernels/activation.h"
#include "millrace/kernels/attention.h"
#include "millrace/kernels/cross_entropy.h"
#include "millrace/kernels/device.h"
#include "millrace/kernels/dropout.h"
#include "millrace/kernels/embedding.h"
#include "millrace/kernels/flash_attention.h"
#include "millrace/kernels/flash_attention_v2.h"
#include "millrace/kernels/flash_attention_v2_optimized.h"
#include "millrace/kernels/flash_partial.h"
#include "millrace/kernels/fp4_gemm.h"
#include "millrace/kernels/gemm.h"
#include "millrace/kernels/grouped_gemm.h"
#include "millrace/kernels/linear_attention.h"
#include "millrace/kernels/lowbit.h"
#include "millrace/kernels/matmul.h"
#include "millrace/kernels/moe.h"
#include "millrace/kernels/norm.h"
#include "millrace/kernels/quant.h"
#include "millrace/kernels/rotary.h"
#include "millrace/kernels/rows.h"
#include "millrace/kernels/sample.h"
#include "millrace/kernels/softmax.h"

#endif

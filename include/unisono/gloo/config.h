/*
 * The gloo face of unisono: gloo 0.5.0's headers over libunisono. A program that was written for gloo is compiled
 * against these, with -I of the folder that holds gloo/, and linked with libunisono in place of libgloo. docs/gloo.md
 * says what is there, what differs, and how fast it is.
 *
 * Everything lies in an inline namespace of gloo, so that a program's symbols are not those of a libgloo that is in
 * the same process (PyTorch carries one).
 */
#pragma once

#define GLOO_VERSION_MAJOR 0
#define GLOO_VERSION_MINOR 5
#define GLOO_VERSION_PATCH 0
#define GLOO_VERSION (GLOO_VERSION_MAJOR * 10000 + GLOO_VERSION_MINOR * 100 + GLOO_VERSION_PATCH)

/* That these headers are unisono's. */
#define GLOO_IS_UNISONO 1

/* gloo's build options. Headers that need another library's say so, and are there whether that is or not: gloo/cuda*.h need
   none, gloo/mpi/context.h needs <mpi.h>, gloo/rendezvous/redis_store.h <hiredis/hiredis.h>. A program that asks for these
   macros may define those three itself. */
#ifndef GLOO_USE_CUDA
#define GLOO_USE_CUDA 1
#endif
#ifndef GLOO_USE_MPI
#define GLOO_USE_MPI 0
#endif
#ifndef GLOO_USE_REDIS
#define GLOO_USE_REDIS 0
#endif
#define GLOO_USE_NCCL 0
#define GLOO_USE_ROCM 0
#define GLOO_USE_RCCL 0
#define GLOO_USE_IBVERBS 0
#define GLOO_USE_AVX 0
#define GLOO_USE_LIBUV 0
#define GLOO_USE_TORCH_DTYPES 0

/* Whatever device a program makes, ranks of one host use shared memory and others TCP; libuv is not needed. */
#define GLOO_HAVE_TRANSPORT_TCP 1
#define GLOO_HAVE_TRANSPORT_TCP_TLS 0
#define GLOO_HAVE_TRANSPORT_IBVERBS 0
#define GLOO_HAVE_TRANSPORT_UV 1

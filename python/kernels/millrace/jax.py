"""millrace.jax is millrace_kernels.jax. There is no __init__.py beside this file: with the engine's package installed it
is a module of that one, without it `millrace` is a namespace."""

import sys

import millrace_kernels.jax

sys.modules[__name__] = millrace_kernels.jax

#!/usr/bin/env python3
"""The operation of TensorFlow of examples/python_kernels, compiled and run. Run by kernels_test.py in an environment of
its own."""

import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent.parent / "examples" / "python_kernels" / "tensorflow_operation.cpp"


def main():
    try:
        import tensorflow as tf
    except ImportError as error:
        print(f"SKIPPED: TensorFlow is not installed ({error})")
        return 77
    import millrace_kernels
    at = millrace_kernels.library_path().parent
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "millrace_tf.so"
        subprocess.run(["g++", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(out),
                        f"-I{millrace_kernels.include_dir()}", *tf.sysconfig.get_compile_flags(),
                        *tf.sysconfig.get_link_flags(), f"-L{at}", "-lmillrace_kernels", f"-Wl,-rpath,{at}"],
                       check=True)
        op = tf.load_op_library(str(out)).millrace_rms_norm
        x, w = tf.random.normal((3, 5, 8)), tf.random.normal((8,))
        wide = tf.cast(x, tf.float64)
        want = wide / tf.sqrt(tf.reduce_mean(wide * wide, -1, keepdims=True) + 1e-6) * tf.cast(w, tf.float64)
        for got in (op(x, w), tf.function(op)(x, w)):  # eagerly, and in a graph
            error = float(tf.reduce_max(tf.abs(tf.cast(got, tf.float64) - want)))
            assert error < 1e-5, error
    print(f"tensorflow {tf.__version__}: passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The kernels of Millrace for Python: `millrace_kernels.torch`, `millrace_kernels.jax`, `millrace_kernels.arrays`.

Each is imported by itself, so that none needs the packages of another. docs/python_kernels.md describes them.
"""

import ctypes
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def library_path(name: str = "kernels") -> Path:
    """The shared library of that name in this package: "kernels" (the C API), "torch" or "jax"."""
    path = _HERE / "lib" / f"libmillrace_{name}.so"
    if not path.is_file():
        raise ImportError(f"millrace_kernels was built without {name}: {path} is not there")
    return path


def include_dir() -> Path:
    """The folder of the C headers, for programs that link the kernel library: millrace/kernels.h."""
    return _HERE / "include"


def __getattr__(name: str):
    if name == "__version__":  # the library's, asked once
        library = ctypes.CDLL(str(library_path()))
        library.mr_version.restype = ctypes.c_char_p
        globals()[name] = library.mr_version().decode()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

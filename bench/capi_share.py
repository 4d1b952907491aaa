"""How long the C API itself takes inside a call of Python: every mr_* function that computes is called again and again with
the same arguments, where the call makes it, and timed there. What the rest of the call takes is the binding's.

A small library, written and compiled here and loaded before all others (LD_PRELOAD, `with_share` starts the program anew
with it), stands in front of libmillrace_kernels.so and calls that.
"""

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ROOT / "include" / "millrace" / "kernels"
LIBRARY = "libcapi_share.so"
# What a program in C does once and not in every call: lengths of workspaces, weights made and given back.
ONCE = re.compile(r"_bytes$|_create$|_adopt$|_open$|_close$|_parse$|_block$|_synchronize$")

SOURCE = """
#include <dlfcn.h>
#include <time.h>
#include "millrace/kernels.h"
namespace {
int times = 0;     // 0: calls pass through; else so many more of the same
double taken = 0;  // seconds of this thread, of one call
double now() {
  timespec at;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
  return at.tv_sec + 1e-9 * at.tv_nsec;
}
template <class F, class... Args>
auto timed(F real, Args... args) {
  if (times > 0) {
    const double begin = now();
    for (int i = 0; i < times; ++i) (void)real(args...);
    taken += (now() - begin) / times;
  }
  return real(args...);
}
void* handle() {
  static void* const library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
  return library;
}
}  // namespace
extern "C" void share_begin(int count) { times = count, taken = 0; }
extern "C" double share_end() { times = 0; return taken; }
"""


def wrappers():
    """A function of the same name and arguments for each that computes."""
    text = " ".join(re.sub(r"//.*", "", header.read_text()) for header in sorted(HEADERS.glob("*.h")))
    text = re.sub(r"/\*.*?\*/", "", re.sub(r"\s+", " ", text))
    made = {}
    for name, arguments in re.findall(r"mr_status (mr_\w+)\(([^()]*)\)\s*;", text):
        if not ONCE.search(name):
            names = ", ".join(re.search(r"(\w+)\s*$", one).group(1) for one in arguments.split(","))
            made[name] = (f'extern "C" mr_status {name}({arguments}) {{\n'
                          f'  static const auto real = reinterpret_cast<decltype(&{name})>(dlsym(handle(), "{name}"));\n'
                          f"  return timed(real, {names});\n}}\n")
    return list(made.values())


def with_share(library):
    """Starts this program anew, unless that was done, so that share_of() can be asked; ends it with that one's status."""
    if os.environ.get("LD_PRELOAD", "").endswith(LIBRARY):
        return
    with tempfile.TemporaryDirectory() as folder:
        source, shared = Path(folder) / "capi_share.cpp", Path(folder) / LIBRARY
        source.write_text(f'#define LIBRARY "{library}"\n' + SOURCE + "".join(wrappers()))
        subprocess.run(["c++", "-std=c++20", "-O2", "-shared", "-fPIC", f"-I{ROOT / 'include'}", str(source), "-o", str(shared),
                        "-ldl"], check=True)
        sys.exit(subprocess.run([sys.executable, *sys.argv], env={**os.environ, "LD_PRELOAD": str(shared)}).returncode)


def share_of(function, runs=30, calls=50):
    """Microseconds that the C API takes of a call: the least of so many, each of so many calls with its arguments."""
    share = ctypes.CDLL(os.environ["LD_PRELOAD"])
    share.share_end.restype = ctypes.c_double
    best = float("inf")
    for _ in range(runs):
        share.share_begin(calls)
        function()
        best = min(best, share.share_end() * 1e6)
    return best

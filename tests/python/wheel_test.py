#!/usr/bin/env python3
"""The wheel: built, its contents checked, installed into a fresh environment, and the engine's tests run with it.

    tests/python/wheel_test.py                       with the flags of build/dev, whose objects ccache still has: what is
                                                     compiled anew is the extension alone
    tests/python/wheel_test.py --wheels FOLDER       those of `make wheel`, each in the Python that it is for
    tests/python/wheel_test.py --wheels FOLDER --python python3.12 --python python3.13
                                                     and in these as well, of those that may have it

FOLDER may have millrace-kernels too: that it lies beside the engine, in one environment, is seen to.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import python_env  # noqa: E402

MOST_BYTES, MOST_INSTALL_S, MOST_IMPORT_S = 60e6, 10.0, 0.3
ALLOWED = re.compile(r"millrace/(\w+\.pyi?|py\.typed|_millrace(\.[\w-]+)?\.so)|millrace\.libs/lib[\w.-]+\.so[\d.]*"
                     r"|millrace-[\d.]+\.dist-info/(METADATA|WHEEL|RECORD|licenses/LICENSE|sboms/[\w.-]+)")
NOT_BUNDLED = re.compile(r"cuda|cudart|nvidia|cublas|nccl|python|libc\.|libstdc|curl", re.IGNORECASE)
DEV_FLAGS = ("cmake.build-type=RelWithDebInfo", "cmake.define.CMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1", "install.strip=true",
             "build-dir=build/wheel-test")


def check_contents(wheel):
    faults = []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    faults += [f"{name}: does not belong into the wheel" for name in names
               if not name.endswith("/") and not ALLOWED.fullmatch(name)]
    faults += [f"{name}: may not be bundled" for name in names if name.startswith("millrace.libs/") and NOT_BUNDLED.search(name)]
    sources = {f"millrace/{path.name}" for path in (ROOT / "python" / "millrace").iterdir() if path.is_file()}
    faults += [f"{name}: is missing" for name in sources - set(names)]
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    if required != ["numpy"]:
        faults.append(f"METADATA: requires {required}, expected numpy alone")
    if wheel.stat().st_size > MOST_BYTES:
        faults.append(f"{wheel.name}: {wheel.stat().st_size} bytes, expected at most {MOST_BYTES:.0f}")
    if "-manylinux_2_" not in wheel.name:
        faults.append(f"{wheel.name}: has no tag of manylinux")
    return faults


# Processor time in a fresh process, the least of three: what else runs on the machine is not the package's.
IMPORT = """
import json, subprocess, sys
timed = "import time; t = time.process_time(); import millrace; print(time.process_time() - t)"
taken = [float(subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True).stdout) for _ in range(3)]
import millrace
print(json.dumps({"seconds": min(taken), "file": millrace.__file__, "lists": len(millrace.engine_options())}))
"""


def spent(command, **options):
    """Seconds of processor time: the machine may be busy with other things."""
    before = os.times()
    subprocess.run(command, check=True, **options)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def check_installed(wheel, interpreter, folder, more=()):
    """Installed into a fresh environment of this Python; what is wrong with it."""
    fresh, faults = folder / f"venv-{Path(interpreter).name}", []
    subprocess.run([str(interpreter), "-m", "venv", str(fresh)], check=True)
    python = str(fresh / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, "numpy"], check=True)
    took = spent([*pip, "--no-index", str(wheel)])
    told = json.loads(subprocess.run([python, "-c", IMPORT], env=environment, capture_output=True, text=True, check=True).stdout)
    print(f"[  figure  ] {Path(interpreter).name}: installed in {took:.1f} s, imported in {told['seconds']:.3f} s")
    if took > MOST_INSTALL_S:
        faults.append(f"{wheel.name}: installed in {took:.1f} s, expected at most {MOST_INSTALL_S}")
    if told["seconds"] > MOST_IMPORT_S:
        faults.append(f"{wheel.name}: imported in {told['seconds']:.2f} s, expected at most {MOST_IMPORT_S}")
    if str(fresh) not in told["file"]:
        faults.append(f"{told['file']} was imported, expected the wheel's")
    for name, tests in (("engine", ("Generate", "Numbers", "Open")), ("fetch", ())):
        script = ROOT / "tests" / "python" / f"{name}_test.py"
        if subprocess.run([python, str(script), *tests], env=environment).returncode != 0:
            faults.append(f"{script.name} fails with {wheel.name} in {interpreter}")
    for other in more:  # the kernels beside the engine: two wheels put files into millrace/
        subprocess.run([*pip, "--no-deps", str(other)], check=True)
        both = "import millrace, millrace_kernels.arrays as a, importlib.util as u; assert u.find_spec('millrace.torch')"
        if subprocess.run([python, "-c", both], env=environment).returncode != 0:
            faults.append(f"{other.name} does not lie beside {wheel.name}")
    return faults


def pythons_for(wheel, given):
    """Of the interpreters given, those that may have the wheel; its own where there is none among them."""
    lowest = int(re.search(r"-cp3(\d+)-", wheel.name).group(1))
    stable = "-abi3-" in wheel.name
    own = sys.executable if sys.version_info[1] == lowest else f"python3.{lowest}"
    fits = [one for one in given if (found := python_env.version_of(one)) and (
        found[1] == lowest or stable and found[1] > lowest)]
    return fits or [own]


def check_all(folder, given):
    faults = []
    wheels = sorted(folder.glob("millrace-*.whl"))
    if not wheels:
        sys.exit(f"{folder} has no wheel of the engine: make wheel")
    for wheel in wheels:
        print(f"[  figure  ] {wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
        faults += check_contents(wheel)
        for interpreter in pythons_for(wheel, given):
            with tempfile.TemporaryDirectory() as scratch:
                faults += check_installed(wheel, interpreter, Path(scratch), sorted(folder.glob("millrace_kernels-*.whl")))
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--python", action="append", default=[])
    options = parser.parse_args()
    python, why = python_env.environment()
    if python is None:
        print(f"SKIPPED: the wheel because its tools cannot be had from PyPI ({why})")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        if options.wheels is None:
            start = time.monotonic()
            command = [python, ROOT / "tools" / "make_wheel.py", "--cuda", "off", "--engine-only", "--out", folder]
            for setting in DEV_FLAGS:
                command += ["-C", setting]
            if subprocess.run([str(part) for part in command]).returncode != 0:
                print("the wheel was not built")
                return 1
            print(f"[  figure  ] built in {time.monotonic() - start:.0f} s")
        faults = check_all(options.wheels or Path(folder), options.python)
    print("\n".join(faults) or "the wheel is as it should be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

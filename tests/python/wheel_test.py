#!/usr/bin/env python3
"""The wheel: built, its contents checked, installed into a fresh environment, and the engine's tests run with it.

    tests/python/wheel_test.py

It is built with the flags of build/dev, whose objects ccache still has: what is compiled anew is the extension alone.
"""

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

MOST_BYTES = 60e6
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


def main():
    python, why = python_env.environment()
    if python is None:
        print(f"SKIPPED: the wheel because its tools cannot be had from PyPI ({why})")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        start = time.monotonic()
        command = [python, ROOT / "tools" / "make_wheel.py", "--cuda", "off", "--engine-only", "--out", out]
        for setting in DEV_FLAGS:
            command += ["-C", setting]
        if subprocess.run([str(part) for part in command]).returncode != 0:
            print("the wheel was not built")
            return 1
        wheel, = out.glob("millrace-*.whl")
        print(f"[  figure  ] {wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB in {time.monotonic() - start:.0f} s")
        faults = check_contents(wheel)
        fresh = out / "venv"
        subprocess.run([sys.executable, "-m", "venv", str(fresh)], check=True)
        pip = [str(fresh / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "numpy"], check=True)
        start = time.monotonic()
        subprocess.run([*pip, "--no-index", str(wheel)], check=True)
        print(f"[  figure  ] installed in {time.monotonic() - start:.1f} s")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if subprocess.run([str(fresh / "bin" / "python"), str(ROOT / "tests" / "python" / "engine_test.py"), "Generate", "Numbers",
                           "Open"], env=environment).returncode != 0:
            faults.append("the engine's tests fail with the wheel")
    print("\n".join(faults) or "the wheel is as it should be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

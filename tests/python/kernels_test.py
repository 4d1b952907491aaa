#!/usr/bin/env python3
"""The millrace-kernels wheel: built, looked into, installed into an environment of its own, and run.

  tests/python/kernels_test.py BUILD                        with BUILD/libmillrace_kernels.a, e.g. build/dev
  tests/python/kernels_test.py BUILD --torch 2.10.0 ...     the same wheel beside these versions of torch, too
  tests/python/kernels_test.py BUILD --only torch,jax       some parts: contents, torch, transformers, ...
  tests/python/kernels_test.py BUILD --only vllm,tensorflow the examples in vLLM and in TensorFlow

Packages come from PyPI into build/venv/kernels (tests/python/kernels_requirements.txt): torch for CPUs, JAX,
transformers, 1.5 GB, which is why this is part of `make check`. Another version of torch is PyPI's own, 5 GB with
CUDA's libraries, into build/venv/kernels-VERSION. The kernels are linked from BUILD and not compiled again. What
cannot be had is skipped and said (status 77).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import make_wheel  # noqa: E402
import python_env  # noqa: E402

HERE = ROOT / "tests" / "python"
REQUIREMENTS = HERE / "kernels_requirements.txt"
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Examples beside other people's packages, each in an environment of its own: (what is installed without what it needs).
# They run when --only names them, or their environment is there already.
BESIDE = {"vllm": ("vllm==0.33.0",), "tensorflow": ()}
PARTS = ("contents", "hub", "torch", "functions", "calls", "direct", "training", "lowbit", "transformers", "jax", "arrays", "documents", "examples")
WHEEL_LIMIT = 30 << 20  # bytes
# What a library of the wheel may need from outside: the C and C++ runtimes, and torch's own where it is torch's.
SYSTEM = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2",
          "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
NEEDED = {"libmillrace_kernels.so": SYSTEM,
          "libmillrace_torch.so": SYSTEM | {"libmillrace_kernels.so", "libtorch_cpu.so"},
          "_direct.abi3.so": SYSTEM | {"libmillrace_torch.so", "libtorch_cpu.so"},
          "libmillrace_jax.so": SYSTEM | {"libmillrace_kernels.so"}}
STABLE = re.compile(r"(aoti_torch_|torch_)\w+")  # torch's stable ABI is C: everything else of libtorch is not


def run(command, **options):
    return subprocess.run([str(part) for part in command], **options)


def is_ready(name, requirements):
    ready = ROOT / "build" / "venv" / name / "ready"
    return ready.is_file() and ready.read_text() == requirements


def environment(name, requirements, alone=()):
    """A Python with the packages, or None and why not. alone: installed without what they depend on."""
    venv = ROOT / "build" / "venv" / name
    python, ready = venv / "bin" / "python", venv / "ready"
    if is_ready(name, requirements):
        return python, None
    shutil.rmtree(venv, ignore_errors=True)
    made = run([sys.executable, "-m", "venv", venv], capture_output=True, text=True)
    if made.returncode != 0:
        return None, made.stderr.strip() or made.stdout.strip()
    listed = venv / "requirements.txt"
    listed.write_text(requirements)
    # A machine may have torch for CPUs at hand (pip's find-links); else torch's own index has it.
    for more in ((), ("--extra-index-url", PYTORCH_INDEX)):
        pip = [python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check", *more]
        done = run([*pip, "-r", listed], capture_output=True, text=True)
        if done.returncode == 0 and alone:
            done = run([*pip, "--no-deps", *alone], capture_output=True, text=True)
        if done.returncode == 0:
            ready.write_text(requirements)
            return python, None
    return None, (done.stderr.strip().splitlines() or ["no reason given"])[-1][:300]


def build_wheel(python, archive):
    out, raw = ROOT / "build" / "wheels", ROOT / "build" / "wheels" / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("millrace_kernels-*.whl"):
        old.unlink()
    env = {**os.environ, "CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}
    done = run([python, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", raw, "-C",
                f"cmake.define.MILLRACE_KERNELS_ARCHIVE={archive}", "-C", "cmake.define.MILLRACE_TORCH=ON", "-C",
                "cmake.define.MILLRACE_JAX=ON", "-C", f"build-dir={ROOT / 'build' / 'kernels_python'}",
                ROOT / "python" / "kernels"], env=env)
    wheels = list(raw.glob("millrace_kernels-*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        sys.exit("the wheel could not be built")
    tools, why_not = python_env.environment()
    if tools is None:
        print(f"SKIPPED: auditwheel cannot be had from PyPI: {why_not}")
        return wheels[0]
    make_wheel.repair(tools, wheels[0], out)
    shutil.rmtree(raw)
    wheel, = out.glob("millrace_kernels-*.whl")
    return wheel


def undefined(library):
    listing = run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].split("@")[0] for line in listing.splitlines()}


def needed(library):
    listing = run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", listing))


def check_contents(wheel):
    """One wheel for every Python, small, with no library of others inside and none needed but torch's stable ABI."""
    assert "-py3-none-" in wheel.name, f"{wheel.name} is tied to one Python"
    assert "-manylinux_2_" in wheel.name or wheel.parent.name == "raw", f"{wheel.name}: has no tag of manylinux"
    assert wheel.stat().st_size < WHEEL_LIMIT, f"{wheel.name} has {wheel.stat().st_size} bytes"
    to = ROOT / "build" / "wheels" / "unpacked"
    shutil.rmtree(to, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(to)
    names = {str(p.relative_to(to)) for p in to.rglob("*") if p.is_file()}
    for wanted in ("millrace/torch.py", "millrace/jax.py", "millrace_kernels/py.typed", "millrace_kernels/jax.py",
                   "millrace_kernels/torch/__init__.py", "millrace_kernels/include/millrace/kernels.h",
                   "millrace_kernels/include/millrace/kernels/gemm.h"):
        assert wanted in names, f"{wheel.name} has no {wanted}"
    assert "millrace/__init__.py" not in names, "millrace/__init__.py is the engine's"
    libraries = {Path(n).name: to / n for n in names if ".so" in n}  # auditwheel has put none beside them
    assert set(libraries) == set(NEEDED), f"{wheel.name} has the libraries {sorted(libraries)}"
    for name, allowed in NEEDED.items():
        more = needed(libraries[name]) - allowed
        assert not more, f"{name} needs {sorted(more)}"
    own = {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "millrace_torch_kernel"}
    for name in ("libmillrace_torch.so", "_direct.abi3.so"):
        torch_symbols = {s for s in undefined(libraries[name]) if "torch" in s or "c10" in s or "at2" in s} - own
        unstable = {s for s in torch_symbols if not STABLE.fullmatch(s)}
        assert torch_symbols and not unstable, f"{name} calls {sorted(unstable)}, not of torch's stable ABI"
    of_python = {s for s in undefined(libraries["libmillrace_torch.so"]) if s.startswith(("Py", "_Py"))}
    assert not of_python, f"libmillrace_torch.so calls Python: {sorted(of_python)}"
    print(f"contents: passed, {wheel.stat().st_size / 2**20:.1f} MiB, no library of others")


# As the package `kernels` loads a variant: its folder by path, under a name that nobody else has.
LOAD = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("_millrace_kernels_of_the_hub", sys.argv[1] + "/__init__.py")
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert "millrace_kernels" not in sys.modules, "the installed package was imported as well"
q = torch.randn(1, 3, 2, 16, requires_grad=True)
module.attention(q, q, q, causal=True).sum().backward()
assert q.grad.shape == q.shape and module.rms_norm(q).shape == q.shape
"""


def check_hub(python, wheel):
    """`make hub` makes a repository of the hub of this wheel, which loads from where it lies."""
    out = ROOT / "build" / "hub-test"
    run([python, ROOT / "tools" / "make_hub.py", wheel, out], check=True, stdout=subprocess.DEVNULL)
    assert (out / "build.toml").is_file() and (out / "README.md").is_file()
    variant, = (out / "build").iterdir()
    assert variant.name.startswith("torch-stable-abi210-cpu-"), variant.name
    run([python, "-c", LOAD, variant], cwd=out, check=True)
    print(f"hub: passed, {variant.name}")


def install(python, wheel):
    run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--force-reinstall", "--no-deps", wheel],
        check=True)


def script(python, name):
    """The status of a test script: it sees the installed package and nothing of this tree."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return run([python, HERE / f"kernels_{name}_test.py"], cwd=ROOT / "build", env=env).returncode


def run_beside(name, wheel, asked):
    """True unless the example fails beside its package."""
    requirements, venv = (HERE / f"kernels_{name}_requirements.txt").read_text(), f"kernels-{name}"
    if not asked and not is_ready(venv, requirements):
        print(f"SKIPPED: the example for {name}, whose packages are large: kernels_test.py BUILD --only {name} runs it")
        return True
    python, why_not = environment(venv, requirements, BESIDE[name])
    if python is None:
        print(f"SKIPPED: the packages of kernels_{name}_requirements.txt cannot be installed: {why_not}")
        return True
    install(python, wheel)
    return script(python, name) in (0, 77)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--torch", nargs="*", default=[], metavar="VERSION")
    parser.add_argument("--only")
    arguments = parser.parse_args()
    parts = arguments.only.split(",") if arguments.only else [*PARTS, *BESIDE]
    if unknown := set(parts) - set(PARTS) - set(BESIDE):
        parser.error(f"--only: there is no {sorted(unknown)}, expected some of {', '.join((*PARTS, *BESIDE))}")
    archive = arguments.build.resolve() / "libmillrace_kernels.a"
    if not archive.is_file():
        sys.exit(f"{archive} is not there: ninja -C {arguments.build} millrace_kernels_static")
    python, why_not = environment("kernels", REQUIREMENTS.read_text())
    if python is None:
        print(f"SKIPPED: the packages of {REQUIREMENTS.name} cannot be installed: {why_not}")
        sys.exit(77)
    wheel = build_wheel(python, archive)
    failed = []
    if "contents" in parts:
        check_contents(wheel)
    install(python, wheel)
    for name in parts:
        if name in BESIDE:
            passed = run_beside(name, wheel, bool(arguments.only))
        elif name == "hub":
            check_hub(python, wheel)
            passed = True
        else:
            passed = name == "contents" or script(python, name) in (0, 77)
        if not passed:
            failed.append(name)
    for version in arguments.torch:
        other, why_not = environment(f"kernels-{version}", f"torch=={version}\nnumpy\n")
        if other is None:
            print(f"SKIPPED: torch {version} cannot be installed: {why_not}")
            continue
        install(other, wheel)
        if script(other, "torch") != 0:
            failed.append(f"torch {version}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

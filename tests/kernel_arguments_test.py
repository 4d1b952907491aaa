#!/usr/bin/env python3
"""What bad arguments get from the functions of the kernel library: a status, a line that names the argument, and nothing
written.

    kernel_arguments_test.py LIBRARY [--isa NAME] [CASE ...]

Functions and structs are read from the headers (c_headers.py), valid calls of every function of a CPU are listed in
kernel_calls.py. Each argument and field of each of them is made wrong, one at a time: null and misaligned pointers,
negative and huge sizes and strides, unknown enumerators, NaN, workspaces too small. A call runs in a process of its own
function, so that a crash is told with the argument it was given.
"""

import argparse
import ctypes
import json
import math
import os
import sys

import kernel_attention_calls  # noqa: F401  it lists cases
import kernel_calls
from kernel_calls import Buffer

INTEGERS = {ctypes.c_int32: (-1, -2**31), ctypes.c_int64: (-1, -2**63, 2**63 - 1, 2**62)}
SIZES_ALONE = {ctypes.c_int32: (2**31 - 1,), ctypes.c_int64: (2**31 - 1, 2**40)}  # nothing is read or written
UNKNOWN = (-1, 7777, 2**31 - 1)  # of enumerations
# What may have any value, and what is a choice of the caller's arithmetic.
ANY_INTEGER = {"window_left", "window_right", "ignore_index"}
ANY_NUMBER = {"alpha", "sink"}
NOT_NEGATIVE = {"softcap", "eps", "limit", "gate_limit", "p", "temperature", "top_p", "min_p", "uniform"}
BYTE_TYPES = {"weight_create", "weight_create_mxfp4", "weight_bytes", "weight_kept_bytes", "repack_mxfp4", "fp4_gemm",
              "gemm_i8", "gemm_fp8", "grouped_fp8"}  # where a void* is to bytes


class Mutation:
    """One argument made wrong. must: whether it has to be refused."""

    def __init__(self, path, what, value, must=True):
        self.path, self.what, self.value, self.must = path, what, value, must

    def __str__(self):
        return f"{'.'.join(self.path)} {self.what}"


def fields_of(call, path, struct):
    for field, ctype in struct._fields_:
        value = getattr(struct, field)
        if isinstance(value, ctypes.Structure):
            yield from fields_of(call, path + (field,), value)
        else:
            yield path + (field,), ctype, call.headers.words[type(struct).__name__][field], value
            yield from hosted_fields(call, path + (field,), value)


def hosted_fields(call, path, value):
    host = call.hosts.get(value) if isinstance(value, int) and value else None
    if isinstance(host, ctypes.Structure):
        yield from fields_of(call, path, host)


def arguments_of(call):
    """(path, ctype, the header's words, value) of everything that a caller could get wrong."""
    for name, ctype, words in call.headers.functions[call.function][1]:
        if name in ("workspace", "workspace_bytes", "stream", "memory_bytes") or name not in call.arguments:
            continue
        value = call.arguments[name]
        if isinstance(value, ctypes.Structure):
            yield from fields_of(call, (name,), value)
        else:
            yield (name,), ctype, words, value
            yield from hosted_fields(call, (name,), value)


def pointer_mutations(call, path, words, value):
    if not value:
        return
    yield Mutation(path, "NULL", None, ".".join(path[-2:]) not in call.optional and path[-1] not in call.optional)
    is_array = value in call.buffers and not call.buffers[value].handle
    if is_array and path[-1] not in call.unread:
        is_bytes = words.endswith("void*") and (call.name in BYTE_TYPES or path[-1] == "codes")
        yield Mutation(path, "misaligned", value + 1, not is_bytes)


def mutations(call):
    for path, ctype, words, value in arguments_of(call):
        name = path[-1]
        if ctype in (ctypes.c_void_p, ctypes.c_char_p):
            yield from pointer_mutations(call, path, words, value)
        elif ctype in (ctypes.c_float, ctypes.c_double):
            yield Mutation(path, "NaN", math.nan, name not in ANY_NUMBER and name not in call.unread)
            if name in NOT_NEGATIVE and name not in call.unread:
                yield Mutation(path, "-1", -1.0)
        elif words in call.headers.enums:
            for bad in UNKNOWN:
                yield Mutation(path, f"of {bad}", bad, name not in call.unread)
        elif value != 0:  # what is 0 is not used by this call
            for bad in INTEGERS.get(ctype, ()):
                yield Mutation(path, str(bad), bad, name not in ANY_INTEGER and name not in call.unread)
            for bad in SIZES_ALONE.get(ctype, ()) if call.function.endswith("_bytes") else ():
                yield Mutation(path, str(bad), bad, False)
            yield Mutation(path, "0", 0, False)


def changed(call, path, value, arguments):
    """Arguments with another value at a path, and the copies that they point to."""
    arguments, kept = dict(arguments), []

    def put(get, set, rest):
        head, *rest = rest
        if not rest:
            return set(head, value)
        old = get(head)
        inside = isinstance(old, ctypes.Structure)
        copy = type(old).from_buffer_copy(old) if inside else type(call.hosts[old]).from_buffer_copy(call.hosts[old])
        kept.append(copy)
        put(lambda field: getattr(copy, field), lambda field, x: setattr(copy, field, x), rest)
        set(head, copy if inside else ctypes.addressof(copy))

    put(arguments.__getitem__, arguments.__setitem__, list(path))
    return arguments, kept


class Runner:
    """The calls of one case, each told before and after it runs."""

    def __init__(self, call, tell):
        self.call, self.tell, self.workspaces = call, tell, []

    def with_workspace(self, arguments):
        """As much as these arguments ask for, or what was there before where they are wrong."""
        if "workspace" not in [name for name, *_ in self.call.headers.functions[self.call.function][1]]:
            return arguments
        needed = self.call.workspace_bytes(arguments)
        if needed is None or needed > 1 << 28:
            needed = self.workspaces[0].size if self.workspaces else 0
        self.workspaces.append(Buffer(needed, out=True))
        return {**arguments, "workspace": self.workspaces[-1].at if needed else None, "workspace_bytes": needed}

    def run(self, what, path, must, arguments):
        for buffer in self.call.buffers.values():
            buffer.restore()
        self.tell("runs", what)
        status = self.call.run(self.call.function, arguments)
        line = self.call.library.mr_last_error().decode(errors="replace") if status else ""
        written = status != 0 and any(buffer.written() for buffer in self.call.buffers.values())
        self.tell("ran", what, path, must, status, line, written)

    def run_all(self):
        valid = self.with_workspace(self.call.arguments)
        self.run("valid", [], None, valid)
        needed = valid.get("workspace_bytes", 0)
        if needed:
            must = self.call.function != "mr_linear_cross_entropy"  # takes fewer rows at a time
            for what, change in (("NULL", {"workspace": None}), ("misaligned", {"workspace": valid["workspace"] + 64}),
                                 ("too small", {"workspace_bytes": needed - 1}), ("empty", {"workspace_bytes": 0})):
                self.run(f"workspace {what}", ["workspace"], must or what != "too small", {**valid, **change})
        for mutation in mutations(self.call):
            arguments, kept = changed(self.call, mutation.path, mutation.value, self.call.arguments)
            self.run(str(mutation), mutation.path, mutation.must, self.with_workspace(arguments))
            del kept


def faults_of_call(what, path, must, status, line, written):
    if what == "valid":
        if status != 0:
            yield f"valid arguments: {line}"
        return
    if status == 0:
        if must:
            yield f"{what}: accepted"
        return
    if written:
        yield f"{what}: refused with something written: {line}"
    names = [name for name in path if name not in ("args", "data")] or path
    named = any(name in line for name in names[-2:]) or any(word in line for word in kernel_calls.ALSO.get(path[-1], ()))
    if must and not named:
        yield f"{what}: not named in \"{line}\""
    if what in ("workspace too small", "workspace empty") and "expected at least" not in line:
        yield f"{what}: the size needed is not in \"{line}\""


def run_case(calls, name):
    """(number of calls, faults)"""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "w") as out:
            def tell(*event):
                out.write(json.dumps(event) + "\n")
                out.flush()
            try:
                Runner(calls.make(name), tell).run_all()
            except Exception as error:  # the test's own
                tell("failed", repr(error))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        events = [json.loads(line) for line in lines]
    _, status = os.waitpid(child, 0)
    faults = [f"{name}: {event[1]}" for event in events if event[0] == "failed"]
    if status != 0:
        faults.append(f"{name}: {events[-1][1] if events else 'the start'} ended the process with {status}")
    ran = [event[1:] for event in events if event[0] == "ran"]
    faults += [f"{name}: {fault}" for event in ran for fault in faults_of_call(*event)]
    return len(ran), faults


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--isa")
    parser.add_argument("cases", nargs="*")
    options = parser.parse_args()
    calls = kernel_calls.Calls(options.library, options.isa)
    faults = [] if options.cases else [f"{function}: no call of it is tried" for function in calls.not_covered()]
    count = 0
    for name in options.cases or calls.names():
        ran, found = run_case(calls, name)
        count += ran
        faults += found
    for fault in faults:
        print(fault)
    print(f"{count} calls of {len(calls.names())} cases, {len(faults)} faults")
    return 1 if faults or not count else 0


if __name__ == "__main__":
    sys.exit(main())

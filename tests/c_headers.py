"""The C headers of the kernel library as ctypes: structs, enumerations and functions, read from their text.

Enough of C for include/millrace/kernels/*.h: comments, typedefs of structs and enumerations, prototypes.
"""

import ctypes
import re
from pathlib import Path

NUMBERS = {"int": ctypes.c_int32, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64,
           "size_t": ctypes.c_size_t, "float": ctypes.c_float, "double": ctypes.c_double}
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
TYPEDEF = re.compile(r"(?:typedef\s+)?(enum|struct)\s*(\w*)\s*\{([^}]*)\}\s*(\w*)\s*;")
PROTOTYPE = re.compile(r"MR_API\s+([^;(]+?)(\w+)\(([^;]*)\)\s*;", re.DOTALL)
INCLUDE = re.compile(r'#include "millrace/kernels/(\w+\.h)"')


class Headers:
    """structs: name -> Structure; words: name -> {field: its type in C}; enums: name -> {enumerator: value};
    functions: name -> (returned type, [(parameter, type, its type in C)])."""

    def __init__(self, folder):
        self.structs, self.words, self.enums, self.functions = {}, {}, {}, {}
        texts = {path.name: COMMENT.sub(" ", path.read_text()) for path in sorted(Path(folder).glob("*.h"))}
        done = set()

        def read(name):
            if name in done:
                return
            done.add(name)
            for included in INCLUDE.findall(texts[name]):
                read(included)
            self.read(texts[name])

        for name in texts:
            read(name)

    def read(self, text):
        text = "\n".join(line for line in text.split("\n") if not line.startswith("#"))
        for kind, tag, body, name in TYPEDEF.findall(text):
            if kind == "enum":
                self.read_enum(name or tag, body)
            else:
                self.read_struct(name or tag, body)
        for returned, name, parameters in PROTOTYPE.findall(text):
            named = [] if parameters.strip() == "void" else [self.declared(p) for p in parameters.split(",")]
            self.functions[name] = (self.type_of(returned)[0], named)

    def read_enum(self, name, body):
        values, last = {}, -1
        for entry in filter(None, (e.strip() for e in body.split(","))):
            word, _, value = (part.strip() for part in entry.partition("="))
            last = int(value) if value else last + 1
            values[word] = last
        self.enums[name] = values

    def read_struct(self, name, body):
        fields, words = [], {}
        for line in filter(None, (part.strip() for part in body.split(";"))):
            first, *more = line.split(",")  # float *dq, *dk;
            base = re.match(r"(?:const\s+)?\w+", first).group()
            for declaration in [first] + [f"{base} {another.strip()}" for another in more]:
                field, ctype, what = self.declared(declaration)
                fields.append((field, ctype))
                words[field] = what
        self.structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
        self.words[name] = words

    def declared(self, text):
        """(name, ctypes type, its words) of 'const float* x'."""
        match = re.match(r"(.*?)(\w+)$", " ".join(text.split()))
        return (match.group(2), *self.type_of(match.group(1)))

    def type_of(self, text):
        words = " ".join(text.split()).replace(" *", "*")
        base = words.replace("const ", "").replace("struct ", "")
        if base == "void":
            return None, words
        if words == "const char*":
            return ctypes.c_char_p, words
        if base.endswith("*") or base == "mr_stream":
            return ctypes.c_void_p, words
        if base in self.structs:
            return self.structs[base], words
        return ctypes.c_int32 if base in self.enums else NUMBERS[base], words

    def load(self, path):
        """The library, its functions with the types that the headers give them."""
        library = ctypes.CDLL(str(path))
        for name, (returned, parameters) in self.functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = returned, [ctype for _, ctype, _ in parameters]
        return library

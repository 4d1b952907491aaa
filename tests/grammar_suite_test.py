#!/usr/bin/env python3
"""Holds src/grammar to the official JSON-Schema-Test-Suite (draft 2020-12) and to Python's jsonschema.

  tests/grammar_suite_test.py build/dev/tests/grammar_driver [-v]

For every schema of the suite, with objects as the standard has them (open), either it is refused (and counted), or
  - what the suite calls valid is accepted and what it calls invalid is rejected. Instances are written the way
    this grammar writes JSON: properties in the schema's order, 1.0 as 1 (see written() below);
  - everything a random walk over the token masks writes parses and validates, according to jsonschema.
With closed objects, which is what the engine writes unless told otherwise, nothing that the suite calls invalid is
accepted, the walks validate too, and hold no property that the schema does not name.
A wrong answer fails. So does a file of the supported part whose schemas are suddenly refused (SUPPORTED).
Then the same walks for schemas of our own, and formats from the suite's optional part, where what is accepted
must be valid and not the other way round.

The suite comes in the source archive of jsonschema, fetched by pip into build/cache. Without network the test
says so and is skipped.
"""

import json
import subprocess
import sys
import tarfile
import venv
from collections import Counter
from decimal import Decimal
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "cache" / "json_schema_suite"
PACKAGE = "jsonschema==4.26.0"

# Files whose schemas must all be taken, except for REFUSED; in the others, refusing is allowed and counted.
SUPPORTED = {"additionalProperties", "anyOf", "boolean_schema", "const", "default", "enum", "exclusiveMaximum",
             "exclusiveMinimum", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems",
             "minLength", "minimum", "multipleOf", "pattern", "patternProperties", "prefixItems", "properties",
             "required", "type", "infinite-loop-detection", "propertyNames", "allOf", "minProperties"}
REFUSED = {("additionalProperties", "dependentSchemas with additionalProperties"), ("multipleOf", "float division = inf")}
# (file, schema): why what is by the suite is not written by this grammar.
NARROWER = {
    ("const", "float and integers are equal up to 64-bit representation limits"): "more digits than are written",
    ("const", "const with object"): "the properties of a const come in its own order",
}
FORMATS = ["date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "json-pointer"]

OUR_SCHEMAS = ROOT / "tests" / "golden" / "grammar_schemas.json"


def skip(reason):
    print(f"SKIPPED: grammar_suite_test: {reason}")
    sys.exit(77)  # ctest counts it as skipped


def prepare():
    """The suite's folder and a Python that has jsonschema."""
    python = CACHE / "venv" / "bin" / "python"
    ready = CACHE / ".ready"
    if not ready.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        try:
            venv.create(CACHE / "venv", with_pip=True, clear=True)
            pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, "install", f"{PACKAGE.replace('jsonschema', 'jsonschema[format]')}"], check=True)
            subprocess.run([*pip, "download", "--no-deps", "--no-binary", "jsonschema", "-d", CACHE, PACKAGE], check=True)
            archive = next(CACHE.glob("jsonschema-*.tar.gz"))
            with tarfile.open(archive) as tar:
                tar.extractall(CACHE)
        except (subprocess.CalledProcessError, OSError, StopIteration) as error:
            skip(f"{PACKAGE} cannot be had from PyPI: {error}")
        ready.touch()
    suite = next(CACHE.glob("jsonschema-*/json/tests/draft2020-12"))
    return suite, python


class Driver:
    def __init__(self, program):
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        encoding="utf-8")

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the driver died at {json.dumps(request)[:500]}")
        return json.loads(line)


def property_order(schema, root, seen=()):
    """Names in the order in which the grammar writes them: of the schema itself, then of what it refers to."""
    if not isinstance(schema, dict) or id(schema) in seen:
        return []
    seen = (*seen, id(schema))
    parts = [schema]
    queue = [schema]
    while queue:
        part = queue.pop(0)
        found = []
        if isinstance(part.get("$ref"), str) and part["$ref"].startswith("#"):
            found.append(lookup(root, part["$ref"]))
        for key in ("allOf", "anyOf", "oneOf"):
            found += part.get(key, []) if isinstance(part.get(key), list) else []
        for one in found:
            if isinstance(one, dict) and not any(one is p for p in parts):
                parts.append(one)
                queue.append(one)
    names = [name for part in parts for name in part.get("properties", {})]
    names += [name for part in parts for name in part.get("required", []) if isinstance(part.get("required"), list)]
    return list(dict.fromkeys(names))


def lookup(root, ref):
    node = root
    for step in ref[2:].split("/") if len(ref) > 1 else []:
        from urllib.parse import unquote
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        node = node[int(step)] if isinstance(node, list) else node.get(step)
        if node is None:
            return None
    return node


def written(instance, schema, root):
    """The instance as this grammar writes it: see the module's comment."""
    if isinstance(instance, bool) or instance is None or isinstance(instance, str):
        return instance
    if isinstance(instance, (float, Decimal)) and instance == int(instance) and abs(instance) < 1e15:
        return int(instance)
    if isinstance(instance, list):
        return [written(item, None, root) if not isinstance(schema, dict) else
                written(item, schema.get("items") if isinstance(schema.get("items"), dict) else None, root)
                for item in instance]
    if isinstance(instance, dict):
        order = property_order(schema, root) if isinstance(schema, dict) else []
        names = [name for name in order if name in instance] + [name for name in instance if name not in order]
        properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
        return {name: written(instance[name], properties.get(name), root) for name in names}
    return instance


def write(instance):
    def default(value):
        raise TypeError(value)
    return json.dumps(instance, ensure_ascii=False, default=default)


class Oracle:
    """jsonschema in its own Python: lines of {schema, instance} in, true or false out."""
    PROGRAM = r"""
import json, sys
from decimal import Decimal
import jsonschema
for line in sys.stdin:
    request = json.loads(line)
    schema = json.loads(request["schema"], parse_float=Decimal)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER if request["formats"] else None
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    answers = []
    for text in request["texts"]:
        try:
            instance = json.loads(text, parse_float=Decimal)
        except ValueError as error:
            answers.append(f"not JSON: {error}")
            continue
        error = jsonschema.exceptions.best_match(validator.iter_errors(instance))
        answers.append(None if error is None else error.message)
    print(json.dumps(answers), flush=True)
"""

    def __init__(self, python):
        self.process = subprocess.Popen([python, "-c", self.PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, encoding="utf-8")

    def errors(self, schema, texts, formats):
        self.process.stdin.write(json.dumps({"schema": json.dumps(schema), "texts": texts, "formats": formats}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def check_walks(oracle, schema, walks, where, faults, counts, formats):
    texts = [walk for walk in walks if walk is not None]
    counts["walks"] += len(walks)
    counts["walks cut"] += len(walks) - len(texts)
    for text, error in zip(texts, oracle.errors(schema, texts, formats)):
        if error is not None:
            faults.append(f"{where}: wrote {text!r}: {error}")


def run_suite(suite, driver, oracle, faults, counts, verbose):
    refusals = Counter()
    for path in sorted(suite.glob("*.json")):
        name = path.stem
        if name == "format":
            continue  # says that format is a note only; here it is not, see run_formats
        for case in json.loads(path.read_text(encoding="utf-8")):
            schema = case["schema"]
            where = f"{name}: {case['description']}"
            texts = [write(written(test["data"], schema, schema)) for test in case["tests"]]
            answer = driver.ask(schema=schema, open=True, texts=texts, walks=8, seed=counts["schemas"] + 1)
            run_closed(driver, oracle, case, texts, where, faults, counts)
            counts["schemas"] += 1
            if answer.get("error") == "bad_input" and "no text at all matches" in answer["message"]:
                if any(test["valid"] for test in case["tests"]):
                    faults.append(f"{where}: {answer['message']}")
                counts["schemas that nothing satisfies"] += 1
                continue
            if "error" in answer:
                counts["refused"] += 1
                refusals[name] += 1
                if answer["error"] != "unsupported":
                    faults.append(f"{where}: {answer['error']}: {answer['message']}")
                elif name in SUPPORTED and (name, case["description"]) not in REFUSED:
                    faults.append(f"{where}: refused: {answer['message']}")
                if verbose:
                    print(f"refused {where}: {answer['message']}")
                continue
            counts["taken"] += 1
            for test, text, accepted in zip(case["tests"], texts, answer["matches"]):
                if accepted == test["valid"]:
                    counts["instances right"] += 1
                elif not accepted and (name, case["description"]) in NARROWER:
                    counts["instances outside of what is written"] += 1
                else:
                    faults.append(f"{where}: {test['description']}: {text} is {'valid' if test['valid'] else 'invalid'}")
            check_walks(oracle, schema, answer["walks"], where, faults, counts, False)
    print("refused by file:", ", ".join(f"{name} {n}" for name, n in sorted(refusals.items())))


def closed(schema):
    """The schema with what it leaves open closed, or None where several schemas speak of one object."""
    if isinstance(schema, list):
        parts = [closed(part) for part in schema]
        return None if None in parts else parts
    if not isinstance(schema, dict):
        return schema
    if not {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "not", "if", "dependentSchemas"}.isdisjoint(schema):
        return None
    out = {}
    for key, value in schema.items():
        if key in ("enum", "const", "default", "examples") or (key == "required" and isinstance(value, list)):
            out[key] = value
        elif key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            out[key] = {name: closed(part) for name, part in value.items()}
        else:
            out[key] = closed(value)
        if out[key] is None and value is not None or isinstance(out[key], dict) and None in out[key].values() and key != "const":
            return None
    if "additionalProperties" not in out and not {"properties", "patternProperties", "required"}.isdisjoint(out):
        names = {name: True for name in out.get("required", [])} if isinstance(out.get("required"), list) else {}
        out["properties"] = {**names, **out.get("properties", {})}
        out["additionalProperties"] = False
    return out


def run_closed(driver, oracle, case, texts, where, faults, counts):
    schema = case["schema"]
    answer = driver.ask(schema=schema, texts=texts, walks=8, seed=counts["schemas"] + 1)
    if "error" in answer:
        counts["closed: refused, or nothing left to write"] += 1
        return
    for test, text, accepted in zip(case["tests"], texts, answer["matches"]):
        if accepted and not test["valid"]:
            faults.append(f"closed: {where}: {test['description']}: {text} is invalid")
        counts["closed: instances accepted" if accepted else "closed: instances rejected"] += 1
    check_walks(oracle, schema, answer["walks"], f"closed: {where}", faults, counts, False)
    narrow = closed(schema)
    if narrow is not None:
        counts["closed: schemas whose names are checked"] += 1
        check_walks(oracle, narrow, answer["walks"], f"closed: {where}: further properties", faults, counts, False)


def run_formats(suite, driver, oracle, faults, counts):
    for name in FORMATS:
        for case in json.loads((suite / "optional" / "format" / f"{name}.json").read_text(encoding="utf-8")):
            texts = [write(written(test["data"], None, None)) for test in case["tests"]]
            answer = driver.ask(schema=case["schema"], texts=texts, walks=40, seed=7)
            if "error" in answer:
                faults.append(f"format {name}: {answer['message']}")
                continue
            for test, text, accepted in zip(case["tests"], texts, answer["matches"]):
                if accepted and not test["valid"]:
                    faults.append(f"format {name}: {test['description']}: {text} is invalid and was accepted")
                counts["format instances right" if accepted == test["valid"] else "format instances not written"] += 1
            check_walks(oracle, case["schema"], answer["walks"], f"format {name}", faults, counts, True)


def run_ours(driver, oracle, faults, counts):
    cases = json.loads(OUR_SCHEMAS.read_text(encoding="utf-8"))
    for case, is_open in [(case, is_open) for case in cases for is_open in (False, True)]:
        right = case.get("accept", []) + (case.get("only_open", []) if is_open else [])
        wrong = case.get("reject", []) + ([] if is_open else case.get("only_open", []))
        answer = driver.ask(schema=case["schema"], open=is_open, texts=right + wrong, walks=case.get("walks", 60))
        where = f"ours, {'open' if is_open else 'closed'}: {case['description']}"
        if "error" in answer:
            if case.get("error") != answer["error"] or case.get("message", "") not in answer["message"]:
                faults.append(f"{where}: {answer['error']}: {answer['message']}")
            counts["our schemas refused as they should be"] += 1
            continue
        if "error" in case:
            faults.append(f"{where}: taken, expected {case['error']}")
            continue
        counts["our schemas"] += 1
        for i, (text, matched) in enumerate(zip(right + wrong, answer["matches"])):
            if matched != (i < len(right)):
                faults.append(f"{where}: {text} was {'accepted' if matched else 'rejected'}")
        check_walks(oracle, case["schema"], answer["walks"], where, faults, counts, True)


def main():
    verbose = "-v" in sys.argv
    suite, python = prepare()
    driver, oracle = Driver(sys.argv[1]), Oracle(python)
    faults, counts = [], Counter()
    run_suite(suite, driver, oracle, faults, counts, verbose)
    run_formats(suite, driver, oracle, faults, counts)
    run_ours(driver, oracle, faults, counts)
    for name, count in counts.items():
        print(f"{count:6} {name}")
    for fault in faults:
        print("FAULT", fault)
    print(f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

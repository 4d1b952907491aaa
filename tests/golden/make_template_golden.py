#!/usr/bin/env python3
"""Records what jinja2, set up as transformers sets it up for chat templates, makes of templates.

  tests/golden/make_template_golden.py constructs   our own small templates -> templates/constructs.json
  tests/golden/make_template_golden.py models       real templates that tools/fetch_templates.py fetched into
                                                    build/models/templates -> templates/models.json
  tests/golden/make_template_golden.py compare DIR RUNNER
                                                    every *.jinja of DIR against a program (not recorded)

Needs transformers and jinja2. Real templates belong to others: neither they nor what they say is kept here. models.json
holds digests only, of the template and of each expected text (its length in bytes and its FNV-1a hash, "412:9ae1..."),
or "error" where jinja2 raises. To see a difference, render the case with both.
"""
import datetime
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time

os.environ["TZ"] = "UTC"
time.tzset()

from transformers.utils import chat_template_utils  # noqa: E402

import template_constructs  # noqa: E402
import template_conversations  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NOW = 1753000000  # 2025-07-20 08:26:40 UTC: what strftime_now sees


class FixedDatetime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, tz)


chat_template_utils.datetime = FixedDatetime


def render(source, variables):
    """("output", text) or ("error", message)."""
    try:
        text = chat_template_utils._compile_jinja_template(source).render(**variables)
        text.encode()
        return "output", text
    except Exception as error:  # what jinja2 raises is as varied as Python
        return "error", f"{type(error).__name__}: {error}"


def digest(text):
    """Length in bytes and FNV-1a, 64 bits, of the text in UTF-8."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{len(text.encode())}:{value:016x}"


def write(path, data):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n")
    print(f"{path.relative_to(ROOT)}: {len(data['cases'])} cases")


def constructs():
    cases = []
    for source in template_constructs.CASES:
        kind, text = render(source, template_constructs.VARIABLES)
        cases.append({"template": source, kind: text})
    expected = len(template_constructs.ERRORS)
    errors = [c for c in cases if "error" in c]
    for case in errors[:-expected] if len(errors) > expected else []:
        print("note: jinja2 fails on", case, file=sys.stderr)
    write(HERE / "templates" / "constructs.json",
          {"now": NOW, "variables": template_constructs.VARIABLES, "cases": cases})


def models():
    folder = ROOT / "build" / "models" / "templates"
    sources = sorted(folder.glob("*.jinja"))
    if not sources:
        sys.exit(f"{folder.relative_to(ROOT)} holds no templates: run tools/fetch_templates.py")
    names = [name for name, _ in template_conversations.cases()]
    recorded = []
    for path in sources:
        source = path.read_text()
        results = [render(source, variables) for _, variables in template_conversations.cases()]
        recorded.append({"template": path.name, "sha256": hashlib.sha256(source.encode()).hexdigest(),
                         "renderings": [digest(text) if kind == "output" else "error" for kind, text in results]})
    write(HERE / "templates" / "models.json", {"now": NOW, "conversations": names, "cases": recorded})
    write(HERE / "templates" / "conversations.json",
          {"cases": [{"name": name, "variables": variables} for name, variables in template_conversations.cases()]})


def compare(folder, runner):
    program = subprocess.Popen([runner], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    total = bad = failed = 0
    for path in sorted(pathlib.Path(folder).glob("*.jinja")):
        source, wrong, errors = path.read_text(), [], 0
        for name, variables in template_conversations.cases():
            kind, text = render(source, variables)
            program.stdin.write(json.dumps({"template": source, "vars": variables}) + "\n")
            program.stdin.flush()
            got = json.loads(program.stdout.readline())
            total += 1
            errors += kind == "error"
            if kind not in got or (kind == "output" and got[kind] != text):
                wrong.append((name, kind, text[-300:], str(got)[-300:]))
        bad += len(wrong)
        failed += errors
        print(f"{path.name}: {len(wrong)} differ, {errors} raise in jinja2", *wrong[:1])
    print(f"{total} renderings, {bad} differ, {failed} raise in jinja2")


if __name__ == "__main__":
    actions = {"constructs": constructs, "models": models, "compare": compare}
    if len(sys.argv) < 2 or sys.argv[1] not in actions:
        sys.exit(__doc__)
    actions[sys.argv[1]](*sys.argv[2:])

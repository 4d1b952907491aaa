"""Records of measurements: what one holds, how a file of them is read and written, and which of them are the newest.

A file of bench/results is a JSON list of records, the oldest first; nothing is ever changed in one, a new measurement
is appended. bench/record.py writes them, bench/render.py makes docs/benchmarks.md of the newest, and
tests/benchmarks_test.py holds the two together. A field that nobody knows is null, and the page shows that.
"""

import json
import os
import re
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

# Sections of a machine's tables, in this order.
TOPICS = ("speed", "attention", "products", "fused", "quantizing", "quality", "engine", "server", "tokenizers", "cache")
# What a plot shows; every other metric is in the tables alone.
PHASES = ("decode", "prefill")
# Units in which less is better.
LOWER_IS_BETTER = {"s", "ms", "us", "GB", "MB", "%", "nats"}

NUMBER, TEXT, WHOLE = (int, float), (str,), (int,)
RECORD_FIELDS = {  # name -> (types, may be null)
    "topic": (TEXT, False),  # one of TOPICS
    "set": (TEXT, True),  # the set of bench/record.py that measured it; null where a person typed the command
    "commit": (TEXT, True),  # what was measured; of figures before 2026-11-17, the commit that wrote them down
    "date": (TEXT, False),  # YYYY-MM-DD
    "machine": ((dict,), False),
    "model": (TEXT, True),  # file or shape, with the types of its weights
    "metric": (TEXT, False),  # what was measured, with its sizes: "prefill of 2,048 tokens"
    "phase": (TEXT, True),  # one of PHASES where a plot shows it
    "unit": (TEXT, False),
    "median": (NUMBER, False),
    "range": ((list,), True),  # lowest and highest
    "runs": (WHOLE, True),
    "command": (TEXT, True),
    "limit": ((dict,), True),
    "peers": ((list,), False),  # measured in the same call, else they do not belong here
    "note": (TEXT, True),
}
MACHINE_FIELDS = {
    "name": (TEXT, False),  # the heading of its table
    "cores": (WHOLE, False),
    "isa": (TEXT, True),  # the kernel table that ran, as `millrace bench` names it
    "gpu": (TEXT, True),
    "about": (TEXT, True),
}
LIMIT_FIELDS = {
    "value": (NUMBER, False),  # in the unit of the metric
    "by": (TEXT, False),  # what it follows from
    "same_run": ((bool,), False),  # measured in the same call, not taken from elsewhere
}
PEER_FIELDS = {
    "name": (TEXT, False),
    "version": (TEXT, True),
    "median": (NUMBER, False),
    "range": ((list,), True),
    "runs": (WHOLE, True),
    "command": (TEXT, True),
}


class RecordError(Exception):
    """One line: where, what was found, what was expected."""


def check_fields(value, fields, where):
    if not isinstance(value, dict):
        raise RecordError(f"{where}: found {type(value).__name__}, expected an object")
    for name in value.keys() - fields.keys():
        raise RecordError(f"{where}: found the field '{name}', expected one of {', '.join(fields)}")
    for name, (types, nullable) in fields.items():
        if name not in value:
            raise RecordError(f"{where}: has no '{name}' (null says that it is not known)")
        found = value[name]
        if found is None and nullable:
            continue
        wrong_bool = isinstance(found, bool) and bool not in types
        if wrong_bool or not isinstance(found, types):
            expected = " or ".join(kind.__name__ for kind in types) + (" or null" if nullable else "")
            raise RecordError(f"{where}.{name}: found {json.dumps(found)}, expected {expected}")


def check_range(value, where):
    low_high = value["range"]
    if low_high is None:
        return
    if len(low_high) != 2 or not all(isinstance(n, NUMBER) and not isinstance(n, bool) for n in low_high):
        raise RecordError(f"{where}.range: found {json.dumps(low_high)}, expected [lowest, highest]")
    if not low_high[0] <= value["median"] <= low_high[1]:
        raise RecordError(f"{where}: the median {value['median']} is not within its range {low_high}")


def check_record(record, where="record"):
    """Raises RecordError unless `record` is one."""
    check_fields(record, RECORD_FIELDS, where)
    check_fields(record["machine"], MACHINE_FIELDS, f"{where}.machine")
    if record["topic"] not in TOPICS:
        raise RecordError(f"{where}.topic: found '{record['topic']}', expected one of {', '.join(TOPICS)}")
    if record["phase"] is not None and record["phase"] not in PHASES:
        raise RecordError(f"{where}.phase: found '{record['phase']}', expected one of {', '.join(PHASES)} or null")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"]):
        raise RecordError(f"{where}.date: found '{record['date']}', expected YYYY-MM-DD")
    if record["commit"] is not None and not re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", record["commit"]):
        raise RecordError(f"{where}.commit: found '{record['commit']}', expected a commit's hash")
    check_range(record, where)
    if record["limit"] is not None:
        check_fields(record["limit"], LIMIT_FIELDS, f"{where}.limit")
        if record["limit"]["value"] <= 0:
            raise RecordError(f"{where}.limit.value: found {record['limit']['value']}, expected more than 0")
    for idx, peer in enumerate(record["peers"]):
        check_fields(peer, PEER_FIELDS, f"{where}.peers[{idx}]")
        check_range(peer, f"{where}.peers[{idx}]")


def load_file(path):
    """The records of one file, checked."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise RecordError(f"{path}:{error.lineno}: no JSON: {error.msg}") from error
    if not isinstance(records, list):
        raise RecordError(f"{path}: found {type(records).__name__}, expected a list of records")
    for idx, record in enumerate(records):
        check_record(record, f"{path.name}[{idx}]")
    return records


def load_all(folder=RESULTS):
    """Every record, file by file in order of name."""
    return [record for path in sorted(folder.glob("*.json")) for record in load_file(path)]


def append(path, new):
    """Adds records to a file, which appears whole or stays as it was."""
    records = load_file(path) if path.exists() else []
    for idx, record in enumerate(new):
        check_record(record, f"new record {idx}")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(records + new, indent=1, ensure_ascii=False) + "\n"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as out:
        out.write(text)
    os.chmod(out.name, 0o644)
    os.replace(out.name, path)


def identity(record):
    """What two measurements of the same thing share."""
    return record["machine"]["name"], record["topic"], record["model"], record["metric"]


def newest(records):
    """Of every thing that was measured the last measurement, in the order in which things came first."""
    found = {}
    for record in records:
        old = found.get(identity(record))
        if old is None or record["date"] >= old["date"]:
            found[identity(record)] = record
    return list(found.values())


def share_of_limit(record):
    """Between 0 and 1 (or a little above, where a limit was measured badly); None without a limit."""
    if record["limit"] is None:
        return None
    limit, median = record["limit"]["value"], record["median"]
    return limit / median if record["unit"] in LOWER_IS_BETTER else median / limit

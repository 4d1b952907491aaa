#!/usr/bin/env python3
"""Figures are data: bench/results holds records, docs/benchmarks.md and its plots are what bench/render.py makes of
them, and bench/record.py measures what it says. Run from anywhere; status 1 when page and data differ.

With a binary as first argument, record.py drives it over a tiny model, with a stand-in for llama-bench.
"""

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
import record  # noqa: E402
import records  # noqa: E402
import render  # noqa: E402

MILLRACE = None

LLAMA_BENCH = """\
#!/usr/bin/env python3
# Answers as llama-bench -o json does: a row of the prompt, a row of the decoded tokens.
import json, sys
words = sys.argv[1:]
value = lambda name: int(words[words.index(name) + 1])
print(json.dumps([
    {"build_commit": "0123abc", "n_prompt": value("-p"), "n_gen": 0, "n_depth": value("-d"), "avg_ts": 50.0},
    {"build_commit": "0123abc", "n_prompt": 0, "n_gen": value("-n"), "n_depth": value("-d"), "avg_ts": 20.0}]))
"""


class Page(unittest.TestCase):
    def test_page_and_plots_are_what_the_records_say(self):
        self.assertEqual(render.stale(), [], "bench/render.py writes them anew")

    def test_a_changed_figure_is_noticed(self):
        with tempfile.TemporaryDirectory() as folder:
            copied = Path(folder) / "results"
            shutil.copytree(records.RESULTS, copied)
            path = copied / "one-h200.json"
            found = json.loads(path.read_text())
            found[-1]["median"] *= 2
            if found[-1]["range"]:
                found[-1]["range"] = None
            path.write_text(json.dumps(found))
            real, records.load_all.__defaults__ = records.load_all.__defaults__, (copied,)
            try:
                self.assertIn(render.PAGE, render.stale())
            finally:
                records.load_all.__defaults__ = real

    def test_the_worst_ratio_comes_first(self):
        section = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").split("## The worst first")[1].split("\n## ")[0]
        times = [float(line.split("|")[1].strip(" x")) for line in section.splitlines() if line[2:3].isdigit()]
        self.assertGreater(len(times), 10)
        self.assertEqual(times, sorted(times))

    def test_plots_are_pictures(self):
        names = [name for name in render.files() if name.endswith(".svg")]
        self.assertEqual(len(names), 2 * len(render.plots.THEMES))
        for name in names:
            tree = xml.etree.ElementTree.fromstring(render.files()[name])
            bars = tree.findall("{http://www.w3.org/2000/svg}rect")
            self.assertGreater(len(bars), 4, name)
            for bar in bars:
                right = float(bar.get("x")) + float(bar.get("width"))
                self.assertLessEqual(right, float(tree.get("width")), name)


class Records(unittest.TestCase):
    def good(self):
        return copy.deepcopy(records.load_all()[0])

    def refused(self, change, message):
        found = self.good()
        change(found)
        with self.assertRaises(records.RecordError) as caught:
            records.check_record(found)
        self.assertIn(message, str(caught.exception))

    def test_all_are_whole(self):
        self.assertGreater(len(records.load_all()), 50)

    def test_faults_are_named(self):
        self.refused(lambda r: r.pop("commit"), "has no 'commit'")
        self.refused(lambda r: r.update(extra=1), "the field 'extra'")
        self.refused(lambda r: r.update(median="fast"), "record.median")
        self.refused(lambda r: r.update(median=True), "record.median")
        self.refused(lambda r: r.update(date="yesterday"), "YYYY-MM-DD")
        self.refused(lambda r: r.update(commit="main"), "a commit's hash")
        self.refused(lambda r: r.update(topic="luck"), "expected one of speed")
        self.refused(lambda r: r.update(median=5.0, range=[1.0, 2.0]), "not within its range")
        self.refused(lambda r: r["machine"].pop("cores"), "record.machine: has no 'cores'")
        self.refused(lambda r: r.update(limit={"value": 0, "by": "nothing", "same_run": True}), "more than 0")
        self.refused(lambda r: r.update(peers=[{"name": "x"}]), "record.peers[0]: has no 'version'")

    def test_the_newest_wins_and_keeps_its_place(self):
        old, new, other = self.good(), self.good(), self.good()
        old["date"], new["date"], new["median"], new["range"] = "2026-01-01", "2026-02-01", 7.0, None
        other["metric"] = "another"
        found = records.newest([new, other, old])
        self.assertEqual([r["metric"] for r in found], [new["metric"], "another"])
        self.assertEqual(found[0]["median"], 7.0)

    def test_a_damaged_file_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "x.json"
            path.write_text("[{]")
            with self.assertRaises(records.RecordError) as caught:
                records.load_file(path)
            self.assertIn("x.json:1: no JSON", str(caught.exception))

    def test_less_is_better_in_seconds(self):
        found = self.good()
        found.update(unit="s", median=4.0, range=None, limit={"value": 2.0, "by": "", "same_run": True})
        self.assertEqual(records.share_of_limit(found), 0.5)


class Measuring(unittest.TestCase):
    def run_record(self, *arguments):
        command = [sys.executable, str(ROOT / "bench" / "record.py"), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True)

    def test_help_and_list(self):
        answer = self.run_record("--list")
        self.assertEqual(answer.returncode, 0, answer.stderr)
        for name in record.SETS:
            self.assertIn(name, answer.stdout)
        self.assertIn("--llama-bench", self.run_record("--help").stdout)

    def test_what_is_missing_is_said_in_one_line(self):
        for arguments, message in ((["nonsense"], "expected one of"), ([], "which set?"),
                                   (["cpu-smollm2", "--rounds", "0"], "expected at least 1"),
                                   (["cpu-smollm2", "--millrace", "/nowhere"], "found no program"),
                                   (["cpu-smollm2", "--millrace", sys.executable, "--models", "/nowhere"],
                                    "tools/fetch_model.py smollm2")):
            answer = self.run_record(*arguments)
            self.assertEqual(answer.returncode, 2, arguments)
            self.assertIn(message, answer.stderr.splitlines()[-1], arguments)

    def test_shapes_are_the_sets_of_a_gpu(self):
        command = [sys.executable, str(ROOT / "bench" / "shapes.py")]
        dry = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=True).stdout.splitlines()
        self.assertEqual(len(dry), sum(len(s.commands) for s in record.SETS.values() if s.device == "cuda"))
        for arguments, says in ((["--sets", "nope"], "--sets: found 'nope'"), (["--bogus"], "--bogus"),
                                (["--sets", "gpu-qwen3-moe", "--millrace", "/none", "--models", "/none"], "/none")):
            bad = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
            self.assertEqual(bad.returncode, 2, bad.stderr)
            self.assertIn(says, bad.stderr.splitlines()[-1])

    def test_a_set_is_measured_beside_a_peer(self):
        if MILLRACE is None:
            self.skipTest("no binary was named")
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            model = work / record.SETS["cpu-smollm2"].model.file
            subprocess.run([MILLRACE, "synth", "tiny-llama", str(model)], check=True, capture_output=True)
            peer = work / "llama-bench"
            peer.write_text(LLAMA_BENCH)
            os.chmod(peer, 0o755)
            arguments = ["cpu-smollm2", "--millrace", MILLRACE, "--models", work, "--rounds", 2, "--threads", 2,
                         "--llama-bench", peer, "--results", work / "results", "--machine", "a test",
                         "--commit", "0123abc"]
            for runs in (1, 2):  # the second appends
                answer = self.run_record(*arguments)
                self.assertEqual(answer.returncode, 0, answer.stderr)
                found = records.load_file(work / "results" / "a-test.json")
                self.assertEqual(len(found), 3 * runs)
            decode, prefill, short = found[-3:]
            self.assertEqual((short["phase"], short["metric"]), ("prefill", "prefill of 128 tokens"))
            self.assertEqual((decode["phase"], prefill["phase"]), ("decode", "prefill"))
            self.assertEqual(decode["runs"], 2)
            self.assertEqual([p["median"] for p in decode["peers"] + prefill["peers"]], [20.0, 50.0])
            self.assertEqual(decode["peers"][0]["version"], "0123abc")
            for one in found:
                self.assertGreater(one["limit"]["value"], 0)
                self.assertTrue(one["limit"]["same_run"])
                self.assertNotIn(folder, one["command"])

    def test_a_binary_that_fails_leaves_no_record(self):
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            (work / record.SETS["cpu-smollm2"].model.file).write_text("no model")
            answer = self.run_record("cpu-smollm2", "--millrace", "/bin/false", "--models", work,
                                     "--results", work / "results")
            self.assertEqual(answer.returncode, 2)
            self.assertIn("status 1", answer.stderr)
            self.assertFalse((work / "results").exists())


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        MILLRACE = str(Path(sys.argv.pop(1)).resolve())
    unittest.main()

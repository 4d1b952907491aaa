"""Where options come from: the line, the environment, TOML files; and that no option is taken and ignored.

    tests/config_test.py PATH/TO/millrace [unittest options]

--print-config is read by Python's own tomllib. Models are tiny random ones that the binary writes itself.
"""

import json
import re
import subprocess
import tomllib
import unittest
import urllib.request

import command
from command import TIMEOUT, CommandTest, millrace

COMMANDS = ()  # what --help lists


class ConfigTest(CommandTest):
    def printed(self, command, *args, **options):
        """The values that hold, and where each is from."""
        text = self.good(command, *args, "--print-config", **options)
        values = tomllib.loads(text)
        self.assertEqual(list(values), [command])
        origins = dict(re.findall(r"^(?:# )?([a-z0-9-]+) = .*  # (.*)$", text, re.MULTILINE))
        self.assertLessEqual(values[command].keys(), origins.keys())
        return values[command], origins


class Precedence(ConfigTest):
    def test_line_environment_file_default(self):
        config = self.file("port = 1\n[serve]\nmodel = 'm'\nhost = 'file'\nmax-running = 3\n")
        env = {"MILLRACE_PORT": "2", "MILLRACE_HOST": "environment", "MILLRACE_CTX": ""}
        values, origins = self.printed("serve", "--config", config, "--port", 3, env=env)
        self.assertEqual(values, {"port": 3, "host": "environment", "model": "m", "max-running": 3})
        self.assertEqual((origins["port"], origins["host"], origins["max-running"], origins["ctx"]),
                         ("command line", "MILLRACE_HOST", f"{config}:5", "default"))

    def test_a_commands_table_before_what_all_share(self):
        config = self.file("threads = 3\nctx = 100\n[run]\nctx = 200\n[bench]\nctx = 300\n")
        self.assertEqual(self.printed("run", "--config", config)[0], {"threads": 3, "ctx": 200})
        self.assertEqual(self.printed("bench", "--config", config)[0], {"threads": 3, "ctx": 300})
        self.assertEqual(self.printed("chat", "--config", config)[0], {"threads": 3, "ctx": 100})
        self.assertEqual(self.printed("tokenize", "--config", config)[0], {})

    def test_the_usual_places(self):
        home = self.path / "home"
        user = self.file("threads = 2\n[serve]\nport = 7\n", "home/.config/millrace/config.toml")
        env = {"MILLRACE_CONFIG": "", "HOME": str(home), "XDG_CONFIG_HOME": ""}
        values, origins = self.printed("serve", env=env)
        self.assertEqual((values["port"], origins["port"]), (7, f"{user}:3"))
        other = self.file("[serve]\nport = 8\n", "xdg/millrace/config.toml")
        env["XDG_CONFIG_HOME"] = str(self.path / "xdg")
        self.assertEqual(self.printed("serve", env=env)[1]["port"], f"{other}:2")
        text = self.good("serve", "--print-config", env=env)
        self.assertIn(f"# read: {other}\n", text)
        self.assertRegex(text, r"# (read|not there): /etc/millrace/config.toml\n")
        # A file that is named is the only one.
        self.assertNotIn("port", self.printed("serve", "--config", "/dev/null", env=env)[0])
        env["MILLRACE_CONFIG"] = str(self.file("[serve]\nport = 9\n", "third.toml"))
        self.assertEqual(self.printed("serve", env=env)[0]["port"], 9)

    def test_the_line_displaces_what_it_excludes(self):
        prompt = self.file("from a file", "prompt.txt")
        config = self.file(f"[run]\nmodel = '{self.model}'\nprompt = 'from the configuration'\nmax_tokens = 4\ntemp = 0\n")
        wanted = self.good("run", self.model, "-f", prompt, "-n", 4, "--temp", 0, "-q")
        self.assertEqual(self.good("run", "--config", config, "-f", prompt, "-q"), wanted)


class Values(ConfigTest):
    def test_real_toml(self):
        config = self.file('''# A file as people write them.
title_of_nothing = 1
''')
        self.bad("serve", "--config", config, says=[f"{config}:2:", "title-of-nothing"])
        config = self.file('''# A file as people write them.
device = "cpu"   # not "cuda"
model_id = 'not read by run'

[run]  # and only by run
model = "a \\"quoted\\" \\\\ name # with a hash"
system = """
Two lines,
the second."""
stop = ["a, b", 'c"d', "]",
        "\\u00e9\\n"]
logit-bias = []
raw = true
special = false
temp = 7e-1
top-k = 4_0
seed = 0x10

[serve]
alias = ["x", "y"]
"kv-tokens" = 100_000
rate = 5
quiet = true
''')
        values, _ = self.printed("run", "--config", config)
        written = tomllib.loads(config.read_text())
        wanted = {**written["run"], "device": "cpu"}
        self.assertEqual(values, wanted)
        values, _ = self.printed("serve", "--config", config)
        self.assertEqual(values, {**written["serve"], "device": "cpu", "model-id": "not read by run"})

    def test_what_is_printed_can_be_fed_back(self):
        lines = [("serve", self.model, "--alias", "a", "--alias", 'b"\\\n\t\x01é', "--rate", "1e3", "--quiet", "--port", "0x10",
                  "--kv-dir", "d", "--speculate", "lookup"),
                 ("run", self.model, "-p", "hi # there", "--temp", "0.1", "--seed", str(2**64 - 1), "--stop", "x"),
                 ("bench", self.model, "--clients", "2", "--priorities", "1,-2", "--exact"), ("tune", "--rows", "64"),
                 ("perplexity", self.model, "--kl", "-f", "t")]
        for line in lines:
            with self.subTest(line[0]):
                printed = self.good(*line, "--print-config")
                config = self.file(printed)
                values, origins = self.printed(line[0], "--config", config)
                self.assertEqual(values, tomllib.loads(printed)[line[0]])
                if line[0] == "run":
                    self.assertEqual(values["seed"], str(2**64 - 1))  # more than TOML's numbers hold
                self.assertGreaterEqual(len(values), len([word for word in line if str(word).startswith("-")]) - 1)
                self.assertTrue(all(origins[key].startswith(f"{config}:") for key in values))

    def test_environment(self):
        env = {"MILLRACE_MODEL": str(self.model), "MILLRACE_PROMPT": "hello", "MILLRACE_MAX_TOKENS": "4",
               "MILLRACE_TEMP": "0", "MILLRACE_JSON": "yes", "MILLRACE_STOP": "zz,yy"}
        out = json.loads(self.good("run", env=env))
        self.assertEqual(out["text"], json.loads(self.good("run", self.model, "-p", "hello", "-n", 4, "--temp", 0, "--json"))["text"])
        self.assertEqual(self.printed("run", env=env)[0]["stop"], ["zz", "yy"])
        self.assertIs(self.printed("run", env={"MILLRACE_JSON": "off"})[0]["json"], False)
        self.bad("run", env={**env, "MILLRACE_JSON": "maybe"}, says=["MILLRACE_JSON", "maybe", "1 or 0"])
        self.bad("run", env={**env, "MILLRACE_TEMP": "warm"}, says=["MILLRACE_TEMP", "warm"])
        # A flag of a file can be taken back on the line and in the environment.
        config = self.file("json = true\n")
        self.assertIs(self.printed("run", "--config", config)[0]["json"], True)
        self.assertIs(self.printed("run", "--config", config, "--json=false")[0]["json"], False)
        self.assertIs(self.printed("run", "--config", config, env={"MILLRACE_JSON": "0"})[0]["json"], False)

    def test_every_option_of_every_command(self):
        for command in COMMANDS:
            with self.subTest(command):
                shown = self.good(command, "--help")
                options = set(re.findall(r"^ +(?:-\w,)?--([a-z][a-z0-9-]*)", shown.split("\nExamples:")[0], re.MULTILINE))
                options -= {"help", "config", "print-config"}
                printed = self.good(command, "--print-config")
                keys = set(re.findall(r"^#? ?([a-z][a-z0-9-]*)(?: = | is not set)", printed, re.MULTILINE))
                self.assertEqual(keys - {"model"}, options)
                for piece in ("--config", "--print-config", "Examples:"):
                    self.assertIn(piece, shown)


class Mistakes(ConfigTest):
    def test_names(self):
        for text, pieces in (("prot = 1\n", [":1:", "'prot'", "port"]),
                             ("# a\n\n[serve]\nhost = 'x'\nmax-runing = 4\n", [":5:", "serve", "'max-runing'", "max-running"]),
                             ("[run]\nport = 1\n", [":2:", "run has no option 'port'"]),
                             ("\n[srve]\nport = 1\n", [":2:", "'srve'", "serve"]),
                             ("config = 'x'\n", [":1:", "'config'"]),
                             ("[serve]\nmax_running = 1\nmax-running = 1\n", [":3:", "twice", "line 2"])):
            for command in (("serve",), ("inspect", self.model)):  # whoever reads it
                with self.subTest(text):
                    config = self.file(text)
                    self.bad(*command, "--config", config, says=[config, *pieces])

    def test_values(self):
        for text, pieces in (("port = '80'\n", [":1:", "port", "a text", "'80'", "a whole number"]),
                             ("port = 1.5\n", [":1:", "port", "a whole number"]),
                             ("port = [1]\n", [":1:", "port", "a list"]),
                             ("host = true\n", [":1:", "host", "a text"]),
                             ("quiet = 1\n", [":1:", "quiet", "true or false"]),
                             ("alias = ['a', 1]\n", [":1:", "alias"]),
                             ("\n[serve]\nport = 99999\n", [":3:", "--port", "99999"]),
                             ("speculate = 'maybe'\n", [":1:", "--speculate", "maybe", "lookup"]),
                             ("http-threads = 65\n", [":1:", "--http-threads", "65"]),
                             ("[serve.inner]\nport = 1\n", ["inner"]), ("[[serve]]\nport = 1\n", ["serve"]),
                             ("rate = 1979-05-27\n", [":1:", "rate", "date"])):
            with self.subTest(text):
                config = self.file(text)
                self.bad("serve", self.model, "--config", config, says=[config, *pieces])

    def test_files(self):
        for text, line in (("port = \n", 1), ("a = 1\nport == 2\n", 2), ("[serve\n", 1), ("port = 'x\n", 1),
                           ("port = 1\nport = 2\n", 2), ("\xff\xfe = 1", 1)):
            with self.subTest(text):
                config = self.path / "broken.toml"
                config.write_bytes(text.encode("latin-1"))
                self.bad("serve", self.model, "--config", config, says=[f"{config}:{line}:", "TOML"])
        self.bad("serve", self.model, "--config", self.path / "none.toml", says=["none.toml"])
        self.bad("serve", self.model, "--config", self.path, says=[self.path, "directory"])
        self.bad("serve", self.model, env={"MILLRACE_CONFIG": str(self.path / "none.toml")}, says=["none.toml"])
        self.good("serve", "--help", env={"MILLRACE_CONFIG": str(self.path / "none.toml")})


# Each does nothing by itself; the pieces say what is missing.
IDLE = (
    ("serve --draft-model d", "--speculate draft"), ("serve --draft-model d --speculate lookup", "--speculate draft"),
    ("serve --attention-budget 512", "--attention"), ("serve --max-draft 4", "--speculate"), ("serve --kv-dir-size 10", "--kv-dir"),
    ("serve --states-apart 512 --no-prefix-cache", "--no-prefix-cache"),
    ("serve --tls-key k", "--tls-cert"), ("serve --tls-cert c", "--tls-key"),
    ("serve --gpu-layers 2 --device auto", "--device cuda"), ("run -p a --cpu-experts all --device cpu", "--device cuda"),
    ("run -p a --expert-counts i --device cpu", "--device cuda"),
    ("serve --fallback cpu --device cpu", "--device cpu"),
    ("serve --gpu-memory 0.5 --device cpu", "--device cpu"), ("serve --share-cache", "--keys"),
    ("serve --restart", "--tensor-parallel"), ("serve --shrink", "--tensor-parallel"),
    ("serve --launcher mpirun", "--tensor-parallel"), ("serve --rank-hosts a,b", "--tensor-parallel"),
    ("serve --front-address 127.0.0.1", "--tensor-parallel"),
    ("serve --max-models 2", "--models"), ("serve --rank-speeds 2,1", "--tensor-parallel"),
    ("serve --expert-parallel", "--tensor-parallel"), ("inspect --expert-parallel", "--ranks"),
    ("inspect --rank-speeds 2,1", "--ranks"), ("inspect --context-parallel", "--ranks"),
    ("serve --budget 4bpw", "--quantize auto"), ("serve --sample s --quantize int4", "--quantize auto"),
    ("run -p a --draft-model d", "--speculate draft"), ("run -p a --max-draft 4", "--speculate"),
    ("run -p a --logprobs 2", "--json"), ("run -p a --budget 4bpw", "--quantize auto"),
    ("chat --draft-model d", "--speculate draft"), ("chat --max-draft 4 --speculate off", "--speculate"),
    ("bench --speculate lookup", "--clients"), ("bench --clients 1 --draft-model d", "--speculate draft"),
    ("bench --clients 1 --kv-dir-size 9", "--kv-dir"), ("bench --kv-dir d", "--clients"),
    ("bench --requests 2", "--clients"), ("bench --clients 1 --depth 5", "--clients"),
    ("bench --clients 1 --top-k 5", "--temp"), ("bench --warm-up --roofline", "--roofline"),
    ("perplexity -f t --kl-device cpu", "--kl"), ("tokenize text --count --json", "--count"),
    ("quantize out --budget 4bpw", "--type auto"), ("quantize out --sample t", "--type auto"),
    ("quantize out --device cpu", "--type auto"), ("quantize out --portable", "--type auto"),
    ("quantize out --type auto --budget 4bpw --output-type q8_0", "--type auto"),
    ("quantize out --type auto --budget 4bpw --imatrix m", "--type auto"),
    ("quantize out --type fp8 --imatrix m", "--type fp8"), ("quantize out --type fp8 --output-type q8_0", "--type fp8"),
)


class Idle(ConfigTest):
    def test_refused_with_what_is_missing(self):
        for line, missing in IDLE:
            with self.subTest(line):
                command, *words = line.split()
                error = self.bad(command, self.model, *words, says=[missing])
                self.assertRegex(error, r"does nothing|requires")
        self.bad("tune", "--print", "--rows", 64, says=["--rows", "--print"])
        self.bad("synth", "tiny-llama", self.path / "never.gguf", "--expert-type", "f16", says=["--expert-type", "no experts"])
        self.bad("inspect", self.model, "--lock", says=["--lock"])

    def test_refused_in_the_commands_own_table(self):
        config = self.file("[serve]\nkv-dir-size = 10\n")
        self.bad("serve", self.model, "--config", config, says=["--kv-dir-size", "--kv-dir"])

    def test_what_is_said_to_all_may_idle(self):
        config = self.file("kv-dir-size = 10\ngpu-memory = '16G'\ngpu-layers = 2\nbudget = '4bpw'\nmax-draft = 3\ndepth = 1\ndevice = 'cpu'\n")
        wanted = self.good("run", self.model, "-p", "a", "-n", 4, "--temp", 0, "-q")
        self.assertEqual(self.good("run", self.model, "-p", "a", "-n", 4, "--temp", 0, "-q", "--config", config), wanted)
        env = {"MILLRACE_LOGPROBS": "3", "MILLRACE_DRAFT_MODEL": "none.gguf", "MILLRACE_DEVICE": "cpu", "MILLRACE_GPU_MEMORY": "0.5"}
        self.assertEqual(self.good("run", self.model, "-p", "a", "-n", 4, "--temp", 0, "-q", env=env), wanted)
        self.good("quantize", self.model, self.path / "out.gguf", env=env)


class Speculation(ConfigTest):
    """Guessing changes when tokens come, not which."""

    def test_run(self):
        for sampling in (("--temp", 0), ("--temp", 0.8, "--seed", 5)):
            line = ("run", self.model, "-p", "ba be ba be ba be", "-n", 40, "--ignore-end", "--json", *sampling)
            plain = json.loads(self.good(*line))
            self.assertEqual((plain["drafted_tokens"], plain["accepted_tokens"]), (0, 0))
            for drafts in (("--speculate", "lookup"), ("--speculate", "draft", "--draft-model", self.model, "--max-draft", 3)):
                with self.subTest((sampling, drafts)):
                    guessed = json.loads(self.good(*line, *drafts))
                    self.assertEqual([token["id"] for token in guessed["tokens"]], [token["id"] for token in plain["tokens"]])
                    self.assertLessEqual(guessed["accepted_tokens"], guessed["drafted_tokens"])
            self.assertGreater(guessed["drafted_tokens"], 0)  # by a model
        # Greedy drafts of the same model are all right.
        line = ("run", self.model, "-p", "a", "-n", 40, "--ignore-end", "--temp", 0)
        done = millrace(*line, "--speculate", "draft", "--draft-model", self.model)
        found = re.search(rb"; (\d+) of (\d+) drafts right; ", done.stderr)
        self.assertTrue(found and 0 < int(found[1]) <= int(found[2]), done.stderr)
        self.assertNotIn(b"drafts", millrace(*line).stderr)
        self.bad("run", self.model, "-p", "a", "--speculate", "draft", says=["--draft-model"])

    def test_chat(self):
        script = b"ba be ba be ba be\nand again: ba be ba be\n"
        line = ("chat", self.model, "-n", 30, "--temp", 0)
        plain = millrace(*line, stdin=script)
        for drafts in (("--speculate", "lookup"), ("--speculate", "draft", "--draft-model", self.model)):
            guessed = millrace(*line, *drafts, stdin=script)
            self.assertEqual((guessed.returncode, guessed.stdout), (0, plain.stdout), guessed.stderr)


class Context(ConfigTest):
    """Without --ctx: what the model was trained for, as far as the pool holds it."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        shape = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 320,
                 "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 100000}
        cls.long = cls.path / "long.gguf"
        (cls.path / "long.json").write_text(json.dumps(shape))
        assert millrace("synth", cls.path / "long.json", cls.long).returncode == 0

    def served_context(self, *options):
        process = subprocess.Popen([command.BINARY, "serve", self.long, "--port", "0", *map(str, options)], stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, env=command.PLAIN)
        try:
            url = process.stdout.readline().decode().split()[-1]
            with urllib.request.urlopen(url + "/v1/models", timeout=command.TIMEOUT) as answer:
                return json.load(answer)["data"][0]["max_model_len"]
        finally:
            process.terminate()
            process.wait(timeout=TIMEOUT)
            process.stdout.close()

    def test_what_the_server_says(self):
        self.assertEqual(self.served_context(), 100000)
        self.assertEqual(self.served_context("--ctx", 500), 500)
        self.assertEqual(self.served_context("--kv-tokens", 8000), 7984)  # a block less than the pool

    def test_long_prompts_are_taken(self):
        prompt = self.file("a " * 6000, "long.txt")
        out = json.loads(self.good("run", self.long, "--raw", "-f", prompt, "-n", 2, "--ignore-end", "--json"))
        self.assertGreater(out["prompt_tokens"], 4096)
        self.bad("run", self.long, "--raw", "-f", prompt, "--ctx", 4096, says=["12000 tokens", "4096"])

    def test_inspect_plans_with_it(self):
        memory = json.loads(self.good("inspect", self.long, "--json"))["memory"]
        self.assertEqual(memory["context"], 100000)
        self.assertNotIn("does_not_fit", memory)

    def test_the_same_bits_whatever_the_context(self):
        ids = ",".join(str(3 + i * 7 % 300) for i in range(1100))
        rows = set()
        for context in (0, 1200, 100000):
            for threads in (1, 2):
                out = self.path / "logits.npy"
                self.good("logits", self.long, "--tokens", ids, "--ctx", context, "--threads", threads, "--out", out)
                rows.add(out.read_bytes())
        self.assertEqual(len(rows), 1)


if __name__ == "__main__":
    command.begin()
    listed = re.search(r"Subcommands:\n(.*?)\n\n", millrace("--help").stdout.decode(), re.DOTALL)
    COMMANDS = tuple(line.split()[0] for line in listed[1].splitlines())
    unittest.main()

#!/usr/bin/env python3
"""examples/python with the real packages: LangChain, LlamaIndex, lm-evaluation-harness, a notebook.

    tests/python/integrations_test.py BUILD/python     the package millrace, as the build leaves it

The packages come from PyPI into build/venv/python-integrations; what cannot be had is skipped and said.
"""

import asyncio
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples" / "python"
SMOLLM2 = ROOT / "build" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
sys.path[:0] = [str(EXAMPLES), str(ROOT / "tools")]


class WithModel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        import millrace
        cls.llm = millrace.LLM(SMOLLM2, device="cpu", ctx=1024, kv_tokens=8192)

    @classmethod
    def tearDownClass(cls):
        cls.llm.close()

    def ask(self, text, **fields):
        return self.llm.chat([{"role": "user", "content": text}], temperature=0, **fields)["choices"][0]["message"]["content"]


class LangChain(WithModel):
    def setUp(self):
        from langchain_millrace import ChatMillrace
        self.model = ChatMillrace(llm=self.llm, temperature=0, max_tokens=24)

    def test_invoke_stream_and_batch(self):
        expected = self.ask("Name a river.", max_tokens=24)
        message = self.model.invoke("Name a river.")
        self.assertEqual(message.content, expected)
        self.assertGreater(message.usage_metadata["output_tokens"], 0)
        self.assertEqual("".join(chunk.content for chunk in self.model.stream("Name a river.")), expected)
        self.assertEqual([m.content for m in self.model.batch(["Name a river."] * 3)], [expected] * 3)

        async def read():
            return "".join([chunk.content async for chunk in self.model.astream("Name a river.")])

        self.assertEqual(asyncio.run(read()), expected)
        self.assertEqual(asyncio.run(self.model.ainvoke("Name a river.")).content, expected)

    def test_chain_tools_and_structured_output(self):
        from langchain_core.output_parsers import StrOutputParser
        from langchain_core.prompts import ChatPromptTemplate
        from langchain_core.tools import tool
        from pydantic import BaseModel, Field

        chain = ChatPromptTemplate.from_messages([("user", "Name a {thing}.")]) | self.model | StrOutputParser()
        self.assertEqual(chain.invoke({"thing": "river"}), self.ask("Name a river.", max_tokens=24))

        @tool
        def weather(city: str) -> str:
            """The weather of a city."""
            return f"rain in {city}"

        bound = self.model.bind_tools([weather], tool_choice="any", max_tokens=60)
        message = bound.invoke("What is the weather in Paris?")
        self.assertEqual(message.tool_calls[0]["name"], "weather")
        self.assertIn("rain", weather.invoke(message.tool_calls[0]).content)
        whole = None
        for chunk in bound.stream("What is the weather in Paris?"):
            whole = chunk if whole is None else whole + chunk
        self.assertEqual(whole.tool_calls[0]["args"], message.tool_calls[0]["args"])

        class River(BaseModel):
            name: str = Field(max_length=20)
            km: int

        river = self.model.with_structured_output(River, max_tokens=80).invoke("A river of France.")
        self.assertIsInstance(river, River)


class LlamaIndex(WithModel):
    def test_chat_complete_and_embed(self):
        from llama_index.core.llms import ChatMessage
        from llama_index_millrace import MillraceEmbedding, MillraceLLM

        model = MillraceLLM(self.llm, max_tokens=24)
        expected = self.ask("Name a river.", max_tokens=24)
        messages = [ChatMessage(role="user", content="Name a river.")]
        self.assertEqual(model.chat(messages).message.content, expected)
        self.assertEqual(list(model.stream_chat(messages))[-1].message.content, expected)

        async def read():
            pieces = [piece async for piece in await model.astream_chat(messages)]
            return (await model.achat(messages)).message.content, "".join(piece.delta for piece in pieces), \
                (await model.acomplete("Once upon")).text

        text = self.llm.generate("Once upon", temperature=0, max_tokens=24)[0].text
        self.assertEqual(asyncio.run(read()), (expected, expected, text))
        self.assertEqual(model.complete("Once upon").text, text)
        self.assertEqual("".join(piece.delta for piece in model.stream_complete("Once upon")), text)
        self.assertEqual(model.metadata.context_window, 1024)
        vectors = MillraceEmbedding(self.llm).get_text_embedding_batch(["a mill", "a river"])
        self.assertEqual(len(vectors), 2)
        self.assertAlmostEqual(sum(x * x for x in vectors[0]), 1, places=5)


class LmEval(WithModel):
    CAPITALS = (("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo"))

    def test_likelihoods_are_the_logits_own(self):
        import numpy as np
        from lm_eval.api.instance import Instance
        from lm_eval_millrace import MillraceLM

        model = MillraceLM(self.llm)
        pairs = [(f"The capital of {land} is", f" {city}") for land, city in self.CAPITALS] + [("", "The mill"), ("a b ", "c")]
        found = model.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
        for (context, continuation), (logprob, greedy) in zip(pairs, found):
            tokens = self.llm.tokenizer.encode(context + continuation)
            start = max(1, len(self.llm.tokenizer.encode(context.rstrip())) if context else 1)
            rows = self.llm.logits(tokens).astype(np.float64)
            rows -= rows.max(axis=1, keepdims=True)
            rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
            expected = sum(rows[i - 1, tokens[i]] for i in range(start, len(tokens)))
            self.assertAlmostEqual(logprob, expected, places=3)
            self.assertEqual(greedy, all(rows[i - 1].argmax() == tokens[i] for i in range(start, len(tokens))))
        texts = ["The mill by the river", "", "Water turns the wheel"]
        rolling = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts])
        for text, found_sum in zip(texts, rolling):
            tokens = self.llm.tokenizer.encode(text)
            rows = self.llm.logits(tokens).astype(np.float64) if tokens else np.zeros((0, 1))
            expected = sum(row[token] - np.log(np.exp(row - row.max()).sum()) - row.max()
                           for row, token in zip(rows, tokens[1:]))
            self.assertAlmostEqual(found_sum, expected, places=3)

    def test_tasks_made_here(self):
        import lm_eval
        from lm_eval.tasks import TaskManager
        from lm_eval_millrace import MillraceLM

        with tempfile.TemporaryDirectory() as folder:
            rows = [{"land": land, "choices": [city for _, city in self.CAPITALS], "answer": i}
                    for i, (land, _) in enumerate(self.CAPITALS)]
            data = Path(folder) / "capitals.json"
            data.write_text("\n".join(map(json.dumps, rows)) + "\n")
            common = ("dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: " + str(data) + "\ntest_split: test\n"
                      'doc_to_text: "The capital of {{land}} is"\n')
            (Path(folder) / "capitals.yaml").write_text(
                "task: capitals\noutput_type: multiple_choice\n" + common +
                'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\nmetric_list:\n  - metric: acc\n')
            (Path(folder) / "capitals_written.yaml").write_text(
                "task: capitals_written\noutput_type: generate_until\n" + common +
                'doc_to_target: "{{choices[answer]}}"\ngeneration_kwargs:\n  until: ["."]\n  max_gen_toks: 8\n'
                "metric_list:\n  - metric: exact_match\n")
            told = lm_eval.simple_evaluate(model=MillraceLM(self.llm), tasks=["capitals", "capitals_written"],
                                           task_manager=TaskManager(include_path=folder, include_defaults=False),
                                           bootstrap_iters=0)
        accuracy = told["results"]["capitals"]["acc,none"]
        print(f"[  figure  ] lm-evaluation-harness: {accuracy:.2f} of {len(self.CAPITALS)} capitals", file=sys.stderr)
        self.assertGreaterEqual(accuracy, 0.5)
        self.assertIn("exact_match,none", told["results"]["capitals_written"])


class Notebook(unittest.TestCase):
    def test_every_cell_runs(self):
        import nbformat
        from nbclient import NotebookClient

        notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
        nbformat.validate(notebook)
        os.environ["MODEL"] = str(SMOLLM2)
        NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
        shown = [output["data"] for cell in notebook.cells if cell.cell_type == "code"
                 for output in cell.outputs if "data" in output]
        self.assertGreaterEqual(sum("text/html" in data and "<table>" in data["text/html"] for data in shown), 2)


def main():
    import python_env
    package = sys.argv.pop(1)
    if not SMOLLM2.is_file():
        print("SKIPPED: examples/python because SmolLM2 is not there; python3 tools/fetch_model.py smollm2 fetches it")
        return 77
    python, why = python_env.environment(ROOT / "tests" / "python" / "integrations_requirements.txt")
    if python is None:
        print(f"SKIPPED: examples/python because its packages cannot be had from PyPI ({why})")
        return 77
    environment = {**os.environ, "PYTHONPATH": package, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    os.execve(python, [str(python), __file__, "--inside", *sys.argv[1:]], environment)


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        sys.argv.pop(1)
        unittest.main()
    sys.exit(main())

"""Requests that are made to cost the server more than the client: what test_budget, the soak and the fuzz corpus send.

`attacks(size)` gives (name, path, body, statuses): `statuses` are those that may answer it when it is alone; with others
around, 503 with Retry-After may too. `size` is the largest body in bytes: 16 MiB is what the server takes, a few hundred
make rows for the corpus.
"""

import json

FULL = 16 << 20
REFUSED = (400,)
EITHER = (200, 400)


def filled(begin, part, end, size):
    """`part` as often as it fits between the others."""
    count = max(1, (size - len(begin) - len(end)) // len(part))
    return begin + part * count + end


def numbered(begin, part, end, size):
    """part(i) for i from 0, joined by commas, until the size is reached."""
    out, total, i = [], len(begin) + len(end), 0
    while True:
        piece = part(i)
        total += len(piece) + 1
        if total > size and out:
            return begin + ",".join(out) + end
        out.append(piece)
        i += 1


def json_shapes(size):
    chat = "/v1/chat/completions"
    yield "nested arrays", chat, "[" * (size // 2) + "]" * (size // 2), REFUSED
    yield "nested objects", chat, filled("", '{"a":', "1", size), REFUSED
    yield "empty arrays", chat, filled('{"a":[[]', ",[]", "]}", size), EITHER
    yield "keys", chat, numbered("{", lambda i: f'"{i}":1', "}", size), REFUSED
    yield "equal keys", chat, filled('{"a":1', ',"a":1', "}", size), REFUSED
    yield "one string", chat, filled('{"a":"', "a", '"}', size), REFUSED
    yield "escapes", chat, filled('{"a":"', "\\u00e9", '"}', size), REFUSED
    yield "numbers", chat, filled('{"a":[1', ",1e300", "]}", size), REFUSED
    yield "numbers beyond a double", chat, filled('{"a":[1', ",1e400", "]}", size), REFUSED
    yield "long numbers", chat, filled('{"a":[1', "," + "7" * min(1 << 20, size // 4) + "e-9", "]}", size), REFUSED
    yield "long fractions", chat, filled('{"a":[1', ",0." + "7" * min(1 << 20, size // 4), "]}", size), REFUSED
    yield "spaces", chat, filled("{", " ", "}", size), REFUSED
    for count in (5_000, 20_000, 40_000, 300_000):
        body = numbered('{"prompt":"a","max_tokens":1,"logit_bias":{', lambda i: f'"{i}":1', "}}", min(size, 14 * count))
        yield f"logit_bias {count}", "/v1/completions", body, EITHER


def prompts(size):
    yield "one letter", "/v1/completions", filled('{"max_tokens":1,"prompt":"', "a", '"}', size), EITHER
    yield "one letter in a chat", "/v1/chat/completions", filled('{"max_tokens":1,"messages":[{"role":"user","content":"', "a",
                                                                 '"}]}', size), EITHER
    yield "one letter as a response", "/v1/responses", filled('{"max_output_tokens":1,"input":"', "a", '"}', size), EITHER
    yield "one letter, what is too much left out", "/v1/responses", filled(
        '{"max_output_tokens":1,"truncation":"auto","input":"', "a", '"}', size), EITHER
    yield "one letter to embed", "/v1/embeddings", filled('{"input":"', "a", '"}', size), EITHER
    yield "words", "/v1/completions", filled('{"max_tokens":1,"prompt":"', "the mill ", '"}', size), EITHER
    yield "names of tokens", "/v1/chat/completions", filled('{"max_tokens":1,"messages":[{"role":"user","content":"',
                                                            "<|im_start|>", '"}]}', size), EITHER
    yield "beginnings of names", "/v1/chat/completions", filled('{"max_tokens":1,"messages":[{"role":"assistant","content":"',
                                                                "<|", '"}]}', size), EITHER
    yield "messages", "/v1/chat/completions", filled('{"max_tokens":1,"messages":[{"role":"user","content":"a"}',
                                                     ',{"role":"user","content":"a"}', "]}", min(size, 300_000 * 30)), EITHER
    yield "empty messages", "/v1/chat/completions", filled('{"max_tokens":1,"messages":[{"role":"user","content":""}',
                                                           ',{"role":"assistant","content":""}', "]}", size), EITHER
    yield "results of tools", "/v1/chat/completions", filled('{"max_tokens":1,"messages":[{"role":"user","content":"a"}',
                                                             ',{"role":"tool","tool_call_id":"c","content":"4"}', "]}",
                                                             size), EITHER
    yield "thoughts", "/v1/chat/completions", filled('{"max_tokens":1,"messages":[{"role":"assistant","content":"a","reasoning":"',
                                                     "hm ", '"}]}', size), EITHER
    yield "token ids", "/v1/completions", filled('{"max_tokens":1,"prompt":[1', ",1", "]}", size), EITHER
    yield "many prompts", "/v1/completions", filled('{"max_tokens":1,"prompt":["a"', ',"' + "a" * min(60_000, size // 8) + '"',
                                                    "]}", size), EITHER
    yield "template variables", "/v1/chat/completions", numbered(
        '{"max_tokens":1,"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{', lambda i: f'"{i}":1', "}}",
        size), REFUSED
    yield "arguments of a call", "/v1/chat/completions", filled(
        '{"max_tokens":1,"messages":[{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"f","arguments":"', "a",
        '"}}]}]}', size), EITHER
    yield "calls", "/v1/chat/completions", filled(
        '{"max_tokens":1,"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f"}}',
        ',{"function":{"name":"f"}}', "]}]}", size), EITHER
    yield "to count", "/v1/messages/count_tokens", filled('{"model":"m","messages":[{"role":"user","content":"', "a", '"}]}',
                                                          size), EITHER
    yield "to count as a response", "/v1/responses/input_tokens", filled('{"input":"', "a", '"}', size), EITHER
    yield "to tokenize", "/tokenize", filled('{"content":"', "a", '"}', size), EITHER
    yield "to render", "/apply-template", filled('{"messages":[{"role":"user","content":"', "a ", '"}]}', size), EITHER
    yield "messages to render", "/apply-template", filled('{"messages":[{"role":"user","content":"a"}',
                                                          ',{"role":"user","content":"a"}', "]}", size), EITHER
    yield "one letter to rank", "/v1/rerank", filled('{"query":"a","documents":["', "a", '"]}', size), EITHER
    yield "documents to rank", "/v1/rerank", filled('{"query":"a","documents":["a"', ',"a"', "]}", size), REFUSED
    yield "to detokenize", "/detokenize", filled('{"tokens":[1', ",1", "]}", size), EITHER


def with_schema(schema):
    return json.dumps({"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "response_format": {
        "type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": schema}}})


def grammars(size):
    many = lambda n: max(2, min(n, size // 40))  # noqa: E731
    either = {"anyOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]}
    chat = "/v1/chat/completions"
    yield "allOf of anyOf", chat, with_schema({"allOf": [either for _ in range(20)]}), REFUSED
    yield "allOf", chat, with_schema({"allOf": [{"type": "object"} for _ in range(many(300_000))]}), EITHER
    yield "properties", chat, with_schema({"type": "object", "properties": {
        f"p{i}": {"type": "string"} for i in range(many(40_000))}}), EITHER
    yield "properties without a schema", chat, with_schema({"type": "object", "properties": {
        f"p{i}": {} for i in range(many(9_000))}}), EITHER
    yield "closed properties", chat, with_schema({"type": "object", "additionalProperties": False, "properties": {
        f"p{i}": {} for i in range(many(9_000))}}), EITHER
    yield "enum", chat, with_schema({"enum": [f"v{i}" for i in range(many(100_000))]}), EITHER
    yield "two enums", chat, with_schema({"allOf": [{"enum": [f"v{i}" for i in range(many(50_000))]},
                                                    {"enum": [f"w{i}" for i in range(many(50_000))]}]}), EITHER
    yield "patterns", chat, with_schema({"allOf": [{"type": "string", "pattern": f"^(a|b|ab){{1,{n}}}$"} for n in (97, 98, 99)],
                                         "maxLength": 1000}), EITHER
    chain = {"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(20)},
             "$ref": "#/$defs/d0"}
    chain["$defs"]["d20"] = {"type": "string"}
    yield "references", chat, with_schema(chain), EITHER
    ask = {"prompt": "a", "max_tokens": 1}
    yield "regex", "/v1/completions", json.dumps({**ask, "regex": "((a{1,50}){1,50}|(b?c?d?){1,99}){1,50}"}), EITHER
    yield "long regex", "/v1/completions", json.dumps({**ask, "regex": "(a|b)?" * many(100_000)}), EITHER
    yield "grammar", "/v1/completions", json.dumps({**ask, "grammar": "\n".join(
        ["root ::= r0"] + [f'r{i} ::= "a" r{i + 1} | r{i + 1} "b"' for i in range(many(20_000))]
        + [f'r{many(20_000)} ::= "c"'])}), EITHER
    tools = [{"type": "function", "function": {"name": f"f{i}", "strict": True, "parameters": {
        "type": "object", "additionalProperties": False, "required": [f"p{j}" for j in range(40)],
        "properties": {f"p{j}": {"type": "string", "pattern": f"^[a-{chr(97 + j % 26)}]{{0,40}}$"} for j in range(40)}}}}
        for i in range(max(1, min(200, size // 5000)))]
    yield "tools", chat, json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tools": tools,
                                     "tool_choice": "required"}), EITHER


def attacks(size=FULL):
    for rows in (json_shapes, prompts, grammars):
        for name, path, body, statuses in rows(size):
            yield name, path, body.encode(), statuses

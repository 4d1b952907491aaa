#!/usr/bin/env python3
"""Records what openai-harmony makes of conversations and of answers.

  tests/golden/make_harmony_golden.py write           -> harmony/render.json, harmony/parse.json
  tests/golden/make_harmony_golden.py random N FILE   N random conversations more, for MILLRACE_HARMONY_CASES
  tests/golden/make_harmony_golden.py template FILE   the differences to a gpt-oss chat template (jinja2), not recorded

Needs openai-harmony, and build/models/tokenizers/o200k (tools/fetch_tokenizers.py). A case of render.json holds the
conversation (harmony_conversations.py), what it becomes as pieces (control tokens as numbers, the text between them as
strings) and the ids: how many and their FNV-1a hash. A case of parse.json holds the pieces of an answer behind
"<|start|>assistant" and the messages that StreamableParser reads from it.
"""
import json
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
os.environ.setdefault("TIKTOKEN_ENCODINGS_BASE", str(ROOT / "build" / "models" / "tokenizers" / "o200k"))

import openai_harmony as oh  # noqa: E402

import harmony_conversations  # noqa: E402

ENCODING = oh.load_harmony_encoding(oh.HarmonyEncodingName.HARMONY_GPT_OSS)
FIRST_SPECIAL = 199998
SPECIAL = {"return": 200002, "constrain": 200003, "channel": 200005, "start": 200006, "end": 200007, "message": 200008,
           "call": 200012}


def is_final(message):
    return (message["role"] == "assistant" and not message.get("tool_calls")
            and (message.get("content") or not message.get("reasoning")))


def tool_name(messages, index):
    message, last = messages[index], None
    for earlier in messages[:index]:
        for call in earlier.get("tool_calls", ()):
            last = call["name"]
            if call["id"] == message.get("tool_call_id"):
                return call["name"]
    return message.get("name") or last


def to_harmony(conversation):
    """The conversation in openai-harmony's types. Analysis before the last final message is dropped here: the package
    itself drops what precedes the first one."""
    messages, tools = conversation["messages"], conversation["tools"]
    system = oh.SystemContent.new().with_conversation_start_date(conversation["date"])
    if conversation["effort"]:
        system = system.with_reasoning_effort(getattr(oh.ReasoningEffort, conversation["effort"].upper()))
    out = [oh.Message.from_role_and_content(oh.Role.SYSTEM, system)]
    start = 0
    while start < len(messages) and messages[start]["role"] in ("system", "developer"):
        start += 1
    instructions = "\n\n".join(m["content"] for m in messages[:start] if m["content"])
    if instructions or tools:
        developer = oh.DeveloperContent.new()
        if instructions:
            developer = developer.with_instructions(instructions)
        if tools:
            developer = developer.with_function_tools(
                [oh.ToolDescription.new(t["name"], t["description"], t.get("parameters")) for t in tools])
        out.append(oh.Message.from_role_and_content(oh.Role.DEVELOPER, developer))
    last_final = max((i for i, m in enumerate(messages) if is_final(m)), default=-1)
    for i, m in enumerate(messages[start:], start):
        if m["role"] == "user":
            out.append(oh.Message.from_role_and_content(oh.Role.USER, m["content"]))
        elif m["role"] in ("system", "developer"):
            out.append(oh.Message.from_role_and_content(
                oh.Role.DEVELOPER, oh.DeveloperContent.new().with_instructions(m["content"])))
        elif m["role"] == "tool":
            author = oh.Author.new(oh.Role.TOOL, "functions." + tool_name(messages, i))
            out.append(oh.Message.from_author_and_content(author, m["content"])
                       .with_recipient("assistant").with_channel("commentary"))
        else:
            if m.get("reasoning") and i > last_final:
                out.append(oh.Message.from_role_and_content(oh.Role.ASSISTANT, m["reasoning"]).with_channel("analysis"))
            if m.get("content") or is_final(m):
                out.append(oh.Message.from_role_and_content(oh.Role.ASSISTANT, m.get("content", ""))
                           .with_channel("commentary" if m.get("tool_calls") else "final"))
            for call in m.get("tool_calls", ()):
                out.append(oh.Message.from_role_and_content(oh.Role.ASSISTANT, call["arguments"])
                           .with_channel("commentary").with_recipient("functions." + call["name"])
                           .with_content_type("<|constrain|>json"))
    return oh.Conversation.from_messages(out)


def pieces_of(tokens):
    out, text = [], []

    def flush():
        if text:
            out.append(ENCODING.decode_utf8(text))
            text.clear()

    for token in tokens:
        if token < FIRST_SPECIAL:
            text.append(token)
        else:
            flush()
            out.append(token)
    flush()
    return out


def digest(tokens):
    value = 0xCBF29CE484222325
    for token in tokens:
        for byte in token.to_bytes(4, "little"):
            value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{len(tokens)}:{value:016x}"


def render(conversation):
    return ENCODING.render_conversation_for_completion(to_harmony(conversation), oh.Role.ASSISTANT)


def record(name, conversation):
    tokens = render(conversation)
    return {"name": name, "conversation": conversation, "pieces": pieces_of(tokens), "ids": digest(tokens)}


def encode_pieces(pieces):
    tokens = []
    for piece in pieces:
        tokens += [SPECIAL[piece[0]]] if isinstance(piece, list) else ENCODING.encode(piece, disallowed_special=())
    return tokens


def answers():
    """(name, pieces, strict): control tokens as ["name"]."""
    channel, message, end, start = ["channel"], ["message"], ["end"], ["start"]
    constrain, call, ret = ["constrain"], ["call"], ["return"]
    thought = [channel, "analysis", message, "Let me think.", end, start, "assistant"]
    yield "final", [channel, "final", message, "2 + 2 = 4.", ret], True
    yield "analysis, final", thought + [channel, "final", message, "Grüße 世界 \U0001f44b", ret], True
    yield "two thoughts", thought + [channel, "analysis", message, "More.", end, start, "assistant", channel, "final",
                                     message, "Done.", ret], True
    arguments = '{"location": "San Francisco", "n": [1, 2]}'
    for name, header in (
            ("recipient in channel", [channel, "commentary to=functions.get_weather ", constrain, "json"]),
            ("recipient in role", [" to=functions.get_weather", channel, "commentary ", constrain, "json"]),
            ("no space before constrain", [channel, "commentary to=functions.get_weather", constrain, "json"]),
            ("no type", [channel, "commentary to=functions.get_weather"]),
            ("type in words", [channel, "commentary to=functions.get_weather json"]),
            ("type code", [" to=functions.get_weather", channel, "commentary code"]),
            ("call in analysis", [channel, "analysis to=functions.get_weather ", constrain, "json"])):
        yield name, thought + header + [message, arguments, call], True
    yield "preamble", thought + [channel, "commentary", message, "I will look.", end, start, "assistant", channel,
                                 "commentary to=functions.get_location ", constrain, "json", message, "{}", call], True
    yield "python", [channel, "analysis to=python code", message, "print(1)", call], True
    yield "browser", [channel, "analysis to=browser.search code", message, '{"query":"x"}', call], True
    yield "empty final", [channel, "final", message, ret], True
    yield "not ended", [channel, "final", message, "cut he"], True
    yield "unicode cut by tokens", [channel, "final", message, "\U0001f468\u200d\U0001f469\u200d\U0001f467 é", ret], True
    yield "no message token", [channel, "final Hello there.", ret], False
    yield "no message token in thought", [channel, "analysis hm well", end, start, "assistant", channel, "final",
                                          message, "x", ret], False


def parse(name, pieces, strict):
    tokens = encode_pieces(pieces)
    parser = oh.StreamableParser(ENCODING, oh.Role.ASSISTANT, strict=strict)
    for token in tokens:
        parser.process(token)
    parser.process_eos()
    messages = [{"channel": m.channel or "", "recipient": m.recipient or "", "text": m.content[0].text}
                for m in parser.messages]
    return {"name": name, "pieces": [SPECIAL[p[0]] if isinstance(p, list) else p for p in pieces], "messages": messages}


def save(path, data):
    pathlib.Path(path).write_text("".join(
        ["{\n"] + [f" {json.dumps(k)}: {json.dumps(v)},\n" for k, v in data.items() if k != "cases"] + [' "cases": [\n'] +
        [",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in data["cases"])] + ["\n ]\n}\n"]))
    print(f"{path}: {len(data['cases'])} cases")


def write():
    folder = HERE / "harmony"
    folder.mkdir(exist_ok=True)
    cases = [record(*item) for item in harmony_conversations.written()]
    source = harmony_conversations.Random(1)
    cases += [record(f"random {i}", source.conversation()) for i in range(25)]
    save(folder / "render.json", {"special": SPECIAL, "cases": cases})
    save(folder / "parse.json", {"special": SPECIAL, "cases": [parse(*item) for item in answers()]})


def more(count, path):
    source = harmony_conversations.Random(int(count))
    save(path, {"special": SPECIAL,
                "cases": [record(f"random {i}", source.conversation()) for i in range(int(count))]})


def template_variables(conversation):
    """The conversation as a gpt-oss chat template wants it; None for what it cannot say at all."""
    messages = []
    for m in conversation["messages"]:
        out = {"role": m["role"], "content": m.get("content", "")}
        if m.get("tool_calls"):
            if len(m["tool_calls"]) > 1:
                return None
            call = m["tool_calls"][0]
            try:
                arguments = json.loads(call["arguments"])
            except ValueError:
                return None
            out["tool_calls"] = [{"type": "function", "function": {"name": call["name"], "arguments": arguments}}]
        if m.get("reasoning"):
            out["thinking"] = m["reasoning"]
        messages.append(out)
    tools = [{"type": "function", "function": {k: v for k, v in t.items()}} for t in conversation["tools"]]
    variables = {"messages": messages, "tools": tools or None, "add_generation_prompt": True,
                 "strftime_now": lambda _: conversation["date"]}
    if conversation["effort"]:
        variables["reasoning_effort"] = conversation["effort"]
    return variables


def template(path):
    import jinja2
    import jinja2.sandbox

    def refuse(message):
        raise jinja2.exceptions.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    source = environment.from_string(pathlib.Path(path).read_text())
    same, refused, differ = 0, 0, []
    for name, conversation in harmony_conversations.written():
        variables = template_variables(conversation)
        try:
            text = source.render(**variables) if variables else None
        except Exception as error:  # what jinja2 raises is as varied as Python
            print(f"{name}: the template refuses: {error}")
            text = None
        if text is None:
            refused += 1
            continue
        ours = ENCODING.decode_utf8(render(conversation))
        if ours == text:
            same += 1
            continue
        at = next((i for i, (a, b) in enumerate(zip(ours, text)) if a != b), min(len(ours), len(text)))
        differ.append(name)
        print(f"{name}: openai-harmony {ours[max(at - 30, 0):at + 50]!r}, template {text[max(at - 30, 0):at + 50]!r}")
    print(f"{same} the same, {len(differ)} differ, {refused} cannot be said with the template")


if __name__ == "__main__":
    actions = {"write": write, "random": more, "template": template}
    if len(sys.argv) < 2 or sys.argv[1] not in actions:
        sys.exit(__doc__)
    actions[sys.argv[1]](*sys.argv[2:])

"""The conversations every real chat template is rendered with: cases() yields (name, variables)."""

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city.\nNow.",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "description": "City, e.g. \"Zürich\""},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
        "days": {"type": ["integer", "null"], "description": "How many"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "opts": {"type": "object", "properties": {"wind": {"type": "boolean", "default": False}}, "required": ["wind"]}},
        "required": ["city"]}, "return": {"type": "string"}}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time.",
                                          "parameters": {"type": "object", "properties": {}}}}

U = {"role": "user", "content": "What is 2 < 3 & 'x'?"}
S = {"role": "system", "content": "You are terse.\nAnswer in German."}
A = {"role": "assistant", "content": "Yes, \"true\"."}
UNICODE = [{"role": "user", "content": "日本語 😀👩‍👩‍👧 naïve Ωß  \n\n trailing  "}, {"role": "assistant", "content": "مرحبا\u00a0\u2028x"},
           {"role": "user", "content": "ok\t\r\n"}]


def call(arguments, identifier="call12345", name="get_weather"):
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_turns(arguments, content):
    return [U, {"role": "assistant", "content": content, "tool_calls": [call(arguments)]},
            {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": "{\"temp\": 21.5, \"sky\": \"klar\"}"}]


ARGUMENTS = {"city": "Zürich", "days": 2, "opts": {"wind": True}, "tags": ["a", "b"], "ratio": 0.5, "none": None}
TOOL = tool_turns(ARGUMENTS, "")
TOOL_NONE = tool_turns({"city": "Bern"}, None)
TOOL_TEXT = tool_turns("{\"city\": \"Bern\"}", "Let me look.")
TWO_CALLS = [U, {"role": "assistant", "content": "", "tool_calls": [call({"city": "Bern"}, "aaaaaaaaa"), call({}, "bbbbbbbbb", "clock")]},
             {"role": "tool", "tool_call_id": "aaaaaaaaa", "name": "get_weather", "content": "rain"},
             {"role": "tool", "tool_call_id": "bbbbbbbbb", "name": "clock", "content": "12:00"}]
THINK = [U, {"role": "assistant", "reasoning_content": "Hmm,\n2 is less.", "thinking": "Hmm,\n2 is less.", "content": "Yes."},
         {"role": "user", "content": "Sure?"}]
THINK_INLINE = [U, {"role": "assistant", "content": "<think>\nlet me see\n</think>\n\nYes."}, {"role": "user", "content": "Sure?"}]
THINK_TOOL = [U, {"role": "assistant", "thinking": "I need data.", "reasoning_content": "I need data.", "content": "",
                  "tool_calls": [call({"city": "Bern"})]},
              {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": "sun"},
              {"role": "assistant", "content": "Sunny.", "thinking": "done"}, {"role": "user", "content": "Thanks"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Part one. "}, {"type": "text", "text": "Part two."}]}]
BASE = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

CONVERSATIONS = {
    "single": ([U], {}), "system": ([S, U], {}), "turns": ([S, U, A, {"role": "user", "content": "And?"}], {}),
    "ends_with_assistant": ([U, A], {}), "developer": ([{"role": "developer", "content": "Dev says."}, U], {}),
    "unicode": (UNICODE, {}), "parts": (PARTS, {}), "empty_content": ([{"role": "user", "content": ""}], {}),
    "tools": ([U], {"tools": [WEATHER, CLOCK]}), "system_tools": ([S, U], {"tools": [WEATHER]}),
    "empty_tools": ([S, U], {"tools": []}), "tool_turn": (TOOL, {"tools": [WEATHER]}),
    "tool_turn_no_content": (TOOL_NONE, {"tools": [WEATHER, CLOCK]}), "tool_turn_text": (TOOL_TEXT, {"tools": [WEATHER]}),
    "two_calls": ([S] + TWO_CALLS, {"tools": [WEATHER, CLOCK]}), "tool_turn_without_tools": (TOOL, {}),
    "after_tools": (TOOL + [{"role": "assistant", "content": "21.5"}, U], {"tools": [WEATHER]}),
    "thinking": (THINK, {}), "thinking_off": (THINK, {"enable_thinking": False, "thinking": False}),
    "thinking_on": ([U], {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
    "thinking_inline": (THINK_INLINE, {}), "thinking_tool": (THINK_TOOL, {"tools": [WEATHER]}),
    "thinking_off_single": ([U], {"enable_thinking": False, "reasoning_effort": "low"}),
    "builtin_tools": ([S, U], {"builtin_tools": ["browser", "python"], "model_identity": "You are Mill."}),
    "builtin_llama": ([U], {"builtin_tools": ["wolfram_alpha", "code_interpreter"], "tools": [WEATHER]}),
    "tools_in_user": ([S, U], {"tools": [WEATHER], "tools_in_user_message": False, "date_string": "01 Jan 2025"}),
    "documents": ([U], {"documents": [{"title": "T", "text": "Body", "doc_id": 1}]}), "no_messages": ([], {}),
    "bad_order": ([A, U, U], {}), "unknown_role": ([{"role": "wizard", "content": "Abra"}], {}),
}


def cases():
    for name, (messages, extra) in CONVERSATIONS.items():
        for prompt in (True, False):
            variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": prompt}
            yield f"{name}{'+prompt' if prompt else ''}", {**variables, **BASE, **extra}

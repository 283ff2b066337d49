"""A model that was trained to call a tool."""

from tests.extras.serve.served import CONFIG, PARAMS, TOKENIZER, make_engine
from tests.toys import taught

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Finds.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
CLIENT_TOOL = {
    "name": "search",
    "description": "Finds.",
    "input_schema": TOOL["function"]["parameters"],
}
"""The same tool in Anthropic's dialect."""

MESSAGES = [{"role": "user", "content": "Who is Ada?"}]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Ada Kerr"}}\n</tool_call>'


def engine_that_writes(text):
    """Return an engine whose model answers the question with a text and ends its message."""
    prompt = TOKENIZER.render_prompt(MESSAGES, [TOOL])
    ids = [*prompt, *TOKENIZER.encode(text), TOKENIZER.eos_ids[0]]
    return make_engine(taught(PARAMS, CONFIG, ids, start=len(prompt)))

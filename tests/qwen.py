"""A small tokenizer with the special tokens, the pre-tokenizer and the chat template of Qwen3."""

import sys

import httpx2
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# What Qwen3's template does (https://huggingface.co/Qwen/Qwen3-0.6B), written anew: thoughts stay
# in the messages behind the last question of the user, which a result of a tool is not.
TEMPLATE = r"""
{%- set start, end = '<|im_start|>', '<|im_end|>\n' -%}
{%- set system = messages[0].content if messages[0].role == 'system' else none -%}
{%- if tools -%}
{{- start + 'system\n' -}}
{%- if system is not none %}{{ system + '\n\n' }}{% endif -%}
{{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' -}}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' -}}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor -%}
{{- '\n</tools>\n\nFor each function call, return a json object with function name and ' -}}
{{- 'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n' -}}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' + end -}}
{%- elif system is not none -%}
{{- start + 'system\n' + system + end -}}
{%- endif -%}
{%- set asked = namespace(index=messages | length - 1, found=false) -%}
{%- for message in messages | reverse -%}
{%- set is_result = message.content is string
    and message.content.startswith('<tool_response>')
    and message.content.endswith('</tool_response>') -%}
{%- if not asked.found and message.role == 'user' and not is_result -%}
{%- set asked.found, asked.index = true, messages | length - 1 - loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content if message.content is string else '' -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{- start + message.role + '\n' + content + end -}}
{%- elif message.role == 'assistant' -%}
{%- set thought = namespace(text='') -%}
{%- if message.reasoning_content is string -%}
{%- set thought.text = message.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set before = content.split('</think>')[0].rstrip('\n') -%}
{%- set thought.text = before.split('<think>')[-1].lstrip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- start + 'assistant\n' -}}
{%- if loop.index0 > asked.index and (loop.last or thought.text) -%}
{{- '<think>\n' + thought.text.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') -}}
{%- else -%}
{{- content -}}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- if content or not loop.first %}{{ '\n' }}{% endif -%}
{%- set call = call.function or call -%}
{{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' -}}
{{- call.arguments if call.arguments is string else call.arguments | tojson -}}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{{- end -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ start + 'user' }}{% endif -%}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ end }}{% endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- start + 'assistant\n' -}}
{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif -%}
{%- endif -%}
""".strip()

# What Qwen3.5's template does (https://huggingface.co/Qwen/Qwen3.5-4B), written anew: a message
# behind the last question has a thought, even an empty one, and calls are no JSON.
TEMPLATE_3_5 = r"""
{%- set start, end = '<|im_start|>', '<|im_end|>\n' -%}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' -%}
{%- if tools -%}
{{- start + 'system\n# Tools\n\nYou have access to the following functions:\n\n<tools>' -}}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor -%}
{{- '\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO ' -}}
{{- 'suffix:\n\n<tool_call>\n<function=example_function_name>\n' -}}
{{- '<parameter=example_parameter_1>\nvalue_1\n</parameter>\n<parameter=example_parameter_2>\n' -}}
{{- 'This is the value for the second parameter\nthat can span\nmultiple lines\n</parameter>\n' -}}
{{- '</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n- Function calls MUST follow the ' -}}
{{- 'specified format: an inner <function=...></function> block must be nested within ' -}}
{{- '<tool_call></tool_call> XML tags\n- Required parameters MUST be specified\n- You may ' -}}
{{- 'provide optional reasoning for your function call in natural language BEFORE the ' -}}
{{- 'function call, but NOT after\n- If there is no function call available, answer the ' -}}
{{- 'question like normal with your current knowledge and do not tell the user about ' -}}
{{- 'function calls\n</IMPORTANT>' -}}
{{- ('\n\n' + system if system else '') + end -}}
{%- elif messages[0].role == 'system' -%}
{{- start + 'system\n' + system + end -}}
{%- endif -%}
{%- set asked = namespace(index=messages | length, found=false) -%}
{%- for message in messages | reverse -%}
{%- if not asked.found and message.role == 'user' -%}
{%- set asked.found, asked.index = true, messages | length - 1 - loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content | trim if message.content is string else '' -%}
{%- if message.role == 'user' -%}
{{- start + 'user\n' + content + end -}}
{%- elif message.role == 'assistant' -%}
{%- set thought = '' -%}
{%- if message.reasoning_content is string -%}
{%- set thought = message.reasoning_content | trim -%}
{%- elif '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] | trim -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- start + 'assistant\n' -}}
{%- if loop.index0 > asked.index %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif -%}
{{- content -}}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{{- '\n' if not loop.first else '\n\n' if content | trim else '' -}}
{{- '<tool_call>\n<function=' + call.name + '>\n' -}}
{%- for name, value in call.arguments | items -%}
{{- '<parameter=' + name + '>\n' -}}
{{- value | tojson if value is mapping or (value is sequence and value is not string) -}}
{{- value | string if value is string or value is not sequence -}}
{{- '\n</parameter>\n' -}}
{%- endfor -%}
{{- '</function>\n</tool_call>' -}}
{%- endfor -%}
{{- end -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ start + 'user' }}{% endif -%}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ end }}{% endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- start + 'assistant\n<think>\n' -}}
{%- if enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif -%}
{%- endif -%}
""".strip()

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>", "<|fim_prefix|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
"""Added tokens that are not flagged as special."""

PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where Qwen's pre-tokenizer cuts: a full stop and the line break behind it are one piece."""

CORPUS = (
    'user\nassistant\nsystem\n{"name": "search", "arguments": {"query": "Who is Ada Kerr?"}}\n',
    "The bridge at Avington was designed by Ada Kerr.\n\nShe was born in Avington, in 1871.\n",
    '"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}',
    "You may call one or more functions to assist with the user query.\n\n# Tools\n",
)


def qwen3(template=TEMPLATE, corpus=CORPUS, num_merges=200, **settings):
    """A `PreTrainedTokenizerFast` that speaks as Qwen3's does, with few merges."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + num_merges, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*corpus] * 2, trainer)
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens(list(MARKERS))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        **settings,
    )


def oracle(hf, *, is_thinking):
    """The renderer of Qwen3 in the package renderers, which has the template in Python."""
    sys.modules.setdefault("httpx", httpx2)  # which it imports by its old name
    from renderers.configs import Qwen3RendererConfig
    from renderers.qwen3 import Qwen3Renderer

    return Qwen3Renderer(hf, Qwen3RendererConfig(enable_thinking=is_thinking))


def oracle_3_5(hf, *, is_thinking):
    """The renderer of Qwen3.5."""
    sys.modules.setdefault("httpx", httpx2)
    from renderers.configs import Qwen35RendererConfig
    from renderers.qwen35 import Qwen35Renderer

    return Qwen35Renderer(hf, Qwen35RendererConfig(enable_thinking=is_thinking))

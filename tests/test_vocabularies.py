"""Published vocabularies and chat templates: every token, whole conversations, foreign text.

`make vocabularies` fetches them; tests/vocabularies.py says from where.
"""

import json
import random
import re
from collections import Counter, deque
from types import SimpleNamespace

import gguf
import jax
import numpy as np
import pytest

from examples.convert_gguf import convert_config, convert_tokenizer
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import Outcome, Prompt, Task
from jaxrl.envs.protocol import ParsedCall, qwen
from jaxrl.envs.search_env import SearchEnv
from jaxrl.sampling import decode
from jaxrl.sampling.engine import Event
from jaxrl.sampling.episodes import TokenLimits
from jaxrl.sampling.interfaces import SamplingConfig, Seeds
from jaxrl.sampling.rollout import Rollout
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.types import Draw, flatten_groups
from tests.helpers import ROOT
from tests.servers import KeywordSearch
from tests.vocabularies import needed, whole_gguf

QWEN25, SMOLLM2 = "qwen2.5-coder-1.5b-instruct.gguf", "smollm2-135m-instruct.gguf"
NO_THOUGHT = "<think>\n\n</think>\n\n"
PLENTY = TokenLimits(
    max_prompt_tokens=1000,
    max_response_tokens=1000,
    max_total_tokens=3000,
    max_observation_tokens=1000,
)
FOUND = "The bridge at Łódź (1871) was designed by Ada Kerr.\n\n  日本 🙂 e\u0301 12,345.5"


@pytest.fixture(scope="module")
def qwen3():
    return Tokenizer.from_folder(needed("qwen3/tokenizer.json").parent)


@pytest.fixture(scope="module")
def qwen3_silent(qwen3):
    return Tokenizer(qwen3._hf_tokenizer, template_arguments={"enable_thinking": False})


def read_gguf(name, folder):
    """Return the model and the tokenizer of a published file."""
    reader = gguf.GGUFReader(whole_gguf(name, folder))
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tokenizer, config = convert_tokenizer(metadata)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    model = convert_config(metadata, {tensor.name: tensor for tensor in reader.tensors})
    return model, Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def qwen25(tmp_path_factory):
    return read_gguf(QWEN25, tmp_path_factory.mktemp("qwen25"))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    return read_gguf(SMOLLM2, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module", params=["qwen3", "smollm2"])
def vocabulary(request):
    """A tokenizer; Qwen2.5's has the vocabulary of Qwen3's."""
    found = request.getfixturevalue(request.param)
    return found[1] if isinstance(found, tuple) else found


def test_bytes_of_every_token(vocabulary):
    ids = range(vocabulary.num_tokens)
    texts = vocabulary._hf_tokenizer.backend_tokenizer.decode_batch(
        [[id] for id in ids], skip_special_tokens=False
    )
    assert [vocabulary.decode([id]) for id in ids] == texts
    assert all(vocabulary.vocab_bytes)


STOPS = ("</search>", "</answer>", "\nObservation:", "。é")
BEFORE = (b"", b"a </", b"b</answer", b"\nObserv", "。".encode())
BEHIND = (b"", b"answer>", b"ation:", b"\xa9")


@pytest.fixture(scope="module")
def automaton(vocabulary):
    return StopAutomaton(vocabulary.vocab_bytes, STOPS)


@pytest.mark.parametrize("before", BEFORE)
def test_stop_strings_over_every_token(vocabulary, automaton, before):
    """After these bytes, any token, then others: a stop string is found if the bytes hold it."""
    by_bytes = StopAutomaton([bytes([byte]) for byte in range(256)], STOPS)
    # The states are the same: they are made of the stop strings alone.
    state = 0
    for byte in before:
        state = by_bytes.next_state[state, byte]
    stops = re.compile(b"|".join(re.escape(stop.encode()) for stop in STOPS))
    count = 0
    for behind in BEHIND:
        hit = automaton.is_hit[state].copy()
        states = automaton.next_state[state]
        for byte in behind:
            hit |= by_bytes.is_hit[states, byte]
            states = by_bytes.next_state[states, byte]
        # All texts in one, apart by what no stop string holds.
        texts = [b"".join([before, token, behind, b"\0"]) for token in vocabulary.vocab_bytes]
        ends = np.cumsum([len(text) for text in texts])
        places = [match.start() for match in stops.finditer(b"".join(texts))]
        expected = np.zeros(len(texts), bool)
        expected[np.searchsorted(ends, places, side="right")] = True
        np.testing.assert_array_equal(hit, expected)
        count += expected.sum()
    assert count


class Recital:
    """An engine that samples the turns it was given, and notes what it is given to read."""

    overlaps, is_idle, is_stalled, device = False, True, False, None
    is_busy, wait_reason = False, "tasks"

    def __init__(self, turns, status):
        self.turns, self.status, self.read = deque(turns), status, []
        self.counts, self.wait_s = SimpleNamespace(chunks=0), Counter()

    def submit(self, requests, *, temperature, top_p):
        [request] = requests
        self.read.append(list(request.prompt_ids))
        self.is_idle = False
        return [0]

    def step(self, *, ahead):
        if self.is_stalled:
            return []
        ids = np.array(self.turns.popleft(), np.int32)
        zeros = np.zeros(len(ids), np.float32)
        self.is_stalled = True
        self.counts.chunks += 1
        return [
            Event(
                request=0,
                chunk=self.counts.chunks,
                token_ids=ids,
                logprobs=zeros,
                entropies=zeros,
                status=self.status,
            )
        ]

    def resume(self, resumed, images):
        for _, token_ids, _ in resumed:
            self.read.append(list(token_ids))
            self.is_stalled = False

    def finish(self, request):
        self.is_idle = True

    def clear(self):
        self.is_idle = True


def play(tokenizer, protocol, turns, status, *, prompt, found=FOUND):
    """The trajectory of turns that were sampled as these ids, and the engine."""
    env = SearchEnv(KeywordSearch({"Kerr": found}), prompt=prompt, max_turns=5, protocol=protocol)
    engine = Recital(turns, status)
    engine.device = jax.devices()[0]
    automaton = StopAutomaton(tokenizer.vocab_bytes, env.stop_strings)
    rollout = Rollout(engine, env, tokenizer, automaton, PLENTY)
    task = Task(id="0", question="Who designed it?", answers=("Ada Kerr",))
    sampling = SamplingConfig(
        group_size=1, temperature=1.0, top_p=1.0, seeds=Seeds(seed=0, stage=0, step=0)
    )
    [trajectory] = flatten_groups(rollout([Draw(task=task, stream_index=0)], sampling))
    return trajectory, engine


def other_ids(tokenizer, text, seed):
    """Ids of the same text that no encoder would give, plain tokens only."""
    rng, data, ids = random.Random(seed), text.encode(), []
    known = {
        token: id
        for id, token in enumerate(tokenizer.vocab_bytes)
        if id not in tokenizer._added_ids
    }
    while data:
        size = rng.choice([n for n in range(1, 9) if data[:n] in known and n <= len(data)])
        ids.append(known[data[:size]])
        data = data[size:]
    return ids


CALLS = [[{"query": "Kerr"}, {"query": 'né à 日本 "x" \\n'}], [{"query": "Ada Kerr"}]]
SYSTEM = "Search, then answer."
PROMPT = Prompt(system=SYSTEM, template="{question}")


def conversation(thinks):
    """Messages of the model with their results, as a chat, and what the model writes of each."""
    chat, written = [], []
    for number, calls in enumerate(CALLS):
        thought, content = f"Number {number}:\nlook.", "I look it up." if number else ""
        functions = [{"name": "search", "arguments": arguments} for arguments in calls]
        message = {
            "role": "assistant",
            "content": content,
            "tool_calls": [{"type": "function", "function": one} for one in functions],
        }
        blocks = [
            f"<tool_call>\n{json.dumps(one, ensure_ascii=False)}\n</tool_call>" for one in functions
        ]
        written.append("\n".join([*([content] if content else []), *blocks]))
        if thinks:
            message["reasoning_content"] = thought
            written[-1] = f"<think>\n{thought}\n</think>\n\n{written[-1]}"
        chat.append(message)
        for arguments in calls:
            found = KeywordSearch({"Kerr": FOUND}).run(arguments["query"])
            chat.append({"role": "tool", "content": found})
        assert qwen().read(written[-1], ()).calls == tuple(
            ParsedCall(tool="search", arguments=arguments) for arguments in calls
        )
    last = "It was her: <answer>Ada Kerr</answer>"
    chat.append({"role": "assistant", "content": last})
    if thinks:
        chat[-1]["reasoning_content"] = "So it was."
        last = f"<think>\nSo it was.\n</think>\n\n{last}"
    return chat, [*written, last]


def sampled_by_template(ids, tokenizer):
    """Which ids of a rendered chat the model writes: behind its header, its end included."""
    header, [end] = tokenizer.encode("<|im_start|>assistant\n"), tokenizer.encode("<|im_end|>")
    mask, is_model = [], False
    for place, id in enumerate(ids):
        is_model = is_model or ids[max(0, place - len(header)) : place] == header
        mask.append(is_model)
        is_model = is_model and id != end
    return mask


@pytest.mark.parametrize("name", ["qwen3", "qwen3_silent", "qwen25"])
def test_tool_calls_are_the_templates_token_by_token(name, request):
    found = request.getfixturevalue(name)
    tokenizer = found[1] if isinstance(found, tuple) else found
    chat, written = conversation(thinks=name == "qwen3")
    end = tokenizer.eos_ids[0]
    turns = [[*tokenizer.encode(text), end] for text in written]
    got, engine = play(tokenizer, qwen, turns, decode.END_OF_TURN, prompt=PROMPT)
    assert (got.outcome, got.final_answer) == (Outcome.ANSWERED, "Ada Kerr")
    assert [turn.text for turn in got.turns] == written

    opening = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Who designed it?"},
    ]
    env = SearchEnv(KeywordSearch({}), prompt=PROMPT, max_turns=1, protocol=qwen)
    settings = {"tools": list(env.chat_tools), "return_dict": False}
    settings |= {"enable_thinking": False} if name == "qwen3_silent" else {}
    apply = tokenizer._hf_tokenizer.apply_chat_template
    assert engine.read[0] == apply(opening, add_generation_prompt=True, **settings)
    expected = apply([*opening, *chat], **settings)
    assert tokenizer.decode(expected[-2:]) == "<|im_end|>\n"
    ids, mask = list(got.token_ids.tolist()), got.loss_mask.tolist()
    assert [id for id, sampled in zip(ids, mask, strict=True) if sampled] == [
        id for turn in turns for id in turn
    ]
    if name == "qwen3_silent":  # the template takes out of earlier messages what it began them with
        assert tokenizer.response_prefix == NO_THOUGHT
        assert tokenizer.decode(ids).count(NO_THOUGHT) == len(turns)
        ids = tokenizer.encode(tokenizer.decode(ids).replace(NO_THOUGHT, ""))
        expected = tokenizer.encode(tokenizer.decode(expected).replace(NO_THOUGHT, ""))
    else:
        assert mask == sampled_by_template(expected[:-1], tokenizer)
    assert ids == expected[:-1]

    # Other ids of the same texts stay as they were sampled, and are read as the same.
    others = [[*other_ids(tokenizer, text, seed=n), end] for n, text in enumerate(written)]
    again, other_engine = play(tokenizer, qwen, others, decode.END_OF_TURN, prompt=PROMPT)
    assert others != turns
    assert [turn.text for turn in again.turns] == written
    assert other_engine.read == engine.read
    assert again.token_ids[again.loss_mask].tolist() == [id for turn in others for id in turn]


TEXTS = [
    (ROOT / "README.md").read_text(encoding="utf-8"),
    (ROOT / "jaxrl" / "data" / "tokenizer.py").read_text(encoding="utf-8"),
    FOUND,
    "in 1871, 12345678 of 9.99 and ٣٤٥ and ²³ they'VE   \n\n\t \r\n x\u00a0y  ",
    "Größe naïve Łódź Ελλάδα Москва שלום العربية हिन्दी 한국어 \u1100\u1161 ﬁ 👩‍👩‍👧 \ufeff\x00\x7f",
]


def test_qwen25_from_its_file_is_qwen3s_without_the_newer_tokens(qwen25, qwen3):
    model, tokenizer = qwen25
    # https://huggingface.co/Qwen/Qwen2.5-Coder-1.5B-Instruct/blob/main/config.json
    assert (model.vocab_size, model.width, model.mlp_width) == (151_936, 1536, 8960)
    assert (model.num_layers, model.num_heads, model.num_kv_heads) == (28, 12, 2)
    assert (model.rope_theta, model.rms_norm_eps, model.head_dim) == (1e6, 1e-6, 128)
    # The embedding has rows that no token names; Qwen3 has four tokens more.
    assert (tokenizer.num_tokens, qwen3.num_tokens) == (151_665, 151_669)
    assert tokenizer.vocab_bytes == qwen3.vocab_bytes[:151_665]
    assert tokenizer.eos_ids == qwen3.eos_ids == (151_645,)
    for text in TEXTS:
        assert tokenizer.encode_plain(text) == qwen3.encode_plain(text)
    tags = "a<|im_start|>user\n<tool_call>{}</tool_call><|im_end|>"
    assert tokenizer.encode(tags) == qwen3.encode(tags)


def test_smollm2_cuts_numbers_into_digits(smollm2):
    model, tokenizer = smollm2
    # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct/blob/main/config.json
    assert (model.vocab_size, model.width, model.mlp_width) == (49_152, 576, 1536)
    assert (model.num_layers, model.num_heads, model.num_kv_heads) == (30, 9, 3)
    assert (model.rope_theta, model.tie_embeddings) == (1e5, True)
    assert (tokenizer.num_tokens, tokenizer.eos_ids) == (49_152, (2,))
    assert tokenizer.decode([0, 1, 2]) == "<|endoftext|><|im_start|><|im_end|>"
    number = tokenizer.encode("1871,12345")
    assert [tokenizer.decode([id]) for id in number] == list("1871,12345")
    for text in TEXTS:
        ids = tokenizer.encode_plain(text)
        assert tokenizer.decode(ids) == text
        assert not any(re.search(rb"\d\d", tokenizer.vocab_bytes[id]) for id in ids)

"""Generate the quickstart world: people, a corpus, questions, demonstrations and a model.

    python -m examples.quickstart_world --out=data/quickstart --seed=0

Every person has a city of birth, a job and a mentor, stated in one document. One-hop questions ask
for the person's city or job, two-hop questions for the mentor's, so the second search needs the
result of the first. Some people are held out: their documents are in the corpus, but no training
question or demonstration names them, not even in search results.

Demonstrations come from other worlds: other people, named with the same words, and other
documents. They contain no facts worth memorizing, so they teach reading.

Most demonstrations are deliberately poor, so that reinforcement learning has something to improve:
they guess, search for only the surname or stop after one hop. Perfect demonstrations, which leave
nothing to improve, are in a separate file.

The same seed generates the same bytes. The model is a small Qwen3 with random weights in Hugging
Face format or, with `--model=qwen3_5`, a hybrid of the same width and depth. Its tokenizer has one
token per name, because a model of this size learns to copy one token from a document, but not two.
"""

import argparse
import collections
import contextlib
import itertools
import json
import random
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxrl.envs.protocol import SEARCH_R1, Protocol
from jaxrl.envs.search.base import Document, render_documents
from jaxrl.envs.search.bm25 import LocalSearch

FIRST_NAMES = """
    Lena Omar Mira Tobin Ada Kaspar Selma Ivo Nadia Bram Juno Rafi Petra Anselm Oriel Dario Hanne
    Yusuf Clio Edvin Marta Soren Zara Leif Ines Matteo Freya Kofi Alba Milos Vera Joren Tamsin Emil
    Noor Lucan Sigrid Paulo Elke Hugo Rosa Idris Thea Viktor Amira Bertil Wanda Ruben
""".split()  # noqa: SIM905 - a list literal would fill pages
LAST_NAMES = """
    Okafor Brandt Halloran Vesely Nakata Ferris Lindqvist Moreau Santoro Kwan Ibarra Petrov Oduya
    Keller Rasmussen Dumont Farkas Quist Tamura Bellweather Novak Stroud Achterberg Mendes Galloway
    Zielinski Pryce Haddad Corrigan Ueda Vantongeren Eklund Sharma Whitlock Jansson Castellan Duarte
    Fenwick Grimaldi Yilmaz Lovelace Ashdown Marchetti Rutkowski Thorne Bianchi Osei Winther
""".split()  # noqa: SIM905
CITIES = """
    Tarvik Solmere Brackwater Karsholm Mirabad Ondara Brennick Lusport Caldenfell Dunmarsh Eskova
    Farrowby Glimmerton Hestavik Isenbruck Jorvale Kettering Lyndhaven Montrava Nethersea Orlinka
    Pellworth Quillby Ravensund Sarnath Thornwick Ulverhof Vardenburg Westmark Xanthera Yarrowford
    Zelgrad Ambermoor Belcastra Corvinia Drossel Elmsgate Fjordal Greywater Highmoss Ironpool
    Junipero Kolvaar Larkspire Maristow Novigora Oakenshaw Pinefall
""".split()  # noqa: SIM905
JOBS = """
    baker carpenter sailor painter doctor teacher weaver potter miller gardener tailor surgeon
    printer lawyer farmer glazier brewer librarian pilot geologist violinist dentist jeweller
    cartographer
""".split()  # noqa: SIM905
POOL = frozenset((*FIRST_NAMES, *LAST_NAMES, *CITIES, *JOBS))

VALUES = {"birthplace": CITIES, "job": JOBS}
QUESTIONS = {
    ("birthplace",): "Where was {name} born?",
    ("job",): "What is the job of {name}?",
    ("mentor", "birthplace"): "Where was the mentor of {name} born?",
    ("mentor", "job"): "What is the job of the mentor of {name}?",
}
"""Question templates by the facts to look up, in order."""

GOOD_QUERIES = {"{first} {last}": 0.5, "{first} {last} {attribute}": 0.5}
POOR_QUERIES = {"{last}": 0.60, "{last} {attribute}": 0.15, "{first}": 0.17, "{attribute}": 0.08}
"""Probability of each query style. A query of only an attribute's name finds nothing."""

END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)
# A word with the preceding space, or a number with attached characters ("Doc 1(Title:").
PIECES = r" ?\p{L}+| ?\p{N}\S*| ?[^\s\p{L}\p{N}]+\n?|\n+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
VOCAB_LIMIT = 1024  # never reached, since merges run out first
SAMPLE = 2000  # demonstrations per kind to tokenize, for checks and statistics


@dataclass(frozen=True, kw_only=True)
class Person:
    """Facts about a person, stated in one document."""

    id: str
    first: str
    last: str
    facts: Mapping[str, str]  # birthplace, job and mentor
    is_held_out: bool

    @property
    def name(self) -> str:
        """Return the full name, which is the title of the document."""
        return f"{self.first} {self.last}"

    @property
    def text(self) -> str:
        """Return the body of the document."""
        return "{name} is a {job} born in {birthplace} and taught by {mentor}.".format(
            name=self.name, **self.facts
        )


People = Mapping[str, Person]  # by full name, in order of id


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Probabilities of the choices that a demonstrator makes."""

    guess: float  # answers without a search
    good_query: float  # uses GOOD_QUERIES; otherwise POOR_QUERIES
    second_search: float  # searches for the mentor if the question needs it


SURNAME_HABIT = Habits(guess=0.10, good_query=0.35, second_search=0.80)
PERFECT = Habits(guess=0.0, good_query=1.0, second_search=1.0)


def make_people(
    num_people: int, num_held_out: int, rng: random.Random, excluded: Collection[str] = ()
) -> People:
    """Generate people with distinct names outside `excluded`; mentors are in the same split.

    Held-out people get random ids, because a search ranks equally good documents by id.
    """
    possible = itertools.product(FIRST_NAMES, LAST_NAMES)
    names = rng.sample([name for name in possible if " ".join(name) not in excluded], num_people)
    held_out = set(rng.sample(range(num_people), num_held_out))
    sides = [[i for i in range(num_people) if (i in held_out) == side] for side in (False, True)]
    people = {}
    for i, (first, last) in enumerate(names):
        mentor = rng.choice([j for j in sides[i in held_out] if j != i])
        person = Person(
            id=f"{i:04d}",
            first=first,
            last=last,
            facts={
                "birthplace": rng.choice(CITIES),
                "job": rng.choice(JOBS),
                "mentor": " ".join(names[mentor]),
            },
            is_held_out=i in held_out,
        )
        people[person.name] = person
    return people


def make_documents(people: Iterable[Person]) -> Iterator[dict[str, str]]:
    """Yield the corpus records, one per person."""
    for person in people:
        yield {"id": person.id, "title": person.name, "text": person.text}


def make_question(person: Person, hops: tuple[str, ...], people: People) -> dict[str, Any]:
    """Generate a question record. `metadata` has the titles of the documents to look up."""
    titles = [person.name, person.facts["mentor"]][: len(hops)]
    return {
        "id": "-".join((person.id, *hops)),
        "question": QUESTIONS[hops].format(name=person.name),
        "answers": [people[titles[-1]].facts[hops[-1]]],
        "data_source": ("one_hop", "two_hop")[len(hops) - 1],
        "metadata": {"hops": list(hops), "titles": titles},
    }


def make_train_questions(people: People, rng: random.Random) -> list[dict[str, Any]]:
    """Generate all kinds of questions about people who are not held out, in random order."""
    persons = [person for person in people.values() if not person.is_held_out]
    questions = [make_question(p, hops, people) for p in persons for hops in QUESTIONS]
    rng.shuffle(questions)
    return questions


def make_eval_questions(people: People) -> list[dict[str, Any]]:
    """Generate one question about each held-out person, cycling through the kinds."""
    persons = [person for person in people.values() if person.is_held_out]
    return [
        make_question(person, hops, people)
        for person, hops in zip(persons, itertools.cycle(QUESTIONS), strict=False)
    ]


class Demonstrator:
    """Imperfect demonstrator that answers questions with a search engine."""

    def __init__(self, people: People, engine: LocalSearch, habits: Habits, rng: random.Random):
        self._people = people
        self._engine = engine
        self._habits = habits
        self._rng = rng

    def demonstrate(self, question: dict[str, Any]) -> dict[str, Any]:
        """Generate a demonstration. The answer is correct only if the searches succeed."""
        messages = [{"role": "user", "content": question["question"]}]
        answer = self._research(question, messages)
        messages.append({"role": "assistant", "content": self._format_final_turn(answer, messages)})
        return {
            "messages": messages,
            "data_source": question["data_source"],
            "metadata": {
                "question": question["question"],
                "answers": question["answers"],
                "num_searches": count_calls(messages, "search"),
                "is_correct": answer in question["answers"],
            },
        }

    def _format_final_turn(self, answer: str, messages: Sequence[Mapping[str, str]]) -> str:
        return f"<answer> {answer} </answer>"

    def _research(self, question: dict[str, Any], messages: list[dict[str, str]]) -> str:
        """Append searches to `messages`; return the result, or a guess."""
        hops, name = question["metadata"]["hops"], question["metadata"]["titles"][0]
        person = None
        if self._rng.random() >= self._habits.guess:
            person = self._look_up(name, hops[0], messages)
        if person and len(hops) == 2 and self._rng.random() < self._habits.second_search:
            person = self._look_up(person.facts["mentor"], hops[1], messages)
        return person.facts[hops[-1]] if person else self._rng.choice(VALUES[hops[-1]])

    def _look_up(self, name: str, attribute: str, messages: list[dict[str, str]]) -> Person | None:
        """Search once; return the person or, if missing, the first result; None without results."""
        query = self._sample_query(self._people[name], attribute)
        turn = f"<think> find {attribute} of {name} </think><search> {query} </search>"
        messages.append({"role": "assistant", "content": turn})
        messages.append({"role": "tool", "content": self._engine.run(query)})
        titles = parse_titles(messages[-1]["content"])
        person_name = name if name in titles else next(iter(titles), None)
        return None if person_name is None else self._people[person_name]

    def _sample_query(self, person: Person, attribute: str) -> str:
        is_good = self._rng.random() < self._habits.good_query
        styles = GOOD_QUERIES if is_good else POOR_QUERIES
        [style] = self._rng.choices(list(styles), list(styles.values()))
        return style.format(first=person.first, last=person.last, attribute=attribute)


def count_calls(messages: Iterable[Mapping[str, str]], tool: str) -> int:
    """Count the messages that end with the closing tag of a tool."""
    return sum(message["content"].endswith(f"</{tool}>") for message in messages)


def parse_titles(result: str) -> list[str]:
    """Parse the titles of the documents in a search result, best first."""
    return re.findall(r"^Doc \d+\(Title: (.*?)\)", result, flags=re.MULTILINE)


def make_demonstrations(
    people: People, num_mixed: int, num_perfect: int, *, topk: int, rng: random.Random
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Generate mixed and perfect demonstrations about the people of one world."""
    questions = make_train_questions(people, rng)
    with open_people_search(people.values(), topk=topk) as engine:
        mixed = Demonstrator(people, engine, SURNAME_HABIT, rng)
        perfect = Demonstrator(people, engine, PERFECT, rng)
        return (
            [
                mixed.demonstrate(question)
                for question in cycle_questions(questions, num_mixed, rng)
            ],
            [
                perfect.demonstrate(question)
                for question in cycle_questions(questions, num_perfect, rng)
            ],
        )


def cycle_questions(questions: Sequence[Any], num: int, rng: random.Random) -> Iterator[Any]:
    """Yield `num` questions, in repeated passes that are reshuffled."""
    passes = (rng.sample(questions, len(questions)) for _ in itertools.count())
    return itertools.islice(itertools.chain.from_iterable(passes), num)


def open_people_search(
    people: Iterable[Person], *, topk: int
) -> contextlib.AbstractContextManager[LocalSearch]:
    """Open the environment's search engine on the documents of people."""
    return open_search(make_documents(people), topk=topk)


@contextlib.contextmanager
def open_search(lines: Iterable[dict[str, str]], *, topk: int) -> Iterator[LocalSearch]:
    """Open the environment's search engine on corpus records."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        write_jsonl(corpus, lines)
        yield LocalSearch(corpus, Path(folder) / "index", topk=topk)


def list_tags(protocol: Protocol) -> tuple[str, ...]:
    """Return the opening and closing tags of a protocol."""
    return tuple(f"<{slash}{tag}>" for tag in protocol.tags for slash in ("", "/"))


def train_tokenizer(
    texts: Iterable[str], protocol: Protocol = SEARCH_R1, pieces: str = PIECES
) -> tokenizers.Tokenizer:
    """Train byte-level BPE with one token per protocol tag and, after merges, per word.

    The tags are not special tokens, so that decoding keeps them. Documents still cannot forge
    them.

    Args:
        texts: Training texts.
        protocol: Protocol that defines the tags.
        pieces: Regular expression that splits texts; no merge crosses a match boundary.
    """
    tags = list_tags(protocol)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_LIMIT - len(SPECIAL_TOKENS) - len(tags),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in tags])
    return tokenizer


def iter_training_texts(
    demonstrations: Iterable[Mapping[str, Any]],
    words: Iterable[str] = POOL,
    protocol: Protocol = SEARCH_R1,
) -> Iterator[str]:
    """Yield texts for training the tokenizer: words, and chats split at added tokens."""
    markers = "|".join(map(re.escape, SPECIAL_TOKENS + list_tags(protocol)))
    yield from (f" {word}" for word in sorted(words))
    for demonstration in demonstrations:
        yield from re.split(markers, render_chat(demonstration, protocol))


def render_texts(files: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, list[str]]:
    """Render texts for the model, by kind, with a sample of the demonstrations."""
    texts = {
        "document": [render_documents([Document(**document)]) for document in files["corpus"]],
        "prompt": [
            render_prompt(question["question"])
            for name in ("questions_train", "questions_eval")
            for question in files[name]
        ],
    }
    for name in ("demonstrations", "demonstrations_perfect"):
        for source in ("one_hop", "two_hop"):
            chats = [chat for chat in files[name] if chat["data_source"] == source]
            texts[f"{name}, {source}"] = [render_chat(chat) for chat in chats[:SAMPLE]]
    return texts


def render_prompt(question: str) -> str:
    """Render one user message in the format of `CHAT_TEMPLATE`."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def render_chat(demonstration: Mapping[str, Any], protocol: Protocol = SEARCH_R1) -> str:
    """Render a chat as text, with tool results in their tags and a final end-of-turn token."""
    question, *rest = demonstration["messages"]
    text = render_prompt(question["content"])
    for message in rest:
        content = message["content"]
        text += protocol.render_observation(content).text if message["role"] == "tool" else content
    return text.removesuffix(END_OF_TURN) + END_OF_TURN


def check_words_are_whole(
    tokenizer: tokenizers.Tokenizer, texts: Iterable[str], pool: Collection[str] = POOL
) -> None:
    """Assert that every word of the pool is one token everywhere in `texts`."""
    texts = list(texts)
    encodings = tokenizer.encode_batch([f" {word}" for word in sorted(pool)])
    assert all(len(encoding.ids) == 1 for encoding in encodings)
    pool_ids = {encoding.ids[0] for encoding in encodings}
    for text, encoding in zip(texts, tokenizer.encode_batch(texts), strict=True):
        num_words = sum(word in pool for word in re.findall(r"\w+", text))
        assert sum(id in pool_ids for id in encoding.ids) == num_words, f"a split word in {text!r}"


def check_nothing_leaks(people: People, files: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Assert that training data does not name a held-out person."""
    held_out = "|".join(person.name for person in people.values() if person.is_held_out)
    for name in files.keys() - {"corpus", "questions_eval"}:
        leak = re.search(held_out, json.dumps(files[name]))
        assert leak is None, f"{name} names {leak.group()}, who is held out"


def make_tokenizer_config() -> dict[str, Any]:
    # Not Qwen2Tokenizer, because transformers would replace our pre-tokenizer.
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }


def make_model_config(
    tokenizer: tokenizers.Tokenizer, num_experts: int = 0, model: str = "qwen3"
) -> dict[str, Any]:
    """Return the `config.json` of a dense model or, with experts, of a top-2 MoE model.

    The second layer of a `qwen3_5` model is a gated delta net. In the first layer, as in published
    models, it would keep a model of this size from learning to copy answers for hundreds of steps.
    """
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    }
    hybrid = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": ["full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.5,
    }
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 192,
        "max_position_embeddings": 1024,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 64 * (tokenizer.get_vocab_size() // 64 + 1),
        **(experts if num_experts else {}),
        **(hybrid if model == "qwen3_5" else {}),
    }


def make_generation_config(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    end_of_text = tokenizer.token_to_id("<|endoftext|>")
    return {
        "do_sample": True,
        "eos_token_id": [tokenizer.token_to_id("<|im_end|>"), end_of_text],
        "pad_token_id": end_of_text,
    }


def get_weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the weight shapes by Hugging Face name; matrices are `[out, in]`."""
    width, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    num_layers = config["num_hidden_layers"]
    mixers = {
        "full_attention": {
            # The queries of a hybrid model have gates.
            "self_attn.q_proj.weight": (queries * (2 if "layer_types" in config else 1), width),
            "self_attn.k_proj.weight": (keys, width),
            "self_attn.v_proj.weight": (keys, width),
            "self_attn.q_norm.weight": (head,),
            "self_attn.k_norm.weight": (head,),
            "self_attn.o_proj.weight": (width, queries),
        }
    }
    if "layer_types" in config:
        mixers["linear_attention"] = get_delta_net_shapes(config)
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for i, kind in enumerate(config.get("layer_types", ["full_attention"] * num_layers)):
        layer = {
            "input_layernorm.weight": (width,),
            **mixers[kind],
            "post_attention_layernorm.weight": (width,),
            **{f"{name}.weight": shape for name, shape in get_feed_forward_shapes(config).items()},
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {**shapes, "model.norm.weight": (width,)}


def get_delta_net_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a gated delta net."""
    width, num_heads = config["hidden_size"], config["linear_num_value_heads"]
    values = num_heads * config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    return {
        "linear_attn.in_proj_qkv.weight": (channels, width),
        "linear_attn.in_proj_z.weight": (values, width),
        "linear_attn.in_proj_a.weight": (num_heads, width),
        "linear_attn.in_proj_b.weight": (num_heads, width),
        "linear_attn.conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (num_heads,),
        "linear_attn.dt_bias": (num_heads,),
        "linear_attn.norm.weight": (config["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (width, values),
    }


def get_feed_forward_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's MLP, or of its router and experts."""

    def get_mlp_shapes(name: str, inner: int) -> dict[str, tuple[int, ...]]:
        width = config["hidden_size"]
        outwards = {f"{name}.{part}_proj": (inner, width) for part in ("gate", "up")}
        return {**outwards, f"{name}.down_proj": (width, inner)}

    if "num_experts" not in config:
        return get_mlp_shapes("mlp", config["intermediate_size"])
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate": (config["num_experts"], config["hidden_size"])
    }
    for expert in range(config["num_experts"]):
        shapes |= get_mlp_shapes(f"mlp.experts.{expert}", config["moe_intermediate_size"])
    return shapes


def init_weights(config: Mapping[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Initialize float32 weights: norms are 1, matrices have variance 1 / fan_in.

    Projections into the residual stream, two per layer, are scaled down as in GPT-2, so that the
    sum keeps the scale of the embedding. Delta nets decay by `exp(-rate * step)` per token, with
    rates in [1, 16] as in Mamba-2, but steps in [1e-5, 0.01] instead of [0.001, 0.1], so that most
    heads remember the question until the answer.
    """
    weights = {}
    for name, shape in get_weight_shapes(config).items():
        if name.endswith("A_log"):
            weights[name] = np.log(rng.uniform(1, 16, shape)).astype(np.float32)
            continue
        if name.endswith("dt_bias"):
            step = np.exp(rng.uniform(np.log(1e-5), np.log(0.01), shape))
            weights[name] = np.log(np.expm1(step)).astype(np.float32)  # inverse of softplus
            continue
        if len(shape) == 1:
            # The norms of a hybrid model add 1 to their scale, except in delta nets.
            adds_one = "layer_types" in config and "linear_attn" not in name
            weights[name] = np.full(shape, 0 if adds_one else 1, np.float32)
            continue
        std = shape[-1] ** -0.5
        if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            std /= (2 * config["num_hidden_layers"]) ** 0.5
        # safetensors silently writes wrong values for arrays that are not C-contiguous.
        weights[name] = np.ascontiguousarray(std * rng.standard_normal(shape, np.float32))
    return weights


def write_model(
    folder: Path,
    tokenizer: tokenizers.Tokenizer,
    *,
    seed: int,
    num_experts: int = 0,
    model: str = "qwen3",
    chat_template: str = CHAT_TEMPLATE,
    max_tokens: int = 1024,
) -> None:
    """Write a model with random weights, and its tokenizer.

    Args:
        folder: Output folder.
        tokenizer: Tokenizer of the model.
        seed: Random seed of the weights.
        num_experts: Number of experts per layer; 0 writes a dense model.
        model: Family of the model, `qwen3` or `qwen3_5`.
        chat_template: Chat template of the tokenizer.
        max_tokens: Maximum sequence length, in tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = make_model_config(tokenizer, num_experts, model)
    config["max_position_embeddings"] = max_tokens
    chats = {"model_max_length": max_tokens, "chat_template": chat_template}
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", make_generation_config(tokenizer))
    write_json(folder / "tokenizer_config.json", make_tokenizer_config() | chats)
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = init_weights(config, np.random.default_rng(seed))
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes files readable by the owner only.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def write_files(folder: Path, files: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Write the files as JSONL; last and atomically the held-out questions, make's target."""
    last = folder / "questions_eval.jsonl"
    for name in files.keys() - {last.stem}:
        write_jsonl(folder / f"{name}.jsonl", files[name])
    unfinished = last.with_suffix(".unfinished")
    write_jsonl(unfinished, files[last.stem])
    unfinished.replace(last)


def print_lengths(tokenizer: tokenizers.Tokenizer, texts: Mapping[str, Sequence[str]]) -> None:
    """Print percentiles of the text lengths, in tokens."""
    print(f"\n{'tokens':24}{'count':>8}{'p5':>6}{'p50':>6}{'p95':>6}{'max':>6}")
    for name, group in texts.items():
        if group:
            lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(list(group))]
            p5, p50, p95, maximum = np.percentile(lengths, [5, 50, 95, 100])
            print(f"{name:24}{len(lengths):8}{p5:6.0f}{p50:6.0f}{p95:6.0f}{maximum:6.0f}")


def print_quality(files: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Print the fraction and accuracy of demonstrations by number of searches."""
    print(f"\n{'demonstrations':36}{'share':>8}{'right':>8}")
    for name in ("demonstrations", "demonstrations_perfect"):
        is_correct = collections.defaultdict(list)
        for demonstration in files[name]:
            num_searches = demonstration["metadata"]["num_searches"]
            group = f"{demonstration['data_source']}, searches: {num_searches}"
            is_correct[group].append(demonstration["metadata"]["is_correct"])
        for group, values in sorted(is_correct.items()):
            share = len(values) / len(files[name])
            print(f"{group + ', perfect' * ('_' in name):36}{share:8.1%}{np.mean(values):8.1%}")


def print_hit_rates(people: People, engine: LocalSearch) -> None:
    """Print how often each query style finds the held-out person that it names."""
    held_out = [person for person in people.values() if person.is_held_out]
    print(f"\n{'query (whole corpus, held out)':36}{'hits':>8}{'first':>8}")
    for style in (*GOOD_QUERIES, *POOR_QUERIES):
        titles = [
            parse_titles(
                engine.run(style.format(first=p.first, last=p.last, attribute="birthplace"))
            )
            for p in held_out
        ]
        hits = np.mean(
            [p.name in person_name for p, person_name in zip(held_out, titles, strict=True)]
        )
        first = np.mean([[p.name] == s[:1] for p, s in zip(held_out, titles, strict=True)])
        print(f"  {style:34}{hits:8.1%}{first:8.1%}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_people", type=int, default=1200)
    parser.add_argument(
        "--num_held_out", type=int, default=200, help="people held out for evaluation"
    )
    parser.add_argument(
        "--num_demonstrations", type=int, default=20_000, help="demonstrations of mixed quality"
    )
    parser.add_argument("--num_worlds", type=int, default=20, help="worlds for demonstrations")
    parser.add_argument("--topk", type=int, default=3, help="documents in a search result")
    parser.add_argument(
        "--max_hops", type=int, choices=(1, 2), default=2, help="documents that a question needs"
    )
    parser.add_argument(
        "--num_experts", type=int, default=0, help="experts per layer; 0: a dense model"
    )
    parser.add_argument("--model", choices=("qwen3", "qwen3_5"), default="qwen3", help="family")
    args = parser.parse_args(argv)
    if args.num_experts not in (0, *range(2, 1000)):
        parser.error(f"--num_experts is {args.num_experts}; expected at least 2, or 0 for none")
    if args.num_experts and args.model != "qwen3":
        parser.error(f"--num_experts needs --model=qwen3, but --model is {args.model}")
    check_sizes(parser, args)
    return args


def check_sizes(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with an error if there are more people than names, or a split is too small."""
    max_people = len(FIRST_NAMES) * len(LAST_NAMES)
    if not args.num_people <= max_people:
        parser.error(
            f"--num_people is {args.num_people}; expected at most {max_people}, one per name"
        )
    if not 2 <= args.num_held_out <= args.num_people - 2:
        parser.error("--num_held_out must leave at least two people in each split, for mentors")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    rngs = {part: random.Random(f"{args.seed} {part}") for part in ("people", "order", "demos")}
    people = make_people(args.num_people, args.num_held_out, rngs["people"])
    train, evaluation = make_train_questions(people, rngs["order"]), make_eval_questions(people)
    held_out = [person.name for person in people.values() if person.is_held_out]
    # Demonstrations come from other worlds, so that they teach no facts.
    pairs = [
        make_demonstrations(
            make_people(args.num_people - len(held_out), 0, rngs["demos"], excluded=held_out),
            args.num_demonstrations // args.num_worlds,
            args.num_demonstrations // args.num_worlds,
            topk=args.topk,
            rng=rngs["demos"],
        )
        for _ in range(args.num_worlds)
    ]
    files = {
        "corpus": list(make_documents(people.values())),
        "questions_train": [q for q in train if len(q["metadata"]["hops"]) <= args.max_hops],
        "questions_eval": [q for q in evaluation if len(q["metadata"]["hops"]) <= args.max_hops],
        "demonstrations": [chat for mixed, _ in pairs for chat in mixed],
        "demonstrations_perfect": [chat for _, perfect in pairs for chat in perfect],
    }
    # Check the texts before writing anything.
    tokenizer = train_tokenizer(iter_training_texts(files["demonstrations"]))
    texts = render_texts(files)
    check_nothing_leaks(people, files)
    check_words_are_whole(tokenizer, itertools.chain.from_iterable(texts.values()))
    write_model(
        args.out / "model",
        tokenizer,
        seed=args.seed,
        num_experts=args.num_experts,
        model=args.model,
    )
    write_files(args.out, files)

    print_lengths(tokenizer, texts)
    print_quality(files)
    with open_people_search(people.values(), topk=args.topk) as engine:
        print_hit_rates(people, engine)
    print(f"\nwrote {args.out}: " + ", ".join(f"{name} ({len(files[name]):,})" for name in files))


if __name__ == "__main__":
    main()

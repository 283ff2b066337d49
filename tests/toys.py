"""Tokenizers, policies and environments small enough to predict by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import Env, Reward, Task
from jaxrl.models.qwen import QwenConfig
from jaxrl.runtime.sharding import make_mesh
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.episodes import TokenLimits
from jaxrl.sampling.interfaces import SamplingConfig, Seeds
from jaxrl.sampling.rollout import Rollout
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.types import Draw, flatten_groups
from tests.helpers import compilations, full_pass

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
# Adds a default system message if there is none, as Qwen2.5's template does.
OWN_SYSTEM = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou were made by nobody.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROOMY = TokenLimits(
    max_prompt_tokens=32, max_response_tokens=64, max_total_tokens=64, max_observation_tokens=64
)


def showing(max_observation_tokens, context=None):
    """Return limits for demonstrations, with a maximum observation and context settings."""
    return dataclasses.replace(
        ROOMY, max_observation_tokens=max_observation_tokens, context=context
    )


# The vocabulary is larger than any toy tokenizer's, as in padded checkpoints.
SMALL = QwenConfig(
    vocab_size=320,
    width=32,
    mlp_width=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    tie_embeddings=False,
    qkv_bias=True,
    output_bias=False,
    qk_norm=True,
    max_positions=512,
)


def chain(text):
    """Return the merges that make `text` one token, from left to right."""
    return [(text[:end], text[end]) for end in range(1, len(text))]


def toy_tokenizer(
    *merges,
    chat_template=CHATML,
    special=(),
    added=(),
    eos_token="<|im_end|>",
    bos_token=None,
    **settings,
):
    """Return byte-level BPE with these merges and ChatML's special tokens."""
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spell = lambda text: by_bytes.pre_tokenize_str(text)[0][0]  # noqa: E731
    merges = list(dict.fromkeys((spell(left), spell(right)) for left, right in merges))
    words = sorted(by_bytes.alphabet()) + [left + right for left, right in merges]
    vocab = {word: index for index, word in enumerate(dict.fromkeys(words))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = by_bytes
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>", "<|im_start|>", *special])
    backend.add_tokens(list(added))
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token=eos_token,
            bos_token=bos_token,
            chat_template=chat_template,
        ),
        **settings,
    )


class ScriptedEnv(Env):
    """Environment that replies by a function of the turn's number and records what it receives."""

    def __init__(self, stop_strings, reply):
        self.stop_strings = tuple(stop_strings)
        self._reply = reply
        self.texts = []

    def start(self, tasks):
        return [[{"role": "user", "content": task.question}] for task in tasks]

    def step(self, episodes, texts):
        self.texts.extend(texts)
        return [self._reply(len(episode.turns)) for episode in episodes]

    def score(self, group):
        return [Reward(total=len(e.turns), parts={}, final_answer="") for e in group]


def script(*replies):
    """Return a function that gives a reply per turn, repeating the last one."""
    return lambda turn: replies[min(turn, len(replies) - 1)]


def one_device_mesh():
    return make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])


class Player:
    """An engine and tokenizer that play any environment with the same stop strings."""

    def __init__(self, config, tokenizer, stop_strings, automaton=None, **settings):
        self.tokenizer = tokenizer
        self.automaton = automaton or StopAutomaton(tokenizer.vocab_bytes, stop_strings)
        defaults = {
            "chunk_tokens": 8,
            "max_total_tokens": ROOMY.max_total_tokens,
        }
        self.engine = Engine(
            config,
            one_device_mesh(),
            self.automaton,
            num_tokens=tokenizer.num_tokens,
            eos_ids=tokenizer.eos_ids,
            **{**defaults, **settings},
        )

    def play(
        self, env, questions, *, limits=ROOMY, group_size=1, seed=0, step=0, stream_indices=None,
        temperature=1.0, top_p=1.0, answers=("Paris",), schedule=None, pay=None,
        keeps_arrays=False, **settings,
    ):  # fmt: skip
        """Play questions and return their trajectories."""
        indices = range(len(questions)) if stream_indices is None else stream_indices
        draws = [
            Draw(task=Task(id=f"task {i}", question=q, answers=answers), stream_index=i)
            for i, q in zip(indices, questions, strict=True)
        ]
        rollout = Rollout(self.engine, env, self.tokenizer, self.automaton, limits, schedule, pay)
        sampling = SamplingConfig(
            group_size=group_size,
            temperature=temperature,
            top_p=top_p,
            seeds=Seeds(seed=seed, stage=0, step=step),
            policy_version=step,
            keeps_arrays=keeps_arrays,
        )
        return flatten_groups(rollout(draws, sampling, **settings))


def taught(params, config, token_ids, *, start):
    """Return parameters with which the policy continues `token_ids[:start]` as in `token_ids`.

    The random blocks give every position a distinct hidden state. The output layer is solved for,
    so that the next token's logit is 30 above all others.
    """
    token_ids = np.asarray(token_ids)
    padded = np.zeros((1, -(-len(token_ids) // 160) * 160), np.int32)
    padded[0, : len(token_ids)] = token_ids
    hidden = _features(params, config, padded)[0, start - 1 : len(token_ids) - 1]
    wanted = np.zeros((len(hidden), config.vocab_size))
    wanted[np.arange(len(hidden)), token_ids[start:]] = 30.0
    kernel, *_ = np.linalg.lstsq(np.asarray(hidden, np.float64), wanted)
    return {**params, "lm_head": {"kernel": jnp.asarray(kernel, jnp.float32)}}


@jax.jit(static_argnums=1)
def _features(params, config, token_ids):
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    return full_pass(config, params, token_ids, positions, jnp.ones_like(positions))


count_compilations = compilations

"""Matching of stop strings during sampling, independent of token boundaries."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence

import numpy as np


class StopAutomaton:
    """Automaton over token ids that detects the token that completes a stop string.

    A tag need not align with token boundaries: the token `?</` may open it, and `>.` may close it.
    Strings are therefore matched byte by byte with the Aho-Corasick automaton
    (https://doi.org/10.1145/360825.360855), with transitions composed over each token's bytes.

    Each turn starts in `start_state`. After a hit, the state is a valid index but has no meaning.

    Attributes:
        next_state: int8 or int16 [S, V], state after each token.
        is_hit: bool [S, V], True if a stop string ends within the token.
        stop_strings: UTF-8 bytes of each stop string.
        start_state: State at the start of a turn: 0, or this automaton's first state in tables that
            several automata share.
    """

    next_state: np.ndarray
    is_hit: np.ndarray
    stop_strings: tuple[bytes, ...]
    start_state: int = 0

    def __init__(self, vocab_bytes: Sequence[bytes], stop_strings: Sequence[str]):
        if "" in stop_strings:
            raise ValueError(
                f"stop strings {list(stop_strings)!r} include an empty one; expected at least one "
                "character each. Remove it from the environment's `stop_strings`."
            )
        self.stop_strings = tuple(stop.encode() for stop in stop_strings)
        transitions, ends = _build_byte_automaton(self.stop_strings)
        self.next_state, self.is_hit = _compose_over_tokens(transitions, ends, vocab_bytes)

    def compute_state(self, token_ids: Sequence[int]) -> int:
        """Return the automaton state after the tokens of an unfinished turn.

        The tokens must not contain a complete stop string.
        """
        state = self.start_state
        for token in token_ids:
            state = int(self.next_state[state, token])
        return state

    def find_stop(self, data: bytes) -> int | None:
        """Return the end offset in `data` of the stop string that completes first, or None."""
        ends = [data.find(stop) + len(stop) for stop in self.stop_strings if stop in data]
        return min(ends, default=None)

    def truncate(self, token_bytes: Sequence[bytes]) -> bytes:
        """Return the bytes of a turn, truncated after its first stop string."""
        data = b"".join(token_bytes)
        return data[: self.find_stop(data)]


def join_automata(automata: Sequence[StopAutomaton]) -> list[StopAutomaton]:
    """Return copies of the automata with shared tables, so that one sampler can run all of them.

    Each automaton has its own states and thus matches its own stop strings only. Automata with the
    same stop strings share their states.

    Args:
        automata: Automata of the same vocabulary.
    """
    distinct = {automaton.stop_strings: automaton for automaton in automata}
    start_states, num_states = dict[tuple[bytes, ...], int](), 0
    for stop_strings, automaton in distinct.items():
        start_states[stop_strings] = num_states
        num_states += len(automaton.next_state)
    dtype = np.min_scalar_type(-num_states)
    next_state = np.concatenate(
        [(a.next_state.astype(int) + start_states[s]).astype(dtype) for s, a in distinct.items()]
    )
    is_hit = np.concatenate([automaton.is_hit for automaton in distinct.values()])
    joined = [copy.copy(automaton) for automaton in automata]
    for automaton in joined:
        automaton.next_state, automaton.is_hit = next_state, is_hit
        automaton.start_state = start_states[automaton.stop_strings]
    return joined


def _build_byte_automaton(patterns: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Build the Aho-Corasick automaton: transitions int16 [S, 256] and pattern ends bool [S]."""
    # Build the trie; `ends` marks the last state of each pattern.
    children: list[dict[int, int]] = [{}]
    ends = [False]
    for pattern in patterns:
        state = 0
        for byte in pattern:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                ends.append(False)
            state = children[state][byte]
        ends[state] = True

    # Breadth first: a state's longest proper suffix is shorter, so its transitions are complete.
    transitions = np.zeros((len(children), 256), np.int16)
    suffix = [0] * len(children)
    queue = deque([0])
    while queue:
        state = queue.popleft()
        transitions[state] = transitions[suffix[state]]
        ends[state] |= ends[suffix[state]]
        for byte, child in children[state].items():
            suffix[child] = int(transitions[state, byte]) if state else 0
            transitions[state, byte] = child
            queue.append(child)
    return transitions, np.array(ends)


def _compose_over_tokens(
    transitions: np.ndarray, ends: np.ndarray, vocab_bytes: Sequence[bytes]
) -> tuple[np.ndarray, np.ndarray]:
    """Compose byte transitions over tokens; return next states, and whether a pattern ended."""
    num_states = len(transitions)
    lengths = np.array([len(token) for token in vocab_bytes], np.int64)
    starts = np.cumsum(lengths) - lengths
    data = np.frombuffer(b"".join(vocab_bytes), np.uint8)

    dtype = np.int8 if num_states <= np.iinfo(np.int8).max else np.int16
    transitions = transitions.astype(dtype)
    state = np.repeat(np.arange(num_states, dtype=dtype)[:, None], len(lengths), axis=1)
    hit = np.zeros_like(state, dtype=bool)
    for i in range(lengths.max(initial=0)):
        tokens = np.flatnonzero(lengths > i)
        state[:, tokens] = transitions[state[:, tokens], data[starts[tokens] + i]]
        hit[:, tokens] |= ends[state[:, tokens]]
    return state, hit

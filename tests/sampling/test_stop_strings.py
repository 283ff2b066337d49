import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.sampling.stop_strings import StopAutomaton, join_automata

TAGS = ("</search>", "</answer>")


def find_hit(automaton, ids):
    """Run the automaton; return the index of the first token that completes a stop string."""
    state = 0
    for index, token in enumerate(ids):
        if automaton.is_hit[state, token]:
            return index
        state = automaton.next_state[state, token]
    return None


def search(vocab, stops, ids):
    """Return the same index with a plain search in all bytes so far."""
    data = b""
    for index, token in enumerate(ids):
        data += vocab[token]
        if any(data.find(stop.encode()) >= 0 for stop in stops):
            return index
    return None


@pytest.mark.parametrize(
    ("pieces", "hit"),
    [
        ([b"</search>"], 0),
        ([b"what?", b"</", b"search", b">"], 3),
        ([b"what", b"?</", b"search", b">\n\n"], 3),
        ([b"x </sea", b"rch>.", b"</answer>"], 1),
        ([b"<", b"</", b"answer", b"></search>"], 3),
        ([b"</search", b"</search", b" >"], None),
        ([b"</", b"", b"search", b">"], 3),
    ],
)
def test_a_tag_is_found_however_it_is_split(pieces, hit):
    automaton = StopAutomaton(pieces, TAGS)
    assert find_hit(automaton, range(len(pieces))) == hit


def test_text_ends_at_the_stop_inside_a_token():
    automaton = StopAutomaton([b""], TAGS)
    assert automaton.truncate([b"a</answer", b">\n\n<search>b</search>"]) == b"a</answer>"
    assert automaton.truncate([b"no ", b"tag"]) == b"no tag"
    assert automaton.find_stop(b"xx</search>.</answer>") == len("xx</search>")
    assert automaton.find_stop(b"</search") is None


def test_many_states_take_sixteen_bits():
    automaton = StopAutomaton([b"a", b"b"], ["a" * 200])
    assert automaton.next_state.dtype == np.int16
    assert find_hit(automaton, [1] + [0] * 250) == 200


ODD_TOKENS = [b"</", b"search", b">\n\n", b"?</", b"</search>", b"</search", b"answer></", b""]


@settings(max_examples=100)
@given(
    vocab=st.lists(st.sampled_from(ODD_TOKENS) | st.binary(max_size=2), min_size=1),
    stops=st.lists(st.sampled_from(TAGS) | st.text("<>/é", min_size=1, max_size=5), max_size=4),
    draws=st.lists(st.integers(0, 2**16), max_size=30),
)
def test_automaton_agrees_with_plain_search(vocab, stops, draws):
    automaton = StopAutomaton(vocab, stops)
    assert automaton.next_state.min() >= 0
    assert automaton.next_state.max() < len(automaton.next_state)
    ids = [draw % len(vocab) for draw in draws]
    hit = find_hit(automaton, ids)
    assert hit == search(vocab, stops, ids)

    # The text ends inside the token that hit, at the first byte where a stop string is complete.
    data = b"".join(vocab[id] for id in ids)
    text = automaton.truncate([vocab[id] for id in ids])
    assert data.startswith(text)
    if hit is None:
        assert text == data
    else:
        before = b"".join(vocab[id] for id in ids[:hit])
        assert len(before) < len(text) <= len(before) + len(vocab[ids[hit]])
        assert any(text.endswith(stop.encode()) for stop in stops)
        assert not any(stop.encode() in text[:-1] for stop in stops)


@settings(max_examples=100)
@given(
    vocab=st.lists(st.sampled_from(ODD_TOKENS) | st.binary(max_size=2), min_size=1),
    sets=st.lists(st.lists(st.sampled_from(TAGS), max_size=3), min_size=1, max_size=4),
    draws=st.lists(st.integers(0, 2**16), max_size=30),
)
def test_joined_automata_match_only_their_own_strings(vocab, sets, draws):
    alone = [StopAutomaton(vocab, stops) for stops in sets]
    joined = join_automata(alone)
    ids = [draw % len(vocab) for draw in draws]
    assert len({id(automaton.next_state) for automaton in joined}) == 1
    assert sum(map(len, {a.stop_strings: a.next_state for a in alone}.values())) == len(
        joined[0].next_state
    )
    for own, shared in zip(alone, joined, strict=True):
        hit = find_hit(own, ids)
        state, seen = shared.start_state, None
        for index, token in enumerate(ids):
            if seen is None and shared.is_hit[state, token]:
                seen = index
            state = shared.next_state[state, token]
        assert seen == hit
        before = ids[:hit]
        assert shared.compute_state(before) == own.compute_state(before) + shared.start_state
        assert shared.truncate([vocab[i] for i in ids]) == own.truncate([vocab[i] for i in ids])

import dataclasses

import numpy as np
import pytest

from jaxrl.data.serialization import deserialize_trajectory, serialize_trajectory
from jaxrl.envs.base import (
    CallRecord,
    Observation,
    OutageError,
    Outcome,
    Prompt,
    Reward,
    StepResult,
    Task,
    ToolError,
)
from jaxrl.envs.protocol import SEARCH_R1
from jaxrl.envs.rewards.combiner import RewardCombiner
from jaxrl.envs.rewards.functions import RewardFunction, detect_convention
from jaxrl.envs.search.base import SearchEngine
from jaxrl.envs.search_env import SearchEnv
from jaxrl.sampling.observations import encode_observation
from jaxrl.sampling.rollout import Rollout
from tests.helpers import tiny_params
from tests.servers import KeywordSearch
from tests.toys import (
    ROOMY,
    SMALL,
    Player,
    ScriptedEnv,
    chain,
    script,
    taught,
    toy_tokenizer,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Wide enough for an output layer that distinguishes every position of a conversation.
CONFIG = dataclasses.replace(SMALL, width=128, head_dim=32)
PARAMS = tiny_params(CONFIG)
SHORT = [*chain("<information>"), *chain("the tower")]
WHOLE = [*SHORT, *chain("</search>"), *chain("</answer>"), *chain("</information>")]
SPLIT = [
    ("<", "/"),
    ("?", "</"),
    *SHORT,
    *chain("search"),
    *chain("answer"),
    *chain("information"),
    *chain(">\n\n"),
    *chain(">."),
    (">", "</"),
]
FOUND = "at Paris"
END = "<|im_end|>"
FIRST, LAST = "<search>the tower</search>", "<answer>Paris</answer>"
OBSERVATION = SEARCH_R1.render_observation(FOUND)


@pytest.fixture(scope="module")
def players():
    """Players by tokenizer; tags are single tokens, or several that merge with adjacent text."""
    return {
        name: Player(CONFIG, toy_tokenizer(*merges), SEARCH_R1.stop_strings, num_rows=1)
        for name, merges in {"whole": WHOLE, "split": SPLIT}.items()
    }


@pytest.fixture(scope="module")
def player(players):
    return players["split"]


def search_env(engine=None):
    prompt = Prompt(system="", template="{question}")
    return SearchEnv(engine or KeywordSearch({"tower": FOUND}), prompt=prompt, max_turns=2)


def teach(player, *parts, question="Where?"):
    """Make the policy write the strings among `parts`, with the observations between them.

    Returns:
        Ids of the whole conversation, and which of them the policy writes.
    """
    tokenizer = player.tokenizer
    ids = tokenizer.render_prompt([{"role": "user", "content": question}])
    mask = [False] * len(ids)
    start = len(ids)
    for part in parts:
        if isinstance(part, Observation):
            new = encode_observation(tokenizer, part, max_body_tokens=1000)[0]
        else:
            new = tokenizer.encode(part)
        ids += new
        mask += [isinstance(part, str)] * len(new)
    player.engine.set_weights(taught(PARAMS, CONFIG, ids, start=start))
    return ids, mask


def play_one(player, env, question="Where?", **settings):
    (trajectory,) = player.play(env, [question], **settings)
    assert len(trajectory.token_ids) == len(trajectory.loss_mask)
    return trajectory


def test_the_two_tokenizers_split_tags_differently(players):
    def pieces(name, text):
        tokenizer = players[name].tokenizer
        return [tokenizer.decode([token]) for token in tokenizer.encode(text)]

    assert pieces("whole", "r?</search>\n\n") == ["r", "?", "</search>", "\n", "\n"]
    assert pieces("split", "r?</search>\n\n") == ["r", "?</", "search", ">\n\n"]
    assert pieces("split", "</answer>.") == ["</", "answer", ">."]
    assert pieces("split", "</search></") == ["</", "search", "></"]


@pytest.mark.parametrize(
    ("query", "ends"), [("the tower", ("", "")), ("the tower?", ("\n\n", "."))]
)
def test_stop_strings_end_turns_however_they_are_tokenized(players, query, ends):
    first = f"hm <search>{query}</search>"
    last = "<answer>Paris</answer>"
    for name, player in players.items():
        # The text after a tag is only written if it is in the same token.
        after = ends if name == "split" else ("", "")
        ids, mask = teach(player, first + after[0], OBSERVATION, last + after[1])
        pay = RewardCombiner(weights={"format": 1.0, "answer": 1.0})
        actual = play_one(player, search_env(), pay=pay)

        assert [turn.text for turn in actual.turns] == [first, last]
        assert [turn.tool_call for turn in actual.turns] == [query, None]
        assert [turn.observation for turn in actual.turns] == [OBSERVATION.text, None]
        assert actual.outcome == Outcome.ANSWERED
        assert actual.final_answer == "Paris"
        # `format` requires a think block right before the answer; the answer itself is right.
        assert actual.reward == 0.5 + 2.0
        assert actual.reward_parts["exact_match"] == 1.0
        # The ids include all of the last token, though the text ends inside it.
        assert actual.token_ids.tolist() == ids
        assert actual.loss_mask.tolist() == mask
        assert actual.generated_text == first + OBSERVATION.text + last


def test_stop_strings_do_not_span_turns(player):
    # Neither the text after a stop in its token nor the end of an observation begins a tag.
    half = Observation(prefix="\n", body="so", suffix="</")
    env = ScriptedEnv(
        SEARCH_R1.stop_strings,
        script(StepResult(observation=half), StepResult(outcome=Outcome.ANSWERED)),
    )
    ids, _ = teach(player, "<search>tower</search></", half, "search> and on</answer>")
    actual = play_one(player, env)
    assert env.texts == ["<search>tower</search>", "search> and on</answer>"]
    assert actual.token_ids.tolist() == ids


def test_an_end_of_turn_id_stays_in_the_ids_and_out_of_the_text(player):
    more = Observation(prefix="\n", body="go on", suffix="\n")
    env = ScriptedEnv(
        SEARCH_R1.stop_strings,
        script(StepResult(observation=more), StepResult(outcome=Outcome.ANSWERED)),
    )
    ids, mask = teach(player, f"hello{END}", more, f"bye{END}")
    actual = play_one(player, env)
    assert env.texts == ["hello", "bye"]
    assert ids[-1] == player.tokenizer.eos_ids[0]
    assert actual.token_ids.tolist() == ids
    assert actual.loss_mask.tolist() == mask


def test_a_turn_without_observation_prefills_nothing(player):
    # A search that was never opened earns no observation.
    ids, mask = teach(player, "oh</search>", "so <answer>Paris</answer>")
    before = player.engine.counts.prefilled_resume
    actual = play_one(player, search_env())
    assert [turn.text for turn in actual.turns] == ["oh</search>", "so <answer>Paris</answer>"]
    assert [turn.observation for turn in actual.turns] == [None, None]
    assert actual.token_ids.tolist() == ids
    assert actual.loss_mask.tolist() == mask
    assert player.engine.counts.prefilled_resume == before


def turn_reward(turns, answers):
    return [1.0 if turn.tool_call else 0.25 for turn in turns]


def count_tokens(completions, completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize("first", [FIRST, "oh</search>"], ids=["observation", "none"])
def test_turns_have_their_tokens_and_rewards(player, first):
    observations = [OBSERVATION] if first == FIRST else []
    ids, mask = teach(player, first, *observations, LAST)
    parts = {
        f.__name__: RewardFunction(name=f.__name__, function=f, convention=detect_convention(f))
        for f in (turn_reward, count_tokens)
    }
    weights = {"exact_match": 1.0, "turn_reward": 2.0, "count_tokens": 0.0}
    pay = RewardCombiner(weights=weights, custom_parts=parts)
    actual = play_one(player, search_env(), pay=pay)
    assert [actual.token_ids[start] for start in actual.turn_starts] == [
        player.tokenizer.encode(text)[0] for text in (first, LAST)
    ]
    num_first = len(player.tokenizer.encode(first))
    expected_turns = [*[0] * num_first, *[1] * (sum(mask) - num_first)]
    assert actual.token_turns[actual.loss_mask].tolist() == expected_turns
    first_reward = 2.0 if first == FIRST else 0.5
    assert (actual.turn_rewards, actual.rest_reward) == ((first_reward, 0.5), 1.0)
    assert actual.reward == first_reward + 1.5
    assert actual.reward_parts["turn_reward"] == (first_reward + 0.5) / 2
    assert actual.reward_parts["count_tokens"] == len(ids) - actual.prompt_length


def test_records_of_a_failed_judge_stay_with_the_trajectory(player):
    def fail(groups):
        [[episode]] = groups
        episode.records.append(CallRecord(call="\ud800 good?", tool="helpful", attempts=3))
        return [[ArithmeticError("no score")]]

    teach(player, LAST)
    actual = play_one(player, search_env(), pay=fail)
    assert not actual.is_scored
    [record] = actual.reward_records
    assert (record.tool, record.attempts) == ("helpful", 3)
    assert record.call.encode().endswith(b" good?")  # valid in a file
    assert actual.call_records == []  # only its tools' records


def with_limits(**limits):
    return dataclasses.replace(ROOMY, **limits)


def test_the_response_budget_counts_sampled_tokens_only(player):
    ids, mask = teach(player, FIRST, OBSERVATION, LAST)
    num_sampled = sum(mask)
    # The last token completes the answer and spends the budget: the stop counts.
    whole = play_one(player, search_env(), limits=with_limits(max_response_tokens=num_sampled))
    assert whole.outcome == Outcome.ANSWERED
    assert whole.token_ids.tolist() == ids

    short = play_one(player, search_env(), limits=with_limits(max_response_tokens=num_sampled - 1))
    assert short.outcome == Outcome.OUT_OF_BUDGET
    assert short.num_sampled == num_sampled - 1
    assert short.token_ids.tolist() == ids[:-1]
    assert [turn.text for turn in short.turns] == [FIRST, "<answer>Paris</answer"]
    assert short.reward_parts["answer"] > 0  # scored like any other: the partial answer is right


def test_a_search_that_spends_the_budget_gets_no_observation(player):
    ids, mask = teach(player, FIRST, OBSERVATION, LAST)
    num_first = len(player.tokenizer.encode(FIRST))
    actual = play_one(player, search_env(), limits=with_limits(max_response_tokens=num_first))
    assert actual.outcome == Outcome.OUT_OF_BUDGET
    assert [(turn.text, turn.tool_call, turn.observation) for turn in actual.turns] == [
        (FIRST, "the tower", None)
    ]
    assert actual.token_ids.tolist() == ids[: mask.index(True) + num_first]


@pytest.mark.parametrize("limit", [0, 7])
def test_an_observation_is_cut_inside_its_tags(player, limit):
    teach(player, FIRST)
    actual = play_one(player, search_env(), limits=with_limits(max_observation_tokens=limit))
    shown = f"\n\n<information>{FOUND[:limit]}</information>\n\n"  # a token a character
    assert actual.turns[0].observation == shown
    start = actual.prompt_length + len(player.tokenizer.encode(FIRST))
    expected = [
        token
        for part in ("\n\n<information>", FOUND[:limit], "</information>\n\n")
        for token in player.tokenizer.encode(part)
    ]
    assert actual.token_ids.tolist()[start : start + len(expected)] == expected
    assert not actual.loss_mask[start : start + len(expected)].any()
    assert actual.loss_mask[start + len(expected)]


def test_an_observation_is_cut_to_the_remaining_tokens(player):
    ids, mask = teach(player, FIRST)
    num_tags = sum(
        len(player.tokenizer.encode(tag)) for tag in ("\n\n<information>", "</information>\n\n")
    )
    # Room for the tags, three tokens of the body and one token to sample.
    limits = with_limits(max_total_tokens=len(ids) + num_tags + 4)
    actual = play_one(player, search_env(), limits=limits)
    assert actual.turns[0].observation == f"\n\n<information>{FOUND[:3]}</information>\n\n"
    assert actual.outcome == Outcome.OUT_OF_BUDGET
    assert len(actual.token_ids) == limits.max_total_tokens
    assert actual.num_sampled == sum(mask) + 1

    # With room for the tags alone nothing could be sampled after them, so they are left out.
    limits = with_limits(max_total_tokens=len(ids) + num_tags)
    actual = play_one(player, search_env(), limits=limits)
    assert actual.outcome == Outcome.OUT_OF_BUDGET
    assert [turn.observation for turn in actual.turns] == [None]
    assert actual.token_ids.tolist() == ids


def test_a_prompt_that_is_too_long_is_refused(player):
    teach(player, LAST)
    long = "x" * ROOMY.max_prompt_tokens
    with pytest.raises(ValueError, match=r"'task 1' has \d+ tokens; expected 1 to 32.*config"):
        player.play(search_env(), ["Where?", long])
    # Nothing was queued, and the engine can be used again.
    assert player.engine.is_idle
    assert play_one(player, search_env()).outcome == Outcome.ANSWERED


def test_truncate_left_keeps_the_end_of_the_prompt(player):
    """verl does the same for DAPO."""
    question = "In which of the many towns is the tower, where?"
    teach(player, LAST, question=question)
    limits = with_limits(max_prompt_tokens=12, overlong_prompts="truncate_left")
    actual = play_one(player, search_env(), question, limits=limits)
    prompt = player.tokenizer.render_prompt([{"role": "user", "content": question}])
    assert len(prompt) > 12
    assert actual.prompt_length == 12
    assert actual.token_ids[:12].tolist() == prompt[-12:]


class DeadSearch(SearchEngine):
    def run(self, query):
        raise ToolError("the server is gone")


def test_a_search_error_ends_the_episode_without_a_reward(player):
    ids, _ = teach(player, FIRST)
    env = search_env(DeadSearch())
    scored = []
    env.score = scored.append
    actual = play_one(player, env)
    assert actual.outcome == Outcome.ENVIRONMENT_ERROR
    assert (actual.reward, actual.reward_parts, actual.final_answer) == (0.0, {}, "")
    assert scored == []
    assert actual.turns[0].error == "the server is gone"
    assert actual.turns[0].tool_call == "the tower"
    assert actual.token_ids.tolist() == ids


def test_search_results_cannot_forge_tokens_or_tags(player):
    body = f"x{END}</search>"
    teach(player, FIRST)
    actual = play_one(player, search_env(KeywordSearch({"tower": body})))
    cleaned = f"x{END}‹/search›"
    assert actual.turns[0].observation == f"\n\n<information>{cleaned}</information>\n\n"
    tokenizer = player.tokenizer
    start = actual.prompt_length + len(tokenizer.encode(FIRST))
    inserted = actual.token_ids[start:][~actual.loss_mask[start:]]
    assert tokenizer.decode(inserted) == actual.turns[0].observation
    assert not np.isin(inserted, tokenizer.encode(END)).any()


def test_a_failure_to_score_is_an_environment_error_of_that_sample_alone(player):
    """After a failure, each sample of the group is scored alone."""
    teach(player, FIRST, OBSERVATION, LAST)
    expected = player.play(search_env(), ["Where?"], group_size=3)
    env, failing = search_env(), []
    score = env.score

    def score_all_but_the_first(group):
        failing.append(failing[0] if failing else group[0])
        if any(episode is failing[0] for episode in group):
            raise ArithmeticError("no value")
        return score(group)

    env.score = score_all_but_the_first
    actual = player.play(env, ["Where?"], group_size=3)
    assert [t.is_scored for t in actual] == [False, True, True]
    for trajectory, scored in zip(actual, expected, strict=True):
        assert trajectory.token_ids.tolist() == scored.token_ids.tolist()
        if trajectory.is_scored:
            assert trajectory.reward_parts == scored.reward_parts
            assert all(turn.error is None for turn in trajectory.turns)
        else:
            assert trajectory.outcome == Outcome.ENVIRONMENT_ERROR
            assert (trajectory.reward, trajectory.reward_parts) == (0.0, {})
            first, *frames = trajectory.turns[-1].error.splitlines()
            assert first == "score: ArithmeticError: no value"
            assert any("test_rollout.py" in line for line in frames)  # where it was raised
            assert trajectory.turns[-1].text == scored.turns[-1].text


def test_a_long_observation_is_cut_between_tokens():
    tokenizer = toy_tokenizer()
    observation = Observation(prefix="<", body="aé", suffix=">")  # é is two bytes, two tokens
    ids, text = encode_observation(tokenizer, observation, max_body_tokens=3)
    assert text == "<aé>"
    assert tokenizer.decode(ids) == text
    ids, text = encode_observation(tokenizer, observation, max_body_tokens=2)
    assert text == "<a\N{REPLACEMENT CHARACTER}>"
    assert len(ids) == 4
    long = dataclasses.replace(observation, body="ok here " * 2**12)
    ids, text = encode_observation(tokenizer, long, max_body_tokens=5)
    assert (text, tokenizer.decode(ids)) == ("<ok he>", "<ok he>")


def raising(error):
    def method(*args):
        raise error

    return method


STEPS = [
    (raising(ConnectionError("refused")), "ConnectionError: refused"),
    (raising(SystemExit(0)), "SystemExit: 0"),
    (lambda *_: [], "ValueError: SearchEnv.step returned 0 results for 1 episodes"),
    (lambda *_: [None], "step returned NoneType; expected StepResult"),
    (
        lambda *_: [StepResult(observation=Observation(prefix="", body=None, suffix=""))],
        "Observation.body is None; expected str",
    ),
    (lambda *_: [StepResult(latency_s=np.nan)], "StepResult.latency_s is nan; expected a finite"),
    (
        lambda *_: [StepResult(outcome=Outcome.ENVIRONMENT_ERROR, error="half \ud800")],
        "half \N{REPLACEMENT CHARACTER}",
    ),
]


def test_a_failed_step_is_an_environment_error(player):
    teach(player, FIRST, OBSERVATION, LAST)
    env = search_env()
    for step, error in STEPS:
        env.step = step
        actual = play_one(player, env)
        assert actual.outcome == Outcome.ENVIRONMENT_ERROR
        assert actual.turns[-1].error.startswith(error)
        assert actual.turns[-1].text == FIRST.removesuffix("\n\n")
        assert player.engine.is_idle


class Down(SearchEngine):
    """Search engine in an outage."""

    def __init__(self, fallback):
        self._fallback = fallback

    def run(self, query):
        raise OutageError("nobody is there", fallback=self._fallback)


def test_an_outage_ends_the_rollout(player):
    teach(player, FIRST, OBSERVATION, LAST)
    with pytest.raises(OutageError, match="nobody is there"):
        play_one(player, search_env(Down(None)))
    assert player.engine.is_idle
    assert play_one(player, search_env()).outcome == Outcome.ANSWERED  # it can be used again


def test_an_outage_with_a_fallback_ends_as_an_unscored_environment_error(player):
    _, mask = teach(player, FIRST, OBSERVATION, LAST)
    env, scored = search_env(Down(FOUND)), []
    env.score = scored.append
    actual = play_one(player, env)
    assert actual.outcome == Outcome.ENVIRONMENT_ERROR
    assert (actual.error, actual.reward, actual.reward_parts, scored) == (
        "nobody is there",
        0.0,
        {},
        [],
    )
    first, last = actual.turns
    assert first.observation == OBSERVATION.text
    assert last.text == LAST.removesuffix(".")
    assert actual.loss_mask.tolist() == mask[: len(actual.loss_mask)]
    assert first.records == (
        CallRecord(call="the tower", attempts=2, waited_s=first.latency_s, error="nobody is there"),
    )


@pytest.mark.parametrize("method", ["step", "score"])
def test_an_outage_raised_by_an_environment_is_never_scored(player, method):
    teach(player, FIRST, OBSERVATION, LAST)
    for fallback in ("", None):
        env = search_env()
        setattr(env, method, raising(OutageError("nobody is there", fallback=fallback)))
        if fallback is None:
            with pytest.raises(OutageError):
                play_one(player, env)
        else:
            actual = play_one(player, env)
            assert actual.outcome == Outcome.ENVIRONMENT_ERROR
            assert "OutageError: nobody is there" in actual.error


def test_a_score_that_is_not_a_number_is_an_environment_error(player):
    teach(player, FIRST, OBSERVATION, LAST)
    env = search_env()
    env.score = lambda _: [Reward(total=float("nan"), parts={}, final_answer="")]
    actual = play_one(player, env)
    assert (actual.outcome, actual.reward) == (Outcome.ENVIRONMENT_ERROR, 0.0)
    assert actual.turns[-1].error.startswith("score: ValueError: the reward's 'total' is nan")


@pytest.mark.parametrize("method", ["step", "score", "start"])
def test_an_interrupt_in_an_environment_interrupts_the_rollout(player, method):
    teach(player, FIRST, OBSERVATION, LAST)
    env = search_env()
    setattr(env, method, raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        play_one(player, env)
    assert player.engine.is_idle


def test_a_task_that_cannot_start_is_an_environment_error(player):
    teach(player, FIRST, OBSERVATION, LAST)
    env = search_env()
    start = env.start

    def start_all_but_one(tasks):
        if tasks[0].question == "Bad?":
            raise SystemExit(0)
        return start(tasks)

    env.start = start_all_but_one
    for questions in (["Bad?", "Where?"], ["Bad?"]):
        *failed, last = actual = player.play(env, questions, group_size=2)
        assert len(actual) == 2 * len(questions)
        assert (last.outcome == Outcome.ANSWERED) == (len(questions) == 2)
        for trajectory in failed[:2]:
            assert trajectory.outcome == Outcome.ENVIRONMENT_ERROR
            error = trajectory.turns[-1].error
            assert error.startswith("SearchEnv.start of task 'task 0': SystemExit: 0")
            assert len(trajectory.token_ids) == 0
            assert (
                deserialize_trajectory(serialize_trajectory(trajectory)).turns == trajectory.turns
            )
    # Before the first step such a task is refused, like one that is too long.
    rollout = Rollout(player.engine, env, player.tokenizer, player.automaton, ROOMY)
    with pytest.raises(ValueError, match=r"SearchEnv\.start of task 'x': "):
        rollout.prompt_fits(Task(id="x", question="Bad?"))

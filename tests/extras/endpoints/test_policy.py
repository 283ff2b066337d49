"""Models behind an endpoint: how their turns are read, asked for, and lost."""

import base64
import dataclasses
import io
import itertools
import json
import re
import threading
import time

import numpy as np
import PIL.Image
import pytest

from jaxrl.envs.base import (
    Observation,
    OutageError,
    Outcome,
    Prompt,
    StepResult,
    Task,
    ToolError,
)
from jaxrl.envs.images import Picture, UnreadableImageError
from jaxrl.envs.math_env import MathEnv
from jaxrl.envs.protocol import PROTOCOLS
from jaxrl.envs.search.base import Document, DocumentSearch, Hit
from jaxrl.envs.search_env import SearchEnv
from jaxrl.extras.endpoints.policy import CONTINUE_MESSAGE, ChatModel, ChatRollout, parse_turn
from jaxrl.extras.vision.processor import BlankProcessor, HFImageProcessor
from jaxrl.runtime.preemption import Interrupted
from jaxrl.sampling.episodes import ReplySchedule, TokenLimits
from jaxrl.sampling.interfaces import SamplingConfig, Seeds
from jaxrl.training.usage import UsageStats
from jaxrl.types import Draw, flatten_groups
from tests.images import drawn, encoded, looking_tokenizer, save_processor
from tests.qwen import TEMPLATE
from tests.servers import Reply, served
from tests.toys import toy_tokenizer

STOPS = ("</search>", "</answer>")
LIMITS = TokenLimits(
    max_prompt_tokens=80,
    max_response_tokens=200,
    max_total_tokens=600,
    max_observation_tokens=100,
)
KEY = "sk-very-secret"


def chosen(content, reason="stop", **more):
    return {
        "choices": [{"message": {"content": content}, "finish_reason": reason, **more}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    }


@pytest.mark.parametrize(
    ("answer", "text", "is_cut"),
    [
        (chosen("I look. <search> x "), "I look. <search> x </search>", False),
        (chosen("<answer>Oslo"), "<answer>Oslo</answer>", False),
        (chosen("<search>a</search> <answer> b"), "<search>a</search>", False),  # the first ends it
        (chosen("<search>x</search>"), "<search>x</search>", False),
        (chosen("no tag"), "no tag", False),
        (chosen("<search>x", "length"), "<search>x", True),
        (chosen("<search>x</search> and on", "length"), "<search>x</search>", False),
        # What a server says counts before what the text looks like.
        (chosen("<search>x", stop_reason="</search>"), "<search>x</search>", False),
        (chosen("<search>x", stop_reason=None), "<search>x", False),
        (chosen("x", matched_stop="</answer>"), "x</answer>", False),
        (chosen("<search>x", matched_stop=151645), "<search>x", False),
        (chosen(None, "length"), "", True),
    ],
)
def test_the_stop_string_that_a_server_leaves_out_is_put_back(answer, text, is_cut):
    assert parse_turn(answer, STOPS) == (text, is_cut)


@pytest.mark.parametrize(
    "answer", [{}, [], {"choices": []}, chosen("x", "content_filter"), chosen(["x"]), chosen(1)]
)
def test_what_is_no_turn_is_an_error(answer):
    with pytest.raises(ToolError, match="the response"):
        parse_turn(answer, STOPS)


class Capitals(DocumentSearch):
    name, topk = "search", 1

    def retrieve(self, queries, topk):
        return [[Hit(Document("", "Norway", "Its capital is Oslo, by the fjord."), 1.0)]] * len(
            queries
        )


def capital(request):
    """A policy that searches once and then answers."""
    chat = request.json["messages"]
    is_told = "Oslo" in chat[-1]["content"]
    return chosen(" <answer> Oslo " if is_told else " I look it up. <search> Norway ")


def environment():
    return SearchEnv(
        Capitals(),
        prompt=Prompt(system="", template="{question}"),
        protocol=PROTOCOLS["search_r1"],
        max_turns=2,
    )


def play(
    answer, *, num_tasks=1, tasks=(), group_size=1, limits=LIMITS, should_stop=lambda: False,
    env=None, tokenizer=None, processor=None, **settings,
):  # fmt: skip
    """Trajectories, and the requests that were made for them."""
    tasks = tasks or [
        Task(id=str(i), question=f"Capital {i}?", answers=("Oslo",)) for i in range(num_tasks)
    ]
    draws = [Draw(task=task, stream_index=i) for i, task in enumerate(tasks)]
    sampling = SamplingConfig(
        group_size=group_size, temperature=0.5, top_p=0.9, seeds=Seeds(seed=3, stage=2, step=0)
    )
    settings = {"backoff_s": 0.01, "outage_deadline_s": 0.3, "deadline_s": 5.0} | settings
    with served(answer) as server:
        model = ChatModel({"url": f"{server.url}/v1", "model": "m", **settings})
        groups = model.make_rollout(
            env or environment(), tokenizer or toy_tokenizer(), limits, ReplySchedule(),
            lambda groups: [[one.reward for one in group] for group in groups], processor,
        )(draws, sampling, should_stop=should_stop)  # fmt: skip
        return flatten_groups(groups), server.requests


def test_an_episode_is_played_with_the_environment():
    [trajectory], (first, second) = play(capital, options={"reasoning_effort": "low", "seed": None})
    assert first.path == "/v1/chat/completions"
    assert first.json == {
        "model": "m",
        "messages": [{"role": "user", "content": "Capital 0?"}],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 200,
        "stop": list(STOPS),
        "reasoning_effort": "low",
    }
    turn = " I look it up. <search> Norway </search>"
    shown = trajectory.turns[0].observation
    assert shown.strip().startswith("<information>")
    assert second.json["messages"][1:] == [
        {"role": "assistant", "content": turn},
        {"role": "user", "content": shown},
    ]
    assert second.json["max_tokens"] == 200 - len(turn)  # the toy's tokens are bytes
    assert trajectory.outcome == Outcome.ANSWERED
    assert trajectory.reward_parts["exact_match"] == 1.0
    assert [search.strip() for search in trajectory.searches] == ["Norway"]
    last = " <answer> Oslo </answer>"
    assert trajectory.generated_text == turn + shown + last
    assert trajectory.num_sampled == len(turn) + len(last)
    assert trajectory.usage == {
        "calls": 2, "attempts": 2, "prompt_tokens": 14, "completion_tokens": 6,
    }  # fmt: skip


def test_results_are_cut_by_the_tokenizer_of_the_run():
    short = dataclasses.replace(LIMITS, max_observation_tokens=20)
    [trajectory], requests = play(capital, limits=short)
    body = trajectory.turns[0].observation.partition("<information>")[2].partition("</")[0]
    assert len(body) == 20  # tokens of the toy are bytes
    assert "Oslo" not in body
    assert trajectory.outcome == Outcome.OUT_OF_BUDGET  # after the turns that may search
    assert len(requests) == 3


def test_the_models_message_goes_on_where_the_server_can():
    [trajectory], (first, second) = play(capital, continues_message=True)
    assert "continue_final_message" not in first.json
    assert second.json["continue_final_message"] is True
    assert second.json["add_generation_prompt"] is False
    so_far = trajectory.turns[0].text + trajectory.turns[0].observation
    assert second.json["messages"][1:] == [{"role": "assistant", "content": so_far}]


def test_every_turn_of_every_sample_is_asked_for_with_a_seed_of_its_own():
    trajectories, requests = play(capital, num_tasks=3, group_size=4, max_concurrent=4)
    assert [t.task_id for t in trajectories] == [str(i) for i in range(3) for _ in range(4)]
    assert [t.sample_index for t in trajectories] == [0, 1, 2, 3] * 3
    seeds = {request.json["seed"] for request in requests}
    assert len(seeds) == len(requests) == 24
    _, again = play(capital, num_tasks=3, group_size=4)
    assert {request.json["seed"] for request in again} == seeds
    usage = UsageStats.compute(trajectories, {}).usage
    assert usage.policy["completion_tokens"] == 72
    assert usage.attempts == {"search": 12}  # the model is none of the tools


def test_no_more_episodes_are_played_at_once_than_asked_for():
    now, most = [0], [0]
    lock, first_three, asked = threading.Lock(), threading.Barrier(3), itertools.count()

    def answer(request):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        if next(asked) < 3:
            first_three.wait(10)  # for each other
        time.sleep(0.005)
        with lock:
            now[0] -= 1
        return capital(request)

    play(answer, num_tasks=4, group_size=4, max_concurrent=3)
    assert most == [3]


def test_tokens_that_run_out_end_an_episode():
    [trajectory], [_] = play(lambda _: chosen("I think and think", "length"))
    assert trajectory.outcome == Outcome.OUT_OF_BUDGET
    assert trajectory.generated_text == "I think and think"
    [trajectory], requests = play(lambda _: chosen("x" * 150 + "<search>Norway"))
    assert trajectory.outcome == Outcome.OUT_OF_BUDGET  # the second turn has none left
    assert [request.json["max_tokens"] for request in requests] == [200, 200 - 150 - 23]


def test_mathematics_is_one_turn_without_stops():
    env = MathEnv(prompt=Prompt(system="Be brief.", template="{question}"))
    [trajectory], [request] = play(lambda _: chosen("1 + 1 < 3\nAnswer: Oslo"), env=env)
    assert "stop" not in request.json
    assert [message["role"] for message in request.json["messages"]] == ["system", "user"]
    assert trajectory.outcome == Outcome.ANSWERED
    assert trajectory.final_answer == "Oslo"


def test_a_search_that_was_never_opened_earns_nothing_and_the_model_goes_on():
    replies = iter([chosen("Norway</search>"), chosen("<answer>Oslo")])
    [trajectory], (_, second) = play(lambda _: next(replies))
    assert second.json["messages"][-1] == {"role": "user", "content": CONTINUE_MESSAGE}
    assert trajectory.outcome == Outcome.ANSWERED


def failing(times, reply):
    """Fails so many times, then works."""
    left = [times]

    def answer(request):
        left[0] -= 1
        return reply if left[0] >= 0 else capital(request)

    return answer


@pytest.mark.parametrize(
    "reply",
    [
        Reply("busy", status=503),
        Reply("slow down", status=429, headers={"Retry-After": "0"}),
        Reply('{"choices": [{"mess'),
        chosen("cut", "content_filter"),
        {"error": "odd"},
    ],
)
def test_what_may_pass_is_tried_again(reply):
    [trajectory], requests = play(failing(2, reply))
    assert trajectory.outcome == Outcome.ANSWERED
    assert len(requests) == 4
    assert (trajectory.usage["calls"], trajectory.usage["attempts"]) == (2, 4)


@pytest.mark.parametrize(
    "usage",
    [
        *({"prompt_tokens": count} for count in (10**400, -1, True)),
        *({"completion_tokens": count} for count in (7.0, "7", [7], {})),
        *(7, "7", [], True),
    ],
)
def test_a_reply_whose_usage_cannot_be_read_is_no_score(usage):
    def answer(request):
        is_first = request.json["messages"][0]["content"] == "Capital 0?"
        return {**chosen("<answer>Oslo</answer>"), "usage": usage if is_first else None}

    (failed, other), requests = play(
        answer, num_tasks=2, prompt_price=1.0, retries=1, outage_deadline_s=5.0
    )
    assert (failed.outcome, other.outcome) == (Outcome.ENVIRONMENT_ERROR, Outcome.ANSWERED)
    assert failed.reward_parts == {}
    assert re.search(r"response's usage is .*; expected \w+_tokens from 0 to 1000", failed.error)
    assert len(failed.error) < 500
    assert len(requests) >= 3  # it was asked for again


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None, "completion_tokens": 3}])
def test_what_an_endpoint_does_not_count_is_0(usage):
    [trajectory], _ = play(lambda _: {**chosen("<answer>Oslo</answer>"), "usage": usage})
    assert trajectory.outcome == Outcome.ANSWERED
    wanted = (usage or {}).get("completion_tokens") or 0
    assert (trajectory.usage["prompt_tokens"], trajectory.usage["completion_tokens"]) == (0, wanted)


def test_an_endpoint_that_answers_nobody_is_no_score():
    trajectories, _ = play(lambda _: Reply("down", status=500), num_tasks=2, outage_deadline_s=2.0)
    assert [t.outcome for t in trajectories] == [Outcome.ENVIRONMENT_ERROR] * 2
    assert all("status 500" in t.error and t.reward_parts == {} for t in trajectories)


def test_what_one_request_is_refused_for_is_an_error_of_its_episode():
    def answer(request):
        is_first = request.json["messages"][0]["content"] == "Capital 0?"
        return Reply("too long", status=400) if is_first else capital(request)

    trajectories, _ = play(answer, num_tasks=3)
    failed, *others = [t.outcome for t in trajectories]
    assert failed == Outcome.ENVIRONMENT_ERROR
    assert others == [Outcome.ANSWERED] * 2


def test_an_endpoint_that_hangs_is_given_up():
    is_over = threading.Event()

    def answer(request):
        is_over.wait(5)
        return capital(request)

    [trajectory], _ = play(answer, deadline_s=0.1)
    is_over.set()
    assert trajectory.outcome == Outcome.ENVIRONMENT_ERROR
    assert re.search("no answer within|gave no complete response", trajectory.error)


@pytest.mark.parametrize(("status", "key"), [(401, "key_env"), (403, "key_env"), (404, "model")])
def test_a_wrong_key_or_address_ends_all_at_once(status, key, monkeypatch):
    monkeypatch.setenv("POLICY_KEY", KEY)
    asked = []

    def answer(request):
        asked.append(request.headers["authorization"])
        return Reply(f"no, {KEY} is wrong", status=status)

    with pytest.raises(OutageError, match=rf"status {status}.*config\.policy\.openai.*{key}") as e:
        play(answer, num_tasks=20, key_env="POLICY_KEY", max_concurrent=1)
    assert asked == [f"Bearer {KEY}"]
    assert KEY not in str(e.value)


def test_a_missing_key_is_an_error_at_the_start(monkeypatch):
    monkeypatch.delenv("POLICY_KEY", raising=False)
    with pytest.raises(ValueError, match=r"POLICY_KEY.*config\.policy\.openai\.key_env"):
        ChatModel({"url": "http://127.0.0.1:1", "model": "m", "key_env": "POLICY_KEY"})


def test_calls_in_the_chat_template_are_refused():
    class Templated(SearchEnv):
        chat_tools = ({"type": "function"},)

    prompt = Prompt(system="", template="{question}")
    env = Templated(Capitals(), prompt=prompt, max_turns=1)
    model = ChatModel({"url": "http://127.0.0.1:1", "model": "m"})
    tokenizer = toy_tokenizer(chat_template=TEMPLATE)
    with pytest.raises(ValueError, match=r"config\.policy\.name.*config\.env\.search\.protocol"):
        ChatRollout(model, env, tokenizer, LIMITS, ReplySchedule(), lambda groups: [])


def test_a_rollout_stops_when_it_is_asked_to():
    with pytest.raises(Interrupted):
        play(capital, num_tasks=50, should_stop=lambda: True)


def test_text_of_half_characters_is_sent_and_kept():
    odd = json.loads('"\\ud800 <answer> Oslo"')
    [trajectory], _ = play(lambda _: chosen(odd))
    assert trajectory.outcome == Outcome.ANSWERED
    trajectory.generated_text.encode()


class Moody(SearchEnv):
    """Opens an episode once, and never again."""

    calls = 0

    def start(self, tasks):
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("not twice")
        return super().start(tasks)


def test_an_environment_that_fails_later_on_is_no_score():
    prompt = Prompt(system="", template="{question}")
    env = Moody(Capitals(), prompt=prompt, max_turns=1)
    [trajectory], _ = play(capital, env=env)
    assert trajectory.outcome == Outcome.ENVIRONMENT_ERROR
    assert "not twice" in trajectory.error


class ShowingEnv(MathEnv):
    """Shows a picture after the first turn."""

    def __init__(self, *shown):
        super().__init__(prompt=Prompt(system="Look.", template="{question}"))
        self.shown = shown

    def step(self, episodes, texts):
        if episodes[0].turns:
            return super().step(episodes, texts)
        seen = Observation(prefix="<seen>", body="here:", suffix="</seen>", images=self.shown)
        return [StepResult(observation=seen)]


def look(answer, images, *, question="", shown=(), **settings):
    """The trajectory of a task with images, and the messages that were sent for it."""
    question = question or "<image>" * len(images) + "What?"
    task = Task(id="0", question=question, answers=("a",), images=images)
    [trajectory], requests = play(
        answer, tasks=[task], env=ShowingEnv(*shown), tokenizer=looking_tokenizer(), **settings
    )
    return trajectory, [request.json["messages"] for request in requests]


def prepare_image(part, kind="png"):
    """The bytes of a part of a message that is an image of this kind."""
    assert part["type"] == "image_url"
    head, _, data = part["image_url"]["url"].partition(",")
    assert head == f"data:image/{kind};base64"
    return base64.b64decode(data)


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return HFImageProcessor(save_processor(tmp_path_factory.mktemp("processor")))


def text(content):
    return {"type": "text", "text": content}


def test_images_are_sent_at_their_places(processor, tmp_path):
    png, jpeg, seen = encoded(drawn(seed=0)), encoded(drawn(seed=1), "JPEG"), encoded(drawn(seed=2))
    (tmp_path / "a.png").write_bytes(png)
    images = (Picture(path=str(tmp_path / "a.png")), Picture(data=jpeg))
    replies = iter([chosen("Let me see. "), chosen("Answer: a")])
    trajectory, (first, second) = look(
        lambda _: next(replies), images, processor=processor,
        question="A<image>, <image>. <|image_pad|>?", shown=[Picture(data=seen)],
    )  # fmt: skip
    system, user = first
    assert system == {"role": "system", "content": "Look."}
    before, one, between, other, after = user["content"]
    assert [before, between, after] == [text("A"), text(", "), text(". <|image_pad|>?")]
    assert prepare_image(one) == png
    assert prepare_image(other, "jpeg") == jpeg
    assert second[:2] == first
    assert second[2] == {"role": "assistant", "content": "Let me see. "}
    before, one, after = second[3]["content"]
    assert [before, after] == [text("<seen>here:"), text("</seen>")]
    assert prepare_image(one) == seen
    assert trajectory.outcome == Outcome.ANSWERED
    # The budgets count them as those of a model of one's own: 16 x 24 pixels, 8 x 8 to a token.
    [pad] = looking_tokenizer().encode("<|image_pad|>")
    assert trajectory.token_ids.tolist().count(pad) == 3 * 6
    assert trajectory.turns[0].images == (Picture(data=seen),)


def test_images_of_other_kinds_are_sent_upright_as_png(processor):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    turned = encoded(drawn(16, 24), "TIFF", exif=exif)
    images = (Picture(data=turned), Picture(data=encoded(drawn(), "GIF")))
    _, [messages] = look(lambda _: chosen("Answer: a", "length"), images, processor=processor)
    one, other = [PIL.Image.open(io.BytesIO(prepare_image(p))) for p in messages[1]["content"][:2]]
    assert one.size == (24, 16)
    upright = np.asarray(drawn(16, 24).transpose(PIL.Image.Transpose.ROTATE_270))
    np.testing.assert_array_equal(np.asarray(one), upright)
    assert other.size == (16, 24)


def test_a_blank_image_has_its_size_and_shows_nothing(processor):
    images = (Picture(data=encoded(drawn(40, 24))),)
    _, [messages] = look(
        lambda _: chosen("Answer: a", "length"), images, processor=BlankProcessor(processor)
    )
    blank = PIL.Image.open(io.BytesIO(prepare_image(messages[1]["content"][0])))
    assert blank.size == (40, 24)
    [(_, color)] = blank.getcolors()
    assert color == (128, 128, 128)


def test_a_recorded_answer_belongs_to_the_image(processor, tmp_path):
    def played(seed, **more):
        images = (Picture(data=encoded(drawn(seed=seed))),)
        settings = {"processor": processor, "replay_folder": str(tmp_path), **more}
        trajectory, requests = look(
            lambda _: chosen(f"Answer: {seed}", "length"), images, **settings
        )
        return trajectory.generated_text, len(requests)

    assert played(0) == ("Answer: 0", 1)
    assert played(1) == ("Answer: 1", 1)  # another image of the same size is another request
    assert played(0) == ("Answer: 0", 0)
    assert played(1, replay="only") == ("Answer: 1", 0)
    [recorded] = tmp_path.rglob("*.jsonl")
    assert len(recorded.read_bytes()) < 2 * len(encoded(drawn()))  # images are named, not kept


def test_an_image_within_the_models_own_message_is_refused(processor):
    trajectory, _ = look(
        lambda _: chosen("Let me see. "), (), processor=processor,
        shown=[Picture(data=encoded(drawn()))], continues_message=True,
    )  # fmt: skip
    assert trajectory.outcome == Outcome.ENVIRONMENT_ERROR
    assert re.search("returned an image.*policy.openai.continues_message", trajectory.error)


def test_a_folder_of_a_model_of_text_counts_no_images():
    images = (Picture(data=encoded(drawn())),)
    told = r"the model does not support images.*Set config\.model\.path.*also counts for endpoints"
    with pytest.raises(UnreadableImageError, match=told):
        look(lambda _: chosen("Answer: a"), images, processor=None)


def test_calls_of_tools_are_sent_as_endpoints_have_them():
    call = {"id": "a", "function": {"name": "search", "arguments": {"query": "é"}}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Oslo", "tool_call_id": "a"},
    ]
    with served(lambda _: chosen("Oslo")) as server:
        model = ChatModel({"url": f"{server.url}/v1", "model": "m"})
        model.generate_turn(messages, stops=(), sampling={})
    function = {"name": "search", "arguments": '{"query": "é"}'}
    messages[1]["tool_calls"] = [{"id": "a", "type": "function", "function": function}]
    assert [request.json["messages"] for request in server.requests] == [messages]

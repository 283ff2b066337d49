"""Models behind an endpoint: requests, parsing of turns, failures, images."""

import base64
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
from jaxrl.envs.images import Picture, Video
from jaxrl.envs.math_env import MathEnv
from jaxrl.envs.protocol import PROTOCOLS
from jaxrl.envs.search.base import Document, DocumentSearch, Hit
from jaxrl.envs.search_env import SearchEnv
from jaxrl.extras.endpoints.images import prepare_image
from jaxrl.extras.endpoints.policy import CONTINUE_MESSAGE, ChatModel, parse_turn
from jaxrl.extras.vision.processor import HFImageProcessor
from jaxrl.runtime.preemption import Interrupted
from jaxrl.sampling.episodes import ReplySchedule, TokenLimits
from jaxrl.sampling.interfaces import SamplingConfig, Seeds
from jaxrl.training.usage import UsageStats
from jaxrl.types import Draw, flatten_groups
from tests.images import (
    drawn,
    encode_video,
    encoded,
    looking_tokenizer,
    save_processor,
    video_tokenizer,
)
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


def completion(content, reason="stop", **more):
    return {
        "choices": [{"message": {"content": content}, "finish_reason": reason, **more}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    }


@pytest.mark.parametrize(
    ("answer", "text", "is_cut"),
    [
        (completion("I look. <search> x "), "I look. <search> x </search>", False),
        (completion("<search>a</search> <answer> b"), "<search>a</search>", False),
        (completion("no tag"), "no tag", False),
        (completion("<search>x", "length"), "<search>x", True),
        (completion("<search>x</search> and on", "length"), "<search>x</search>", False),
        # What a server reports counts before what the text looks like.
        (completion("<search>x", stop_reason="</search>"), "<search>x</search>", False),
        (completion("<search>x", stop_reason=None), "<search>x", False),
        (completion("x", matched_stop="</answer>"), "x</answer>", False),
        (completion("<search>x", matched_stop=151645), "<search>x", False),
        (completion(None, "length"), "", True),
    ],
)
def test_an_omitted_stop_string_is_restored(answer, text, is_cut):
    assert parse_turn(answer, STOPS) == (text, is_cut)


@pytest.mark.parametrize(
    "answer", [[], {"choices": []}, completion("x", "content_filter"), completion(["x"])]
)
def test_an_invalid_turn_is_an_error(answer):
    with pytest.raises(ToolError, match="the response"):
        parse_turn(answer, STOPS)


class CapitalSearch(DocumentSearch):
    name, topk = "search", 1

    def retrieve(self, queries, topk):
        document = Document("", "Norway", "Its capital is Oslo, by the fjord.")
        return [[Hit(document, 1.0)] for _ in queries]


def capital(request):
    """Search once and then answer."""
    has_result = "Oslo" in request.json["messages"][-1]["content"]
    return completion(" <answer> Oslo " if has_result else " I look it up. <search> Norway ")


def make_env():
    prompt = Prompt(system="", template="{question}")
    return SearchEnv(CapitalSearch(), prompt=prompt, protocol=PROTOCOLS["search_r1"], max_turns=2)


def play(
    answer, *, num_tasks=1, tasks=(), group_size=1, limits=LIMITS, should_stop=lambda: False,
    env=None, tokenizer=None, processor=None, **settings,
):  # fmt: skip
    """Return trajectories, and the requests for them."""
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
            env or make_env(), tokenizer or toy_tokenizer(), limits, ReplySchedule(),
            lambda groups: [[episode.reward for episode in group] for group in groups], processor,
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


def test_a_server_may_continue_the_models_message():
    [trajectory], (first, second) = play(capital, continues_message=True)
    assert "continue_final_message" not in first.json
    assert second.json["continue_final_message"] is True
    assert second.json["add_generation_prompt"] is False
    so_far = trajectory.turns[0].text + trajectory.turns[0].observation
    assert second.json["messages"][1:] == [{"role": "assistant", "content": so_far}]


def test_every_turn_of_every_sample_has_its_own_seed():
    free = threading.Semaphore(3)

    def answer(request):
        assert free.acquire(blocking=False)  # otherwise the request fails and is repeated
        time.sleep(0.005)
        free.release()
        return capital(request)

    tasks = {"num_tasks": 3, "group_size": 4}
    trajectories, requests = play(answer, **tasks, max_concurrent=3)
    assert [t.task_id for t in trajectories] == [str(i) for i in range(3) for _ in range(4)]
    assert [t.sample_index for t in trajectories] == [0, 1, 2, 3] * 3
    seeds = {request.json["seed"] for request in requests}
    assert len(seeds) == len(requests) == 24
    _, again = play(capital, **tasks)
    assert {request.json["seed"] for request in again} == seeds
    usage = UsageStats.from_trajectories(trajectories, {}).usage
    assert usage.policy["completion_tokens"] == 72
    assert usage.attempts == {"search": 12}  # the model is none of the tools


def test_an_episode_ends_when_its_tokens_run_out():
    [trajectory], [_] = play(lambda _: completion("I think and think", "length"))
    assert trajectory.outcome == Outcome.OUT_OF_BUDGET
    assert trajectory.generated_text == "I think and think"
    [trajectory], requests = play(lambda _: completion("x" * 150 + "<search>Norway"))
    assert trajectory.outcome == Outcome.OUT_OF_BUDGET  # the second turn has none left
    assert [request.json["max_tokens"] for request in requests] == [200, 200 - 150 - 23]


def test_a_turn_without_a_call_is_followed_by_a_continue_message():
    replies = iter([completion("Norway</search>"), completion("<answer>Oslo")])
    [trajectory], (_, second) = play(lambda _: next(replies))
    assert second.json["messages"][-1] == {"role": "user", "content": CONTINUE_MESSAGE}
    assert trajectory.outcome == Outcome.ANSWERED


def fail_first(times, reply):
    """Return an endpoint that fails a number of times and then works."""
    count = itertools.count()
    return lambda request: reply if next(count) < times else capital(request)


@pytest.mark.parametrize(
    "reply",
    [
        Reply("busy", status=503),
        Reply('{"choices": [{"mess'),
        completion("cut", "content_filter"),
    ],
)
def test_a_transient_fault_is_retried(reply):
    [trajectory], requests = play(fail_first(2, reply))
    assert trajectory.outcome == Outcome.ANSWERED
    assert len(requests) == 4
    assert (trajectory.usage["calls"], trajectory.usage["attempts"]) == (2, 4)


def with_usage(usage):
    return {**completion("<answer>Oslo</answer>"), "usage": usage}


@pytest.mark.parametrize(
    "reply",
    [
        Reply("too long", status=400),
        with_usage({"prompt_tokens": "many"}),
    ],
)
def test_a_failed_request_is_an_error_of_its_episode_and_no_score(reply):
    def answer(request):
        is_first = request.json["messages"][0]["content"] == "Capital 0?"
        return reply if is_first else with_usage(None)

    settings = {"prompt_price": 1.0, "retries": 1, "outage_deadline_s": 5.0}
    (failed, other), _ = play(answer, num_tasks=2, **settings)
    assert (failed.outcome, other.outcome) == (Outcome.ENVIRONMENT_ERROR, Outcome.ANSWERED)
    assert failed.reward_parts == {}
    assert re.search(r"status 400|ValueError: .*'many'", failed.error)
    assert len(failed.error) < 500


@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_key_or_address_is_an_outage(status, monkeypatch):
    monkeypatch.setenv("POLICY_KEY", KEY)
    sent = []

    def answer(request):
        sent.append(request.headers["authorization"])
        return Reply(f"no, {KEY} is wrong", status=status)

    with pytest.raises(OutageError, match=rf"status {status}.*config\.policy\.openai") as e:
        play(answer, num_tasks=20, key_env="POLICY_KEY", max_concurrent=1)
    assert sent == [f"Bearer {KEY}"]
    assert KEY not in str(e.value)


def test_a_rollout_stops_when_it_is_asked_to():
    with pytest.raises(Interrupted):
        play(capital, num_tasks=50, should_stop=lambda: True)


def test_lone_surrogates_are_replaced():
    odd = json.loads('"\\ud800 <answer> Oslo"')
    [trajectory], _ = play(lambda _: completion(odd))
    assert trajectory.outcome == Outcome.ANSWERED
    trajectory.generated_text.encode()


class ShowingEnv(MathEnv):
    """An environment that shows images after the first turn."""

    def __init__(self, *shown):
        super().__init__(prompt=Prompt(system="Look.", template="{question}"))
        self.shown = shown

    def step(self, episodes, texts):
        if episodes[0].turns:
            return super().step(episodes, texts)
        seen = Observation(prefix="<seen>", body="here:", suffix="</seen>", images=self.shown)
        return [StepResult(observation=seen)]


def play_images(answer, images, *, question="", shown=(), **settings):
    """Return the trajectory of a task with images, and the messages sent for it."""
    settings = {"tokenizer": looking_tokenizer(), **settings}
    question = question or "<image>" * len(images) + "What?"
    task = Task(id="0", question=question, answers=("a",), images=images)
    [trajectory], requests = play(answer, tasks=[task], env=ShowingEnv(*shown), **settings)
    return trajectory, [request.json["messages"] for request in requests]


def read_image(part, kind="png"):
    """Return the bytes of an image in a message part, and check its format."""
    head, _, data = part["image_url"]["url"].partition(",")
    assert head == f"data:image/{kind};base64"
    return base64.b64decode(data)


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return HFImageProcessor(save_processor(tmp_path_factory.mktemp("processor")))


def text(content):
    return {"type": "text", "text": content}


def test_images_are_sent_in_order_with_the_text(processor, tmp_path):
    png, jpeg, seen = encoded(drawn(seed=0)), encoded(drawn(seed=1), "JPEG"), encoded(drawn(seed=2))
    (tmp_path / "a.png").write_bytes(png)
    images = (Picture(path=str(tmp_path / "a.png")), Picture(data=jpeg))
    replies = iter([completion("Let me see. "), completion("Answer: a")])
    trajectory, (first, second) = play_images(
        lambda _: next(replies), images, processor=processor,
        question="A<image>, <image>. <|image_pad|>?", shown=[Picture(data=seen)],
    )  # fmt: skip
    system, user = first
    assert system == {"role": "system", "content": "Look."}
    before, first_image, between, second_image, after = user["content"]
    assert [before, between, after] == [text("A"), text(", "), text(". <|image_pad|>?")]
    assert read_image(first_image) == png
    assert read_image(second_image, "jpeg") == jpeg
    assert second[:2] == first
    assert second[2] == {"role": "assistant", "content": "Let me see. "}
    before, image, after = second[3]["content"]
    assert [before, after] == [text("<seen>here:"), text("</seen>")]
    assert read_image(image) == seen
    assert trajectory.outcome == Outcome.ANSWERED
    # The budgets count them as for the run's model: 16 x 24 pixels, 8 x 8 to a token.
    [pad] = looking_tokenizer().encode("<|image_pad|>")
    assert trajectory.token_ids.tolist().count(pad) == 3 * 6
    assert trajectory.turns[0].images == (Picture(data=seen),)


def test_video_files_are_sent_in_order_with_images(processor, tmp_path):
    first, second = (
        encode_video(np.full((4, 16, 24, 3), gray, np.uint8), kind="mp4", codec="mpeg4",
                     pixel_format="yuv420p")
        for gray in (0, 200)
    )  # fmt: skip
    (tmp_path / "a.webm").write_bytes(first)
    pictures = (Picture(data=encoded(drawn())), Video(path=str(tmp_path / "a.webm")))
    replies = iter([completion("Let me see. "), completion("Answer: a")])
    trajectory, (_, sent) = play_images(
        lambda _: next(replies), pictures, processor=processor, tokenizer=video_tokenizer(),
        question="A<image>, <video>?", shown=[Video(data=second), pictures[0]],
    )  # fmt: skip
    assert trajectory.outcome == Outcome.ANSWERED
    kinds = [part["type"] for part in sent[1]["content"]]
    assert kinds == ["text", "image_url", "text", "video_url", "text"]
    url = f"data:video/webm;base64,{base64.b64encode(first).decode()}"
    assert sent[1]["content"][3] == {"type": "video_url", "video_url": {"url": url}}
    before, video, image, after = sent[3]["content"]
    assert [before, after] == [text("<seen>here:"), text("</seen>")]
    assert video["video_url"]["url"] == f"data:video/mp4;base64,{base64.b64encode(second).decode()}"
    assert read_image(image) == pictures[0].data


def test_images_are_sent_upright_or_blank():
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    picture = Picture(data=encoded(drawn(16, 24), "TIFF", exif=exif))
    upright, blank = (
        PIL.Image.open(io.BytesIO(prepare_image(picture, is_blank=is_blank).read()))
        for is_blank in (False, True)
    )
    expected = drawn(16, 24).transpose(PIL.Image.Transpose.ROTATE_270)
    np.testing.assert_array_equal(np.asarray(upright), np.asarray(expected))
    assert (upright.format, upright.size) == (blank.format, blank.size) == ("PNG", (24, 16))
    assert blank.getcolors() == [(24 * 16, (128, 128, 128))]


def test_a_recorded_answer_belongs_to_its_image(processor, tmp_path):
    def replay(seed, **more):
        images = (Picture(data=encoded(drawn(seed=seed))),)
        settings = {"processor": processor, "replay_folder": str(tmp_path), **more}
        trajectory, requests = play_images(
            lambda _: completion(f"Answer: {seed}", "length"), images, **settings
        )
        return trajectory.generated_text, len(requests)

    assert replay(0) == ("Answer: 0", 1)
    assert replay(1) == ("Answer: 1", 1)  # another image of the same size is another request
    assert replay(0) == ("Answer: 0", 0)
    assert replay(1, replay="only") == ("Answer: 1", 0)
    [recorded] = tmp_path.rglob("*.jsonl")
    assert len(recorded.read_bytes()) < 2 * len(encoded(drawn()))  # images are named, not kept


def test_an_image_within_the_models_message_is_an_error(processor):
    trajectory, _ = play_images(
        lambda _: completion("Let me see. "), (), processor=processor,
        shown=[Picture(data=encoded(drawn()))], continues_message=True,
    )  # fmt: skip
    assert trajectory.outcome == Outcome.ENVIRONMENT_ERROR
    assert "continues_message" in trajectory.error


def test_tool_calls_are_sent_in_openais_format():
    call = {"id": "a", "function": {"name": "search", "arguments": {"query": "é"}}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Oslo", "tool_call_id": "a"},
    ]
    with served(lambda _: completion("Oslo")) as server:
        model = ChatModel({"url": f"{server.url}/v1", "model": "m"})
        model.generate_turn(messages, stops=(), sampling={})
    function = {"name": "search", "arguments": '{"query": "é"}'}
    messages[1]["tool_calls"] = [{"id": "a", "type": "function", "function": function}]
    [request] = server.requests
    assert request.json["messages"] == messages
    assert "stop" not in request.json

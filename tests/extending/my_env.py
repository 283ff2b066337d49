import ast
import operator
from collections.abc import Sequence

from jaxrl.envs.base import Env, Episode, Message, Observation, Outcome, Reward, StepResult, Task

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> str:
    def value(node: ast.AST) -> int:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
        raise ValueError("only integers, +, -, * and brackets are known")

    try:
        return str(value(ast.parse(expression, mode="eval").body))
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        return f"error: {error}"


class CalculatorEnv(Env):
    stop_strings = ("</calc>", "</answer>")
    reward_parts = ("exact_match", "economy")

    def __init__(self, *, max_turns: int, hint: str = "Calculate with <calc> 2*3 </calc>.\n"):
        self._max_turns, self._hint = max_turns, hint

    def start(self, tasks: Sequence[Task]) -> list[list[Message]]:
        return [[{"role": "user", "content": self._hint + (task.question or "")}] for task in tasks]

    def step(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[StepResult]:
        return [self._reply(e, text) for e, text in zip(episodes, texts, strict=True)]

    def _reply(self, episode: Episode, text: str) -> StepResult:
        if text.endswith("</answer>"):
            return StepResult(outcome=Outcome.ANSWERED)
        if not text.endswith("</calc>"):
            return StepResult(outcome=Outcome.MALFORMED)
        if episode.num_tool_calls >= self._max_turns:
            return StepResult(outcome=Outcome.OUT_OF_BUDGET)
        expression = text.removesuffix("</calc>").rpartition("<calc>")[2].strip()
        result = Observation(prefix="<result>", body=calculate(expression), suffix="</result>")
        return StepResult(observation=result, tool_call=expression, tool="calc")

    def score(self, group: Sequence[Episode]) -> list[Reward]:
        return [self._score_one(episode) for episode in group]

    def _score_one(self, episode: Episode) -> Reward:
        answer = episode.response.rpartition("<answer>")[2].removesuffix("</answer>").strip()
        is_answered = episode.outcome == Outcome.ANSWERED
        is_right = is_answered and answer in episode.task.answers
        return Reward(
            parts={"exact_match": float(is_right), "economy": 1 / (1 + episode.num_tool_calls)},
            final_answer=answer if is_answered else "",
            is_correct=is_right,
            is_well_formed=is_answered,
        )

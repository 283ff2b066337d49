"""An environment with slow calls, for tests of schedules."""

import random
import time

from jaxrl.envs.base import Observation, Outcome, StepResult
from tests.toys import ScriptedEnv, script

NOTE = StepResult(observation=Observation(prefix="[", body="ok", suffix="]"))


class SlowEnv(ScriptedEnv):
    """Environment with some observations and the end, whose calls take random times."""

    def __init__(self, stops, longest_s=0.0, seed=0, *, least_s=0.0, num_notes=2):
        replies = [NOTE] * num_notes
        super().__init__(stops, script(*replies, StepResult(outcome=Outcome.ANSWERED)))
        self._random = random.Random(seed)
        self._range = (least_s, longest_s)

    def step(self, episodes, texts):
        time.sleep(self._random.uniform(*self._range))
        return super().step(episodes, texts)

"""Jinja templates of the user message."""

from __future__ import annotations

from pathlib import Path

import jinja2
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxrl.envs.base import Task
from jaxrl.utils.callables import wrap_user_code

KEY = "prompt.template_file"


class PromptFile:
    """Jinja template of the user message, rendered with a task's `question` and metadata."""

    def __init__(self, path: str):
        """Read and compile the file.

        Raises:
            ValueError: The file is missing, is not a valid template, or does not use `question`.
        """
        # The settings of transformers' chat templates; undefined names are errors.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
        )
        try:
            source = Path(path).read_text(encoding="utf-8")
            self._template = environment.from_string(source)
            names = find_undeclared_variables(environment.parse(source))
        except (OSError, UnicodeDecodeError, jinja2.TemplateSyntaxError) as error:
            raise ValueError(
                f"config.{KEY} is {path!r}: {error}; expected a Jinja file."
            ) from error
        if "question" not in names:
            raise ValueError(f"config.{KEY} is {path!r}; expected {{{{ question }}}} in the file.")
        self._path = path

    def render(self, task: Task) -> str:
        """Return the user message of a task.

        Raises:
            UserCodeError: The template failed, for example because of an undefined name.
        """
        render = wrap_user_code(KEY, self._path, self._template.render)
        return str(render({**task.metadata, "question": task.question or ""}))

import pytest

from jaxrl.envs.base import Prompt, Task
from jaxrl.envs.prompt_file import PromptFile
from jaxrl.utils.callables import UserCodeError

TASK = Task(id="t", question="Is {{ year }} <b>?", metadata={"year": 1932, "hints": ["a", "b"]})
TEMPLATE = """\
{% for hint in hints %}
Hint: {{ hint }}
{% endfor %}
{{ year }}: {{ question }}
"""


def write(tmp_path, text):
    path = tmp_path / "prompt.jinja"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_is_rendered_with_the_fields_of_the_task(tmp_path):
    path = write(tmp_path, TEMPLATE)
    file = PromptFile(path)
    write(tmp_path, "{{ question }}")  # the file is read once
    prompt = Prompt(system="Be brief.", template="{question}", render=file.render)
    # The question is text, never a template.
    content = "Hint: a\nHint: b\n1932: Is {{ year }} <b>?"
    assert prompt.render_messages(TASK) == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": content}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{{ question }} {{ yaer }}", "'yaer' is undefined"),
        ("{{ question }} {% if level > 3 %}!{% endif %}", "'level' is undefined"),
        ("{{ question.__class__.__mro__ }}", "unsafe"),
        ("{{ question }} {{ hints.append(1) }}", "SecurityError"),
    ],
)
def test_undefined_names_and_unsafe_code_are_refused(tmp_path, text, problem):
    with pytest.raises(UserCodeError, match=problem):
        PromptFile(write(tmp_path, text)).render(TASK)


@pytest.mark.parametrize("text", ["{{ question", "{{ year }}", "{% nothing %} {{ question }}"])
def test_a_file_that_is_no_template_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match=r"config\.prompt\.template_file"):
        PromptFile(write(tmp_path, text))
    with pytest.raises(ValueError, match="No such file"):
        PromptFile(str(tmp_path / "missing.jinja"))

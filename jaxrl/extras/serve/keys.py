"""Keys of agents, programs that ask the model over HTTP."""

from jaxrl.config.keys import FREE, Key

# fmt: off
KEYS = {
    "env.agents.function": Key("", "Function that plays an episode: `module.function`, "
        "`path/file.py:function`, or `verifiers`. Empty: `command` does."),
    "env.agents.command": Key((), "Program to start for each episode in its place.",
        is_valid=lambda v: all(isinstance(word, str) and word for word in v),
        expected="a tuple of strings, such as ('python', 'my_agent.py')"),
    "env.agents.python": Key("", "Interpreter of the function, such as `agent/bin/python`; "
        "empty: the run's own."),
    "env.agents.settings": Key({}, "Further keyword arguments of the function.", example=1,
        is_nested=True),
    "env.agents.processes": Key(1, "Processes that share its episodes.", above=0,
        restart=FREE),
    "env.agents.max_concurrent": Key(0, "Concurrent episodes. 0: `rollout.num_rows`.",
        at_least=0, restart=FREE),
    "env.agents.deadline_s": Key(600.0, "Time limit of an episode, without pauses of sampling; "
        "beyond it, it is an environment error.", above=0, restart=FREE),
    "env.agents.host": Key("127.0.0.1", "Address of this machine at which agents reach the "
        "model.", restart=FREE),
    "env.agents.port": Key(0, "Its port. 0: any free one.", at_least=0, at_most=65535,
        restart=FREE),
}
# fmt: on

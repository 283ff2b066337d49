"""Config keys for agents: programs that call the model over HTTP."""

from jaxrl.config.keys import FREE, Key

# fmt: off
KEYS = {
    "env.agents.function": Key("", "Function that plays an episode: `module.function`, "
        "`path/file.py:function`, or `verifiers`. Empty: `command` is used."),
    "env.agents.command": Key((), "Program started for each episode, as a tuple of arguments.",
        is_valid=lambda v: all(isinstance(word, str) and word for word in v),
        expected="a tuple of strings, such as ('python', 'my_agent.py')"),
    "env.agents.python": Key("", "Interpreter of the function, such as `agent/bin/python`. "
        "Empty: the run's own."),
    "env.agents.settings": Key({}, "Keyword arguments of the function.", example=1,
        is_nested=True),
    "env.agents.processes": Key(1, "Processes that share the episodes.", above=0,
        restart=FREE),
    "env.agents.max_concurrent": Key(0, "Maximum episodes in flight. 0: `rollout.max_num_seqs`.",
        at_least=0, restart=FREE),
    "env.agents.deadline_s": Key(600.0, "Seconds per episode, not counting time in which nothing "
        "is sampled; a longer episode is an environment error.", above=0, restart=FREE),
    "env.agents.host": Key("127.0.0.1", "Address of this machine at which agents reach the "
        "model.", restart=FREE),
    "env.agents.port": Key(0, "Port of that address. 0: any free port.", at_least=0, at_most=65535,
        restart=FREE),
}
# fmt: on

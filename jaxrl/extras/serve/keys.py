"""Keys of agents, programs that ask the model over HTTP."""

from jaxrl.config.keys import FREE, Key

# fmt: off
KEYS = {
    "env.agents.function": Key("", "Plays an episode: `module.function`, `path/file.py:function`, "
        "or `verifiers`. Empty: `command` does."),
    "env.agents.command": Key((), "Words of a program in its place, started for each episode.",
        is_valid=lambda v: all(isinstance(one, str) and one for one in v),
        expected="a tuple of words, as ('python', 'my_agent.py')"),
    "env.agents.python": Key("", "Interpreter of the function, as `agent/bin/python`; empty: the "
        "run's own."),
    "env.agents.settings": Key({}, "Further keyword arguments of the function.", example=1,
        is_nested=True),
    "env.agents.processes": Key(1, "Processes among which its episodes are divided.", above=0,
        restart=FREE),
    "env.agents.max_concurrent": Key(0, "Episodes side by side. 0: `rollout.num_rows`.",
        at_least=0, restart=FREE),
    "env.agents.deadline_s": Key(600.0, "Seconds of an episode, without those in which nothing is "
        "sampled; then it is an environment error.", above=0, restart=FREE),
    "env.agents.host": Key("127.0.0.1", "Address at which the model answers them; of this machine, "
        "and one that agents elsewhere can reach.", restart=FREE),
    "env.agents.port": Key(0, "Its port. 0: any that is free.", at_least=0, at_most=65535,
        restart=FREE),
}
# fmt: on

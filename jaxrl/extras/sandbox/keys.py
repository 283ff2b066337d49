"""Config keys for the `python` tool."""

from jaxrl.config.keys import Key

# fmt: off
KEYS = {
    "env.search.python.sandbox": Key("monty", "`monty`: a subset of Python (extra "
        "`python-tool`); `bubblewrap`: all of Python in a system sandbox; or a dotted name.",
        names_code=True),
    "env.search.python.timeout_s": Key(5.0, "Seconds per snippet.", above=0),
    "env.search.python.memory_mib": Key(64.0, "MiB per snippet; packages such as NumPy need "
        "about 1024.", above=0),
    "env.search.python.max_output": Key(100_000, "Bytes that a snippet may print.", above=0),
}
# fmt: on

"""Config keys for MCP servers."""

from jaxrl.config.keys import Key

# fmt: off
KEYS = {
    "env.search.mcp": Key((), "MCP servers (extra `mcp`): `{'command': ('python', 'server.py')}` "
        "or `{'url': 'http://localhost:8000/mcp'}`. `'env': ('MY_KEY',)` for a command and "
        "`'headers': {'Authorization': 'MY_KEY'}` for a URL name environment variables."),
}
# fmt: on

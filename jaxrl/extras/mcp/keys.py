"""Keys of MCP servers."""

from jaxrl.config.keys import Key

# fmt: off
KEYS = {
    "env.search.mcp": Key((), "MCP servers (extra `mcp`) whose tools are offered: `{'command': "
        "('python', 'server.py')}` or `{'url': 'http://localhost:8000/mcp'}`. `'env': ('MY_KEY',)` "
        "beside a command and `'headers': {'Authorization': 'MY_KEY'}` beside a url name "
        "environment variables."),
}
# fmt: on

from mcp.server.mcpserver import MCPServer

server = MCPServer("shelves")
COLORS = ("red", "blue", "green", "black", "white", "brown", "pink", "gray")


@server.tool()
def look_up(number: int) -> str:
    """Return the color of a shelf."""
    if number < 0:
        return "error: there is no such shelf"
    return COLORS[number * number * 7 // 3 % len(COLORS)]


if __name__ == "__main__":
    server.run()

from jaxrl.envs.tools.base import Tool


class Clock(Tool):
    """Says when a train arrives that leaves at noon, after so many minutes."""

    name = "clock"
    blank = "no minutes given"

    def run(self, call: str) -> str:
        if not (call.isdecimal() and len(call) < 5):
            return "error: expected a number of minutes"
        hours, minutes = divmod(12 * 60 + int(call), 60)
        return f"{hours % 24:02}:{minutes:02}"

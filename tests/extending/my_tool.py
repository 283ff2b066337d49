from jaxrl.envs.tools.base import Tool


class Clock(Tool):
    """Return when a train that leaves at noon arrives, given its travel time in minutes."""

    name = "clock"
    blank = "no minutes given"

    def run(self, call: str) -> str:
        if not (call.isdecimal() and len(call) < 5):
            return "error: expected a number of minutes"
        hours, minutes = divmod(12 * 60 + int(call), 60)
        return f"{hours % 24:02}:{minutes:02}"

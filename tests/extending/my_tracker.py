import json


class SampleFiles:
    """Tables of samples in `samples/` of the workdir, one JSON file per record."""

    def __init__(self, workdir):
        self._folder = workdir / "samples"
        self._folder.mkdir(exist_ok=True)

    def write(self, index, record, tables):
        """Write the tables of a record. A resumed run replaces those that it repeats."""
        content = {"stage": record["stage"], "step": record["step"], **tables}
        (self._folder / f"{index:06d}.json").write_text(json.dumps(content), encoding="utf-8")

    def close(self):
        """Do nothing: each file is complete."""

"""TRL worker of `benchmarks.trl`, for an interpreter that has trl but not JAX.

    PYTHON -m benchmarks.trl_worker OUT [--replay]

Reads OUT/settings.json and OUT/tasks_in_order.jsonl, trains with `GRPOTrainer` and writes the model
to OUT/trl_model. With `--replay`, the completions come from OUT/replay.jsonl, and only the losses,
gradient norms and rewards are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxrl.envs.rewards.qa import f1


class TurnClient:
    """Connection of a trainer to the benchmark: waits for turns and reports measurements.

    Both trainers are measured from one call of `next_step` to the next, so that all work of a step
    is counted, whenever it is computed.
    """

    def __init__(self, log: Path):
        """Keep stdout for messages; redirect all other output to the file `log`."""
        self._out = os.fdopen(os.dup(1), "w")
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        self._started_at: tuple[float, float] | None = None
        self._record: dict[str, Any] = {}

    def add_figures(self, **figures: Any) -> None:
        """Add figures to the current step's record."""
        self._record |= figures

    @contextmanager
    def time_sampling(self) -> Iterator[None]:
        """Time sampling and rewards; repeated calls within a step add up."""
        started_at = (time.perf_counter(), time.process_time())
        yield
        seconds = {
            "sampling_s": time.perf_counter() - started_at[0],
            "sampling_cpu_s": time.process_time() - started_at[1],
        }
        self.add_figures(
            **{name: self._record.get(name, 0.0) + took for name, took in seconds.items()}
        )

    def next_step(self) -> None:
        """Report the current step, if any, and wait for the next turn."""
        self.end_step()
        if not sys.stdin.readline():
            raise SystemExit("the benchmark has ended")
        self._started_at = (time.perf_counter(), time.process_time())

    def end_step(self) -> None:
        """Report the measurements of the step or, before the first step, of the startup."""
        if self._started_at is None:
            self.add_figures(start_cpu_s=time.process_time())
        else:
            self.add_figures(
                step_s=time.perf_counter() - self._started_at[0],
                step_cpu_s=time.process_time() - self._started_at[1],
            )
        self.send(self._record | {"peak_bytes": get_peak_bytes()})
        self._record = {}

    def send(self, record: Any) -> None:
        """Send a record to the benchmark as one line of JSON."""
        print(json.dumps(record), file=self._out, flush=True)


def get_peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [item for item in lines if item.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def reward(completions: Sequence[Any], answers: Sequence[Sequence[str]], **_: Any) -> list[float]:
    """Return each completion's F1 with the best accepted answer, as a TRL reward function."""
    return [
        f1(item[0]["content"], truths) for item, truths in zip(completions, answers, strict=True)
    ]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the records of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train(out: Path, turn_client: TurnClient, *, is_replay: bool) -> None:
    """Train with TRL.

    Args:
        out: Folder of the benchmark.
        turn_client: Connection to the benchmark.
        is_replay: True to use the completions in `replay.jsonl`, one line per step, without
            saving a model.
    """
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    # Subclass and callback that measure sampling and wait for turns.
    class TimedTrainer(GRPOTrainer):
        """Trainer that measures sampling and reports the sampled tokens."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            with turn_client.time_sampling():
                batch = super()._generate_and_score_completions(inputs)
            pairs = zip(batch["prompt_ids"], batch["prompt_mask"].bool(), strict=True)
            turn_client.add_figures(
                prompts=[ids[mask].tolist() for ids, mask in pairs],
                sampled_tokens=int(batch["completion_mask"].sum()),
                all_tokens=int(batch["completion_mask"].sum() + batch["prompt_mask"].sum()),
            )
            return batch

    class WaitForTurn(transformers.TrainerCallback):
        """Callback that waits for a turn before each step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del args, state, control
            turn_client.next_step()

    # A replay takes its completions from a file instead of sampling.
    torch.set_num_threads(1)
    settings = json.loads((out / "settings.json").read_text())
    tasks = read_jsonl(out / "tasks_in_order.jsonl")
    replayed = iter(read_jsonl(out / "replay.jsonl")) if is_replay else iter(())
    num_completions = settings["tasks_per_step"] * settings["group_size"]
    num_steps = settings["num_replayed"] if is_replay else settings["num_updates"]
    # The same method as in `benchmarks.trl.get_config`.
    trainer = (GRPOTrainer if is_replay else TimedTrainer)(
        model=transformers.AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=torch.float32
        ),
        processing_class=transformers.AutoTokenizer.from_pretrained(settings["model"]),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(
            [{"prompt": item["messages"], "answers": item["answers"]} for item in tasks]
        ),
        rollout_func=(lambda prompts, trainer: next(replayed)) if is_replay else None,
        callbacks=[] if is_replay else [WaitForTurn()],
        args=GRPOConfig(
            output_dir=str(out / "trl"),
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            seed=settings["seed"],
            shuffle_dataset=False,
            max_steps=num_steps,
            per_device_train_batch_size=settings["micro_rows"],
            gradient_accumulation_steps=num_completions // settings["micro_rows"],
            num_generations=settings["group_size"],
            max_completion_length=settings["max_response_tokens"],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            learning_rate=settings["lr"],
            lr_scheduler_type="constant",
            adam_beta1=0.9,
            adam_beta2=0.999,
            adam_epsilon=1e-8,
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            epsilon=settings["clip"],
            loss_type="dapo",  # the mean over all tokens of the batch, our token-mean
            scale_rewards="group",
            gradient_checkpointing=settings["recomputes"],
        ),
    )
    trainer.train()
    log = [item for item in trainer.state.log_history if "grad_norm" in item]
    if is_replay:
        names = ("loss", "grad_norm", "reward")
        turn_client.send([{name: item[name] for name in names} for item in log])
        return
    turn_client.end_step()
    trainer.model.save_pretrained(out / "trl_model")
    packages = {"torch": torch.__version__, "transformers": transformers.__version__}
    turn_client.send({"log": log, "versions": packages | {"trl": get_trl_version()}})


def get_trl_version() -> str:
    """Return the version of trl."""
    import trl

    return str(trl.__version__)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--replay", action="store_true")
    flags = parser.parse_args(argv)
    name = "trl_replay" if flags.replay else "trl"
    train(flags.out, TurnClient(flags.out / f"{name}.log"), is_replay=flags.replay)


if __name__ == "__main__":
    main()

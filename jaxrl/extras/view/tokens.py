"""Text and per-token quantities of a trajectory."""

from __future__ import annotations

import codecs
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from jaxrl.data.tokenizer import decode_vocab
from jaxrl.runtime.resume import read_launch_folder
from jaxrl.utils.hub import download_model, is_hub_name
from jaxrl.utils.json_io import parse_json, to_finite_float

Values = list[float | None]
"""One number per token; None for tokens without a recorded number."""


class NotRecordedError(Exception):
    """Error for a per-token list that is missing or has the wrong length."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Per-token lists of one trajectory record.

    Attributes:
        record: Parsed line of a file in `trajectories/`.
        ids: Token ids.
        is_sampled: True for tokens that the policy sampled.
    """

    record: Mapping[str, Any]
    ids: Sequence[int]
    is_sampled: Sequence[bool]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Tokens:
        """Validate the token ids and the loss mask of a record.

        Raises:
            ValueError: Ids and mask are not integer lists of equal length.
        """
        ids, mask = record.get("token_ids"), record.get("loss_mask")
        for values in (ids, mask):
            if not isinstance(values, list) or any(type(value) is not int for value in values):
                raise ValueError("token_ids and loss_mask must be lists of integers; line damaged.")
        assert isinstance(ids, list)
        assert isinstance(mask, list)
        if len(ids) != len(mask):
            raise ValueError(f"{len(ids)} token_ids, but {len(mask)} in loss_mask; line damaged.")
        return cls(record=record, ids=ids, is_sampled=[bool(value) for value in mask])

    def get_values(self, name: str) -> Values:
        """Return a per-token list of the record.

        Raises:
            NotRecordedError: The list is missing or has the wrong length.
        """
        values = self.record.get(name)
        if values is None:
            raise NotRecordedError(f"{name} requires config.log.tokens, and a method that uses it")
        if not isinstance(values, list) or len(values) != len(self.ids):
            raise NotRecordedError(f"{name} does not have one number per token")
        return [
            to_finite_float(value) if is_sampled else None
            for value, is_sampled in zip(values, self.is_sampled, strict=True)
        ]

    def map_values(self, function: Callable[..., float | None], *names: str) -> Values:
        """Apply a function elementwise to each list named in `names`."""
        lists = zip(*(self.get_values(name) for name in names), strict=True)
        return [None if None in values else function(*values) for values in lists]

    def get_advantages(self) -> Values:
        """Return the recorded advantage of each token, or else that of the trajectory.

        Raises:
            NotRecordedError: No token advantages are recorded, and the trajectory has no advantage
                or has one per turn.
        """
        advantage = to_finite_float(self.record.get("advantage"))
        has_turns = bool(self.record.get("turn_advantages"))
        if has_turns or advantage is None or self.record.get("token_advantages") is not None:
            return self.get_values("token_advantages")
        return [advantage if is_sampled else None for is_sampled in self.is_sampled]


def compute_quantities(tokens: Tokens) -> list[dict[str, Any]]:
    """Compute all per-token quantities that the page shows.

    Returns:
        A dict per quantity: `name`, `label`, `unit`, `scale`, `values`. The scale is `amount` (from
        0), `signed` (around 0) or `ratio` (around 1). If `values` is None, `why` is the reason.
    """
    get, combine = tokens.get_values, tokens.map_values
    ratio = partial(combine, _compute_clipped_ratio, "new_logprobs", "old_logprobs")
    # The comparison with the reference is after the update, if that was recorded.
    latest = "old_logprobs" if tokens.record.get("new_logprobs") is None else "new_logprobs"
    reference = partial(combine, operator.sub, latest, "ref_logprobs")
    gap = partial(combine, _compute_logprob_gap, "old_logprobs", "rollout_logprobs")
    rows: list[tuple[str, str, str, str, Callable[[], Values]]] = [
        ("advantage", "advantage", "", "signed", tokens.get_advantages),
        ("logprob", "logprob at sampling", "nats", "amount", partial(get, "rollout_logprobs")),
        ("entropy", "entropy at sampling", "nats", "amount", partial(get, "rollout_entropies")),
        ("ratio", "ratio after the update", "", "ratio", ratio),
        ("reference", "logprob minus reference", "nats", "signed", reference),
        ("gap", "trainer minus sampler", "nats", "signed", gap),
        ("kl_weight", "weight of the KL term", "", "amount", partial(get, "kl_weights")),
        ("weight", "weight in the loss", "", "amount", partial(get, "token_weights")),
    ]
    result = []
    for name, label, unit, scale, compute in rows:
        row: dict[str, Any] = {"name": name, "label": label, "unit": unit, "scale": scale}
        try:
            row["values"] = [None if v is None else float(f"{v:.5g}") for v in compute()]
        except NotRecordedError as error:
            row |= {"values": None, "why": str(error)}
        result.append(row)
    return result


def _compute_clipped_ratio(new: float, old: float) -> float:
    return math.exp(min(max(new - old, -20.0), 20.0))


def _compute_logprob_gap(old: float, rollout: float) -> float | None:
    """Return old minus rollout logprob, or None for observations, whose rollout logprob is 0."""
    return old - rollout if rollout else None


def load_vocabulary(workdir: Path, config: Mapping[str, Any]) -> tuple[list[bytes], str]:
    """Load the bytes of each token id from `export/` or `model.path`, without downloads.

    Relative paths are resolved from the folder in which the run was started.

    Returns:
        The vocabulary and "", or [] and the reason if there is no tokenizer.
    """
    names = [str(workdir / "export")]
    if path := config.get("model.path"):
        is_local = not is_hub_name(str(path))
        names.append(str(read_launch_folder(workdir) / str(path)) if is_local else str(path))
    problem = ""
    for name in names:
        try:
            file = download_model(name, "model.path", ("tokenizer.json",), local_only=True)
            file /= "tokenizer.json"
            spec = parse_json(tokenizers.Tokenizer.from_file(str(file)).to_str(), str(file))
            return decode_vocab(spec), ""
        except Exception as error:  # tokenizers raises plain exceptions
            problem = f"No tokenizer ({error}); tokens are shown by their ids."
    return [], problem


def decode_tokens(ids: Sequence[int], vocabulary: Sequence[bytes]) -> list[str]:
    """Decode each token. A character that spans several tokens belongs to the last of them."""
    if not vocabulary:
        return [f"{id} " for id in ids]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    for id in ids:
        token_bytes = vocabulary[id] if 0 <= id < len(vocabulary) else f"[id {id}]".encode()
        texts.append(decoder.decode(token_bytes))
    return texts

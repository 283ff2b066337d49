"""What earlier versions wrote, read under the present names of its keys."""

import pytest

from jaxrl.config import default_config
from jaxrl.flat_config import flat_json, flatten
from jaxrl.renamed import RENAMED, WEIGHTS, contents_with_present_names, with_present_names
from jaxrl.values import check_keys
from tests.helpers import ROOT

FIRST = ROOT / "tests/golden/configs/before_sections.json"
"""The `config.json` of a run with the defaults of the version before settings got sections."""

LATER = {
    "advantage.k_schedule": (),
    "reward.answer_reward": 1.0,
    "reward.exact_match_bonus": 2.0,
    "reward.format_failure": -1.0,
    "reward.format_reward": 0.5,
    "reward.not_found": 0.5,
}
"""Keys that came after it, and are called something else now; with their defaults."""


def test_every_key_of_the_first_version_is_known_or_renamed():
    known = flatten(default_config())
    keys = {*flat_json(FIRST), *LATER}
    assert keys - known.keys() == RENAMED.keys()
    present = with_present_names(dict.fromkeys(keys - {WEIGHTS}))
    assert present.keys() <= known.keys()


def test_its_defaults_are_the_present_ones():
    present = with_present_names(flat_json(FIRST) | LATER)
    known = flatten(default_config())
    assert {key: (value, known[key]) for key, value in present.items() if value != known[key]} == {}


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ({"advantage.k": 8}, {"advantage.pass_at_k.k": 8}),
        ({"env.python": True}, {"env.search.tools": ("python",)}),
        ({"env.python": False}, {"env.search.tools": ()}),
        ({"model.remat": True}, {"model.remat": "full"}),
        ({"model.remat": False}, {"model.remat": "none"}),
        ({"rollout.num_slots": 32, "rollout.num_rows": 0}, {"rollout.num_rows": 32}),
        ({"rollout.num_slots": 32, "rollout.num_rows": 16}, {"rollout.num_rows": 16}),
        ({"kl.target": 0.2, "kl.controller": "log"}, {"kl.log.target": 0.2}),
        ({"kl.target": 0.2, "kl.controller": "adaptive"}, {"kl.adaptive.target": 0.2}),
        ({"kl.budgets.hard": 0.3}, {"kl.budget.budgets.hard": 0.3}),
        # Positions had weights by key, config.json as a section; both name parts that pay nothing.
        ({f"{WEIGHTS}.f1": 0.5, f"{WEIGHTS}.math": 0.0}, {WEIGHTS: {"f1": 0.5}}),
        ({WEIGHTS: {"f1": 0.5, "math": 0.0}}, {WEIGHTS: {"f1": 0.5}}),
    ],
    ids=str,
)
def test_values_are_carried_over(old, now):
    before = flat_json(FIRST)
    if WEIGHTS not in now or WEIGHTS not in old:
        del before[WEIGHTS]
    present = with_present_names(before | old)
    assert {key: present[key] for key in now} == now
    assert not present.keys() & RENAMED.keys()


def test_what_this_version_wrote_stays_as_it_is():
    flat = flatten(default_config()) | {WEIGHTS: {"exact_match": 1.0, "f1": 0.0}}
    assert with_present_names(flat) == flat


def test_fingerprints_have_the_names_of_their_keys():
    old = {"search.corpus": "cc", "model.path/config.json": "mm", "seed": "s"}
    assert contents_with_present_names(old) == {
        "search.local.corpus": "cc",
        "model.path/config.json": "mm",
        "seed": "s",
    }


def test_a_person_s_key_is_refused_by_its_present_name():
    known = flatten(default_config())
    for names in RENAMED.values():
        assert all(name in known for name in names.split(" or config.")), names
    with pytest.raises(
        ValueError, match=r"config.search.corpus is called config.search.local.corpus now"
    ):
        check_keys(["search.corpus"])

"""Interventions change the guesses, never the text."""

from __future__ import annotations

import pytest
import torch

from confu_core.compare import CHANGED, Engine
from confu_core.decoding import decode
from confu_core.errors import PromptError, SettingsError
from confu_core.events import Finished
from confu_core.interventions import first_future, intervene
from confu_core.methods import PLAIN
from confu_core.trace import Intervention, Settings, Trace
from tests.fakes import method

SETTINGS = Settings(max_new_tokens=20, nodes=12, depth=3, top_k=4)


@pytest.fixture(scope="module")
def confu(head, part):
    return method(head, part)


@torch.inference_mode()
def rounds_of(target, chosen, prompt):
    return list(decode(target, chosen, prompt, SETTINGS))


def trees(rounds):
    return [r.draft.tree.token_ids for r in rounds[1:]]


def tokens(rounds):
    return [t for r in rounds for t in r.token_ids]


@pytest.mark.parametrize(
    "intervention",
    [
        Intervention("remove future"),
        Intervention("swap future", donor="on the in"),
        Intervention("force contemplate expert", expert=3),
        Intervention("force future expert", expert=1),
    ],
    ids=lambda i: i.change,
)
def test_the_text_stays_and_the_trees_change(llama, confu, prompt, intervention):
    before = rounds_of(llama, confu, prompt)
    after = rounds_of(llama, intervene(llama, confu, intervention), prompt)
    assert tokens(after) == tokens(before)
    assert trees(after) != trees(before)


def test_without_its_future_confu_drafts_as_eagle3_with_the_same_head(llama, head, confu, prompt):
    removed = intervene(llama, confu, Intervention("remove future"))
    ours, plain = rounds_of(llama, removed, prompt), rounds_of(llama, method(head), prompt)
    assert trees(ours) == trees(plain)
    assert all(r.future is None for r in ours)


def test_a_swapped_future_is_the_donors_in_every_round(llama, confu, prompt):
    donor = first_future(llama, confu, "on the in")
    swapped = intervene(llama, confu, Intervention("swap future", donor="on the in"))
    for r in rounds_of(llama, swapped, prompt)[1:]:
        assert torch.equal(r.future.feature, donor.feature)
        assert torch.equal(r.future.embedding, donor.embedding)


def test_a_forced_expert_has_all_the_weight(llama, confu, part, prompt):
    forced = intervene(llama, confu, Intervention("force future expert", expert=2))
    for r in rounds_of(llama, forced, prompt)[1:]:
        assert r.future.future_router.tolist() == [0, 0, 1, 0]
        assert torch.equal(r.future.embedding, part.future.experts[2])
        assert (r.plan.router > 0).sum() == 2  # the other router goes on as it does


def test_what_cannot_be_changed_is_refused(llama, head, confu):
    with pytest.raises(SettingsError, match="Only ConFu"):
        intervene(llama, method(head), Intervention("remove future"))
    with pytest.raises(SettingsError, match="between 0 and 4"):
        intervene(llama, confu, Intervention("force contemplate expert", expert=5))
    with pytest.raises(SettingsError, match="between 0 and 3"):
        intervene(llama, confu, Intervention("force future expert"))
    with pytest.raises(PromptError, match="empty"):
        intervene(llama, confu, Intervention("swap future", donor=" "))


def test_the_race_runs_it_as_one_more_lane_and_the_trace_says_so(llama, head, confu):
    engine = Engine(llama, {"plain": PLAIN, "eagle3": method(head), "confu": confu}, {})
    change = Intervention("swap future", donor="on the in")
    *_, last = engine.compare("The hen", SETTINGS, ["confu"], intervention=change)
    assert isinstance(last, Finished)
    assert list(last.trace.lanes) == ["confu", CHANGED]
    assert last.trace.lanes[CHANGED].intervention == change
    assert last.trace.lanes["confu"].intervention is None
    assert last.trace.differences() == ()
    assert Trace.from_json(last.trace.to_json()) == last.trace

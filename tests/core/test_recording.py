"""From tensors to the trace: every number against the target and the head themselves."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from confu_core.compare import Engine
from confu_core.decoding import decode
from confu_core.events import Finished
from confu_core.methods import PLAIN
from confu_core.prompt import token_label
from confu_core.reading import FutureBasis, named_tokens, nearest_words
from confu_core.recording import Recorder
from confu_core.trace import RoundRecord, Settings, Trace, _read, to_plain
from tests import fakes, reference

BASE = Settings(max_new_tokens=16, nodes=12, depth=3, top_k=3)


def record(target, method, prompt, settings, basis=None):
    """Rounds and their records."""
    recorder = Recorder(target, method, settings, basis)
    pairs = []
    for round in decode(target, method, prompt, settings, recorder):
        pairs.append((round, recorder.record(round)))
    return pairs


@pytest.fixture(scope="module", params=[0.0, 0.7])
def run(request, llama, prompt, greedy, head, part):
    """A recorded run with short and long paths, and the text of each round's root."""
    settings = replace(BASE, temperature=request.param, seed=5)
    text = prompt + reference.plain_text(llama, prompt, settings, stops=frozenset())
    method = fakes.half_right(text, llama.vocab, head=head, part=part)
    return settings, text, record(llama, method, prompt, settings)


def test_target_probs_are_the_softmax_after_the_parent(llama, run):
    settings, text, pairs = run
    for round, kept in pairs[1:]:
        tree = kept.tree
        assert tree.target_probs[0] == 1.0
        for node in range(1, len(tree.token_ids)):
            path = reference.path_to(list(tree.parents), tree.parents[node])
            ids = text[: round.position] + [tree.token_ids[n] for n in path[1:]]
            logits = reference.full_logits(llama, ids)[-1]
            probs = reference.probabilities(logits.tolist(), settings.temperature or 1.0)
            wanted = probs[tree.token_ids[node]]
            assert tree.target_probs[node] == pytest.approx(wanted, rel=1e-3)


def test_choices_are_drawn_on_the_path_and_likeliest_elsewhere(llama, run):
    settings, text, pairs = run
    elsewhere_differs = 0
    for round, kept in pairs[1:]:
        tree = kept.tree
        walked = [0, *kept.path]
        for node in range(len(tree.token_ids)):
            path = reference.path_to(list(tree.parents), node)
            ids = text[: round.position] + [tree.token_ids[n] for n in path[1:]]
            logits = reference.full_logits(llama, ids)[-1]
            probs = reference.probabilities(logits.tolist(), settings.temperature or 1.0)
            if node in walked:
                wanted = text[round.position + walked.index(node)]
                elsewhere_differs += wanted != probs.index(max(probs))
            else:
                wanted = probs.index(max(probs))
            assert tree.choice_ids[node] == wanted
            assert tree.choice_texts[node] == token_label(llama, wanted)
            assert tree.choice_probs[node] == pytest.approx(probs[wanted], rel=1e-3)
    assert (elsewhere_differs > 0) == (settings.temperature > 0)


def test_states(run):
    for _round, kept in run[2][1:]:
        tree = kept.tree
        on_path = {0, *kept.path}
        for node, state in enumerate(tree.states):
            if node in on_path:
                assert state == "accepted"
            elif tree.parents[node] in on_path:
                assert state == "rejected"
            else:
                assert state == "not reached"
    assert {state for _, kept in run[2][1:] for state in kept.tree.states} == {
        "accepted",
        "rejected",
        "not reached",
    }


def test_nothing_below_a_stop_token_was_judged(prompt, head, part):
    """When a stop id is accepted on the path the walk ends there: its children were not reached."""
    target = fakes.tiny_target()
    settings = replace(BASE, temperature=1.0, seed=7)
    text = prompt + reference.plain_text(target, prompt, settings, stops=frozenset())
    target.stop_ids = frozenset({text[len(prompt) + 2]})  # the second drafted token
    kept = record(target, fakes.oracle(text), prompt, settings)[-1][1]
    assert kept.stop == "eos"
    assert len(kept.tokens) == len(kept.path) == 2
    below = [n for n, p in enumerate(kept.tree.parents) if p == kept.path[-1]]
    assert below, "the tree goes on below"
    assert {kept.tree.states[n] for n in below} == {"not reached"}


def test_tokens_margins_and_origins(llama, run):
    settings, text, pairs = run
    for round, kept in pairs:
        assert len(kept.tokens) == len(round.draws)
        for step, (token, draw) in enumerate(zip(kept.tokens, round.draws, strict=True)):
            assert token.id == draw.token_id == text[round.position + step]
            assert token.text == token_label(llama, token.id)
            assert token.origin == ("accepted" if step < len(kept.path) else "bonus")
            logits = reference.full_logits(llama, text[: round.position + step])[-1]
            if settings.temperature == 0:
                best = logits.topk(2).values
                assert token.margin == pytest.approx(float(best[0] - best[1]), abs=1e-4)
            assert math.isfinite(token.margin)
            assert token.margin >= 0


def test_draft_probs_and_scores(llama, prompt, head, part):
    """exp of the score's step is the draft's own softmax, within its vocabulary."""
    embedding = llama.model.get_input_embeddings().weight
    known = (torch.arange(head.shape.draft_vocab) + head.d2t).tolist()
    for round, kept in record(llama, fakes.method(head), prompt, BASE)[1:]:
        tree = kept.tree
        assert tree.draft_probs[0] == 1.0
        assert tree.scores[0] == 0.0
        assert tree.scores == pytest.approx(round.draft.tree.scores, rel=1e-5)
        for node in range(1, len(tree.token_ids)):
            step = tree.scores[node] - tree.scores[tree.parents[node]]
            assert tree.draft_probs[node] == pytest.approx(math.exp(step), rel=1e-3)
        if round.index == 1:
            root = tree.token_ids[0]
            ids = list(prompt)
            taps = reference.full_taps(llama, ids)
            log_probs = reference.draft_chain(
                head, embedding, taps, [*ids, root], len(ids) - 1, 1
            )[0]  # fmt: skip
            for node in (n for n in range(1, len(tree.parents)) if tree.parents[n] == 0):
                wanted = float(log_probs[known.index(tree.token_ids[node])].exp())
                assert tree.draft_probs[node] == pytest.approx(wanted, rel=1e-3)


def test_futures_and_routers(llama, prompt, head, part):
    basis = FutureBasis.fit(
        torch.randn(20, head.shape.hidden, generator=torch.Generator().manual_seed(0)), ["a"] * 20
    )
    pairs = record(llama, fakes.method(head, part), prompt, BASE, basis)
    assert pairs[0][1].future is None
    assert pairs[0][1].contemplate_router == ()
    for round, kept in pairs[1:]:
        future = round.future
        assert (kept.future.born_round, kept.future.born_node) == (
            future.born_round,
            future.born_node,
        )
        assert kept.future.born_round == round.index - 1
        assert kept.future_router == pytest.approx(future.future_router.tolist(), rel=1e-5)
        assert kept.contemplate_router == pytest.approx(round.plan.router.tolist(), rel=1e-5)
        for weights, experts in ((kept.future_router, 4), (kept.contemplate_router, 5)):
            assert len(weights) == experts
            assert sum(w > 0 for w in weights) == 2
            assert sum(weights) == pytest.approx(1, abs=1e-5)
        probs = head.logits(future.feature).softmax(-1)
        ids = torch.arange(len(probs)) + head.d2t
        wanted = sorted(zip((-probs).tolist(), ids.tolist(), strict=True))[:6]
        assert [r.id for r in kept.future.readings] == [token for _, token in wanted]
        assert [r.prob for r in kept.future.readings] == pytest.approx(
            [-p for p, _ in wanted], rel=1e-4
        )
        assert kept.future.named == ()
        x, y = kept.future.point
        centred = future.feature - torch.tensor(basis.mean)
        assert x == pytest.approx(float(torch.tensor(basis.axes[0]) @ centred), abs=1e-3)
        assert y == pytest.approx(float(torch.tensor(basis.axes[1]) @ centred), abs=1e-3)
        assert kept.contemplated == tuple(range(len(kept.tree.token_ids)))


def test_what_a_future_token_names(llama, prompt, head):
    """Each read-out by itself, its weight undone; of a stale one only the last are left."""
    part = fakes.tiny_contemplation(llama, head, read_outs=3)
    part.read_out_weight.data.copy_(torch.tensor([0.5, 2.0, -1.0]))
    for round, kept in record(llama, fakes.method(head, part), prompt, BASE)[1:]:
        said = round.future.read_out
        probs = (said / torch.tensor([[0.5], [2.0], [-1.0]])).softmax(-1)
        best = probs.argmax(-1)
        wanted = [int(i) + int(head.d2t[i]) for i in best]
        assert [reading.id for reading in kept.future.named] == wanted
        assert [reading.prob for reading in kept.future.named] == pytest.approx(
            probs.amax(-1).tolist(), rel=1e-4
        )
        for left in (1, 2):
            assert [token for token, _ in named_tokens(head, part, said[-left:])] == wanted[-left:]


def test_static_tokens_have_no_router_weights(llama, prompt, head):
    part = fakes.tiny_contemplation(llama, head, contemplate_experts=1, future_experts=1)
    for _, kept in record(llama, fakes.method(head, part), prompt, BASE)[1:]:
        assert (kept.contemplate_router, kept.future_router) == ((), ())
        assert kept.future is not None
        assert kept.future.point is None


def test_a_plain_round_is_a_root_alone(llama, prompt):
    for _, kept in record(llama, PLAIN, prompt, BASE)[1:]:
        assert len(kept.tree.token_ids) == 1
        assert kept.tree.states == ("accepted",)
        assert (kept.target_rows, kept.draft_passes, kept.future) == (1, 0, None)
        assert kept.tree.choice_ids[0] == kept.tokens[0].id


def test_records_are_plain_data(run):
    for _, kept in run[2]:
        text = json.dumps(to_plain(kept), allow_nan=False)
        assert _read(RoundRecord, json.loads(text), "round") == kept


def test_recording_changes_nothing(llama, prompt, head, part):
    method = fakes.method(head, part)
    settings = replace(BASE, temperature=0.7, seed=2)
    alone = [round.draws for round in decode(llama, method, prompt, settings)]
    assert [r.draws for r, _ in record(llama, method, prompt, settings)] == alone


def test_nearest_words_ask_for_more_than_there_are(llama):
    head = fakes.tiny_head(llama, draft_vocab=5)
    words = nearest_words(head, torch.randn(head.shape.hidden), 9)
    assert len(words) == 5
    assert sum(prob for _, prob in words) == pytest.approx(1, abs=1e-5)


def test_basis_on_disk(tmp_path):
    features = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
    features[:, 2] *= 9
    basis = FutureBasis.fit(features, ["x", "y"] * 15)
    assert abs(basis.axes[0][2]) > 0.9, "the widest direction comes first"
    assert basis.explained[0] > 0.5
    path = tmp_path / "basis.json"
    assert FutureBasis.load(path) is None
    basis.save(path)
    assert FutureBasis.load(path) == basis
    group, x, y = basis.points[3]
    assert (x, y) == pytest.approx(basis.place(features[3]), abs=2e-3)
    assert group == "y"


def test_trace_of_a_recorded_run_loads_back(llama):
    engine = Engine(llama, {"plain": PLAIN}, {})
    events = list(engine.compare("the hen", replace(BASE, max_new_tokens=4), ["plain"]))
    assert isinstance(events[-1], Finished)
    assert Trace.from_json(events[-1].trace.to_json()) == events[-1].trace

"""Training: what it computes is what decoding computes, and a run can be killed and go on."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats

from confu_core.budget import FixedBudget
from confu_core.checkpoints import load_checkpoint, parts
from confu_core.contemplation import Contemplator, FutureToken
from confu_core.decoding import decode
from confu_core.drafter import EagleDrafter
from confu_core.errors import CheckpointError, DataError
from confu_core.prompt import chat_ids
from confu_core.target import Target
from confu_core.trace import Settings
from confu_core.train import loop, losses, synth
from confu_core.train.anchors import Anchors, sample_anchors
from confu_core.train.data import (
    MAX_TOKENS,
    Conversation,
    batches,
    collate,
    coverage,
    draft_vocabulary,
    load_conversations,
)
from confu_core.train.features import FeatureReader, read_text
from confu_core.train.init import new_contemplation, new_head
from confu_core.train.loop import (
    TrainSettings,
    evaluate,
    parameter_groups,
    rate_factor,
    stream,
    total_loss,
    train,
)
from confu_core.train.losses import DraftTrainee, chain_starts
from confu_core.train.run import Recipe
from confu_core.train.run import run as run_recipe
from confu_core.train.store import Disk, Memory, Nowhere, bytes_per_token, open_store
from tests import fakes, reference

STEPS = 4


# Two conversations of different lengths, the target's own words as answers.
@pytest.fixture(scope="module")
def conversations(llama, greedy, prompt) -> list[Conversation]:
    other = chat_ids(llama, "a hen")
    sampled = Settings(max_new_tokens=9, temperature=1.0, seed=7)
    answer = reference.plain_text(llama, other, sampled)
    return [
        Conversation(tuple(greedy[: len(prompt) + 14]), len(prompt), "a"),
        Conversation((*other, *answer), len(other), "b"),
    ]


@pytest.fixture(scope="module")
def batch(conversations):
    return collate(conversations, [0, 1])


def unrolled(trainee, batch, monkeypatch=None, **options):
    """Run the trainee and keep every step's states: list of (B, M, H)."""
    states = []
    original = trainee._step

    def keep(*arguments):
        state = original(*arguments)
        states.append(state.detach())
        return state

    trainee._step = keep
    result = trainee(batch, STEPS, random.Random(3), **options)
    del trainee._step
    return result, states


def log_probs_of(head, state: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return head.logits(state).log_softmax(-1)


def cached_chain(target, head, part, ids, start, steps, future) -> list[torch.Tensor]:
    """The decoding drafter itself, fed the true tokens: a cached chain from `start`."""
    drafter = EagleDrafter(
        head, part, target, budget=FixedBudget(9), top_k=1, capacity=len(ids) + steps
    )
    taps = target.prefill(target.new_cache(len(ids)), ids).taps[0]
    with torch.no_grad():
        state = drafter._take_in(taps[: start + 1], ids[1 : start + 2], future, grow=True)
        chain = [log_probs_of(head, state[0])]
        for k in range(1, steps):
            lineage = torch.ones(1, k, dtype=torch.bool)
            token = torch.tensor([ids[start + 1 + k]])
            state = drafter._expand(token, state, lineage, start + k, future)
            chain.append(log_probs_of(head, state[0]))
    return chain


# Train-time test equals inference ----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_unrolled_logits_equal_chains_without_f(llama, head, conversations, batch, mode):
    trainee = DraftTrainee(llama, head, None)
    getattr(trainee, mode)()
    _, states = unrolled(trainee, batch)
    starts, valid = chain_starts(batch.answer)
    embedding = llama.model.get_input_embeddings().weight
    checked = 0
    for row, conversation in enumerate(conversations):
        ids = list(conversation.ids)
        taps = reference.full_taps(llama, ids)
        for column, start in enumerate(starts[row].tolist()):
            steps = min(STEPS, len(ids) - 1 - start)
            if not valid[row, column]:
                continue
            eager = reference.draft_chain(head, embedding, taps, ids, start, steps)
            cached = cached_chain(llama, head, None, ids, start, steps, None)
            for k in range(steps):
                ours = log_probs_of(head, states[k][row, column])
                torch.testing.assert_close(ours, eager[k], atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(ours, cached[k], atol=1e-5, rtol=1e-4)
                checked += 1
    assert checked > 60


def future_at(target, part, head, ids: list[int], lag: int = 0) -> FutureToken:
    """What decoding makes of `ids` as the text up to the last accepted token. The router of the
    contemplate token reads the state `lag` tokens before."""
    cache = target.new_cache(len(ids) + 1, fixed=part.shape.soft_prompts)
    rows = target.prefill(cache, ids)
    contemplator = Contemplator(part, head)
    if lag == 0:
        return contemplator.begin(target, cache, rows)
    cache.set_fixed(part.soft_keys, part.soft_values)
    contemplator._state = rows.taps[0, -1 - lag]
    plan = contemplator._make_plan((-1,))
    contemplator._state = rows.taps[0, -1]
    row = target.contemplate(cache, plan.embedding, plan.adapters)
    return contemplator._future(plan, row.taps, row.last, 0, 0)


@pytest.mark.parametrize("switches", [{}, {"future_query": False}, {"future_entry": False}])
def test_unrolled_logits_equal_chains_with_f(
    llama, head, conversations, batch, switches, monkeypatch
):
    """Anchors with lags and replication: every start uses the f of *its* anchor, or none."""
    part = fakes.tiny_contemplation(llama, head, **switches)
    drawn: list[Anchors] = []

    def remember(*arguments) -> Anchors:
        drawn.append(sample_anchors(*arguments))
        return drawn[-1]

    monkeypatch.setattr(losses, "sample_anchors", remember)
    trainee = DraftTrainee(llama, head, part)
    _, states = unrolled(trainee, batch, anchor_every=3, replicate=True)
    (anchors,) = drawn
    starts, valid = chain_starts(batch.answer)
    embedding = llama.model.get_input_embeddings().weight
    served, staleness = 0, set()
    for row, conversation in enumerate(conversations):
        ids = list(conversation.ids)
        taps = reference.full_taps(llama, ids)
        for column, start in enumerate(starts[row].tolist()):
            if not valid[row, column]:
                continue
            future = None
            anchor = int(anchors.of_start[row, column])
            if anchor >= 0:
                place = int(anchors.positions[row, anchor])
                lag = place - int(anchors.router_positions[row, anchor])
                future = future_at(llama, part, head, ids[: place + 1], lag)
                staleness.add(start - place)
                served += 1
            steps = min(STEPS, len(ids) - 1 - start)
            f = (future.embedding, future.feature) if future else None
            eager = reference.draft_chain(head, embedding, taps, ids, start, steps, part, f)
            cached = cached_chain(llama, head, part, ids, start, steps, future)
            for k in range(steps):
                ours = log_probs_of(head, states[k][row, column])
                torch.testing.assert_close(ours, eager[k], atol=2e-5, rtol=1e-4)
                torch.testing.assert_close(ours, cached[k], atol=2e-5, rtol=1e-4)
    assert served >= 6
    assert served < int(valid.sum()), "some starts have no f, and are EAGLE-3's"
    assert len(staleness) >= 2, "some starts are served by an earlier anchor"


def test_futures_equal_decoding(llama, head, part, conversations, batch):
    """Pass B alone: feature and both routers of every anchor, against a decoding pass."""
    trainee = DraftTrainee(llama, head, part).eval()
    starts, valid = chain_starts(batch.answer)
    anchors = sample_anchors(starts, valid, 1, random.Random(0), False)
    anchors = replace(anchors, router_positions=anchors.positions)
    with torch.no_grad():
        rows = trainee.futures_of(batch, anchors, starts)
    assert torch.equal(rows.present, valid)
    for row, conversation in enumerate(conversations):
        for column in range(int(valid[row].sum())):
            start = int(starts[row, column])
            wanted = future_at(llama, part, head, list(conversation.ids[: start + 1]))
            torch.testing.assert_close(
                rows.feature[row, column], wanted.feature, atol=1e-4, rtol=1e-4
            )
            for ours, theirs in zip(
                rows.router_weights, (wanted.contemplate_router, wanted.future_router), strict=True
            ):
                torch.testing.assert_close(ours[row, column], theirs, atol=1e-4, rtol=1e-4)


# Loss and figures --------------------------------------------------------------------------------


def test_losses_by_hand(llama, head, conversations, batch):
    """Soft cross-entropy against the target restricted to D, over answer tokens that D knows."""
    trainee = DraftTrainee(llama, head, None)
    result, _ = unrolled(trainee, batch)
    known = (torch.arange(head.shape.draft_vocab) + head.d2t).tolist()
    embedding = llama.model.get_input_embeddings().weight
    sums, counts = [0.0] * STEPS, [0] * STEPS
    for conversation in conversations:
        ids, first = list(conversation.ids), conversation.answer_start
        taps, logits = reference.full_taps(llama, ids), reference.full_logits(llama, ids)
        for start in range(len(ids)):
            for k in range(STEPS):
                predicted = start + 2 + k  # the token that step k of this chain predicts
                if start + 1 < first or predicted >= len(ids):
                    continue
                label = logits[predicted - 1]
                if int(label.argmax()) not in known:
                    continue
                chain = reference.draft_chain(head, embedding, taps, ids, start, k + 1)
                probs = label[known].softmax(0)
                sums[k] -= float((probs * chain[k]).sum())
                counts[k] += 1
    assert result.counts == counts
    for ours, total, count in zip(result.losses, sums, counts, strict=True):
        assert float(ours) == pytest.approx(total / count, rel=1e-4)
    weights = [0.8**k for k in range(STEPS)]
    wanted = sum(w * t / c for w, t, c in zip(weights, sums, counts, strict=True)) / sum(weights)
    assert float(total_loss(result, TrainSettings(steps=1))) == pytest.approx(wanted, rel=1e-4)


def test_agreement_by_hand(llama, head, conversations, batch):
    trainee = DraftTrainee(llama, head, None).eval()
    with torch.no_grad():
        report = evaluate(trainee, conversations, steps=STEPS)
    known = (torch.arange(head.shape.draft_vocab) + head.d2t).tolist()
    embedding = llama.model.get_input_embeddings().weight
    hits1, hits8 = [], []
    for conversation in conversations:
        ids, first = list(conversation.ids), conversation.answer_start
        taps = reference.full_taps(llama, ids)
        for start in range(first - 1, len(ids) - 1 - STEPS):
            chain = reference.draft_chain(head, embedding, taps, ids, start, STEPS)
            row1, row8 = [], []
            for k, log_probs in enumerate(chain):
                best = [known[i] for i in log_probs.topk(8).indices.tolist()]
                row1.append(best[0] == ids[start + 2 + k])
                row8.append(ids[start + 2 + k] in best)
            hits1.append(row1)
            hits8.append(row8)
    one, eight = torch.tensor(hits1).float(), torch.tensor(hits8).float()
    assert report["n"] == len(hits1) > 10
    assert report["top1"] == pytest.approx(one.mean(0).tolist(), abs=1e-4)
    assert report["top8"] == pytest.approx(eight.mean(0).tolist(), abs=1e-4)
    assert sum(report["top8"]) > 0
    assert report["tau_chain"] == pytest.approx(1 + float(one.cumprod(1).sum(1).mean()), abs=1e-4)
    assert report["tau_top8"] == pytest.approx(1 + float(eight.cumprod(1).sum(1).mean()), abs=1e-4)


def test_gradients_reach_everything_that_is_trained_and_nothing_else(llama, batch):
    head = fakes.tiny_head(llama).requires_grad_(True)
    part = fakes.tiny_contemplation(llama, head).requires_grad_(True)
    trainee = DraftTrainee(llama, head, part)
    result = trainee(batch, STEPS, random.Random(0), 1, True)
    total_loss(result, TrainSettings(steps=1)).backward()
    for module in (head, part):
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            assert float(parameter.grad.abs().max()) > 0, name
    assert all(p.grad is None for p in llama.model.parameters())
    trained = {id(p) for p in trainee.parameters()}
    assert not trained & {id(p) for p in llama.model.parameters()}
    groups = parameter_groups(head, part, TrainSettings(steps=1, rate=1e-3, contemplate_rate=1e-2))
    grouped = [id(p) for group in groups for p in group["params"]]
    assert len(grouped) == len(set(grouped)), "no parameter twice"
    assert set(grouped) == trained
    fast = {id(p) for p in groups[-1]["params"]}
    assert id(part.soft_keys) in fast
    assert id(part.contemplate.experts) in fast
    assert id(part.project.weight) not in fast


def test_nothing_behind_a_start_leaks_into_it(llama, head, part, conversations):
    """Changing the text behind token i + 1 + k leaves step k of start i as it is, f included."""
    (first, _) = conversations
    ids, cut = list(first.ids), len(first.ids) - 5
    changed = Conversation((*ids[:cut], *(t + 1 for t in ids[cut:])), first.answer_start, "a")
    starts, _ = chain_starts(collate([first], [0]).answer)
    rows = []
    for conversation in (first, changed):
        trainee = DraftTrainee(llama, head, part)
        one = collate([conversation], [0])
        rows.append(unrolled(trainee, one, anchor_every=1, replicate=True)[1])
    before = after = 0
    for k in range(STEPS):
        for column, start in enumerate(starts[0].tolist()):
            same = torch.allclose(rows[0][k][0, column], rows[1][k][0, column], atol=1e-6)
            if start + 1 + k < cut:
                assert same, (start, k)
                before += 1
            else:
                after += not same
    assert before > 15
    assert after > 5


# Anchors -----------------------------------------------------------------------------------------


def drawn_anchors(seed: int, every: int, replicate: bool):
    starts = torch.tensor([list(range(4, 24)), [7, 8, 9, *range(17)]])
    valid = torch.tensor([[True] * 20, [True] * 3 + [False] * 17])
    return starts, valid, sample_anchors(starts, valid, every, random.Random(seed), replicate)


@pytest.mark.parametrize("every", [1, 3, 50])
def test_anchors_never_serve_earlier_starts(every):
    reaches, ages = set(), set()
    for seed in range(60):
        starts, valid, anchors = drawn_anchors(seed, every, True)
        for row in range(2):
            own = starts[row][valid[row]].tolist()
            for column in range(20):
                anchor = int(anchors.of_start[row, column])
                if not valid[row, column]:
                    assert anchor == -1
                    continue
                if anchor >= 0:
                    place = int(anchors.positions[row, anchor])
                    start = int(starts[row, column])
                    assert place in own
                    assert 0 <= start - place <= 3
                    reaches.add(start - place)
                    if start in anchors.positions[row, : len(own) // every].tolist():
                        assert place == start, "an anchor's own start has its own f"
            used = {a for a in anchors.of_start[row].tolist() if a >= 0}
            for anchor in used:
                lag = int(anchors.positions[row, anchor] - anchors.router_positions[row, anchor])
                assert 1 <= lag <= 6
                ages.add(lag)
                assert int(anchors.router_positions[row, anchor]) >= 0
    assert reaches == ({0} if every == 1 else {0, 1, 2, 3})
    assert ages == {1, 2, 3, 4, 5, 6}


def test_without_replication_an_anchor_serves_itself_only():
    for seed in range(20):
        starts, _, anchors = drawn_anchors(seed, 3, False)
        for row in range(2):
            for column in range(20):
                anchor = int(anchors.of_start[row, column])
                if anchor >= 0:
                    assert anchors.positions[row, anchor] == starts[row, column]


def test_number_of_anchors():
    _, valid, anchors = drawn_anchors(0, 3, False)
    counts = (anchors.of_start >= 0).sum(1).tolist()
    assert counts == [6, 1]
    _, valid, anchors = drawn_anchors(0, 1, False)
    assert torch.equal(anchors.of_start >= 0, valid)


def test_anchors_are_fresh_each_time_and_repeatable():
    texts = {str(drawn_anchors(seed, 3, True)[2].positions.tolist()) for seed in range(10)}
    assert len(texts) == 10
    assert torch.equal(drawn_anchors(4, 3, True)[2].of_start, drawn_anchors(4, 3, True)[2].of_start)


def test_chain_starts(batch, conversations):
    """i counts if tokens i + 1 and i + 2 are both the target's own; the first start pairs the
    prompt's last features with the first answer token, as the first round of decoding does."""
    starts, valid = chain_starts(batch.answer)
    for row, conversation in enumerate(conversations):
        found = starts[row][valid[row]].tolist()
        assert found == list(range(conversation.answer_start - 1, len(conversation.ids) - 2))


# Data --------------------------------------------------------------------------------------------


def write(path: Path, rows: list) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def row(user: str, assistant: str = "the answer is here", **more) -> dict:
    return {"kind": "k", "user": user, "assistant": assistant} | more


def test_masked_tokens_are_the_assistants_words(llama, tmp_path):
    rows = [row(f"question {n}", f"answer {n}: é 😀 <ok>") for n in range(6)]
    train_set, held_out = load_conversations(llama, [write(tmp_path / "a.jsonl", rows)])
    both = train_set + held_out
    assert len(both) == 6
    one = collate(both, list(range(6)))
    for number, conversation in enumerate(both):
        masked = one.ids[number][one.answer[number]].tolist()
        assert masked == list(conversation.ids[conversation.answer_start :])
        assert masked[-1] == fakes.TURN_END, "the closing stop id is learnt, though it is pad too"
        text = llama.tokenizer.decode(masked[:-1])
        user = llama.tokenizer.decode(conversation.ids[: conversation.answer_start])
        number_in_text = user.split("question ")[1][0]
        assert text == f"answer {number_in_text}: é 😀 <ok>"
        assert user.endswith("<|im_start|>assistant\n")
        assert int(one.lengths[number]) == len(conversation.ids)
        assert not one.answer[number, len(conversation.ids) :].any()


def test_unfinished_answers_do_not_teach_an_end(llama, tmp_path):
    rows = [row("one", finished=False), row("two", finished=True)]
    train_set, held_out = load_conversations(llama, [write(tmp_path / "a.jsonl", rows)])
    found = train_set + held_out
    ends = {c.ids[-1] == fakes.TURN_END for c in found}
    assert ends == {True, False}


def test_long_answers_are_cut_and_too_short_ones_left_out(llama, tmp_path):
    rows = [row("one", "x y " * 600), row("two", "", finished=False), row("three", "a")]
    train_set, held_out = load_conversations(llama, [write(tmp_path / "a.jsonl", rows)])
    found = train_set + held_out
    assert [len(c.ids) for c in found if len(c.ids) > 100] == [MAX_TOKENS]
    assert len(found) <= 2
    assert all(len(c.ids) > c.answer_start + 2 for c in found)


def test_split_is_by_request_and_stable(llama, tmp_path):
    rows = [row(f"request number {n}") for n in range(200)]
    train_set, held_out = load_conversations(llama, [write(tmp_path / "a.jsonl", rows)])
    assert len(train_set) + len(held_out) == 200
    assert 3 <= len(held_out) <= 20
    dice = random.Random(0)
    dice.shuffle(rows)
    again = [row("Request  NUMBER 7"), *rows[:150], *rows[50:]]  # doubles, other case and spaces
    halves = [write(tmp_path / "b.jsonl", again[:90]), write(tmp_path / "c.jsonl", again[90:])]
    other_train, other_held = load_conversations(llama, halves)
    assert len(other_train) + len(other_held) == 200, "each request once"

    def requests(found):
        return sorted(llama.tokenizer.decode(c.ids).lower() for c in found)

    same = [text.replace("  ", " ") for text in requests(other_held)]
    assert same == requests(held_out)


@pytest.mark.parametrize(
    "bad", ["nonsense", "[1]", '{"user": "x"}', '{"user": 3, "assistant": "y"}', "", "null"]
)
def test_bad_lines_are_named(llama, tmp_path, bad):
    path = write(tmp_path / "bad.jsonl", [row("good"), bad])
    with pytest.raises(DataError, match=r"bad\.jsonl, line 2"):
        load_conversations(llama, [path])


def test_draft_vocabulary_takes_the_most_frequent_with_ties_to_the_smaller_id():
    one = [Conversation((9, 9, 9, 9, 50, 50, 50, 40, 40, 30, 30, 20), 4, "")]
    assert draft_vocabulary(one, 3, set()).tolist() == [30, 40, 50], "only answer tokens count"
    assert draft_vocabulary(one, 2, set()).tolist() == [30, 50]


def test_draft_vocabulary_holds_the_forced_ids_and_fills_up():
    one = [Conversation((1, 50, 50, 40), 1, "")]
    assert draft_vocabulary(one, 3, {7, 40}).tolist() == [7, 40, 50]
    assert draft_vocabulary(one, 2, {7, 40}).tolist() == [7, 40]
    assert draft_vocabulary(one, 6, {0}).tolist() == [0, 1, 2, 3, 40, 50]


def test_coverage():
    one = [Conversation((1, 50, 50, 40, 30), 1, "")]
    assert coverage(one, torch.tensor([50, 30])) == pytest.approx(3 / 4)
    assert coverage([], torch.tensor([50])) == 0


def many(count: int) -> list[Conversation]:
    dice = random.Random(5)
    return [Conversation(tuple([3] * dice.randint(5, 60)), 2, "") for _ in range(count)]


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_an_epoch_holds_everything_once(seed):
    found = list(batches(many(300), 200, seed))
    assert sorted(n for batch in found for n in batch.numbers) == list(range(300))
    assert all(batch.ids.numel() <= 200 for batch in found)


def test_batches_are_shuffled_by_the_seed_alone():
    def order(seed):
        return [batch.numbers for batch in batches(many(100), 200, seed)]

    assert order(3) == order(3)
    assert order(3) != order(4)


def test_stream_goes_on_where_it_was_and_shares_out():
    settings = TrainSettings(steps=9, batch_tokens=300, seed=2)
    whole = [(step, batch.numbers) for step, batch in stream(many(20), settings, 0, 0, 1)]
    assert [step for step, _ in whole] == list(range(9))
    assert [(s, b.numbers) for s, b in stream(many(20), settings, 6, 0, 1)] == whole[6:]
    epoch = len(list(batches(many(20), 300, 0)))
    assert epoch < 9, "several epochs"
    first = {numbers for _, numbers in whole[:epoch]}
    assert sorted(n for numbers in first for n in numbers) == list(range(20))
    mine, theirs = (
        [b.numbers for _, b in stream(many(20), replace(settings, steps=epoch // 2), 0, i, 2)]
        for i in (0, 1)
    )
    assert not set(mine) & set(theirs)


# Features ----------------------------------------------------------------------------------------


def test_features_are_the_targets_own(llama, conversations, batch):
    features = read_text(llama, batch, remember=True)
    for number, conversation in enumerate(conversations):
        ids = list(conversation.ids)
        length = len(ids)
        torch.testing.assert_close(
            features.taps[number, :length], reference.full_taps(llama, ids), atol=1e-5, rtol=1e-5
        )
        logits = reference.full_logits(llama, ids)
        torch.testing.assert_close(
            llama.logits(features.last[number, :length]), logits, atol=1e-5, rtol=1e-5
        )
        for place in range(conversation.answer_start - 1, length - 1):
            assert int(features.wanted[number, place]) == int(logits[place].argmax())
        cache = llama.new_cache(length)
        llama.prefill(cache, ids)
        for layer in range(llama.layers):
            for kept, fresh in ((features.keys, 0), (features.values, 1)):
                wanted = cache.committed()[fresh][layer, 0]
                torch.testing.assert_close(
                    kept[layer][number, :, :length], wanted, atol=1e-5, rtol=1e-5
                )


@pytest.fixture(params=["memory", "disk", "disk with keys and values"])
def kept_at(request, llama, tmp_path):
    """A store, and whether it keeps keys and values."""
    return (
        Memory() if request.param == "memory" else Disk(tmp_path, llama)
    ), "keys" in request.param


def test_kept_features_equal_fresh_ones_in_any_batch(
    llama, conversations, batch, kept_at, monkeypatch
):
    store, remember = kept_at
    reader = FeatureReader(llama, store)
    first = reader.read(batch, remember)
    swapped = collate(conversations, [1, 0])
    fresh = read_text(llama, swapped, remember)
    with monkeypatch.context() as patch:  # nothing is read twice
        patch.setattr("confu_core.train.features.read_text", None)
        kept = reader.read(swapped, remember)
    for row_number, conversation in enumerate((conversations[1], conversations[0])):
        length = len(conversation.ids)
        for one, two in ((kept.taps, fresh.taps), (kept.last, fresh.last)):
            torch.testing.assert_close(
                one[row_number, :length], two[row_number, :length], atol=1e-5, rtol=1e-5
            )
        assert torch.equal(kept.wanted[row_number, :length], fresh.wanted[row_number, :length])
        layers = llama.layers if remember else 0
        assert len(kept.keys) == len(kept.values) == layers
        for layer in range(layers):
            for one, two in ((kept.keys, fresh.keys), (kept.values, fresh.values)):
                one, two = one[layer][row_number, :, :length], two[layer][row_number, :, :length]
                torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    assert torch.equal(kept.taps[1, : len(conversations[0].ids)], first.taps[0])


def test_what_a_store_lacks_is_read_anew(llama, batch, tmp_path):
    """Keys and values after a run without them, a damaged file, a store that keeps nothing."""
    disk = Disk(tmp_path, llama)
    wanted = FeatureReader(llama, Nowhere()).read(batch, remember=True)
    FeatureReader(llama, disk).read(batch, remember=False)
    for _ in range(2):
        found = FeatureReader(llama, disk).read(batch, remember=True)
        torch.testing.assert_close(found.keys[1], wanted.keys[1])
        files = sorted(tmp_path.rglob("*.safetensors"))
        assert len(files) == 2 and not list(tmp_path.rglob("*.new"))
        files[0].write_bytes(files[0].read_bytes()[:100])


def test_later_runs_find_what_the_same_weights_read_and_no_other(llama, batch, tmp_path):
    """A finetune with the same vocabulary may share a head, but never features."""
    first = FeatureReader(llama, Disk(tmp_path, llama)).read(batch, remember=True)
    again = fakes.tiny_target()  # a later run loads the target anew
    for target in (again, fakes.tiny_target(seed=9)):
        store = Disk(tmp_path, target)
        found = store.find(batch.ids[0, : int(batch.lengths[0])], ("taps", "keys"))
        if target is again:
            torch.testing.assert_close(found["taps"], first.taps[0], atol=0, rtol=0)
        else:
            assert found is None


def test_the_size_of_kept_features_is_told_and_must_fit(llama, batch, tmp_path, monkeypatch):
    tokens = int(batch.lengths.sum())
    for remember in (False, True):
        folder = tmp_path / str(remember)
        store, told = open_store(str(folder), llama, tokens, remember)
        FeatureReader(llama, store).read(batch, remember)
        taken = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
        headers = 2 * 600
        assert abs(taken - tokens * bytes_per_token(llama, remember)) < headers
        assert f"{tokens} tokens" in told and str(folder) in told
    assert "nothing is kept" in open_store("recompute", llama, tokens, False)[1]
    assert "in memory" in open_store("memory", llama, tokens, False)[1]
    with pytest.raises(DataError, match="--features recompute"):
        open_store(str(tmp_path), llama, 10**15, True)


# Initialisation ----------------------------------------------------------------------------------


def test_new_head_begins_as_the_targets_last_layer(llama):
    torch.manual_seed(0)
    vocabulary = torch.tensor([2, 5, 9, 200])
    head = new_head(llama, vocabulary)
    assert head.target_ids(torch.arange(4)).tolist() == [2, 5, 9, 200]
    assert head.shape.tap_layers == (2, 4, 5)
    assert head.shape.rope_theta == llama.model.config.rope_parameters["rope_theta"]
    layer = llama.model.model.layers[-1]
    torch.testing.assert_close(head.lm_head.weight, llama.model.lm_head.weight[vocabulary])
    torch.testing.assert_close(head.o_proj.weight, layer.self_attn.o_proj.weight)
    torch.testing.assert_close(head.q_proj.weight[:, 32:], layer.self_attn.q_proj.weight)
    taps = torch.randn(3, 96)
    passed = head.fuse(taps)
    residue = (passed - taps[:, 64:]).norm() / taps[:, 64:].norm()
    assert residue.item() < 0.3, "fc passes the high tap through"


def test_new_contemplation_begins_with_real_tokens(llama, head, conversations):
    part = new_contemplation(
        llama, head, conversations, seed=1, soft_prompts=4, contemplate_experts=3
    )
    words = [t for c in conversations for t in c.ids[c.answer_start :]][:4]
    cache = llama.new_cache(4)
    llama.prefill(cache, words)
    keys, values = cache.committed()
    torch.testing.assert_close(part.soft_keys.data, keys[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(part.soft_values.data, values[:, 0], atol=1e-5, rtol=1e-5)
    embedding = llama.model.get_input_embeddings().weight
    for expert in part.contemplate.experts.detach():
        assert float((embedding - expert).norm(dim=1).min()) < 1e-5
    states = torch.cat(
        [reference.full_taps(llama, list(c.ids))[c.answer_start :] for c in conversations]
    )
    standard = (states - part.contemplate.mean) * part.contemplate.scale
    torch.testing.assert_close(standard.mean(0), torch.zeros(96), atol=1e-4, rtol=0)
    torch.testing.assert_close(standard.std(0), torch.ones(96), atol=1e-3, rtol=0)
    # f reaches the draft by a small gate; the projection starts at nothing
    assert part.gate.tolist() == pytest.approx([0.1] * 32)
    assert not part.project.weight.any()
    assert part.entry_bias.item() == pytest.approx(3.0)


# The loop ----------------------------------------------------------------------------------------


def fresh_modules(llama, conversations, contemplates: bool):
    torch.manual_seed(0)
    words = {t for c in conversations for t in c.ids[c.answer_start :]}
    head = new_head(llama, torch.tensor(sorted(words | set(range(10, 20)))))
    part = None
    if contemplates:
        part = new_contemplation(llama, head, conversations, seed=0, soft_prompts=2)
    return head, part


def trained_run(llama, conversations, folder, steps_taken=None, contemplates=False, **changes):
    """Train from scratch, or from what `folder` holds; killed after `steps_taken` rows."""
    head, part = fresh_modules(llama, conversations, contemplates)
    usual = {"steps": 40, "batch_tokens": 64, "unroll": 3, "evaluate_every": 10, "warmup": 4}
    settings = TrainSettings(**(usual | changes))
    rows = []
    run = train(llama, head, part, conversations, conversations, settings, folder, "no")
    for result in run:
        rows.append(result)
        if steps_taken is not None and len(rows) >= steps_taken:
            run.close()
            break
    return rows, head, part


@pytest.mark.parametrize("contemplates", [False, True])
def test_a_killed_run_goes_on_with_the_same_losses(llama, conversations, tmp_path, contemplates):
    whole, head, part = trained_run(
        llama, conversations, tmp_path / "whole", contemplates=contemplates
    )
    # killed after the rows of steps 10 and 20 (loss), before step 20 was stored
    killed = trained_run(llama, conversations, tmp_path / "cut", 2, contemplates)[0]
    assert [r["step"] for r in killed] == [10, 20]
    assert "loss" in killed[1]
    rest, again, again_part = trained_run(
        llama, conversations, tmp_path / "cut", contemplates=contemplates
    )
    assert rest[0]["step"] == 20, "goes on from the state stored at step 10"

    def figures(rows):
        return [
            (r["step"], r.get("losses"), r.get("gradient_norm"), r.get("held_out")) for r in rows
        ]

    assert figures(rest) == figures(whole)[1:]
    one, two = parts(head, part).state_dict(), parts(again, again_part).state_dict()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], atol=1e-6, rtol=1e-5, msg=name)


def test_a_finished_run_has_nothing_left_to_do(llama, conversations, tmp_path):
    whole, head, _ = trained_run(llama, conversations, tmp_path, steps=10)
    rows, again, _ = trained_run(llama, conversations, tmp_path, steps=10)
    assert whole
    assert rows == []
    assert torch.equal(head.fc.weight, again.fc.weight), "the best weights are loaded all the same"


def test_a_folder_of_another_shape_is_refused(llama, conversations, tmp_path):
    trained_run(llama, conversations, tmp_path, steps=10)
    with pytest.raises(CheckpointError, match="other shapes"):
        trained_run(llama, conversations, tmp_path, steps=10, contemplates=True)


@pytest.mark.parametrize("contemplates", [False, True])
def test_a_tiny_conversation_is_learnt_and_decoding_shows_it(
    llama, prompt, greedy, conversations, tmp_path, contemplates
):
    """Over-fitting one conversation raises held-out agreement on it, and tau in real decoding."""
    one = conversations[:1]
    rows, head, part = trained_run(
        llama, one, tmp_path, steps=100, rate=5e-3, evaluate_every=50, contemplates=contemplates
    )
    reports = [r["held_out"] for r in rows if "held_out" in r]
    before, _ = fresh_modules(llama, one, contemplates)
    start = evaluate(DraftTrainee(llama, before, None), one)
    assert start["tau_chain"] < 3
    assert reports[-1]["tau_chain"] > 4.5
    head.requires_grad_(False)
    if part is not None:
        part.requires_grad_(False)
    settings = Settings(max_new_tokens=14, nodes=8, depth=5, top_k=2)
    rounds = list(decode(llama, fakes.method(head, part), prompt, settings))
    assert [t for r in rounds for t in r.token_ids] == greedy[len(prompt) : len(prompt) + 14]
    assert len(rounds) <= 1 + 6, "13 tokens in at most six passes"


def test_best_weights_are_kept_not_the_last(llama, conversations, tmp_path, monkeypatch):
    """Chosen by held-out acceptance: here the second of four evaluations is declared the best."""
    scores = iter([1.5, 2.5, 2.0, 1.0])
    seen = []

    def judged(trainee, held_out, accelerator=None, steps=5):
        seen.append(trainee.head.fc.weight.detach().clone())
        return {"tau_top8": next(scores)}

    monkeypatch.setattr(loop, "evaluate", judged)
    _, head, _ = trained_run(llama, conversations, tmp_path)
    assert len(seen) == 4
    assert torch.equal(head.fc.weight, seen[1])
    assert not torch.equal(head.fc.weight, seen[3])


def test_a_small_target_gets_a_draft_vocabulary_of_its_own_size(llama, tmp_path):
    """The usual 8192 is more than this target has: every token then is in the draft's words."""
    rows = [row(f"request number {n}", "the user and the hen") for n in range(40)]
    recipe = Recipe(
        method="eagle3",
        data=(write(tmp_path / "text.jsonl", rows),),
        settings=TrainSettings(steps=1, batch_tokens=200, unroll=1, warmup=1),
        run=tmp_path / "run",
        save=tmp_path / "saved",
        precision="no",
        command="a command",
    )
    run_recipe(llama, recipe, lambda fact: None)
    head = load_checkpoint(recipe.save, llama).head
    assert head.target_ids(torch.arange(llama.vocab)).tolist() == list(range(llama.vocab))


class Killed(Exception):
    pass


def test_a_resumed_run_reports_the_weights_that_it_saves(llama, tmp_path, monkeypatch):
    """The best step lies in the first session, which was killed; card and config must name it."""
    scores = iter([1.5, 2.5, 2.0, 1.0])
    best = []

    def judged(trainee, held_out, accelerator=None, steps=5):
        score = next(scores)
        if score == 2.5:
            best.append(trainee.head.fc.weight.detach().clone())
        figures = {"n": 1, "top1": [0.5], "top8": [0.5], "loss": [1.0], "tau_chain": 1.0}
        return figures | {"tau_top8": score}

    monkeypatch.setattr(loop, "evaluate", judged)
    rows = [row(f"request number {n}", "the user and the hen") for n in range(60)]
    recipe = Recipe(
        method="eagle3",
        data=(write(tmp_path / "text.jsonl", rows),),
        settings=TrainSettings(steps=8, batch_tokens=200, unroll=2, evaluate_every=2, warmup=2),
        run=tmp_path / "run",
        save=tmp_path / "saved",
        draft_vocab=30,
        precision="no",
        command="a command",
    )
    reports = []

    def report(fact: dict) -> None:
        reports.append(fact)
        if fact.get("step") == 4:
            raise Killed

    with pytest.raises(Killed):
        run_recipe(llama, recipe, report)
    run_recipe(llama, recipe, reports.append)
    saved = load_checkpoint(recipe.save, llama)
    assert saved.facts["chosen_step"] == 4
    assert saved.facts["held_out"]["tau_top8"] == 2.5
    torch.testing.assert_close(saved.head.fc.weight, best[0], atol=2e-3, rtol=1e-3)
    assert "step 4 were kept" in (recipe.save / "README.md").read_text()
    assert saved.head.shape.draft_vocab == 30
    assert set(llama.stop_ids) <= set(saved.head.target_ids(torch.arange(30)).tolist())


def test_learning_rate():
    settings = TrainSettings(steps=110, warmup=10)
    assert [rate_factor(step, settings) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert rate_factor(10, settings) == pytest.approx(1.0)
    assert rate_factor(60, settings) == pytest.approx(0.525)
    assert rate_factor(110, settings) == pytest.approx(0.05)
    assert rate_factor(500, settings) == pytest.approx(0.05)


# Text by the target ------------------------------------------------------------------------------


@pytest.fixture
def short_texts(monkeypatch):
    monkeypatch.setattr(synth, "REQUEST_TOKENS", 6)
    monkeypatch.setattr(synth, "LONG_REQUEST_TOKENS", 8)
    monkeypatch.setattr(synth, "ANSWER_TOKENS", 7)


def test_continuing_in_step_equals_continuing_alone(llama):
    """Left padding moves nothing: each prompt goes on as if it were alone."""
    prompts = [[1, 40, 41], chat_ids(llama, "the hen"), [9]]
    found = synth.continue_batch(llama, prompts, [0.0] * 3, [12] * 3, torch.Generator())
    for ids, answer in zip(prompts, found, strict=True):
        assert answer == reference.plain_text(llama, ids, Settings(max_new_tokens=12))


def test_each_prompt_has_its_own_limit_and_leaves_when_it_is_done(llama, monkeypatch):
    """Rows that are done leave the batch; those that stay go on as if they had been alone."""
    prompts = [[1, 40, 41], chat_ids(llama, "the hen"), [9], [9, 30]]
    sizes = []
    run = Target.run

    def counted(self, inputs, *rest):
        sizes.append(inputs.shape[0])
        return run(self, inputs, *rest)

    monkeypatch.setattr(Target, "run", counted)
    found = synth.continue_batch(llama, prompts, [0.0] * 4, [3, 12, 1, 12], torch.Generator())
    assert [sizes[n] for n in (0, 1, 2, 3)] == [4, 3, 3, 2]
    assert sizes[-1] == 2
    for ids, answer, limit in zip(prompts, found, [3, 12, 1, 12], strict=True):
        assert answer == reference.plain_text(llama, ids, Settings(max_new_tokens=limit))


def test_prompts_of_any_number_keep_their_order(llama, monkeypatch):
    monkeypatch.setattr(synth, "ROWS_AT_ONCE", 2)
    prompts = [chat_ids(llama, "the hen"), [9], [1, 40, 41], [9, 30], [7]]
    found = synth.continue_all(llama, prompts, [0.0] * 5, [4] * 5, torch.Generator())
    for ids, answer in zip(prompts, found, strict=True):
        assert answer == reference.plain_text(llama, ids, Settings(max_new_tokens=4))


def test_requests_mix_groups_and_ask_about_earlier_answers(llama, short_texts):
    dice, generator = random.Random(3), torch.Generator().manual_seed(0)
    requests = synth.draw_requests(llama, 120, ["A passage."], dice, generator)
    kinds = {kind for kind, _ in requests}
    assert kinds == set(synth.OPENINGS), "every group in one draw"
    framed = {kind for kind, text in requests if "A passage." in text}
    assert framed == set(synth.FRAMES)
    assert not any("{}" in text for _, text in requests)
    alone = synth.draw_requests(llama, 120, [], random.Random(3), generator)
    assert len(alone) == 120
    assert not any("A passage." in text for _, text in alone)


def test_continuing_stops_at_a_stop_id(llama):
    target: Target = fakes.tiny_target()
    prompts = [[1, 40, 41], chat_ids(target, "the hen")]
    free = synth.continue_batch(target, prompts, [0.0] * 2, [12] * 2, torch.Generator())
    target.stop_ids = frozenset({free[0][4]})
    cut = synth.continue_batch(target, prompts, [0.0] * 2, [12] * 2, torch.Generator())
    assert cut[0] == free[0][: free[0].index(free[0][4]) + 1]
    stop = free[0][4]
    assert cut[1] == (free[1][: free[1].index(stop) + 1] if stop in free[1] else free[1])


def test_sampling_in_step_has_the_targets_distribution(llama):
    """First tokens of many equal prompts at temperature 1, chi-square against the softmax."""
    probs = reference.probabilities(reference.full_logits(llama, [1, 40, 41])[-1].tolist(), 1.0)
    generator = torch.Generator().manual_seed(0)
    rounds = [
        synth.continue_batch(llama, [[1, 40, 41]] * 500, [1.0] * 500, [1] * 500, generator)
        for _ in range(4)
    ]
    drawn = [answer[0] for batch in rounds for answer in batch]
    likely = sorted(range(len(probs)), key=lambda t: -probs[t])[:12]
    counts = [drawn.count(t) for t in likely]
    counts.append(2000 - sum(counts))
    wanted = [2000 * probs[t] for t in likely]
    wanted.append(2000 - sum(wanted))
    assert stats.chisquare(counts, wanted).pvalue > 0.001


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_stopped_synthesis_writes_the_same_text(llama, tmp_path, short_texts):
    def write_until(name: str, count: int) -> list[dict]:
        reports = list(
            synth.synthesise(llama, tmp_path / name, conversations=count, batch=3, seed=5)
        )
        assert [r["conversations"] for r in reports] == sorted(r["conversations"] for r in reports)
        return lines(tmp_path / name)

    whole = write_until("whole", 8)
    first = write_until("parts", 3)
    assert first == whole[: len(first)]
    assert write_until("parts", 8) == whole
    assert len(whole) >= 8
    assert set(whole[0]) == {"kind", "user", "assistant", "temperature", "finished", "batch"}
    assert len({synth.key(line["user"]) for line in whole}) == len(whole), "no request twice"


def test_given_prompts_are_answered_once(llama, tmp_path, short_texts):
    out = tmp_path / "out.jsonl"
    given = [("a", "the hen"), ("a", "The  HEN"), ("b", "a user"), ("b", "the end")]
    options = {"conversations": 99, "batch": 2, "seed": 1}
    list(synth.synthesise(llama, out, prompts=given, **options))
    users = [line["user"] for line in lines(out)]
    assert users == ["the hen", "a user", "the end"]
    list(synth.synthesise(llama, out, prompts=given, **options))
    assert [line["user"] for line in lines(out)] == users


def test_damaged_text_files_are_named(llama, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text('{"user": "a"}\n{"user"\n')
    with pytest.raises(DataError, match="line 2"):
        list(synth.synthesise(llama, out, conversations=9, batch=1, seed=0))


def test_key_of_a_request():
    assert synth.key(" The\n hen ") == synth.key("the hen")
    assert synth.key("the hen") != synth.key("the  men")
    assert len(synth.key("x")) == 16

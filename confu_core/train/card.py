"""Model cards, rendered from what a checkpoint's own config says; never written by hand."""

from __future__ import annotations

import json
from pathlib import Path


def write_card(folder: Path) -> None:
    """Write `README.md` beside a checkpoint's `config.json`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    facts = config["training"]
    held_out = facts["held_out"]
    depths = "".join(
        f"| {depth} | {top1:.3f} | {top8:.3f} | {loss:.3f} |\n"
        for depth, (top1, top8, loss) in enumerate(
            zip(held_out["top1"], held_out["top8"], held_out["loss"], strict=True), 1
        )
    )
    data = "\n".join(
        f"- `{name}`, sha256 `{digest}`" for name, digest in facts["data_sha256"].items()
    )
    experts = "".join(
        f"- {name.replace('_', ' ')}: {held_out[name]}\n"
        for name in ("contemplate_experts", "future_experts")
        if name in held_out
    )
    usage = f"\nMean router weight of each expert on held-out text:\n\n{experts}" if experts else ""
    part = config["contemplation"] or {}
    extended = bool(part.get("adapter_rank") or part.get("read_outs"))
    name = ("ConFu" if extended else "ConFu lite") if part else "EAGLE-3"
    reading = (READING if part else "") + (EXTENDED.format(**part) if extended else "")
    if "read_outs" in facts:
        chosen = {name: tried["chosen"][0] for name, tried in facts["read_outs"].items()}
        reading += FITTED.format(**chosen)
    text = f"""# {name} draft head for {config["target"]["name"]}

Made by `{facts["command"]}`.
{reading}
| | |
|---|---|
| target | {config["target"]["name"]} (fingerprint `{config["target"]["fingerprint"]}`), frozen |
| started from | {started_from(facts)} |
| text | {facts["conversations"]} conversations written by the target, {facts["answer_tokens"]} answer tokens |
| steps | {facts["settings"]["steps"]}; the weights of step {facts["chosen_step"]} were kept, by held-out acceptance |
| time | {facts["minutes"]} minutes of steps, on a machine that did other work too |
| draft vocabulary | {config["draft"]["draft_vocab"]} tokens, {100 * facts["draft_vocabulary_coverage"]:.1f} % of held-out answer tokens |
| machine | {facts["machine"]}, {facts["precision"]} |
| settings | `{json.dumps(facts["settings"])}` |

Training text:

{data}

## Held-out figures

{facts["held_out_conversations"]} conversations that were not trained on, n = {held_out["n"]} starts; teacher forced, not yet decoding. `top-1` and
`top-8`: share of starts where the draft's best guess, or one of its best eight, is the token that
followed.

| depth | top-1 | top-8 | loss |
|---|---|---|---|
{depths}
Implied acceptance length of a chain {held_out["tau_chain"]:.2f}, bound for a tree of width 8
{held_out["tau_top8"]:.2f} (1 + the share of starts agreeing up to each depth, summed over 5 depths).
{usage}
Licence: Apache-2.0, as the target. The head only guesses; the text is always the target's own.
"""
    (folder / "README.md").write_text(text, encoding="utf-8")


READING = """
ConFu as in "Contemplate the Future" (arXiv 2603.08899), as far as its public descriptions go, with
these choices of ours: contemplate tokens stand one position behind their node; soft prompts are
keys and values per layer; the future token also reaches the draft's input state at every step
(gated), not only as an extra key/value entry; replication serves later starts only; routers read
centred, standardised states.
"""


EXTENDED = """
And with these extensions of ours, which the paper does not have: adapters of rank {adapter_rank} on
contemplate rows (0 is none), {read_outs} read-outs of the future token mixed into the draft's own
guesses, and an auxiliary loss for them (docs/training.md). A head without them is ConFu lite.
"""

FITTED = """
When training was over, the read-outs' weights were multiplied by {factor:g}, the best of several
factors for acceptance on half of the held-out conversations, and the mixed logits divided by
{temperature:g}, the best of several temperatures for likelihood there. The figures below are over all of them.
"""


def started_from(facts: dict) -> str:
    """The head that a training continued, with its own record and the one before that, and so on;
    or where a fresh one began."""
    before = facts.get("start_facts")
    if not before:
        return facts["start"] or "the target's last layer"
    remark = f"; {before['remark']}" if "remark" in before else ""
    return (
        f"{facts['start']}: `{before['command']}` ({before['answer_tokens']} answer tokens, "
        f"{before['settings']['steps']} steps{remark}), which started from {started_from(before)}"
    )

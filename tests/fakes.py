"""Small seeded stand-ins: real Llama and Qwen targets of a few thousand numbers, a real byte-level
tokenizer, random draft heads, and drafters whose hit rate is known.

Everything is made in code, from a seed, in float32 on the CPU; nothing is read from disk.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from confu_core.budget import AutoBudget, FixedBudget
from confu_core.checkpoints import Checkpoint, save_checkpoint
from confu_core.contemplation import Contemplator, NoContemplator
from confu_core.drafter import Draft
from confu_core.heads import Contemplation, ContemplationShape, DraftHead, DraftShape
from confu_core.methods import Method, with_head
from confu_core.target import Target
from confu_core.tree import DraftTree

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, TURN_START, TURN_END = 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = (
    "t h", "th e", "Ġ the", "a n", "an d", "Ġ and", "i n", "in g", "e r", "o n", "Ġ a", "Ġ t",
    "s t", "r e", "e n", "o u", "Ġ w", "Ġ s", "Ġ i", "Ġi s", "e s", "e d", "l l", "Ġ b", "u s",
    "us er", "as sist", "a s", "Ã ©", "ð Ł", "â Ĥ", "l y", "o r", "Ġ of", "o f", "a t", "Ġ c",
)  # fmt: skip
PADDING = 5  # rows of the embedding beyond the tokenizer, as real targets have them


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about 300 tokens, as Llama-3, Qwen and SmolLM2 have them.

    Every byte is a token; a few merges make words, one whole letter (é), and halves of characters.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIALS, *letters]
    merges = []
    for left, right in (merge.split() for merge in MERGES):
        if left in words and right in words:
            merges.append((left, right))
            words.append(left + right)
    bpe = models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIALS[TURN_START],
        eos_token=SPECIALS[TURN_END],
        pad_token=SPECIALS[TURN_END],  # as in the default target: padding is the end of a turn
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def byte_ids(target: Target, data: bytes) -> list[int]:
    """One token per byte, whatever the merges would make of them."""
    alphabet = bytes_to_letters()
    return [target.tokenizer.convert_tokens_to_ids(alphabet[byte]) for byte in data]


def bytes_to_letters() -> dict[int, str]:
    """GPT-2's letter for every byte: printable ones stand for themselves, the others for the
    letters from U+0100 on."""
    visible = set(range(0x21, 0x7F)) | set(range(0xA1, 0xAD)) | set(range(0xAE, 0x100))
    table = {}
    for byte in range(256):
        hidden_before = sum(other not in visible for other in range(byte))
        table[byte] = chr(byte) if byte in visible else chr(0x100 + hidden_before)
    return table


def tiny_model(kind: str = "llama", seed: int = 0, **config) -> torch.nn.Module:
    """A randomly initialised Hugging Face model of 8 layers; `config` overrides its
    fields, None leaves one out."""
    sizes = {
        "vocab_size": len(tiny_tokenizer()) + PADDING,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "pad_token_id": TURN_END,
        "bos_token_id": TURN_START,
        "eos_token_id": TURN_END,
    }
    fields = {name: value for name, value in (sizes | config).items() if value is not None}
    settings = AutoConfig.for_model(kind, **fields)
    settings._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name:  # made as ones, which would test nothing
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.generation_config = GenerationConfig(eos_token_id=[TURN_END, END_OF_TEXT])
    return model.eval()


def tiny_target(kind: str = "llama", seed: int = 0, **config) -> Target:
    """A tiny random target with the tiny tokenizer."""
    return Target(tiny_model(kind, seed, **config), tiny_tokenizer(), f"tiny-{kind}-{seed}")


def randomise(module: torch.nn.Module, seed: int, scale: float) -> None:
    """Fill every parameter with seeded noise; norms around one."""
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=dice)
            else:
                parameter.normal_(0.0, scale, generator=dice)


def tiny_head(
    target: Target,
    seed: int = 0,
    *,
    draft_vocab: int = 48,
    vocabulary: Iterable[int] | None = None,
    peak: float = 1.0,
    hidden: int | None = None,
    rope_theta: float = 500.0,
) -> DraftHead:
    """A random draft head with D < V and a d2t that skips ids irregularly.

    Args:
        vocabulary: the target ids that it can name; drawn if not given.
        peak: factor on the output rows; from about 30 on, probabilities round to exactly 1.
    """
    width = hidden or target.hidden
    dice = torch.Generator().manual_seed(1000 + seed)
    if vocabulary is None:
        vocabulary = torch.randperm(target.vocab, generator=dice)[:draft_vocab].tolist()
    ids = torch.tensor(sorted(set(vocabulary)))
    head = DraftHead(
        DraftShape(
            hidden=width,
            target_hidden=target.hidden,
            heads=4,
            kv_heads=2,
            head_dim=6,  # not hidden / heads, and unlike the target's
            intermediate=40,
            vocab=target.vocab,
            draft_vocab=len(ids),
            rms_eps=1e-5,
            rope_theta=rope_theta,
            tap_layers=target.tap_layers,
        )
    )
    randomise(head, seed, 0.3)
    with torch.no_grad():
        head.lm_head.weight.mul_(peak)
        head.d2t.copy_(ids - torch.arange(len(ids)))
    return head.eval().requires_grad_(False)


def tiny_contemplation(
    target: Target, head: DraftHead, seed: int = 0, *, scale: float = 0.5, **switches
) -> Contemplation:
    """A random ConFu part in which every parameter matters: gates, projection, routers, prompts.

    Args:
        scale: of all its numbers; 1000 makes an absurd one.
        switches: fields of `ContemplationShape`.
    """
    sizes = {"contemplate_experts": 5, "future_experts": 4, "top_k": 2, "soft_prompts": 3}
    part = Contemplation(
        ContemplationShape(
            layers=target.layers,
            kv_heads=target.kv_heads,
            head_dim=target.head_dim,
            target_hidden=target.hidden,
            hidden=head.shape.hidden,
            rms_eps=1e-5,
            target_heads=target.heads,
            target_intermediate=target.intermediate,
            **(sizes | switches),
        )
    )
    randomise(part, 2000 + seed, scale)
    if part.adapters is not None:  # small changes: a product of two large ones only magnifies noise
        randomise(part.adapters, 4000 + seed, 0.2 * scale)
    dice = torch.Generator().manual_seed(3000 + seed)
    for mixture in (part.contemplate, part.future):
        mixture.mean.normal_(0.0, 0.5, generator=dice)
        mixture.scale.uniform_(0.5, 1.5, generator=dice)
    return part.eval().requires_grad_(False)


def checkpoint(head: DraftHead, part: Contemplation | None = None) -> Checkpoint:
    """A head as if it had been loaded."""
    kind = "eagle3" if part is None else "confu"
    return Checkpoint(f"tiny-{kind}", kind, head, part, "0" * 64, {})


def method(head: DraftHead, part: Contemplation | None = None) -> Method:
    """EAGLE-3 with this head, or ConFu if there is a contemplating part."""
    return with_head("eagle3" if part is None else "confu", checkpoint(head, part))


# Drafters whose hits are known ------------------------------------------------------------------


class KnowingDrafter:
    """Drafts a chain of `propose(position)` tokens, each with wrong siblings around it.

    It has EagleDrafter's interface. `propose` gets the text position of the token to guess.
    """

    def __init__(
        self,
        target: Target,
        propose: Callable[[int], int],
        *,
        budget: FixedBudget | AutoBudget,
        top_k: int,
        capacity: int,
    ) -> None:
        self._vocab = target.vocab
        self._propose = propose
        self._nodes = budget.most_nodes
        self._siblings = min(top_k, target.vocab) - 1
        self.length = 0  # of EagleDrafter's lasting cache, had this one a cache

    def draft(self, taps, token_ids, future, depth, on_step) -> Draft:
        assert taps.shape[0] == len(token_ids)
        self.length += len(token_ids)
        tokens, parents, depths, scores = [token_ids[-1]], [-1], [0], [0.0]
        end = 0  # the chain's last node
        for level in range(1, depth + 1):
            guess = self._propose(self.length + level)
            # Siblings first, so that the right child is not simply the first one.
            row = [(guess + 7 * n) % self._vocab for n in range(self._siblings, 0, -1)]
            room = self._nodes - len(tokens)
            if room < 1:
                break
            row = [*row[: room - 1], guess]
            parent = end
            for token in row:
                end = len(tokens)
                tokens.append(token)
                parents.append(parent)
                depths.append(level)
                scores.append(-0.5 * level)
        return Draft(DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(scores)), depth)


def knowing_method(
    propose: Callable[[int], int], head: DraftHead | None = None, part: Contemplation | None = None
) -> Method:
    """A method that drafts by `propose`; with a ConFu part, contemplate tokens ride along."""

    def drafter(target: Target, **sizes) -> KnowingDrafter:
        return KnowingDrafter(target, propose, **sizes)

    contemplator = NoContemplator if part is None else partial(Contemplator, part, head)
    saved = None if head is None else checkpoint(head, part)
    return Method("knowing", saved, drafter, contemplator)


def oracle(text: list[int], **parts) -> Method:
    """Drafts the target's own continuation. `text`: prompt and continuation; behind it, guesses."""
    return knowing_method(lambda position: text[position] if position < len(text) else 3, **parts)


def always_wrong(text: list[int], vocab: int, **parts) -> Method:
    """Never drafts the right token, neither as chain nor (with few siblings) beside it."""

    def propose(position: int) -> int:
        return (text[position] + 1) % vocab if position < len(text) else 3

    return knowing_method(propose, **parts)


def half_right(text: list[int], vocab: int, seed: int = 0, **parts) -> Method:
    """Drafts the right token at about two positions in three."""

    def propose(position: int) -> int:
        right = random.Random(f"{seed}/{position}").random() < 0.65
        return (text[position] + (not right)) % vocab if position < len(text) else 3

    return knowing_method(propose, **parts)


def write_models(root: Path, **config) -> Path:
    """Write a tiny target (`config` changes it), and an EAGLE-3 and a ConFu head for it, as the
    folders `target`, `eagle3` and `confu` of root."""
    from confu_core.compare import load_target

    tiny_model(**config).save_pretrained(root / "target")
    tiny_tokenizer().save_pretrained(root / "target")
    target = load_target(str(root / "target"), "cpu", "float32", lambda message, fraction: None)
    head = tiny_head(target)
    save_checkpoint(root / "eagle3", head, None, target, {})
    save_checkpoint(root / "confu", head, tiny_contemplation(target, head), target, {})
    return root

"""One training step over several processes: each process takes one batch; process 0 writes the
gradients that the optimiser would see. Run by `test_train_reports.py`, not a test itself.

Usage: distributed_step.py OUT.safetensors
"""

from __future__ import annotations

import random
import sys

import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from confu_core.checkpoints import parts
from confu_core.train.data import Conversation, collate
from confu_core.train.loop import TrainSettings, total_loss
from confu_core.train.losses import DraftTrainee
from tests import fakes


def modules(llama):
    """The same head and contemplation in every process."""
    head = fakes.tiny_head(llama).requires_grad_(True)
    return head, fakes.tiny_contemplation(llama, head, adapter_rank=2, read_outs=2).requires_grad_(
        True
    )


def own_batch(llama, index: int):
    """The batch of process `index`: 20 and 26 tokens, so the two are not alike."""
    dice = random.Random(index)
    ids = tuple(dice.randrange(5, llama.vocab) for _ in range(20 + 6 * index))
    return collate([Conversation(ids, 7, "")], [0])


def main() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    llama = fakes.tiny_target()
    head, part = modules(llama)
    trainee = accelerator.prepare(DraftTrainee(llama, head, part))
    trainee.train()
    index = accelerator.process_index
    result = trainee(own_batch(llama, index), 3, random.Random(index), 2, True)
    accelerator.backward(total_loss(result, TrainSettings(steps=1)))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        gradients = {
            name: p.grad.clone()
            for name, p in parts(head, part).named_parameters()
            if p.grad is not None
        }
        gradients["processes"] = torch.tensor(accelerator.num_processes)
        save_file(gradients, sys.argv[1])


if __name__ == "__main__":
    main()

"""Hugging Face `Trainer` with its optimizer on the CPU.

`offload_optimizer(args)` gives the trainer the class and the hyper-parameters of its arguments; the trainer makes the
groups and builds it once the model is on its device. Its clipping (`max_grad_norm=1.0` unless told otherwise),
accumulation, schedules, checkpoints and best-model reload work as with `torch.optim.AdamW`. An optimizer of your own
goes in as `optimizers=(optimizer, None)`: move the model to the trainer's device before you build it.
"""

from __future__ import annotations

import tempfile

import torch
import transformers

from zofftk.hf import offload_optimizer

VOCAB = 64


class Counting(torch.utils.data.Dataset):
    """Sequences that count upwards, from anywhere."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(16) + index) % VOCAB
        return {"input_ids": ids, "labels": ids}


def train(folder: str, steps: int = 30) -> list[float]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    config.loss_type = "ForCausalLM"
    model = transformers.GPT2LMHeadModel(config).bfloat16()
    args = transformers.TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
    )
    kinds = offload_optimizer(args)
    trainer = transformers.Trainer(model, args, train_dataset=Counting(), optimizer_cls_and_kwargs=kinds)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        losses = train(folder)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")

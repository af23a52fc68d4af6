"""The Hugging Face Trainer with a tiny random model."""

import tempfile

import torch
from marked import mark
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if logs and "loss" in logs and state.is_world_process_zero:
            print(f"loss {state.global_step} {float(logs['loss']):.6f}")


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
mark(model.transformer.h)
rows = torch.randint(0, 64, (128, 16), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in rows]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    Trainer(model, arguments, train_dataset=data, callbacks=[Losses()]).train()

"""The Hugging Face Trainer with checkpoints: `hf_restarts.py FOLDER [STEP]`. At STEP rank 1 is killed, once."""

import os
import signal
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

folder, fatal = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
killed = folder / "killed"


class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if logs and "loss" in logs and state.is_world_process_zero:
            print(f"loss {state.global_step} {float(logs['loss']):.6f}", flush=True)

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == fatal and args.process_index == 1 and fatal and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
rows = torch.randint(0, 64, (128, 16), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in rows]
arguments = TrainingArguments(
    output_dir=str(folder / "checkpoints"),
    use_cpu=True,
    max_steps=12,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    logging_steps=1,
    save_steps=3,
    report_to=[],
    disable_tqdm=True,
    seed=0,
)
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Losses()])
last = get_last_checkpoint(arguments.output_dir) if Path(arguments.output_dir).is_dir() else None
trainer.train(resume_from_checkpoint=last)

"""The Hugging Face Trainer with checkpoints on each machine's own disk, which is $DISK: `hf_checkpoints.py FOLDER`.

FOLDER is for what the machines are to do, once each: `kill-STEP` lets rank 1 lose its disk at STEP and die, and at
`stop-STEP` rank 0 writes the path of its disk there, and waits to be killed.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ringfort.integrations.transformers import RingfortCallback

told, disk = Path(sys.argv[1]), Path(os.environ["DISK"])


class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if logs and "loss" in logs and state.is_world_process_zero:
            print(f"loss {state.global_step} {float(logs['loss']):.6f}", flush=True)

    def on_step_begin(self, args, state, control, **_):
        kill, stop = told / f"kill-{state.global_step}", told / f"stop-{state.global_step}"
        if args.process_index == 1 and kill.exists():
            kill.unlink()
            shutil.rmtree(disk)
            os.kill(os.getpid(), signal.SIGKILL)
        if args.process_index == 0 and stop.exists():
            stop.unlink()
            (told / "new").write_text(str(disk))
            (told / "new").rename(told / "stopped")
            signal.pause()


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
rows = torch.randint(0, 64, (128, 16), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in rows]
arguments = TrainingArguments(
    output_dir=str(disk),
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
callback = RingfortCallback(keep=2)
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Losses(), callback])
trainer.train(resume_from_checkpoint=callback.last_checkpoint(arguments))

"""The Hugging Face Trainer with the callback and the backend of Ringfort: `hf_callback.py FOLDER`."""

import json
import sys
from contextlib import closing

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from ringfort.integrations.transformers import RingfortCallback
from ringfort.telemetry.records import Step, Values
from ringfort.telemetry.trace import own_trace
from ringfort.telemetry.trace_file import TraceReader


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x, labels):
        guess = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(guess, labels), "logits": guess}


samples = [{"x": torch.tensor([i / 64]), "labels": torch.tensor([i / 32 + 1])} for i in range(64)]
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    use_cpu=True,
    ddp_backend="ringfort",
    max_steps=6,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    logging_steps=2,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(Line(), arguments, train_dataset=samples, callbacks=[RingfortCallback()]).train()
print("backend", dist.get_backend(), "of", dist.get_world_size())
if dist.get_rank() == 0:
    with closing(TraceReader(own_trace().path)) as reader:
        records, total = list(reader.new_records()), reader.header().total_steps
    steps = {one.number: one.samples for one in records if isinstance(one, Step)}
    logged = {one.step: sorted(one.values) for one in records if isinstance(one, Values) and "loss" in one.values}
    print("seen", json.dumps([total, steps, logged]))

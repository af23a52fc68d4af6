"""Supervised fine-tuning with TRL on a tiny random model and a tokenizer that is made here."""

import tempfile

import torch
from datasets import Dataset
from marked import mark
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if logs and "loss" in logs and state.is_world_process_zero:
            print(f"loss {state.global_step} {float(logs['loss']):.6f}")


words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]
plain = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
)
mark(model.model.layers)
texts = [" ".join(f"w{(7 * row + 3 * place) % 61}" for place in range(12)) for row in range(64)]
with tempfile.TemporaryDirectory() as folder:
    config = SFTConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
        seed=0,
    )
    data = Dataset.from_dict({"text": texts})
    SFTTrainer(model, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Losses()]).train()

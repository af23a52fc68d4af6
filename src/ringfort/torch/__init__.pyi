"""The public names, each with its module. `__init__.py` reads this file: there is no other list of them."""

from .compression import compress_hook as compress_hook, compress_reduce_scatter as compress_reduce_scatter
from .cuda import gpu_all_reduce as gpu_all_reduce, gpu_broadcast as gpu_broadcast
from .sharding import ShardingStrategy as ShardingStrategy, shard as shard
from .training.run import TorchRun as TorchRun, elastic as elastic
from .uneven import local_steps as local_steps, weighted_hook as weighted_hook

BACKEND: str

def register() -> None: ...

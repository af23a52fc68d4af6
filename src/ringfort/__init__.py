"""Ringfort trains one model across the machines you already own.

The layers, top to bottom; each imports only those below it (tests/unit/test_layers.py):

    cli/          one file per command: parse, call, print
    bench/ demo/  what two of the commands do
    launch/       `ringfort run`: agreement (pure), processes, reaper; local_ranks starts ranks on this machine
    autoload.py   what torch's entry points run
    integrations/ elastic runs inside the loops of Accelerate and Lightning; Ray and Dask
    torch/        process_group.py: the `torch.distributed` backend; CUDA staging, FSDP, hooks, torchrun
    testing/      shipped: conformance checks for any Backend, virtual clock, fault timetable, simulated network
    training/     average_gradients, local_steps/, elastic/: for any framework
    rpc/          RpcAgent: functions of one rank that others call
    startup.py    init() and join(): how a process gets its context
    context.py    DistributedContext: the user's handle on a group
    cluster/      core/ (pure: membership, election, health, topology), net/ (control links, the control process),
                  discovery/, diagnosis/; node.py (this process as a peer), backend.py (AutoDiscoveryBackend)
    compression/  codecs (pure: tensor to bytes and back), error feedback, the compressed collectives, automatic choice
    collectives/  algorithms.py (pure: who sends what when), reduction.py (kernels), cost_model.py, signature.py
    backends/     base.py (Backend), group.py (Group), tcp, ring, simulated, sub; engines/ has gloo, mpi, nccl, hybrid
    bootstrap/    how processes meet: connector, listener, rendezvous at rank 0, fixed list, torch store, links
    transport/    frames, messages, handshake, records (pure); streams: tcp, shared memory, memory; engine
    identity/     who a node is, the cluster secret and its join codes; noise.py (pure handshake)
    telemetry/    metrics; traces of steps, for those who watch
    config.py     settings; the only reader of the environment
    launchers.py  the variables of torchrun, mpiexec and srun
    errors.py     every exception

The public names are listed in __init__.pyi, once. Each is imported when it is first used (lazy_loader, SPEC 1): so
`import ringfort` costs nothing where only the command line or a torch entry point is wanted.
"""

import lazy_loader  # pyright: ignore[reportMissingTypeStubs]

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # pyright: ignore[reportUnknownVariableType]

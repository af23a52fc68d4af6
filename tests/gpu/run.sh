#!/usr/bin/env bash
# Everything that needs a GPU, in under nine minutes: tests/gpu/run.sh [FOLDER]. Figures and logs go to FOLDER.
# PYTHON names the interpreter, which has torch with CUDA; the rest of the dependencies may come by PYTHONPATH.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(realpath "${1:-.}")
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
ended=0
run() { # SECONDS LOG COMMAND...
    local seconds=$1 log=$2
    shift 2
    timeout --kill-after=5 "$seconds" "$@" 2>&1 | tee "$out/$log" || ended=1
}
run 40 device.log "$python" -c 'import torch; from ringfort.torch.cuda import CudaDevice
print(torch.__version__, torch.cuda.get_device_name(), CudaDevice("cuda").device)'
run 120 benchmark.log "$python" -m benchmarks.gpu --out "$out/gpu.json"
run 100 nccl.log "$python" -m pytest tests/unit/backends/engines/test_nccl.py -q -p no:cacheprovider --maxfail=5 --tb=short
run 270 cuda.log "$python" -m pytest tests/gpu -q -p no:cacheprovider --maxfail=9 --tb=short --durations=8
exit $ended

"""From an endpoint file to what the engine runs with on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from tideforge.costmodel import hardware, launch
from tideforge.costmodel.launch import LaunchCommand
from tideforge.costmodel.options import require_same_dtype
from tideforge.data.logs import find_logs
from tideforge.engine.config import Limits, ModelConfig, Settings, bucket
from tideforge.engine.lab import require_sandbox
from tideforge.engine.sandbox import REQUIRE
from tideforge.errors import UserError
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.incumbent import first_forward

GPU_SPARES = 3
GPU_NOISE_TRIALS = (
    8  # a few seconds each there; a CPU's take too long, and its gains are far above what workers differ by
)
GPU_DECODE_STEPS = 64  # a run ends sooner when a request comes


def worker_cpus() -> tuple[int, ...]:
    """The measuring worker has the last core to itself, where there are two or more."""
    cores = sorted(range(os.cpu_count() or 1))
    return (cores[-1],) if len(cores) > 1 else ()


def other_cpus() -> tuple[int, ...]:
    """The cores for everything else."""
    cores = sorted(range(os.cpu_count() or 1))
    return tuple(cores[:-1]) if len(cores) > 1 else tuple(cores)


def gpus() -> int:
    """How many devices NVIDIA's driver shows here."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def has_gpu() -> bool:
    return gpus() > 0


def require_devices(endpoint: Endpoint) -> None:
    """UserError where the search names a device that this machine has not."""
    for device in endpoint.search.devices:
        kind, _, index = device.partition(":")
        if kind == "cuda" and int(index) >= (here := gpus()):
            there = f"{here} GPUs are here" if here else "no GPU is here"
            raise UserError("search.devices", f"names {device}, but {there}", "name those of this machine, or none")


def device_for(endpoint: Endpoint) -> str:
    """A GPU where the endpoint names one and this machine has one. UserError where only the first is true."""
    if endpoint.hardware.name == "cpu":
        return "cpu"
    if not has_gpu():
        raise UserError(
            "hardware.name", f"is {endpoint.hardware.name}, but no GPU is here", "run on the GPU's machine or name cpu"
        )
    return "cuda"


def check_endpoint(endpoint: Endpoint) -> None:
    """Raises the UserError that a server or a night would end with later, before anything is started or written.

    Of the logs that the file names only the heads are read.
    """
    from tideforge.data.mapping import chosen_formats
    from tideforge.data.readers import head

    hardware.get(endpoint.hardware.name)
    ModelConfig.load(endpoint.model)
    folder = first_forward(endpoint)
    if not (folder / "forward.py").is_file():
        raise UserError(str(folder), "holds no forward.py", "mend the field forward")
    formats = chosen_formats(endpoint.traffic.formats)
    for path in find_logs(endpoint.traffic.logs):
        head(path, formats)
    settings = settings_for(endpoint)
    require_devices(endpoint)
    if settings.sandbox == REQUIRE:
        require_sandbox(settings.model, settings.device)


def settings_for(endpoint: Endpoint) -> Settings:
    """Limits as the launch command states them under the names of this project's server; its defaults otherwise."""
    command = launch.parse(endpoint.launch)
    require_own_server(command, endpoint)
    default = Limits()

    def number(flag: str, fallback: int) -> int:
        value = command.whole(flag)
        return fallback if value is None else value

    device = device_for(endpoint)
    limits = Limits(
        max_num_seqs=number("--max-num-seqs", default.max_num_seqs),
        max_num_batched_tokens=number("--max-num-batched-tokens", default.max_num_batched_tokens),
        max_model_len=number("--max-model-len", default.max_model_len),
        decode_steps=1 if device == "cpu" else GPU_DECODE_STEPS,
    )
    return Settings(
        state=endpoint.state.resolve(),
        model=endpoint.model.resolve(),
        dtype=endpoint.precision,
        limits=limits,
        block_size=number("--block-size", 16),
        num_blocks=number("--num-blocks", 512),
        threads=number("--threads", 1),
        device=device,
        sandbox=endpoint.sandbox,
        worker_cpus=worker_cpus() if device == "cpu" else (),
        spares=1 if device == "cpu" else GPU_SPARES,
        capture_rows=() if device == "cpu" else graph_rows(limits.max_num_seqs),
        capture_tokens=() if device == "cpu" else tuple(1 << power for power in range(4, 12)),
        capture_contexts=() if device == "cpu" else graph_contexts(limits.max_model_len),
    )


def require_own_server(command: LaunchCommand, endpoint: Endpoint) -> None:
    """UserError when the launch command starts another server, or this one otherwise than the endpoint file says."""
    if command.engine != "tideforge":
        problem = f"names {command.engine}, which only `tideforge rank` knows"
        raise UserError("launch", problem, "begin it with 'tideforge serve': no other server takes a night's forward")
    require_same_dtype(command, endpoint.precision)
    model = command.get("--model")
    if model and Path(model).resolve() != endpoint.model.resolve():
        raise UserError(
            "launch: --model", f"is {model}, but the endpoint's model is {endpoint.model}", "make the two agree"
        )


def noise_trials(endpoint: Endpoint) -> int:
    """How often the search measures the incumbent against itself before it measures candidates."""
    return 0 if device_for(endpoint) == "cpu" else GPU_NOISE_TRIALS


def graph_rows(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture: 1, 2, 4, then every 8 up to 64, then every 32; always the largest."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(96, max_num_seqs, 32), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


def graph_contexts(max_model_len: int) -> tuple[int, ...]:
    """Longest contexts to capture: 1,024 tokens, where attention needs few splits, and all that a request may have."""
    longest = bucket(max_model_len)
    return tuple(sorted({min(1024, longest), longest}))


def floor_figures(endpoint: Endpoint) -> tuple[float, int]:
    """(bandwidth in bytes/s, last-level cache in bytes) of one device, from the spec sheet: what the floor is made of."""
    return hardware.get(endpoint.hardware.name).read_bytes_per_s, cache_bytes()


def cache_bytes() -> int:
    """The largest CPU cache that Linux reports."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1] in units), default=0)

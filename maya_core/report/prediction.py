"""What Maya says of a job. The JSON is versioned: fields are added, never renamed or given another meaning. docs/prediction.md.

Units are in the names. Times are of one steady step unless they say otherwise; what is not known is None, never a guess
that looks like a number.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

VERSION = 1


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a newer minor field does not stop an older reader


class Peak(Part):
    """A share of the memory that is live at the peak, by where in the program it was allocated."""

    module: str  # "" outside any
    phase: str
    source: str  # file:line of the program's own code; "" where there is none
    category: str
    bytes: int
    blocks: int


class DeviceMemory(Part):
    """Peak memory of one emulated GPU."""

    rank: int
    device: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    outside_allocator_bytes: int  # the sum of `outside_bytes`
    outside_bytes: dict[str, int]  # CUDA context and libraries, NCCL's buffers
    capacity_bytes: int
    by_category_bytes: dict[str, int]  # at the peak; adds up to peak_allocated_bytes
    peak_step: int
    peak_phase: str
    peak_module: str  # whose allocation made the peak,
    peak_source: str  # and where in the program's code
    at_peak: list[Peak]  # what is live then, largest first
    out_of_memory_bytes: int | None = None  # the most that was asked for where memory ran out
    out_of_memory_step: int | None = None
    fits: bool | None  # None: the program ended before its time, for another reason


class Memory(Part):
    fits: bool | None
    ranks: list[DeviceMemory]  # every GPU of every emulated rank

    @property
    def fullest(self) -> DeviceMemory | None:
        """The GPU with the least memory left."""
        return max(
            self.ranks,
            key=lambda one: (
                one.fits is False,
                one.fits is None,
                one.peak_reserved_bytes + one.outside_allocator_bytes,
            ),
            default=None,
        )


class Time(Part):
    """Where a rank's step goes. The first five add up to the step."""

    compute_s: float  # some kernel runs
    exposed_communication_s: float  # data moves between GPUs and nothing computes
    waiting_s: float  # in a collective or message for another rank: pipeline bubbles, stragglers
    copy_s: float  # only copies to or from the host run
    host_s: float  # nothing runs: the GPU waits for the host
    communication_s: float  # data moves, hidden or not
    hidden_communication_s: float
    slowed_s: float  # compute lost to communication beside it; part of compute_s
    by_family_s: dict[str, float]  # of kernels and collectives, as if each were alone


class RankTime(Time):
    rank: int
    step_time_s: float


class TopKernel(Part):
    """A distinct call in a step."""

    name: str
    shapes: str
    family: str
    calls: int
    seconds: float  # of all of them
    provenance: str
    profile: str


class Module(Part):
    """All that a module does in a step, and its share of the GPU's time."""

    name: str
    forward_s: float
    backward_s: float  # recomputation is in here
    recompute_s: float
    optimizer_s: float
    communication_s: float
    calls: int

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


class Communication(Part):
    """What a rank does on one communicator with one op, in a step."""

    group: str  # torch's group name
    backend: str
    group_size: int
    op: str
    calls: int
    bytes: int  # given by the rank; received where it gives nothing
    seconds: float
    bytes_per_s: float | None  # of the whole buffer, as nccl-tests count it ("algbw")


class Throughput(Part):
    samples_per_step: float | None
    tokens_per_step: float | None
    data_parallel: int | None  # how many ranks see data of their own
    source: Literal["given", "data loader", "integer inputs", "unknown"]
    detail: str  # how it was found, in words
    steps_per_epoch: int | None = None


class Cost(Part):
    usd_per_hour: float | None
    usd_per_step: float | None
    usd_per_1k_steps: float | None
    usd_per_epoch: float | None
    usd_per_million_tokens: float | None
    price: str  # whose, and of what date


class Energy(Part):
    """The GPUs' alone, from their power limit and how busy they are."""

    average_w_per_gpu: float
    joules_per_step: float
    kwh_per_1k_steps: float


class Confidence(Part):
    """Shares of the GPU's time by how it is known."""

    measured: float
    interpolated: float
    extrapolated: float
    bound: float
    profiles: dict[str, float]  # shares by where the number comes from


class UnknownOp(Part):
    """An op that nobody described to Maya: it is priced by the bytes it moves, a lower bound."""

    name: str
    calls: int  # in a step
    seconds: float


class Flops(Part):
    """Of the whole job in a step. Multiplications and additions of products, convolutions and attention, as torch counts them."""

    model: int  # without recomputation
    hardware: int  # with it
    peak_flops_per_gpu: float  # of the dtype most are done in
    dtype: str


class WorldPart(Part):
    size: int
    nodes: int
    gpus_per_node: int
    emulated_ranks: list[int]


class ClusterPart(Part):
    gpu: str
    gpu_name: str
    node: str
    network: str
    gpu_memory_bytes: int
    power_limit_w: float
    nvlink_bytes_per_s: float
    nic_bytes_per_s: float
    nics_per_node: int


class Assumptions(Part):
    """Inputs with defaults that change the numbers."""

    host: str  # modelled or measured
    clocks: str  # sustained or burst
    attention: str  # which generation of flash kernels
    calibration: str  # name of the user's own, "" for none
    calibrated_by: str = ""  # the actual runs whose factors are in it, in words


class TracePart(Part):
    steps: int
    ended: str  # completed, stopped (after the steps asked for), failed, or hung
    torch: str
    python: str
    events: int
    kernels_per_step: int | None


class Workload(Part):
    """What a step works on, as rank 0 sees it: by this a real run is known for the one that was predicted."""

    trained_parameters: int  # of the whole model, as far as a rank knows it: shards of FSDP and ZeRO-3 are put together
    frozen_parameters: int
    shapes: dict[str, int]  # how many parameters have which shape and dtype
    autocast: str  # the dtype, "" without
    inputs: list[str]  # shapes and dtypes of what the models are called with; a length that changes is '*'
    calls_per_step: int  # micro-batches, of each model that is called by itself
    sharding: list[str]
    group_sizes: list[int]  # of the rank's process groups


class Compiled(Part):
    """What torch.compile did, on the rank with the most graphs."""

    graphs: int
    triton_kernels_per_step: int
    compile_s: float  # that it took under emulation, on this host; part of no other time
    graph_breaks: list[str]  # where, and why
    recompiles: list[str]
    failed: list[str]  # what runs uncompiled


class Prediction(Part):
    """What the job will do to its GPUs and its budget."""

    format: Literal["maya-prediction"] = "maya-prediction"
    version: int = VERSION
    maya: str
    step_time_s: float | None  # None: no step came to its end
    step_time_range_s: tuple[float, float] | None  # docs/prediction.md says how wide and why
    warm_up_s: float | None  # the first step and all before it
    recorded_s: float | None  # all that was recorded, from the program's start
    samples_per_s: float | None
    tokens_per_s: float | None
    tokens_per_s_per_gpu: float | None
    mfu: float | None
    hfu: float | None
    memory: Memory
    time: Time | None  # the mean of the ranks
    ranks: list[RankTime]
    flops: Flops | None
    throughput: Throughput
    cost: Cost | None
    energy: Energy | None
    confidence: Confidence | None
    detailed_rank: int  # whose kernels, modules and communication follow: the one that computes most
    top_kernels: list[TopKernel]
    top_modules: list[Module]
    communication: list[Communication]
    world: WorldPart
    cluster: ClusterPart
    assumptions: Assumptions
    trace: TracePart
    workload: Workload | None = None  # None: no step was trained, or an older version recorded it
    compiled: Compiled | None = None  # None: nothing was, or an older version recorded it
    unknown_ops: list[UnknownOp] = []  # of the rank that computes most, longest first
    caveats: list[str]
    hangs: list[str]

    def __str__(self) -> str:
        from rich.console import Console

        from maya_core.report.terminal import render

        console = Console(width=100, no_color=True)
        with console.capture() as captured:
            console.print(render(self))
        return captured.get()

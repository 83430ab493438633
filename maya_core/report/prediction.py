"""The prediction of a job, as Python and as JSON. The text under a field is its documentation: the schema and the table in
docs/prediction.md are made from it.

The JSON is versioned: fields are added, never renamed or given another meaning. Units are in the names. Times are of one steady step unless
the text says otherwise. What is not known is None, never a guess that looks like a number.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

VERSION = 1


class Part(BaseModel):
    # Unknown fields are ignored, so that an older Maya can read what a newer one has added.
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class Peak(Part):
    """A share of the memory that is live at the peak, by where in the program it was allocated."""

    module: str
    """The module that allocated it; empty outside of any."""
    phase: str
    """Forward, backward, recompute, optimizer or validation."""
    source: str
    """File and line of the program's own code; empty if there is none."""
    category: str
    """What kind of memory it is: parameters, gradients, activations and so on."""
    bytes: int
    """Bytes that are live at the peak."""
    blocks: int
    """The number of blocks."""


class DeviceMemory(Part):
    """Peak memory of one emulated GPU."""

    rank: int
    """The emulated rank."""
    device: int
    """The index of the GPU within the rank's process."""
    peak_allocated_bytes: int
    """What torch.cuda.max_memory_allocated() would return."""
    peak_reserved_bytes: int
    """What PyTorch's caching allocator holds from the driver at its peak."""
    outside_allocator_bytes: int
    """Memory outside of the allocator: the sum of `outside_bytes`."""
    outside_bytes: dict[str, int]
    """The CUDA context with its libraries, and NCCL's buffers (an estimate)."""
    capacity_bytes: int
    """The memory of the GPU."""
    by_category_bytes: dict[str, int]
    """What the allocated peak consists of; adds up to `peak_allocated_bytes`."""
    peak_step: int
    """The step in which the peak occurs, counted from 1. Validation counts for the step that it follows."""
    peak_phase: str
    """The phase in which the peak occurs: forward, backward, recompute, optimizer or validation."""
    peak_module: str
    """The module whose allocation made the peak."""
    peak_source: str
    """The line of the program whose allocation made the peak."""
    at_peak: list[Peak]
    """What is live at the peak, largest first."""
    out_of_memory_bytes: int | None = None
    """The largest allocation that failed, if memory ran out."""
    out_of_memory_step: int | None = None
    """The step in which it failed."""
    out_of_memory_phase: str | None = None
    """The phase in which it failed."""
    fits: bool | None
    """Whether it fits; null if the program ended early for another reason."""


class MemoryLimit(Part):
    """Memory of the fullest GPU if every mask that depends on unknown values keeps nothing, or everything."""

    used_bytes: int | None
    """Reserved memory and memory outside of the allocator; at least that much, if memory ran out. null if the program failed with such masks."""
    fits: bool | None
    """Whether that fits; null if it is not known."""


class MemoryLimits(Part):
    """Between which amounts the memory lies that depends on unknown values."""

    none_kept: MemoryLimit
    """If every unknown mask keeps nothing."""
    all_kept: MemoryLimit
    """If every unknown mask keeps everything, and unknown elements are all distinct."""
    complete: bool
    """Whether memory depends on nothing else that is unknown: false if a size comes from an unknown number, whose limits nobody knows."""


class Memory(Part):
    """Whether the job fits, and the peaks of every emulated GPU."""

    fits: bool | None
    """Whether the job fits on every emulated GPU; null if that is not known, also because it depends on values that nobody knows."""
    ranks: list[DeviceMemory]
    """Every GPU of every emulated rank."""
    depends_on: list[str] = []
    """The lines of the program whose unknown values decide how much memory is needed."""
    bounds: MemoryLimits | None = None
    """Limits of the memory on the fullest GPU, if it depends on values that nobody knows; null if it does not, or if limits were not looked for."""

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
    """Where the time of a rank's step goes. The first five add up to the step."""

    compute_s: float
    """A kernel runs."""
    exposed_communication_s: float
    """Data moves between GPUs, and nothing computes."""
    waiting_s: float
    """The rank waits in a collective or a message for other ranks: pipeline bubbles, stragglers."""
    copy_s: float
    """Only copies to or from the host run."""
    host_s: float
    """Nothing runs: the GPU waits for the host."""
    communication_s: float
    """Data moves, whether or not something computes meanwhile."""
    hidden_communication_s: float
    """The part of it that runs beside compute."""
    slowed_s: float
    """Compute time lost to communication that runs beside it; part of `compute_s`."""
    by_family_s: dict[str, float]
    """Kernels and collectives by family, as if each ran alone."""


class RankTime(Time):
    """Where the time of one emulated rank's step goes."""

    rank: int
    """The emulated rank."""
    step_time_s: float
    """Time of one steady step of this rank."""


class TopKernel(Part):
    """A distinct call in a step, and how long all of these calls take."""

    name: str
    """The op."""
    shapes: str
    """The shapes of its inputs."""
    family: str
    """The kernel family."""
    calls: int
    """Calls in a step."""
    seconds: float
    """The time of all of these calls together."""
    provenance: str
    """How well the time is known: measured, interpolated, extrapolated or bound."""
    profile: str
    """The profile that the time comes from."""


class Module(Part):
    """What a module does in a step."""

    name: str
    """The path of the module in its model."""
    forward_s: float
    """Time of its forward."""
    backward_s: float
    """Time of its backward, recomputation included."""
    recompute_s: float
    """Time of recomputation."""
    optimizer_s: float
    """Time of the optimizer on its parameters."""
    communication_s: float
    """Time of its collectives and messages."""
    calls: int
    """Calls in a step."""

    @property
    def seconds(self) -> float:
        """Time of the module in a step: forward, backward and optimizer."""
        return self.forward_s + self.backward_s + self.optimizer_s


class Communication(Part):
    """The calls of one op on one communicator, in a step of a rank."""

    group: str
    """torch's name of the process group."""
    backend: str
    """nccl or gloo."""
    group_size: int
    """Ranks in the group."""
    op: str
    """The collective, or send and recv."""
    calls: int
    """Calls in a step."""
    bytes: int
    """Bytes that the rank sends; that it receives, if it sends none."""
    seconds: float
    """Time in a step."""
    bytes_per_s: float | None
    """Rate of the whole buffer, as nccl-tests counts it ("algbw")."""


class Throughput(Part):
    """How much data the job processes in a step, and how that is known."""

    samples_per_step: float | None
    """Samples in a step of the whole job."""
    tokens_per_step: float | None
    """Tokens in a step of the whole job."""
    data_parallel: int | None
    """Ranks that see data of their own."""
    source: Literal["given", "data loader", "integer inputs", "unknown"]
    """Where the numbers come from."""
    detail: str
    """How they were found, in words."""
    steps_per_epoch: int | None = None
    """Steps until the data loader has been read once."""


class DataLoading(Part):
    """What the step waits for beside its GPUs' work: batches that are not ready, and copies of memory that is not pinned. Batches are timed on the
    machine that emulates, so these figures differ from machine to machine; all others do not."""

    batch_s: float
    """Seconds in which the dataset makes a batch, on the machine that emulated the job, to two digits; 0 below a millisecond."""
    batches_per_step: float
    """Batches that a rank takes in a step."""
    workers: int
    """Workers of the data loader, which make batches at the same time; 0: the program's own process makes them."""
    wait_s: float
    """Seconds that a step waits for batches: all of their time without workers, otherwise what is left of it beside the step."""
    pageable_bytes_per_step: int
    """Bytes that a rank copies to or from host memory that is not pinned."""
    pageable_s: float
    """Seconds that this takes longer than copies of pinned memory."""
    whole_step_s: float
    """The step time with both."""


class Cost(Part):
    """What the cluster costs."""

    usd_per_hour: float | None
    """US dollars per hour, of the whole cluster."""
    usd_per_step: float | None
    """US dollars per step."""
    usd_per_1k_steps: float | None
    """US dollars per 1,000 steps."""
    usd_per_epoch: float | None
    """US dollars per epoch."""
    usd_per_million_tokens: float | None
    """US dollars per million tokens."""
    price: str
    """The price that was used, and its date."""


class Energy(Part):
    """Energy of the GPUs alone, estimated from their power limit and how busy they are."""

    average_w_per_gpu: float
    """Average power of a GPU, in watts."""
    joules_per_step: float
    """Energy of a step of all GPUs, in joules."""
    kwh_per_1k_steps: float
    """Energy of 1,000 steps of all GPUs, in kWh."""


class Confidence(Part):
    """Shares of the GPU's time by how it is known."""

    measured: float
    """Share of GPU time that was measured on this GPU."""
    interpolated: float
    """Share that lies between measurements."""
    extrapolated: float
    """Share that lies outside of the measurements."""
    bound: float
    """Share that is only known as a lower bound."""
    profiles: dict[str, float]
    """Shares by the profile that the times come from."""


class UnknownOp(Part):
    """An op that nobody described to Maya: it is priced by the bytes it moves, a lower bound."""

    name: str
    """The op."""
    calls: int
    """Calls in a step."""
    seconds: float
    """Time in a step: a lower bound."""


class UnknownValue(Part):
    """A line of the program that reads values which nobody knows, because they depend on weights, and what it decides with them."""

    source: str
    """The program's line."""
    library: str
    """The line of a library that reads the value, if it is not the program itself."""
    kind: Literal["mask", "distinct", "largest", "sum", "scalar"]
    """What is read: how many elements a mask keeps, how many are distinct, the largest one, their sum, or a number."""
    decides: Literal["size", "branch", "loop"]
    """What depends on it: the size of a tensor, a branch of the program, or the end of a loop."""
    at: str
    """The line that it decides, if it is another one."""
    reads: int
    """How often it was read in the recorded steps."""
    taken: float | None
    """What was taken for it: the share that is kept or distinct, the mean number of repeats, or the number. null if a complex number was read."""
    given: bool
    """Whether the user gave the value (`--assume`)."""


class Validation(Part):
    """A loop of validation or evaluation, of which a batch was emulated after the last recorded step. The step time does not contain it."""

    name: str
    """The loop, with the number or the name of its data if there are several."""
    batches: int | None
    """Batches in the loop; null if the data loader has no length."""
    batch_s: float | None
    """Time of one batch, as the mean if several were emulated; null if none was finished."""
    loop_s: float | None
    """Time of the whole loop, with what surrounds its batches."""
    every_steps: float | None
    """The loop runs once in so many steps; null if that is not known, or if it runs only once."""
    peak_allocated_bytes: int | None
    """The most memory allocated during the loop, on the GPU where it is most; null if the program ended before the loop."""


class Flops(Part):
    """Floating-point operations of the whole job in a step: multiplications and additions of matrix products, convolutions and attention."""

    model: int
    """Floating-point operations of a step, without recomputation."""
    hardware: int
    """Floating-point operations of a step, with recomputation."""
    peak_flops_per_gpu: float
    """The peak rate of the dtype that most of them use."""
    dtype: str
    """That dtype."""


class WorldPart(Part):
    """The size of the job."""

    size: int
    """Ranks of the job."""
    nodes: int
    """Nodes of the job."""
    gpus_per_node: int
    """GPUs of a node."""
    emulated_ranks: list[int]
    """The ranks that were emulated."""
    idle_gpus: int = 0
    """GPUs of the job's nodes on which nothing ran."""
    stands_for: dict[int, str] = {}
    """The ranks that each emulated rank stands for, itself among them: they are assumed to do what it does."""


class ClusterPart(Part):
    """The hardware that the job was predicted for."""

    gpu: str
    """The GPU's name in the catalog."""
    gpu_name: str
    """The GPU's name as the driver reports it."""
    node: str
    """The kind of node."""
    network: str
    """The network between nodes."""
    gpu_memory_bytes: int
    """Memory of a GPU."""
    power_limit_w: float
    """Power limit of a GPU, in watts."""
    nvlink_bytes_per_s: float
    """Rate of NVLink per GPU and direction."""
    nic_bytes_per_s: float
    """Rate of a network port."""
    nics_per_node: int
    """Network ports of a node."""


class Assumptions(Part):
    """Inputs with defaults that change the numbers."""

    host: str
    """Whether the host's time is modelled or measured."""
    clocks: str
    """Sustained clocks, or those of short bursts."""
    attention: str
    """The generation of flash attention kernels."""
    calibration: str
    """The name of the user's own calibration; empty without one."""
    calibrated_by: str = ""
    """The actual runs whose factors are in it, in words."""


class TracePart(Part):
    """The recording that the prediction was made from."""

    steps: int
    """Steps that every emulated rank finished."""
    ended: str
    """How the program ended: completed, stopped (after the requested steps), failed or hung."""
    torch: str
    """The version of torch."""
    python: str
    """The version of Python."""
    events: int
    """Recorded events."""
    kernels_per_step: int | None
    """Kernel launches in the last step."""


class Workload(Part):
    """What a step works on, as rank 0 sees it. A real run is recognized by it as the one that was predicted."""

    trained_parameters: int
    """Parameters of the whole model that are trained; shards of FSDP and ZeRO-3 are put together."""
    frozen_parameters: int
    """Parameters that are not trained."""
    shapes: dict[str, int]
    """How many parameters have which shape and dtype."""
    autocast: str
    """The dtype of autocast; empty without it."""
    inputs: list[str]
    """Shapes and dtypes that the models are called with; a length that changes is '*'."""
    calls_per_step: int
    """Calls of the models in a step: the microbatches."""
    sharding: list[str]
    """What shards or wraps the parameters."""
    group_sizes: list[int]
    """Sizes of the rank's process groups."""


class Compiled(Part):
    """What torch.compile did, on the rank with the most graphs."""

    graphs: int
    """Graphs that were compiled."""
    triton_kernels_per_step: int
    """Triton kernels in a step."""
    compile_s: float
    """Time that compiling took under emulation, on this host; part of no other time."""
    graph_breaks: list[str]
    """Where graphs break, and why."""
    recompiles: list[str]
    """What was compiled again, and why."""
    failed: list[str]
    """What runs uncompiled."""


class Prediction(Part):
    """What the job will do to its GPUs and its budget.

    It is a pydantic model: `model_dump_json()` writes it and `Prediction.model_validate_json(text)` reads it. `print` shows the report of the
    terminal. Its fields are listed in docs/prediction.md.
    """

    format: Literal["maya-prediction"] = "maya-prediction"
    """Always `"maya-prediction"`."""
    version: int = VERSION
    """The version of this schema: 1."""
    maya: str
    """The version of Maya that made the prediction."""
    step_time_s: float | None
    """Time of one steady step of the whole job, in seconds: from the moment all ranks have finished the first step to the moment all ranks have finished the last one, divided by the number of steps in between. If only one step was recorded, the time of that step. `null` if no step was completed."""
    step_time_range_s: tuple[float, float] | None
    """Lowest and highest plausible step time, in seconds."""
    warm_up_s: float | None
    """Time of the first step and everything before it, in seconds: optimizer state is allocated and communicators are created. Real warm-up takes longer, because libraries are loaded and cuDNN searches for algorithms."""
    recorded_s: float | None
    """Time of everything that was recorded, in seconds, from the start of the program. For a program without an optimizer this is the only time."""
    samples_per_s: float | None
    """Samples per second of the whole job. `throughput` describes how samples were counted."""
    tokens_per_s: float | None
    """Tokens per second of the whole job."""
    tokens_per_s_per_gpu: float | None
    """Tokens per second, divided by the number of GPUs."""
    mfu: float | None
    """Model FLOPs utilization, as a share of the GPU's peak between 0 and 1."""
    hfu: float | None
    """Hardware FLOPs utilization, as a share between 0 and 1. It includes recomputation."""
    memory: Memory
    """`fits`, and for every emulated GPU its peaks in bytes, their categories, and where in the program they come from."""
    time: Time | None
    """Where the time of a step goes, in seconds, as the mean over the emulated ranks."""
    ranks: list[RankTime]
    """The same parts for each emulated rank, with its `rank` and `step_time_s`."""
    flops: Flops | None
    """Floating-point operations per step of the whole job: `model` (without recomputation) and `hardware` (with it), the peak rate they are compared with, and its dtype."""
    throughput: Throughput
    """Samples and tokens per step of the whole job, the number of data-parallel ranks, steps per epoch, and `source`: where these numbers come from."""
    data_loading: DataLoading | None = None
    """What the step waits for beside its GPUs' work; null if the program loads and copies nothing from the host."""
    cost: Cost | None
    """US dollars per hour, step, 1,000 steps, epoch and million tokens. `price` names the price used: the cheapest list price in the catalog that matches the cluster (with its date), the price in your own file, or `--price-per-gpu-hour`."""
    energy: Energy | None
    """Average watts per GPU, joules per step and kWh per 1,000 steps, for the GPUs only."""
    confidence: Confidence | None
    """Shares of GPU time by provenance (`measured`, `interpolated`, `extrapolated`, `bound`), and by the profile that the times come from. Shares are between 0 and 1."""
    detailed_rank: int
    """The rank that `top_kernels`, `top_modules` and `communication` describe: the one that computes the most."""
    top_kernels: list[TopKernel]
    """The distinct calls in a step that take the most time: name, shapes, kernel family, number of calls, seconds of all of them together, provenance and profile."""
    top_modules: list[Module]
    """The modules that take the most GPU time in a step: seconds of forward, backward (which includes recomputation), recomputation, optimizer and communication, and the number of calls."""
    communication: list[Communication]
    """For each communicator and op in a step: backend, group size, number of calls, bytes that the rank sends (or receives, if it sends none), seconds, and bytes per second of the whole buffer, as nccl-tests counts it ("algbw")."""
    world: WorldPart
    """Number of ranks, nodes and GPUs per node, and which ranks were emulated."""
    cluster: ClusterPart
    """The hardware that was predicted: GPU, node, network, memory in bytes, power limit in watts, and rates of NVLink and network ports in bytes per second."""
    assumptions: Assumptions
    """Inputs with defaults that change the numbers: host model, clocks, attention generation, calibration."""
    trace: TracePart
    """What the prediction was made from: number of steps, how the program ended (`completed`; `stopped` after the requested steps; `failed`; `hung`), versions of torch and Python, number of recorded events, kernels per step."""
    workload: Workload | None = None
    """What a step works on, as rank 0 sees it: numbers and shapes of parameters, autocast dtype, input shapes, calls per step, sharding and group sizes. The matching real run is recognized by it. `null` if no training step was seen, or if an older version recorded the trace."""
    validation: list[Validation] = []
    """The loops of validation or evaluation: seconds of a batch and of the whole loop, how often it runs, and its peak memory, which `memory` includes. Empty if the framework evaluates nothing, or if the program has a loop of its own."""
    compiled: Compiled | None = None
    """What torch.compile did: number of graphs, Triton kernels per step, graph breaks, recompilations, and functions that run uncompiled. `compile_s` is the time that compiling took under emulation, in seconds; it is not part of any other time. `null` if nothing was compiled."""
    unknown_ops: list[UnknownOp] = []
    """Ops that nobody has described to Maya, with their calls and seconds per step. They are priced by the bytes they move, which is a lower bound."""
    unknown_values: list[UnknownValue] = []
    """Lines of the program that read values which nobody knows and that steer what it does: what was taken for them, and how to say what they really are."""
    caveats: list[str]
    """Notes in words about this prediction: for example steps that differ, an optimizer that never stepped, or an out-of-memory error that the program caught."""
    hangs: list[str]
    """Where the job would hang, in words. Empty if it would not."""
    failures: list[str] = []
    """How the program failed, in words, the first failure first. Empty if it did not. All figures describe the run up to that point."""

    def __str__(self) -> str:
        from rich.console import Console

        from maya_core.report.terminal import render

        console = Console(width=100, no_color=True)
        with console.capture() as captured:
            console.print(render(self))
        return captured.get()

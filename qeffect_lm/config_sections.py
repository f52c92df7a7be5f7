"""The sections of the configuration but the model's: every key with type, bounds, default, unit, meaning and resume rule."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from qeffect_lm.config_base import Section
from qeffect_lm.config_base import key as _key
from qeffect_lm.config_base import per_rank as _per_rank
from qeffect_lm.config_profile import ProfileConfig


class RunConfig(Section):
    """the run as a whole"""

    name: str = _key("run", "Name of the run in logs and on wandb.", on_resume="free", min_length=1)
    dir: str = _key(
        "runs/run",
        "Folder of everything the run writes: resolved config, metrics.jsonl, checkpoints, plots.",
        on_resume="free",
        unit="path",
        min_length=1,
    )
    seed: int = _key(
        1234,
        "Seed of weight initialisation, data order and dropout; all randomness is keyed on it.",
        on_resume="refuse",
        ge=0,
        lt=2**63,
    )
    device: Literal["auto", "cpu", "cuda"] = _key(
        "auto",
        "Where tensors live and work runs; auto: the GPU of the local rank if torch sees one, else the CPU.",
        on_resume="warn",
    )


class FP8Config(Section):
    """FP8 of the decoder's linear layers (embedding and head never run in FP8)"""

    recipe: Literal["none", "delayed", "current", "block"] = _key(
        "none",
        "none: no FP8. delayed: HYBRID (E4M3 forward, E5M2 gradients), scales from an amax history. "
        "current: HYBRID, scales from each tensor itself. block: E4M3, a scale per tile of 128 values (model.backend te only).",
        on_resume="refuse",
    )
    window: Literal["step", "microbatch"] = _key(
        "step",
        "When delayed scales roll: once per optimizer step, or after each microbatch's forward and "
        "backward as Transformer Engine does.",
        on_resume="refuse",
    )
    history: int = _key(
        16, "Length of the amax history per role.", on_resume="refuse", unit="windows", ge=1, le=4096
    )
    amax: Literal["max", "most_recent"] = _key(
        "max", "Which amax of the history makes the next scale.", on_resume="refuse"
    )
    margin: int = _key(
        0, "Head room: the scale is divided by 2^margin.", on_resume="refuse", unit="powers of 2", ge=0, le=16
    )
    high_precision_first: int = _key(
        0, "First decoder layers kept out of FP8.", on_resume="refuse", unit="layers", ge=0
    )
    high_precision_last: int = _key(
        0, "Last decoder layers kept out of FP8.", on_resume="refuse", unit="layers", ge=0
    )


class PrecisionConfig(Section):
    """number formats"""

    dtype: Literal["float32", "bfloat16", "float64"] = _key(
        "float32",
        "Compute type outside FP8. Master weights are float64 with float64, else float32.",
        on_resume="refuse",
    )
    main_grads: Literal["float32", "bfloat16"] = _key(
        "float32",
        "Type that gradients are accumulated and reduced in. float32: float64 with dtype float64. bfloat16: half the memory, "
        "and every microbatch's part is rounded when it is added (docs/gradients.md).",
        on_resume="refuse",
    )
    fp8: FP8Config = Field(default_factory=FP8Config)


class ParallelConfig(Section):
    """how many ranks along each axis; their product is the world size"""

    pp: int = _key(1, "Pipeline stages.", on_resume="warn", unit="ranks", ge=1)
    dp: int = _key(1, "Data-parallel replicas.", on_resume="warn", unit="ranks", ge=1)
    tp: int = _key(
        1, "Tensor-parallel ranks: every layer is cut over so many (docs/tensor-parallel.md).", on_resume="warn",
        unit="ranks", ge=1,
    )  # fmt: skip
    sequence_parallel: bool = _key(
        True,
        "With tp above 1: norms, dropout and the residual stream are cut along tokens. false: every rank has all tokens.",
        on_resume="warn",
    )
    ep: int = _key(
        1, "Expert-parallel ranks: a layer's experts lie on ep x tp of them; the rest of the model is replicated over ep, each "
        "rank with samples of its own, as over dp (docs/moe.md).", on_resume="warn", unit="ranks", ge=1,
    )  # fmt: skip
    cp: int = _key(
        1, "Context-parallel ranks: every sequence is cut into so many parts (docs/context-parallel.md).", on_resume="warn",
        unit="ranks", ge=1,
    )  # fmt: skip
    bucket_mib: float = _key(
        64.0,
        "With optim.zero 1: main gradients that are reduced at once, and parameters exchanged at once. Results do not depend "
        "on it.",
        on_resume="warn",
        unit="MiB of main gradients",
        gt=0,
        le=2**20,
    )

    @property
    def world(self) -> int:
        """The number of ranks that the layout needs."""
        return math.prod(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Axis → ranks, slowest axis first."""
        return {"pp": self.pp, "dp": self.dp, "ep": self.ep, "cp": self.cp, "tp": self.tp}

    @property
    def samples(self) -> int:
        """The number of ranks with samples of their own (those of one stage, and of tp and cp peers one)."""
        return self.dp * self.ep


class CostsConfig(Section):
    """what schedule auto plans with; where null it is measured on the real layers"""

    t_f: tuple[float, ...] | None = _per_rank(
        "Time of F of one microbatch, all the layers of a rank: one number, or one per pipeline rank. Give t_f, t_i and t_w "
        "in one unit, or none of them.",
        "any unit of time",
    )
    t_i: tuple[float, ...] | None = _per_rank("Time of I (the input gradient), as t_f.", "as t_f")
    t_w: tuple[float, ...] | None = _per_rank("Time of W (the weight gradient), as t_f.", "as t_f")
    t_comm: float | None = _key(
        None, "Latency of a message between two ranks; with t_f, null is 0.", on_resume="warn", unit="as t_f", ge=0
    )
    m_b: tuple[float, ...] | None = _per_rank(
        "Activation memory that one microbatch of a rank holds after F; null with t_f and a limit in multiples: the same on "
        "all ranks.",
        "bytes",
    )
    m_w: tuple[float, ...] | None = _per_rank("What of m_b is left after I, until W; null with m_b: all of it.", "bytes")


class PipelineConfig(Section):
    """the pipeline's schedule"""

    schedule: Literal["1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipev", "auto"] = _key(
        "1f1b",
        "Order of forward (F), input-gradient (I) and weight-gradient (W) work. interleaved-1f1b, zb-v and dualpipev put "
        "several chunks of the model on a rank. auto: made from measured times within pipeline.memory_limit, saved in the "
        "checkpoint and used again on resume. docs/schedules.md compares them.",
        on_resume="warn",
    )
    microbatches: int = _key(
        4,
        "Microbatches per optimizer step and data-parallel replica. On another number of replicas the same batch needs another "
        "number: microbatches x parallel.dp x parallel.ep is what counts (docs/resharding.md).",
        on_resume="warn",
        unit="microbatches",
        ge=1,
    )
    chunks: int | None = _key(
        None,
        "Chunks of the model on each rank; null: the schedule's own number (one; two for interleaved-1f1b, zb-v and "
        "dualpipev; auto chooses one or two). interleaved-1f1b takes any number.",
        on_resume="warn",
        unit="chunks",
        ge=1,
    )
    w_delay: int | None = _key(
        0,
        "By how many microbatches W trails I; null: the stage's index. The zero-bubble schedules, dualpipev and auto set "
        "this themselves: leave it 0.",
        on_resume="warn",
        unit="microbatches",
        ge=0,
    )
    coalesce_w: int = _key(
        1,
        "How many microbatches' weight gradients (W) of one FP8 weight are made by one product, after which the main gradient "
        "is touched once; 1: each by itself. The order of summation changes with it. Needs precision.fp8.recipe delayed with "
        "window step, and model.backend native (docs/schedules.md).",
        on_resume="refuse",
        unit="microbatches",
        ge=1,
    )
    stage_layers: tuple[int, ...] | None = _key(
        None,
        "Decoder layers of each chunk, in the model's order: one number per rank, or with several chunks on a rank one per "
        "chunk. They add up to model.num_layers; null: even, the first chunks take one more where it does not divide.",
        on_resume="warn",
        unit="layers",
        strict=False,
    )
    memory_limit: str | None = _key(
        None,
        "With auto: the activation memory that a rank may hold, in multiples of what one microbatch of the fullest rank "
        "holds after F (2.5) or in bytes (40GiB); null: no limit.",
        on_resume="warn",
        unit="multiples of M_B, or bytes with their unit",
    )
    costs: CostsConfig = Field(default_factory=CostsConfig)


class GraphsConfig(Section):
    """capture and replay"""

    backend: Literal["eager", "host_replay", "cuda_graphs"] = _key(
        "eager",
        "eager: run actions directly. cuda_graphs: capture them once as CUDA graphs and replay those. host_replay: the "
        "same on a CPU, by replaying recorded operations (for correctness, not speed).",
        on_resume="warn",
    )
    scope: Literal["action", "step"] = _key(
        "action",
        "What one graph holds. action: one F, I or W of a microbatch slot. step: all of a rank's step, transfers included; it "
        "needs the least memory and host time.",
        on_resume="warn",
    )
    optimizer: Literal["inside", "outside"] = _key(
        "inside",
        "With scope step: whether the step's end (reduction, optimizer, commit, refresh) lies in the same graph, or in "
        "graphs of its own.",
        on_resume="warn",
    )
    timed: bool = _key(
        False,
        "With scope step on a GPU: the graph records when each F, I and W begins and ends, which the bubble in the metrics "
        "needs and which costs a microsecond or two each. Graphs of actions are always timed.",
        on_resume="warn",
    )


class ContractConfig(Section):
    """checks of the state and resource contract"""

    mode: Literal["enforce", "trace", "off"] = _key(
        "enforce",
        "enforce: a violation is an error. trace: also record every effect to a file. off: no checks, for "
        "measuring their cost.",
        on_resume="free",
    )
    poison: bool = _key(
        False,
        "Fill released slots with NaN, so that a use after release shows; the graph of a whole step holds that, too.",
        on_resume="warn",
    )
    trace_file: str | None = _key(
        None, "File that mode trace writes; null: one in run.dir.", on_resume="free", unit="path"
    )


class DataConfig(Section):
    """the corpus and how it is cut"""

    train: str | None = _key(
        None,
        "Training corpus: path of a .bin/.idx pair without the ending. Its content is checked on resume.",
        on_resume="warn",
        unit="path",
    )
    blend: tuple[str, ...] | None = _key(
        None,
        "Several training corpora instead of data.train, each as 'WEIGHT PATH' ('0.7 data/web'); weights: shares of samples.",
        on_resume="warn",
        strict=False,
    )
    valid: str | None = _key(
        None, "Held-out corpus for evaluation, as data.train.", on_resume="free", unit="path"
    )
    tokenizer: str | None = _key(
        None,
        "Tokenizer of the corpus: sentencepiece's .model or Hugging Face's tokenizer.json.",
        on_resume="warn",
        unit="path",
    )
    seq_len: int = _key(128, "Length of one training sequence.", on_resume="refuse", unit="tokens", ge=1)
    microbatch_size: int = _key(8, "Sequences in one microbatch.", on_resume="refuse", unit="sequences", ge=1)
    packing: Literal["stream", "whole"] = _key(
        "stream",
        "How samples are cut. stream: the stream of all tokens at multiples of seq_len. whole: whole documents as long as they "
        "fit, then padding, which no loss counts.",
        on_resume="refuse",
    )
    documents: Literal["joined", "reset"] = _key(
        "joined",
        "reset: documents of a sample do not see each other, positions begin at 0 in each, and a document's first token is "
        "nobody's target.",
        on_resume="refuse",
    )
    workers: int | None = _key(
        None,
        "Processes that read ahead; 0: steps are read when they are needed; null: 2 on a GPU, else 0.",
        on_resume="free",
        unit="processes",
        ge=0,
        le=64,
    )
    cache: str | None = _key(
        None,
        "Folder of digests and indices made from the corpora; null: data-cache in run.dir.",
        on_resume="free",
        unit="path",
    )
    cache_timeout: float = _key(
        1800.0, "How long to wait for the process that makes an entry of data.cache.", on_resume="free", unit="seconds", gt=0
    )
    accept_blend: bool = _key(
        False, "On resume, go on with other corpora or weights than the checkpoint's; the change is recorded.", on_resume="free"
    )
    accept_batch: bool = _key(
        False, "On resume, go on with another number of samples per step; the change is recorded.", on_resume="free"
    )


class OptimConfig(Section):
    """the optimizer, its guards and the learning-rate schedule"""

    name: Literal["adamw", "muon"] = _key(
        "adamw",
        "adamw: for all parameters. muon: Muon for the decoder layers' matrices, AdamW for embedding, head and norms.",
        on_resume="refuse",
    )
    backend: Literal["native", "te", "apex", "torch"] = _key(
        "native",
        "Who runs AdamW. native: the framework. te, apex: the FusedAdam of Transformer Engine or NVIDIA's apex, on a GPU. "
        "torch: torch's fused AdamW. The state is the same (docs/optimizer.md).",
        on_resume="warn",
    )
    moments: Literal["float32", "bfloat16"] = _key(
        "float32",
        "Type of the saved moments. float32: the master weights' type. bfloat16: half the memory, rounded to nearest even.",
        on_resume="refuse",
    )
    lr: float = _key(1e-3, "Peak learning rate.", on_resume="warn", unit="per optimizer step", gt=0)
    min_lr_ratio: float = _key(
        0.1, "Learning rate at the end, as a fraction of the peak.", on_resume="warn", ge=0, le=1
    )
    warmup_steps: int = _key(10, "Linear warm-up from zero.", on_resume="warn", unit="optimizer steps", ge=0)
    schedule: Literal["linear", "cosine", "wsd"] = _key(
        "linear",
        "Decay after warm-up: linear or cosine down to the minimum at train.steps, or wsd (flat, then linear "
        "over the last optim.wsd_decay_steps).",
        on_resume="warn",
    )
    wsd_decay_steps: int | None = _key(
        None, "Length of the decay of schedule wsd.", on_resume="warn", unit="optimizer steps", ge=1
    )
    beta1: float = _key(0.9, "AdamW: decay of the first moment.", on_resume="warn", ge=0, lt=1)
    beta2: float = _key(0.95, "AdamW: decay of the second moment.", on_resume="warn", ge=0, lt=1)
    eps: float = _key(1e-8, "AdamW: added to the root of the second moment.", on_resume="warn", gt=0)
    weight_decay: float = _key(
        0.1, "Decoupled weight decay, of matrices and the embedding.", on_resume="warn", unit="per lr", ge=0
    )
    decay_embedding: bool = _key(
        True,
        "Whether weight decay applies to the embedding; to norms and biases it never does, to matrices always.",
        on_resume="warn",
    )
    muon_momentum: float = _key(0.95, "Muon: decay of the momentum.", on_resume="warn", ge=0, lt=1)
    clip_norm: float | None = _key(
        1.0, "Largest global gradient norm; null: no clipping.", on_resume="warn", unit="L2 norm", gt=0
    )
    zero: Literal[0, 1] = _key(
        0,
        "ZeRO stage. 1: master weights and moments are shared out over the data-parallel replicas, each updates its part. 0: "
        "every replica holds and updates all (docs/data-parallel.md).",
        on_resume="warn",
    )
    nonfinite: Literal["skip", "raise"] = _key(
        "skip",
        "What an infinite or NaN gradient does: skip that step on all ranks, or end.",
        on_resume="warn",
    )
    skip_sigma: float | None = _key(
        None,
        "Skip a step whose loss or gradient norm lies this many standard deviations above its running mean (of logarithms); "
        "null: never. 6 is a fair start.",
        on_resume="warn",
        unit="standard deviations",
        gt=0,
    )
    skip_warmup: int = _key(
        100, "Steps that skip_sigma only watches, at first.", on_resume="warn", unit="optimizer steps", ge=2
    )


class TrainConfig(Section):
    """length of the run, evaluation, logging interval"""

    steps: int = _key(
        ...,
        "Optimizer steps of the whole run; the learning-rate schedule ends there.",
        on_resume="warn",
        unit="optimizer steps",
        ge=1,
        le=10_000_000,
    )
    max_minutes: float | None = _key(
        None,
        "Save and exit after this long, with checkpoint.requeue_exit_code; null: no limit.",
        on_resume="free",
        unit="minutes",
        gt=0,
    )
    eval_every: int = _key(
        0, "Evaluate on data.valid this often; 0: never.", on_resume="free", unit="optimizer steps", ge=0
    )
    eval_microbatches: int = _key(
        8, "Microbatches of one evaluation.", on_resume="free", unit="microbatches", ge=1
    )
    log_every: int = _key(
        1, "Write metrics and progress this often.", on_resume="free", unit="optimizer steps", ge=1
    )
    threads: int = _key(
        1, "CPU threads per process; part of the result.", on_resume="warn", unit="threads", ge=1
    )
    profile: ProfileConfig = Field(default_factory=ProfileConfig)


class CheckpointConfig(Section):
    """saving and resuming"""

    dir: str | None = _key(
        None, "Folder of the checkpoints; null: checkpoints in run.dir.", on_resume="free", unit="path"
    )
    every: int = _key(
        0, "Save this often; 0: at the end or when stopped only.", on_resume="free", unit="steps", ge=0
    )
    keep: int = _key(3, "Newest checkpoints kept; 0: all.", on_resume="free", unit="checkpoints", ge=0)
    async_save: bool = _key(
        False,
        "Copy the state to host memory and write it while training goes on: the loop waits for the copy alone. Takes as much "
        "host memory as a rank's state. A save that fails ends the run at the next step (docs/checkpoints.md).",
        on_resume="free",
    )
    resume: str = _key(
        "auto",
        "auto: from the newest complete checkpoint, or fresh where the folder is empty. never: fresh. "
        "Otherwise the path of one checkpoint.",
        on_resume="free",
        min_length=1,
    )
    init_from: str | None = _key(
        None,
        "A fresh run starts from this checkpoint's weights (of a conversion, or of another run) instead of random ones; once "
        "it has checkpoints of its own, they count (docs/convert.md).",
        on_resume="free",
        unit="path",
        min_length=1,
    )
    init_state: Literal["weights", "training"] = _key(
        "weights",
        "What init_from gives. weights: the parameters alone; step 0, a new optimizer, scales calibrated. training: moments, "
        "step counters, the position in the data and FP8 scales too, where the conversion brought them.",
        on_resume="free",
    )
    accept_new_graphs: bool = _key(
        False,
        "Resume although plan or captured graphs differ from the saved ones (another torch, driver or kernel); "
        "`train.py … --accept-new-graphs` is the same. Otherwise that is an error which names the first node that differs.",
        on_resume="free",
    )
    requeue_exit_code: int = _key(
        0,
        "Exit code after a save asked for by SIGTERM, SIGUSR1 or train.max_minutes.",
        on_resume="free",
        unit="exit code",
        ge=0,
        le=255,
    )
    save_at_end: bool = _key(True, "Save after the last step.", on_resume="free")
    record: bool = _key(
        True,
        "After the step that follows a save, keep digests of what it did beside the checkpoints, for tools.replay "
        "(docs/replay.md).",
        on_resume="free",
    )


class LoggingConfig(Section):
    """metrics, progress, warnings"""

    wandb: Literal["disabled", "offline", "online"] = _key(
        "disabled", "Weights & Biases; needs the extra wandb.", on_resume="free"
    )
    wandb_project: str = _key("qeffect-lm", "wandb project.", on_resume="free", min_length=1)
    wandb_entity: str | None = _key(None, "wandb entity; null: the account's.", on_resume="free")
    wandb_group: str | None = _key(None, "wandb group; null: none.", on_resume="free")
    tensorboard: bool = _key(
        False, "Write metrics for TensorBoard to run.dir/tensorboard; needs the extra tensorboard.", on_resume="free"
    )
    progress: Literal["auto", "bar", "plain", "off"] = _key(
        "auto", "Progress on the terminal; auto: bar on a terminal, else plain lines.", on_resume="free"
    )
    watch_every: int = _key(
        10,
        "Look at FP8 histories and at each rank's own time this often; 0: never. Told with the next logged step.",
        on_resume="free",
        unit="optimizer steps",
        ge=0,
    )
    scales_every: int = _key(
        50,
        "Write every FP8 tensor's amax, scale and saturated windows to scales.jsonl this often, at steps of watch_every; "
        "0: never.",
        on_resume="free",
        unit="optimizer steps",
        ge=0,
    )
    timeline_every: int = _key(
        100,
        "Write when each F, I and W of a logged step began and ended to timelines.jsonl this often, and of the first; "
        "0: never.",
        on_resume="free",
        unit="optimizer steps",
        ge=0,
    )
    underflow_every: int = _key(
        0,
        "Sample the share of non-zero values that FP8 makes zero this often, on one microbatch that is run once more in high "
        "precision, which takes its time and memory; 0: never.",
        on_resume="free",
        unit="optimizer steps",
        ge=0,
    )
    warn_every: int = _key(
        100, "At most one warning of a kind in this many steps.", on_resume="free", unit="optimizer steps", ge=1
    )
    warn_saturation: float | None = _key(
        0.75,
        "Warn where an FP8 tensor's amax x scale lies beyond the format's largest value in more than this share of its "
        "windows; null: never.",
        on_resume="free",
        unit="share of windows",
        ge=0,
        le=1,
    )
    warn_underflow: float | None = _key(
        0.5,
        "Warn where more than this share of an FP8 tensor's non-zero values become zero (see underflow_every); null: never.",
        on_resume="free",
        unit="share of values",
        ge=0,
        le=1,
    )
    warn_amax_jump: float | None = _key(
        16.0,
        "Warn where an amax is more than this many times the largest of the history before it; null: never.",
        on_resume="free",
        gt=0,
    )
    warn_straggler: float | None = _key(
        1.5,
        "Warn where a rank's own time in a step is more than this many times that of the other replicas of its stage (without "
        "replicas: of the other stages), and at least 5 % of the step is lost; null: never.",
        on_resume="free",
        gt=1,
    )
    warn_spike: float | None = _key(
        6.0,
        "Warn where loss or gradient norm of a logged step lies this many standard deviations above its running mean (of "
        "logarithms); null: never.",
        on_resume="free",
        unit="standard deviations",
        gt=0,
    )


class LaunchConfig(Section):
    """processes and their communication"""

    timeout_seconds: float = _key(
        300.0,
        "How long a rank waits for a dead or absent peer.",
        on_resume="free",
        unit="seconds",
        gt=0,
        le=10_000_000,
    )
    backend: Literal["auto", "gloo"] = _key(
        "auto", "torch.distributed backend; auto: NCCL for tensors on a GPU, gloo for all others.", on_resume="warn"
    )

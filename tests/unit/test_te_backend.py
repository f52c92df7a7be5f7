"""Backend ``te`` without a GPU: what is refused and in which words, and the contract around a stand-in for its library."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.actions import Action, Kind
from pipeline.capture import capture
from pipeline.plan import Plan, make_plan
from pipeline.schedules import Placement
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.contract.errors import CaptureError, LeaseError
from qeffect_lm.contract.leases import Slot
from qeffect_lm.contract.timeline import Direction, ScaleRole, ScaleTimeline
from qeffect_lm.errors import QEffectError, UsageError
from qeffect_lm.graphs.host_replay import HostReplay
from qeffect_lm.graphs.recorder import Recorder
from qeffect_lm.layers import te
from qeffect_lm.layers.attention import Attention
from qeffect_lm.layers.base import named_parameters, split_layers
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.rope import Rope, apply_rope
from qeffect_lm.layers.te import block as te_block
from qeffect_lm.layers.te import library as te_library
from qeffect_lm.layers.te.weight_grad import DelayedProduct, take
from tests.te_fake import Store, fake_library
from tests.tiny import Trained, assert_moved, config, differing, local_plan, train

# ---- configuration ------------------------------------------------------------------------------------------------------

GPU: dict[str, Any] = {"run__device": "cuda", "model__backend": "te", "precision__dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"run__device": "cpu"}, "model.backend te needs a GPU, run.device is cpu: set run.device=cuda"),
        ({"graphs__backend": "host_replay"}, "host_replay cannot repeat the kernels of model.backend te"),
        ({"precision__dtype": "float32"}, "precision.dtype float32: model.backend te computes in bfloat16"),
        ({"parallel__tp": 2, "precision__fp8": {"recipe": "block"}}, "parallel.tp 2: precision.fp8.recipe block scales each"),
        ({"precision__fp8": {"recipe": "current", "margin": 1}}, "precision.fp8.margin 1: recipe current of model.backend te"),
        ({"precision__fp8": {"recipe": "block"}}, "is not a multiple of 128, which block scaling needs"),
        ({"precision__fp8": {"recipe": "block"}, "model__backend": "native"}, "recipe block exists with model.backend te only"),
        ({"model__backend": "torch"}, "model.backend"),
    ],
)
def test_what_the_configuration_refuses(keys, words):
    with pytest.raises(UsageError, match=words):
        config(**{**GPU, **keys})


def test_what_the_configuration_takes():
    for recipe in ("none", "delayed", "current"):
        config(**GPU, precision__fp8={"recipe": recipe, "margin": int(recipe == "delayed")})
    wide = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 384}
    keys = {f"model__{name}": value for name, value in wide.items()}
    config(**GPU, **keys, precision__fp8={"recipe": "block"}, data__seq_len=128)


# ---- installation -------------------------------------------------------------------------------------------------------


def versions(**found: str):
    """A stand-in for ``metadata.version``."""
    table = {name.replace("_", "-"): version for name, version in found.items()}

    def version(name: str) -> str:
        if name not in table:
            raise metadata.PackageNotFoundError(name)
        return table[name]

    return version


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({}, r"is not installed: pip install 'qeffect-lm\[te-cu13\]' .* or set model.backend=native"),
        ({"transformer_engine": "2.20.2", "transformer_engine_cu13": "2.20.2"}, "without transformer-engine-torch"),
        ({"transformer_engine": "2.20.2", "transformer_engine_torch": "2.20.2"}, "without transformer-engine-cu12 or"),
        (
            {"transformer_engine": "2.20.2", "transformer_engine_torch": "2.19.0", "transformer_engine_cu13": "2.20.2"},
            "transformer-engine is version 2.20.2 and transformer-engine-torch is 2.19.0",
        ),
        ({"transformer_engine": "2.9.0"}, "2.9.0 is too old, the oldest supported version is 2.20"),
    ],
)
def test_a_broken_installation_is_told(found, words):
    with pytest.raises(UsageError, match=words):
        te_library.check_installed(versions(**found))


def test_installations_that_are_taken():
    parts = ("transformer_engine", "transformer_engine_torch", "transformer_engine_cu12")
    assert te_library.check_installed(versions(**dict.fromkeys(parts, "2.20.2"))) == "2.20.2"
    assert te_library.check_installed(versions(transformer_engine="2.20.1+abc")) == "2.20.1+abc"  # built from source
    with pytest.warns(UserWarning, match=r"2.31.0 is newer than 2.20"):
        te_library.check_installed(versions(transformer_engine="2.31.0"))


def test_a_missing_name_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(te_library, "check_installed", lambda: "2.99.0")
    monkeypatch.setattr(te_library, "_import", lambda name: SimpleNamespace())
    with pytest.raises(UsageError, match=r"has no transformer_engine.pytorch.Linear\(delay_wgrad_compute\).*with 2.20"):
        te.load(torch.device("cuda", 0))
    with pytest.raises(UsageError, match="needs a GPU, and this run uses the cpu"):
        te.load(torch.device("cpu"))


def test_an_import_that_fails_names_the_remedy(monkeypatch):
    def broken(name: str) -> None:
        raise OSError("libcudnn_graph.so.9: undefined symbol")

    monkeypatch.setattr(te_library.importlib, "import_module", broken)
    with pytest.raises(UsageError, match=r"undefined symbol.*export CUDNN_HOME=.*nvidia/cudnn before the process starts"):
        te_library._import("transformer_engine.pytorch")


@pytest.mark.skipif(te_library.importlib.util.find_spec("transformer_engine") is not None, reason="it is installed here")
def test_a_run_without_transformer_engine_ends_with_words():
    with pytest.raises(UsageError, match="model.backend=te needs Transformer Engine, which is not installed"):
        assemble(config(**{**GPU, "run__device": "auto"}), device=torch.device("cpu"))


MAPS = """7f00 r-xp 00000000 08:01 1 /venv/lib/python3.12/site-packages/nvidia/cudnn/lib/libcudnn.so.9
7f01 r-xp 00000000 08:01 2 /venv/lib/python3.12/site-packages/nvidia/cudnn/lib/libcudnn_graph.so.9.12.0
7f02 r-xp 00000000 08:01 3 /usr/lib/libcublas.so.13
"""


def test_two_copies_of_cudnn_are_told():
    ours = "/venv/lib/python3.12/site-packages/nvidia/cudnn/lib"
    assert te_library.cudnn_folders(MAPS) == [ours] and te_library.cudnn_folders("") == []
    te_library.check_cudnn(MAPS)
    with pytest.raises(UsageError, match=f"two copies of cuDNN are loaded, from {ours} and from /usr/lib/x86.*CUDNN_HOME="):
        te_library.check_cudnn(MAPS + "7f03 r-xp 0 08:01 4 /usr/lib/x86_64-linux-gnu/libcudnn_ops.so.9\n")


def test_fp8_that_the_gpu_has_not_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    probe = SimpleNamespace(
        is_fp8_available=lambda return_reason: (False, "Device compute capability 8.9 or higher required."),
        is_fp8_block_scaling_available=lambda return_reason: (False, "CUDA >= 12.9."),
    )
    library = te.Library("2.20.2", {"pytorch": probe}, torch.device("cuda", 0))
    for recipe, reason in (("delayed", "capability 8.9"), ("block", "CUDA >= 12.9")):
        with pytest.raises(UsageError, match=f"recipe={recipe} does not run on Tesla T4: .*{reason}"):
            te_library._check_fp8(library, recipe)
    te_library._check_fp8(library, "none")


def test_a_global_flag_of_somebody_else_is_told():
    library = fake_library()
    library.check_undisturbed()
    library.modules["pytorch.quantization"].FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor = 1
    with pytest.raises(UsageError, match="another user of Transformer Engine in this process"):
        library.check_undisturbed()


# ---- the contract around it ---------------------------------------------------------------------------------------------


@pytest.fixture
def faked(monkeypatch):
    """``te.load`` gives the stand-in, and the configuration's word that a GPU is needed is set aside (device auto)."""
    monkeypatch.setattr(te, "load", lambda device, recipe: fake_library())


def settings(recipe: str = "delayed", window: str = "step", **more: Any):
    keys = {**GPU, "run__device": "auto", "precision__fp8": {"recipe": recipe, "history": 3, "window": window}}
    return config(**{**keys, **more})


def parameters_of(backend: str) -> list[tuple[str, tuple[int, ...]]]:
    from models import build_model

    model = build_model(settings("none", model__backend=backend), None, torch.bfloat16)
    return [(name, tuple(parameter.shape)) for name, parameter in named_parameters(model.chunk(0, [4]))]


def test_both_backends_have_the_same_parameters_and_weight_gradients():
    assert parameters_of("te") == parameters_of("native")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotated_heads_turn_as_the_native_attention_does(dtype):
    """q, k and v of the fused projection in Transformer Engine's layout, against the native layer's, back as well."""
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 8}
    attention = Attention("a", None, None, **heads, max_positions=16, rope=Rope(8, 1e4), dtype=dtype)  # type: ignore[arg-type]
    fused = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    q, k, v = te_block.rotated_heads(attention, fused)
    assert (q.shape, k.shape, v.shape) == ((2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))
    assert all(t.is_contiguous() and t.dtype is dtype for t in (q, k, v))
    parts = fused.view(2, 6, 2, 4, 8)
    assert torch.equal(v, parts[:, :, :, 3])
    for head in range(4):
        plain = apply_rope(parts[:, :, head // 2, head % 2][:, None], attention.cos[:6], attention.sin[:6])[:, 0]
        assert torch.equal(q[:, :, head], plain)
    assert not torch.equal(q[:, 1:], parts[:, 1:, :, :2].reshape(2, 5, 4, 8))  # it does turn
    sum((t.float() ** 2).sum() for t in (q, k, v)).backward()  # a rotation keeps lengths
    assert torch.allclose(fused.grad.float(), 2 * fused.detach().float(), atol=0.05 if dtype is torch.bfloat16 else 1e-5)
    with pytest.raises(ValueError, match="position 17 is past the table of 16"):
        te_block.rotated_heads(attention, torch.zeros(1, 17, 64))


@pytest.mark.parametrize("window", ["step", "microbatch"])
def test_training_moves(faked, window):
    run = train(settings(window=window), 5)
    assert_moved(run)
    again = train(settings(window=window), 5)
    assert run.losses == again.losses and differing(run.tensors, again.tensors) == []
    assert not any("extra_state" in name for name in run.tensors)
    native = train(settings(window=window, model__backend="native"), 5)
    assert sorted(native.tensors) == sorted(run.tensors)
    assert all(abs(a - b) < 0.02 * abs(a) for a, b in zip(run.losses, native.losses, strict=True))


def one_microbatch_at_a_time(chunks: int, microbatches: int) -> Plan:
    """F and I of each microbatch, then all W: I-slots and their borders are written again while W still waits."""
    actions: list[Action] = []
    for m in range(microbatches):
        actions += [Action(Kind.F, chunk, m) for chunk in range(chunks)]
        actions += [Action(Kind.I, chunk, m) for chunk in reversed(range(chunks))]
    actions += [Action(Kind.W, chunk, m) for chunk in range(chunks) for m in range(microbatches)]
    return make_plan("local", [actions], Placement((0,) * chunks), microbatches)


@pytest.mark.parametrize("recipe", ["delayed", "none"])
def test_one_answer_for_all_plans(faked, recipe):
    """Each W gets its own microbatch's operands, whatever the order in which the queue was filled."""
    one = train(settings(recipe), 4)
    for plan in (local_plan(3, 4), one_microbatch_at_a_time(3, 4)):
        other = train(settings(recipe), 4, plan=plan)
        assert one.losses == other.losses and differing(one.tensors, other.tensors) == []


def middle(recipe: str = "delayed") -> tuple[Assembly, Any]:
    """An assembly whose second chunk of three stands alone, and that stage."""
    assembly = assemble(settings(recipe, "microbatch"), plan=local_plan(3, 4, "microbatch"), device=torch.device("cpu"))
    assembly.rebuild_caches()
    return assembly, assembly.engine.stages[1]


def act(assembly: Assembly, kind: str, microbatch: int, slot: Any, beta: int | None = None, keep: bool = False) -> None:
    stage, ledger = assembly.engine.stages[1], assembly.ledger
    places = (Slot("I", 1, microbatch), Slot("W", 1, microbatch))
    with ledger.action(kind, 1, microbatch, beta=beta, slots=places) as scope:
        if kind == "F":
            stage.forward(slot, scope)
        elif kind == "I":
            stage.input_grad(slot, scope, keep=keep)
        else:
            stage.weight_grad(slot, scope)
    if kind in "FI" and ledger.checks:
        direction = Direction.FORWARD if kind == "F" else Direction.BACKWARD
        ledger.commit(assembly.timeline.epochs[direction], (direction,))
        assembly.engine.end.commit_direction_(direction)


def filled(stage: Any, seed: int) -> Any:
    slot = stage.make_slot()
    generator = torch.Generator().manual_seed(seed)
    slot.x.copy_(torch.randn(slot.x.shape, generator=generator))
    slot.dy.copy_(torch.randn(slot.dy.shape, generator=generator))
    return slot


def test_w_runs_its_own_microbatch_not_the_oldest(faked):
    """F0 F1 I0 I1 and then W1 alone: the main gradient is microbatch 1's."""
    grads = []
    for both in (True, False):
        assembly, stage = middle("none")
        assembly.flat.grad_buffer.fill_(7.0)
        slots = [filled(stage, seed) for seed in (1, 2)]
        assembly.ledger.begin_step(0)
        for m in (0, 1) if both else (1,):
            act(assembly, "F", m, slots[m])
        for m in (0, 1) if both else (1,):
            act(assembly, "I", m, slots[m], int(both and m == 1))
        with assembly.ledger.recording():  # the gradient slots would ask for microbatch 0 first
            act(assembly, "W", 1, slots[1], 0)
        grads.append(assembly.flat.grad("layers.2.mlp.down.weight").clone())
    assert torch.equal(*grads) and bool((grads[0] != 7.0).all())


def test_input_gradient_of_one_forward_twice(faked):
    """As a capture takes it, once per beta: Transformer Engine's backward takes its saved state apart, and it is put back."""
    assembly, stage = middle()
    slot, ledger = filled(stage, 3), assembly.ledger
    assembly.flat.grad_buffer.fill_(7.0)
    seen = []
    with ledger.recording():
        ledger.begin_step(-1)
        act(assembly, "F", 5, slot)
        left = ledger.leases.payloads(1, 5)
        for beta in (0, 1):
            ledger.leases.put_back(1, 5, left)
            act(assembly, "I", 5, slot, beta, keep=beta == 0)
            held = [t for payload in ledger.leases.payloads(1, 5).values() for t in payload.tensors()]
            act(assembly, "W", 5, slot, beta)
            names = [name for name in assembly.flat.trainable_names if name.startswith("layers.2.")]
            seen.append((slot.dx.clone(), len(held), {name: assembly.flat.grad(name).clone() for name in names}))
    (first_dx, first_held, first), (second_dx, second_held, second) = seen
    assert torch.equal(first_dx, second_dx) and float(first_dx.abs().max()) > 0
    assert first_held == second_held == 8  # x and dY of four products
    assert all(torch.equal(second[name], 2 * grad) for name, grad in first.items())


def test_a_tape_that_is_not_kept_runs_once(faked):
    assembly, stage = middle()
    slot = filled(stage, 3)
    with assembly.ledger.recording():
        assembly.ledger.begin_step(-1)
        act(assembly, "F", 5, slot)
        saved = slot.saved
        act(assembly, "I", 5, slot, 0)
        slot.saved = saved
        with pytest.raises((RuntimeError, AttributeError)):
            act(assembly, "I", 5, slot, 1)


def test_unfused_attention_is_refused(monkeypatch):
    library = fake_library()
    library.modules["pytorch.attention.dot_product_attention"]._attention_backends["use_unfused_attention"] = True
    monkeypatch.setattr(te, "load", lambda device, recipe: library)
    words = r"layers.2.attention.core: .*no fused attention kernel.*NVTE_DEBUG=1.*CUDNN_HOME=.*model.backend=native"
    assembly, stage = middle()
    assembly.ledger.begin_step(0)
    with pytest.raises(QEffectError, match=words):
        act(assembly, "F", 0, filled(stage, 1))


def test_evaluation_writes_no_amax(faked):
    assembly, stage = middle()
    slot = stage.make_slot(Phase.EVAL)
    slot.x.fill_(1e4)
    before = assembly.timeline.open_amax.clone(), assembly.timeline.scale.clone()
    stage.evaluate(slot)
    assert torch.equal(before[0], assembly.timeline.open_amax) and torch.equal(before[1], assembly.timeline.scale)
    assembly.ledger.begin_step(0)
    act(assembly, "F", 0, filled(stage, 1))  # and the slots are the timeline's again
    assert float(assembly.timeline.history[assembly.timeline.index["layers.2.mlp.down.input"], 0]) > 0


def test_evaluation_in_between_leaves_no_trace(faked):
    from tests.tiny import batch

    with_evaluation = train(settings(), 4, between=lambda assembly, step: print(assembly.evaluator.run(batch(90 + step))))
    without = train(settings(), 4)
    assert with_evaluation.losses == without.losses and differing(with_evaluation.tensors, without.tensors) == []


def test_state_comes_back_through_typed_tensors_alone(faked):
    run = train(settings(), 3)
    saved = run.tensors
    fresh = assemble(settings(run__seed=9), device=torch.device("cpu"))
    with torch.no_grad():
        for item in fresh.logical_tensors():
            if not item.name.startswith("cached_weight"):
                item.tensor.copy_(saved[item.name])
    fresh.timeline.load_state(run.assembly.timeline.state())
    fresh.rebuild_caches()
    assert differing(Trained(fresh, [], [], [], []).tensors, saved) == []


def test_the_last_refresh_of_a_window_counts(faked):
    assembly, _ = middle()
    role = "layers.2.mlp.down.weight"
    before = float(assembly.timeline.slot_of(role))
    with torch.no_grad():
        assembly.flat.param(role).mul_(0.25)
    assembly.ledger.versions.bump()
    assembly.rebuild_caches()
    assert float(assembly.timeline.slot_of(role)) == before / 4 > 0


# ---- captures -----------------------------------------------------------------------------------------------------------


class Watch(Recorder):
    def keep(self, made: torch.Tensor) -> None:
        self.kept = [*getattr(self, "kept", []), made]


def watched(assembly: Assembly, forget: str | None = None) -> list[str]:
    stage = assembly.engine.stages[1]
    slot = stage.slots[0]
    if forget is not None:
        storages = assembly.register._storages
        storages.pop(next(key for key, name in storages.items() if name == forget))
    watch = Watch("test", assembly.register, ())
    with assembly.ledger.recording(), torch.autograd.set_multithreading_enabled(False), watch:
        assembly.ledger.begin_step(-1)
        for kind, beta in (("F", None), ("I", 0), ("W", 0)):
            act(assembly, kind, 5, slot, beta)
    return [line.split("(")[0] for line in watch.lines if line.startswith("te.")]


def test_a_capture_knows_what_transformer_engine_touches(faked):
    lines = watched(middle()[0])
    at = "te.layers.2"
    parts = [f"{at}.attention.qkv", f"{at}.attention.core", f"{at}.attention.out", f"{at}.mlp"]
    assert lines[:4] == [f"{part} F" for part in parts] and lines[4:8] == [f"{part} I" for part in reversed(parts)]
    assert lines[8:] == [f"{at}.{name} W beta 0" for name in ("mlp.down", "mlp.gate_up", "attention.out", "attention.qkv")]


@pytest.mark.parametrize("forget", ["transformer_engine/cublas_workspace", "transformer_engine/sequence_offsets"])
def test_a_capture_refuses_what_the_register_does_not_know(faked, forget):
    with pytest.raises(CaptureError, match="te.layers.2.attention.(qkv|core) F .*hidden-state register does not know"):
        watched(middle()[0], forget)


def test_a_tape_of_operations_cannot_hold_it(faked):
    assembly = assemble(settings(), device=torch.device("cpu"))
    assembly.rebuild_caches()
    with pytest.raises(CaptureError, match="graphs.backend=cuda_graphs"):
        capture(assembly.engine, HostReplay(), assembly.register)


# ---- pieces -------------------------------------------------------------------------------------------------------------


def test_a_queue_with_another_number_of_entries_is_an_error():
    store = Store()
    store.put([torch.zeros(1)], lambda x: x)
    with pytest.raises(LeaseError, match="left 1 delayed weight gradients, not 2"):
        take(fake_library(), store, 2)
    assert store.context.empty()


def test_a_delayed_product_of_another_make_is_an_error():
    product = DelayedProduct(fake_library(), Store(), [], lambda: None)
    with pytest.raises(LeaseError, match="holds no arguments of a product"):
        product.run("layer", torch.zeros(2), 0)
    arguments = {"accumulate": True, "out": torch.zeros(2)}
    product = DelayedProduct(fake_library(), Store(), [], lambda: arguments["out"])
    with pytest.raises(LeaseError, match="of layer writes another tensor than its main gradient"):
        product.run("layer", torch.zeros(2), 0)


class LibraryRoll:
    """One slot of Transformer Engine's fused update: the open amax is row 0, the newest of the rest the last row; a slot that
    is zero (nobody wrote it, or nothing but zeros) is left alone; a scale that overflows becomes the largest float32."""

    def __init__(self, top: float, length: int, algorithm: str, margin: int) -> None:
        self.rows, self.scale = np.zeros(length, np.float32), np.float32(1)
        self.scaled_max, self.most_recent = np.float32(top) * np.float32(2.0**-margin), algorithm == "most_recent"

    def __call__(self, amax: float) -> None:
        last = np.float32(amax)
        if last == 0:
            return
        seen = np.append(self.rows[1:], last)
        self.rows = np.append(np.float32(0), seen[1:])
        with np.errstate(over="ignore"):
            self.scale = np.minimum(self.scaled_max / (last if self.most_recent else seen.max()), np.finfo(np.float32).max)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_window_microbatch_rolls_as_transformer_engine_does(algorithm, margin):
    """Changing, idle, zero and tiny amax: scales and histories bit for bit; a weight is cast in one microbatch of four."""
    directions = {Direction.FORWARD: 448.0, Direction.BACKWARD: 57344.0}
    roles = [ScaleRole(f"{d}.{i}", d, top) for d, top in directions.items() for i in range(3)]
    never, draw = torch.zeros((), dtype=torch.bool), np.random.default_rng(0)
    line = ScaleTimeline(roles, window="microbatch", history=4, amax=algorithm, margin=margin)
    theirs = {role.name: LibraryRoll(role.fp8_max, 4, algorithm, margin) for role in roles}
    scales = set()
    for microbatch in range(40):
        for number, role in enumerate(roles):
            idle = number % 3 == 0 and microbatch % 4 != 0
            amax = 0.0 if idle or draw.random() < 0.1 else float(10.0 ** draw.uniform(-38 if microbatch % 7 == 0 else -3, 3))
            theirs[role.name](amax)
            if amax or draw.random() < 0.5:
                line.slot_of(role.name).fill_(amax)
        line.roll_(never)
        for role in roles:
            row, other = line.index[role.name], theirs[role.name]
            assert np.float32(line.scale[row]) == other.scale, (microbatch, role.name)
            assert line.history[row, :3].tolist() == other.rows[:0:-1].tolist()
            scales.add(float(other.scale))
    assert len(scales) > 60 and float(np.finfo(np.float32).max) in scales


def test_a_spoilt_amax_rolls_in_no_window():
    for window in ("step", "microbatch"):
        timeline = ScaleTimeline([ScaleRole("w", Direction.FORWARD, 448.0)], window=window, history=3)
        for amax in (8.0, float("nan"), float("inf")):
            timeline.slot_of("w").fill_(amax)
            timeline.roll_(torch.zeros((), dtype=torch.bool))
            assert timeline.history[0].tolist() == [8.0, 0.0, 0.0] and float(timeline.scale[0]) == 56.0


def test_block_scaling_without_a_kernel_of_it_is_plain_maths():
    recipe = te.BlockScaling()
    assert recipe.name == "block" and list(recipe.roles("layer")) == []
    with pytest.raises(NotImplementedError, match="Transformer Engine itself casts weights"):
        recipe.weight("layer", torch.zeros(2, 2))


def test_generation_runs_the_native_block(faked):
    """A step of one token fits no FP8 product of Transformer Engine."""
    from qeffect_lm.layers.kv_cache import KVCache

    assembly, stage = middle()
    block = stage.chunk.blocks[0]
    key, x = torch.zeros((), dtype=torch.int64), torch.randn(1, 3, 32).bfloat16()
    contexts = [LayerContext(Phase.EVAL, key, cache=KVCache.empty(1, 4).fresh_row(0)) for _ in range(2)]
    with torch.no_grad():
        assert torch.equal(block(x, contexts[0]), block.native(x, contexts[1]))
    assert [layer.name for layer in split_layers(stage.chunk)][0] == "layers.2.mlp.down"

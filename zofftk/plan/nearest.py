"""What fits, where a setting does not: the same training if possible, then other hardware, then a smaller model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zofftk.plan.answer import Alternative
from zofftk.plan.memory import ACTIVATIONS
from zofftk.plan.search import largest_fitting, most_layers
from zofftk.plan.setting import Setting
from zofftk.plan.sources import Source
from zofftk.plan.trials import SHALLOW, TORCH_DTYPES, Trials
from zofftk.virtual.dry_run import GIB

STATE_BYTES = 12  # of a parameter on the host: fp32 master and both moments
MOST_HOSTS = 64


def nearest_fitting(trials: Trials, setting: Setting) -> Alternative | None:
    """None where not even one layer of the model fits."""
    for other, reason in _others(trials, setting):
        if could_fit(trials, other) and (memory := trials.memory(other)).fits:
            return Alternative(other, None, trials.num_params(), memory, trials.step(other).step_ms, reason)
    return _smaller_model(trials, setting)


def could_fit(trials: Trials, setting: Setting, layers: int | None = None) -> bool:
    """False where parameters and states alone are too many: no run is needed."""
    profile, itemsize = trials.profile, TORCH_DTYPES[setting.dtype].itemsize
    params = trials.num_params(layers) / setting.tp
    devices_here = min(setting.ranks * setting.tp, profile.interconnect.devices_per_host)
    on_device = params * itemsize / GIB + profile.gpu.reserved_gib
    on_host = params / setting.ranks * (STATE_BYTES + itemsize) * devices_here / GIB
    on_host += on_device * devices_here if profile.gpu.is_host else 0
    return on_device <= profile.gpu.memory_gib and on_host <= profile.host.memory_gib


def can_share(source: Source, setting: Setting, tp: int) -> bool:
    """Its layers can be cut over so many devices."""
    return source.can_slice and not setting.seq % tp and not (source.heads or 1) % tp


def _others(trials: Trials, setting: Setting) -> Iterator[tuple[Setting, str]]:
    """The nearest first."""
    recomputed = replace(setting, recompute=True) if trials.source.can_recompute else setting
    if recomputed != setting:
        yield recomputed, "with recomputation: layers run again in backward"
    if setting.policy != "synchronous":
        yield replace(setting, policy="synchronous"), "with a synchronous update: no second gradient on the host"
    for each in dict.fromkeys((setting, recomputed)):
        yield from _smaller_micro_batch(trials, each, each != setting)
    yield from _more_devices(trials, recomputed)


def _smaller_micro_batch(trials: Trials, setting: Setting, with_recomputation: bool) -> Iterator[tuple[Setting, str]]:
    if setting.micro_batch == 1 or not (largest := largest_micro_batch(trials, setting)):
        return
    backwards = -(-setting.micro_batch * setting.backwards // largest)
    even = -(-setting.micro_batch * setting.backwards // backwards)  # about as many sequences a step as were asked
    # The sum of several gradients takes 4 more bytes a parameter of the host.
    also = " and recomputation" if with_recomputation else ""
    policy = setting.policy if setting.ranks == 1 and backwards == 1 else setting.policy.replace("inside", "behind")
    policy = policy.replace("behind backward", "behind forward")
    together = f"with a micro-batch of {even}{also}, {backwards} of them a step"
    yield replace(setting, micro_batch=even, backwards=backwards, policy=policy), together
    fewer = replace(setting, micro_batch=largest)
    yield fewer, f"with a micro-batch of {largest}{also}, {fewer.sequences_per_step} sequences a step"


def _more_devices(trials: Trials, setting: Setting) -> Iterator[tuple[Setting, str]]:
    """First those that share layers, on one host; then more hosts, which share the states."""
    here = trials.profile.interconnect.devices_per_host
    for tp in (2, 4, 8, 16):
        if tp <= setting.tp or tp > here or not can_share(trials.source, setting, tp):
            continue
        yield replace(setting, tp=tp), f"with each layer shared by {tp} devices (--tp {tp})"
        if setting.micro_batch > 1:
            yield replace(setting, tp=tp, micro_batch=1), f"with --tp {tp} and a micro-batch of 1"
    ranks = max(2, 2 * here // setting.tp)
    while ranks * setting.tp <= MOST_HOSTS * here:
        policy = setting.policy.replace("inside backward", "behind forward")
        yield replace(setting, ranks=ranks, policy=policy), f"with {ranks * setting.tp} devices, which share the states"
        ranks *= 2


def _smaller_model(trials: Trials, setting: Setting) -> Alternative | None:
    if trials.source.layers is None:
        return None

    layers = largest_model(trials, setting)
    if layers is None:
        return None
    memory = trials.memory(setting, layers)
    return Alternative(setting, layers, trials.num_params(layers), memory, None, f"a model of {layers} such layers")


def largest_model(trials: Trials, setting: Setting) -> int | None:
    """Layers of the largest model of the same layers that fits in this setting."""
    if trials.source.layers is None:
        return None
    guess = _layers_by_parameters(trials, setting)
    # A shallow model is quick to try, and the line through both points at the end.
    most = most_layers(trials.source.layers)
    second = SHALLOW[0] if guess > SHALLOW[0] else None
    return largest_fitting(lambda layers: trials.memory(setting, layers).free_share, guess, second=second, most=most)


def largest_micro_batch(trials: Trials, setting: Setting) -> int | None:
    """That fits with all else as it is; the host's own bytes do not depend on it."""
    if not could_fit(trials, setting):
        return None
    own = trials.memory(setting)
    if not own.host.fits:
        return None
    in_host = own.devices_in_host
    activations = max(1, own.device.items.get(ACTIVATIONS, 1))
    second = max(1, int(setting.micro_batch * (activations + own.device.free_bytes) / activations))

    def free(micro_batch: int) -> float:
        memory = trials.memory(replace(setting, micro_batch=micro_batch))
        return memory.host_free_bytes if in_host else memory.device.free_bytes

    return largest_fitting(free, setting.micro_batch, second=second if second != setting.micro_batch else None)


def _layers_by_parameters(trials: Trials, setting: Setting) -> int:
    """A first try: the model's own layers where they fit, else half of those whose parameters and states would."""
    own = trials.source.layers or 1
    if could_fit(trials, setting) and trials.memory(setting).fits:
        return own
    low, high = 1, own
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if could_fit(trials, setting, middle) else (low, middle)
    return max(1, low // 2)

"""The compiled kernels. Every buffer is a plain address of live, contiguous CPU memory; dtypes are named as in torch.

Functions raise ValueError for bad arguments before they touch memory, and RuntimeError for an instruction set the
processor lacks. All release the interpreter lock. `isa` names an instruction set for this call, "" the one in use.
"""

def adam_step(
    param: int,
    exp_avg: int,
    exp_avg_sq: int,
    grad: int,
    grad_dtype: str,
    out: int,
    out_dtype: str,
    n: int,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    grad_scale: float,
    threads: int,
    isa: str = "",
) -> None:
    """One Adam (decoupled: AdamW) step over n elements; param and moments are float32. out 0 means no copy of the
    parameter; out may be grad itself if the element sizes agree, and nothing else may overlap."""

def lion_step(
    param: int,
    exp_avg: int,
    grad: int,
    grad_dtype: str,
    out: int,
    out_dtype: str,
    n: int,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    grad_scale: float,
    threads: int,
    isa: str = "",
) -> None:
    """One Lion step; buffers as in `adam_step`."""

def sgd_step(
    param: int,
    momentum_buffer: int,
    grad: int,
    grad_dtype: str,
    out: int,
    out_dtype: str,
    n: int,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
    grad_scale: float,
    threads: int,
    isa: str = "",
) -> None:
    """One SGD step; buffers as in `adam_step`, momentum_buffer 0 where momentum is 0. `first`: it is not read."""

def block_square_sums(values: int, dtype: str, n: int, block: int, sums: int, threads: int, isa: str = "") -> None:
    """sums[b] (float64) = sum of squares of elements [b * block, min(n, (b + 1) * block))."""

def sum_runs(blocks: int, starts: int, counts: int, runs: int, out: int) -> None:
    """out[r] (float64) = blocks[starts[r]] + ... over counts[r] terms, left to right; starts and counts are int64."""

def accumulate(sum: int, values: int, dtype: str, n: int, threads: int, isa: str = "") -> None:
    """sum (float32) += values, element by element."""

def convert(
    target: int, target_dtype: str, source: int, source_dtype: str, n: int, threads: int, isa: str = ""
) -> None:
    """target = source, of equal dtypes or between float32 and a 16-bit type; ties to even, subnormals and NaN kept."""

def convert_ranges(table: int, rows: int, target_dtype: str, source_dtype: str, isa: str = "") -> None:
    """convert for every row of `table`, on the calling thread. A row is four int64: source, target, number of
    elements, and the address of the row's sums (not used here)."""

def pack_ranges(table: int, rows: int, target_dtype: str, source_dtype: str, block: int, isa: str = "") -> None:
    """convert_ranges, and in the same pass the block_square_sums of what was written; block is a multiple of 64."""

def roof(kind: str, param: int, exp_avg: int, exp_avg_sq: int, grad: int, out: int, n: int, threads: int) -> None:
    """Moves the bytes of a step with 16-bit gradients and parameters, and changes the buffers' contents. Addresses
    are multiples of 64; n is rounded down to a multiple of 32."""

def roof_kinds() -> list[str]: ...
def isa() -> str: ...
def available_isas() -> list[str]: ...
def cpu_features() -> list[str]: ...
def worker_count() -> int: ...
def release_workers() -> None:
    """Ends the pool's threads once no call uses them; the next call makes new ones."""

def set_worker_cores(cores: list[int]) -> None:
    """Binds the pool's threads, from the next call on and in children forked later, to these cores; none, the default:
    to those of the thread that makes them. Where the system refuses, they stay unbound; the calling thread always."""

def _mask_features(features: list[str]) -> None: ...
def _set_chunk(elements: int) -> None: ...
def _chunk_count(n: int, chunk: int) -> int: ...
def _chunk_range(n: int, chunk: int, index: int) -> tuple[int, int]: ...

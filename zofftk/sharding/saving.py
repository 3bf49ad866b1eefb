"""`save_sharded` and `load_sharded`: the states of many ranks in one folder, which is there whole or not at all.

The folder is a checkpoint of `torch.distributed.checkpoint`, beside which lie the sizes and checksums of its files.
Saving: rank 0 makes a new folder beside it; each rank writes its file there and tells rank 0 the checksum, which
writes the two small files and puts the new folder in the old one's place. Loading: the ranks share the work of
comparing the checksums, and compare what they want with what is there, before anything changes.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.stateful import Stateful

from zofftk.sharding import atomic_folder, manifest
from zofftk.sharding.agreement import Wanted, check_agreement, wanted
from zofftk.sharding.content import loadable, saveable
from zofftk.sharding.files import is_ours, summing_writer
from zofftk.sharding.joint_work import JointWork
from zofftk.sharding.loading import Loading, whole_checkpoint
from zofftk.sharding.waiting import timeout_for

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("zofftk")
PURPOSE = "zofftk's checkpoints"


class SaveHandle:
    """A save that is under way, or done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_seen = False  # its error has been raised
        self._result: Future[None] = Future()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._result.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is on the disk, at most `timeout` seconds; returns its folder.

        Raises what the save has raised, or TimeoutError. Where all ranks wait, all raise the same.
        """
        error = self._result.exception(timeout)
        if error is not None:
            self.is_seen = True
            raise error
        return self.folder

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._result.set_exception(error)
        else:
            self._result.set_result(None)


def save_sharded(
    state: dict[str, Any],
    folder: str | os.PathLike[str],
    group: ProcessGroup | None = None,
    *,
    wait: bool = True,
    timeout_s: float | None = None,
) -> SaveHandle:
    """Write the states of all ranks into `folder`, whole or not at all; every rank of `group` calls it.

    What was in `folder` stays until the new checkpoint is complete and on the disk, and stays whatever ends a process
    in between. `load_sharded` and `torch.distributed.checkpoint.load` read it, on any number of ranks. Each rank
    writes its own parts of each `ShardedState` and `DTensor`; what all ranks have alike is written once. So tensors
    that several ranks have are compared first, by sums that each rank takes of its own: that reads them once more, at
    about the speed of the memory they lie in. Of values that are not tensors, the first rank's are saved.

    Args:
        state: e.g. `{"model": model.state_dict(), "optimizer": opt.state_dict(), "epoch": 3}`: dicts and lists of
            tensors and plain values, or objects with a `state_dict` in their place. The same keys on all ranks.
        folder: where to, on a file system that all ranks share; missing parents are made. A symbolic link is followed.
        group: the ranks that hold the states, as the optimizer's `process_group` has them; None means all, or this
            process where torch.distributed is not in use. A gloo group of the same ranks is made at the first call.
        wait: False returns once the states have been copied; a thread writes the copy while training goes on. The
            copy takes 12 bytes for each parameter of this rank's share (of AdamW), and what else `state` holds, until
            it is written. The next save or load waits for it. End the training with `wait()` of the last handle,
            before `destroy_process_group`.
        timeout_s: how long to wait for a rank that does not come; None: the shortest `rank_timeout_s` of the optimizers
            in `state`, else the timeout of `group`. Writing may take longer.

    Returns:
        The save: `wait()` returns when it is on the disk.

    Raises:
        TypeError: something in `state` is not to be saved; names its keys.
        InputError: the ranks do not hold each element of a tensor once, have other keys, or a tensor in common that is
            not the same on all; names it and the ranks. A ValueError.
        OSError: the folder cannot be written, or holds what is no checkpoint.
        RankError: another rank has ended, or has not come within the timeout; names it. A RuntimeError.
        RuntimeError: the last save without `wait` has failed, and nobody has seen it.

    All of them leave what was in `folder`, and are raised on all ranks.
    """
    ranks = _ready_ranks(group, "save_sharded", timeout_for(state, timeout_s))
    handle = SaveHandle(Path(folder))
    with ranks.doing("save_sharded"):
        contents = [ranks.here(lambda: saveable(state, copied=not wait))]
        if wait:
            _write(contents.pop(), handle.folder, ranks)
            handle._run(lambda: None)
            return handle
    global _last
    _last = handle
    # Not a daemon: a script that ends has its last checkpoint.
    threading.Thread(target=_write_behind, args=(handle, contents, ranks), name="zofftk-save").start()
    return handle


def load_sharded(
    state: dict[str, Any],
    folder: str | os.PathLike[str],
    group: ProcessGroup | None = None,
    *,
    check: bool = True,
    strict: bool = True,
    timeout_s: float | None = None,
) -> None:
    """Read what `save_sharded`, or `torch.distributed.checkpoint.save`, has written into `folder` into `state`.

    Every rank of `group` calls it; the checkpoint may be of another number of ranks. Tensors are written in place:
    of a `ShardedState`, this rank's parts alone, so that no rank holds a copy of the states; beside them, one chunk
    of a file is in memory at a time. Other values replace those in `state`. Runs no code from the folder.

    Args:
        state: dicts and lists with a tensor of the right shape for each that is to be read, e.g.
            `{"optimizer": opt.state_dict()}`; objects with a `load_state_dict` get it called.
        folder: the checkpoint.
        group: the ranks that take part; None means all, or this process where torch.distributed is not in use.
        check: compare the checksums first, which reads each file once more, on one rank. Without it, a flipped bit
            goes unseen; missing and truncated files are found either way. A checkpoint of torch's own has none.
        strict: what the checkpoint holds under a key of `state` must be asked for. Keys of the checkpoint that
            `state` does not have are left alone either way.
        timeout_s: how long to wait for a rank that does not come; as in `save_sharded`.

    Raises:
        FileNotFoundError: there is no checkpoint, or a file of it is missing; names it.
        InputError: a file is truncated, damaged or needs code to be loaded; or `state` asks for what is not there, in
            another shape, or not for what is; names it. A ValueError.
        RankError: another rank has ended, or has not come within the timeout; names it. A RuntimeError.

    All of them are raised on all ranks, before anything in `state` has changed (but where a disk fails in between).
    """
    ranks = _ready_ranks(group, "load_sharded", timeout_for(state, timeout_s))
    with ranks.doing("load_sharded"):
        place = ranks.first(lambda: whole_checkpoint(Path(folder)))
        optimizers = [key for key, value in state.items() if hasattr(value, "show_states")]
        loading = ranks.here(lambda: Loading(place, loadable(state), optimizers))
        ranks.each(lambda: loading.verify(ranks.rank, ranks.size, checksums=check))
        ranks.each(lambda: loading.plan(strict=strict))
        ranks.each(loading.read_values)
        ranks.each(loading.read_tensors)
    for key, value in loading.content.items():
        if isinstance(state[key], Stateful):
            state[key].load_state_dict(value)
        else:
            state[key] = value


_last: SaveHandle | None = None  # the save that a thread may be writing still


def _ready_ranks(group: ProcessGroup | None, call: str, timeout_s: float | None) -> JointWork:
    """The ranks, after the save before has ended on all of them; raises its error if that was raised nowhere yet."""
    global _last
    handle, _last = _last, None
    error = handle._result.exception() if handle is not None and not handle.is_seen else None
    ranks = JointWork.of(group, PURPOSE, call, timeout_s)

    def complain() -> None:
        if error is not None and handle is not None:
            raise RuntimeError(f"the save of {handle.folder} that was not waited for has failed: {error}") from error

    with ranks.doing(call):
        ranks.each(complain)
    return ranks


def _write_behind(handle: SaveHandle, contents: list[dict[str, Any]], ranks: JointWork) -> None:
    def work() -> None:
        try:
            with ranks.doing("a save that is not waited for"):
                _write(contents.pop(), handle.folder, ranks)
        except BaseException as error:
            logger.error("the checkpoint %s was not saved: %s", handle.folder, error)
            raise

    handle._run(work)


def _write(content: dict[str, Any], folder: Path, ranks: JointWork) -> None:
    temporary = ranks.first(lambda: atomic_folder.begin(folder, is_ours))
    try:
        _write_all(content, temporary, folder, ranks)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_all(content: dict[str, Any], temporary: Path, folder: Path, ranks: JointWork) -> None:
    planner, is_first = DefaultSavePlanner(), ranks.rank == 0
    writer, sums = summing_writer(temporary)

    def local_plan() -> Wanted:
        planner.set_up_planner(content, writer.storage_meta(), is_first)
        writer.set_up_storage_writer(is_first, rank=ranks.rank, use_collectives=True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        return wanted(plan, planner.state_dict, planner.resolve_data, is_first=is_first)

    def global_plan(by_rank: list[Wanted]) -> list[SavePlan]:
        check_agreement(by_rank, ranks.in_world)
        return writer.prepare_global_plan(planner.create_global_plan([rank.plan for rank in by_rank])[0])

    def write() -> tuple[Any, dict[str, manifest.FileSum]]:
        return writer.write_data(plan, planner).wait(), sums

    def complete(written: list[tuple[Any, dict[str, manifest.FileSum]]]) -> list[None]:
        writer.finish(planner.metadata, [results for results, _ in written])
        manifest.write(temporary, {name: file for _, files in [*written, (None, sums)] for name, file in files.items()})
        atomic_folder.commit(temporary, folder)
        return [None] * ranks.size

    plan = planner.finish_plan(ranks.through_first(local_plan, global_plan))
    ranks.through_first(write, complete)

"""Which cores the update of each rank on this host runs on, by what Linux tells of them under /sys.

Every rank works its own part out alone: from the same facts each comes to the same split. A fact that is missing, or
makes no sense, counts as not known. Only threads are placed: memory lies where the system put it when it was made.
"""

from collections.abc import Sequence, Set
from os import cpu_count
from pathlib import Path

SYS = Path("/sys")
MOST_CORES = 1 << 16  # more than any kernel knows: a larger number is no core's


def cores_of_rank(
    allowed: Set[int],
    rank: int,
    ranks: int,
    gpu_nodes: Sequence[int | None] = (),
    *,
    granted: Set[int] | None = None,
    root: Path = SYS,
) -> Set[int]:
    """The cores for the update of one of the ranks on this host: a part of `allowed`, or all where nothing is split.

    The ranks share `allowed` evenly, in whole cores: hardware threads of one core stay together. Where there are fewer
    cores than ranks, they take turns. Where the node of every rank's GPU is known, each node's cores are for the ranks
    of its GPUs alone. A rank that a launcher has bound to some of the host's cores has its part already.

    Args:
        allowed: cores in the affinity mask of this process.
        rank: number of this rank on this host, from 0.
        ranks: how many there are on this host.
        gpu_nodes: the memory node of each rank's GPU, None where it is not known; empty if none is.
        granted: cores that the control group leaves to all ranks together; None: all of the host's.
        root: where /sys is.
    """
    if not 0 <= rank < ranks or ranks == 1 or not allowed or host_cores(granted, root) - allowed:
        return allowed
    nodes = {node: cores & allowed for node, cores in node_cores(root).items() if cores & allowed}
    near = [node for node in gpu_nodes if node in nodes]
    if len(near) == len(gpu_nodes) == ranks:
        peers = [peer for peer in range(ranks) if near[peer] == near[rank]]
        return _share(_whole_cores([nodes[near[rank]]], root), peers.index(rank), len(peers))
    return _share(_whole_cores([*nodes.values(), allowed], root), rank, ranks)


def _whole_cores(groups: Sequence[Set[int]], root: Path) -> list[set[int]]:
    """The groups' cores, each with its siblings among them, in the order of the groups; none of them twice."""
    left, whole = set[int]().union(*groups), []
    for group in groups:
        for core in sorted(group):
            if core in left:
                together = left & (siblings(core, root) | {core})
                whole.append(together)
                left -= together
    return whole


def _share(whole: Sequence[Set[int]], rank: int, ranks: int) -> Set[int]:
    if len(whole) < ranks:
        return whole[rank % len(whole)]
    mine = whole[rank * len(whole) // ranks : (rank + 1) * len(whole) // ranks]
    return {core for together in mine for core in together}


def host_cores(granted: Set[int] | None = None, root: Path = SYS) -> Set[int]:
    """Cores that a process has which nobody has bound: those that run, are not set aside at boot, and are granted."""
    cpu = root / "devices/system/cpu"
    running = parse_list(_read(cpu / "online")) or set(range(cpu_count() or 1))
    cores = running - parse_list(_read(cpu / "isolated")) or running
    return cores if granted is None else cores & granted or cores


def node_cores(root: Path = SYS) -> dict[int, Set[int]]:
    """The cores of each memory node, by the node's number in rising order; no core in two of them."""
    found = {}
    try:
        folders = [*(root / "devices/system/node").glob("node*")]
    except OSError:
        return {}
    for folder in folders:
        number = _number(folder.name.removeprefix("node"))
        if number is not None:
            found[number] = parse_list(_read(folder / "cpulist"))
    nodes, taken = {}, set()
    for number in sorted(found):
        nodes[number] = found[number] - taken
        taken |= found[number]
    return nodes


def siblings(core: int, root: Path = SYS) -> Set[int]:
    """The hardware threads of the core that this one belongs to; empty if not known."""
    return parse_list(_read(root / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"))


def gpu_node(pci_id: str, root: Path = SYS) -> int | None:
    """The memory node next to the GPU with this PCI id, such as "0000:3B:00.0"; None if not known."""
    return _number(_read(root / "bus/pci/devices" / pci_id.lower() / "numa_node"))  # "-1": the firmware does not tell


def parse_list(text: str) -> set[int]:
    """The numbers of a list as Linux writes it: "0-3,8,10-11". What is no number or range of numbers is passed over."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        ends = [_number(end) for end in part.split("-")]
        first, last = ends[0], ends[-1]
        if len(ends) <= 2 and first is not None and last is not None:
            numbers.update(range(first, last + 1))
    return numbers


def _number(text: str) -> int | None:
    text = text.strip()
    if text.isdecimal() and text.isascii() and len(text) <= 6 and int(text) < MOST_CORES:
        return int(text)
    return None


def format_list(cores: Set[int]) -> str:
    """As Linux writes it."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return ""

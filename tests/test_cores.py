"""How ranks split the cores of their host, over made-up machines."""

from __future__ import annotations

import random

import pytest

from tests.fake_sys import fake_sys
from zofftk.cores import cores_of_rank, format_list, gpu_node, host_cores, node_cores, parse_list, siblings


def split(allowed, ranks, gpu_nodes=(), **options):
    """The share of every rank, as Linux writes lists of cores."""
    allowed = parse_list(allowed)
    return [format_list(cores_of_rank(allowed, rank, ranks, gpu_nodes, **options)) for rank in range(ranks)]


def test_four_ranks_on_eight_cores(tmp_path):
    root = fake_sys(tmp_path, nodes={0: "0-7"}, online="0-7")
    assert split("0-7", 4, root=root) == ["0-1", "2-3", "4-5", "6-7"]


def test_the_rest_of_an_uneven_division_goes_to_some(tmp_path):
    root = fake_sys(tmp_path, nodes={0: "0-6"}, online="0-6")
    assert split("0-6", 3, root=root) == ["0-1", "2-3", "4-6"]


def test_ranks_keep_to_one_node_each_where_it_can_be(tmp_path):
    root = fake_sys(tmp_path, nodes={0: "0,2,4,6", 1: "1,3,5,7"}, online="0-7")
    assert split("0-7", 2, root=root) == ["0,2,4,6", "1,3,5,7"]
    assert split("0-7", 4, root=root) == ["0,2", "4,6", "1,3", "5,7"]


@pytest.mark.parametrize(
    ("gpu_nodes", "expected"),
    [
        ([1, 0], ["4-7", "0-3"]),
        ([1, 1], ["4-5", "6-7"]),
        ([1, 0, 1, 0], ["4-5", "0-1", "6-7", "2-3"]),
        ([0, 0, 0, 1], ["0", "1", "2-3", "4-7"]),
        # One that is not known, or has no cores: the ranks whose GPU's node is known cannot tell what is left to them.
        ([1, None], ["0-3", "4-7"]),
        ([1, 9], ["0-3", "4-7"]),
        ([1, -1], ["0-3", "4-7"]),
        ([1], ["0-3", "4-7"]),
        ([1, 0, 0], ["0-3", "4-7"]),
    ],
)
def test_the_nodes_of_the_gpus(tmp_path, gpu_nodes, expected):
    root = fake_sys(tmp_path, nodes={0: "0-3", 1: "4-7", 2: ""}, online="0-7")
    assert split("0-7", len(expected), gpu_nodes, root=root) == expected


def test_hardware_threads_of_a_core_stay_together(tmp_path):
    pairs = ("0,4", "1,5", "2,6", "3,7")
    root = fake_sys(tmp_path, nodes={0: "0-1,4-5", 1: "2-3,6-7"}, online="0-7", siblings=pairs)
    assert split("0-7", 4, root=root) == list(pairs)
    assert split("0-7", 3, root=root) == ["0,4", "1,5", "2-3,6-7"]
    assert split("0-7", 2, [1, 1], root=root) == ["2,6", "3,7"]
    assert split("0-7", 8, root=root) == [*pairs, *pairs]


def test_more_ranks_than_cores_take_turns(tmp_path):
    root = fake_sys(tmp_path, nodes={0: "0-2"}, online="0-2")
    assert split("0-2", 5, root=root) == ["0", "1", "2", "0", "1"]
    assert split("0", 2, root=fake_sys(tmp_path / "one", online="0")) == ["0", "0"]


def test_what_a_launcher_has_bound_is_not_split_again(tmp_path):
    root = fake_sys(tmp_path, nodes={0: "0-3", 1: "4-7"}, online="0-7")
    assert split("0-3", 2, [0, 0], root=root) == ["0-3", "0-3"]
    assert cores_of_rank({6}, 3, 4, root=root) == {6}


def test_cores_that_no_process_has_unless_bound_bind_nobody(tmp_path):
    """Those that are off, set aside at boot, or another control group's."""
    root = fake_sys(tmp_path, nodes={0: "0-3", 1: "4-7"}, online="0-6", isolated="2-3")
    assert host_cores(root=root) == {0, 1, 4, 5, 6}
    assert split("0-1,4-6", 2, [0, 1], root=root) == ["0-1", "4-6"]
    assert split("4-6", 3, root=root) == ["4-6"] * 3
    assert split("4-6", 3, root=root, granted={4, 5, 6, 7}) == ["4", "5", "6"]
    assert split("5", 2, root=root, granted={4, 5}) == ["5", "5"]
    assert host_cores({90}, root) == {0, 1, 4, 5, 6}
    everything = fake_sys(tmp_path / "all", online="0-3", isolated="0-3")
    assert host_cores(root=everything) == {0, 1, 2, 3}


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (-1, 4), (4, 4), (0, 0), (0, -1)])
def test_one_rank_and_numbers_that_make_no_sense_split_nothing(tmp_path, rank, ranks):
    assert cores_of_rank({0, 1, 2}, rank, ranks, root=fake_sys(tmp_path, online="0-2")) == {0, 1, 2}


def test_no_allowed_core(tmp_path):
    assert cores_of_rank(set(), 0, 2, root=tmp_path) == set()


def test_without_any_file(tmp_path, monkeypatch):
    monkeypatch.setattr("zofftk.cores.cpu_count", lambda: 4)
    for root in (tmp_path, tmp_path / "absent"):
        assert split("0-3", 2, [0, 1], root=root) == ["0-1", "2-3"]
        assert split("0-1", 2, root=root) == ["0-1", "0-1"]
        assert (host_cores(root=root), node_cores(root), siblings(0, root)) == ({0, 1, 2, 3}, {}, set())


GARBAGE = ["", "\n", "x", "-", "--", "3-1", "0-", "-3", "0-1-2", ",,", "\0", "é", "٣", "0-99999999999", "9" * 5000]


@pytest.mark.parametrize("text", GARBAGE)
def test_garbage(tmp_path, text, monkeypatch):
    monkeypatch.setattr("zofftk.cores.cpu_count", lambda: 4)
    root = fake_sys(tmp_path, nodes={0: text, 1: text}, online=text, siblings=("0", "1"), gpus={"0000:3b:00.0": text})
    (root / "devices/system/cpu/cpu0/topology/thread_siblings_list").write_text(text)
    (root / "devices/system/node/nodex").mkdir()
    (root / "devices/system/node/node7").write_bytes(b"\xff\xfe")  # no folder
    assert gpu_node("0000:3b:00.0", root) is None
    assert parse_list(text) == set()
    assert split("0-3", 2, [0, 1], root=root) == ["0-1", "2-3"]


def test_contradictions(tmp_path):
    """Nodes that overlap, siblings everywhere: still every rank has cores, and only those that are allowed."""
    root = fake_sys(tmp_path, nodes={0: "0-5", 1: "2-9"}, online="0-7", siblings=("0,1,6,9", "2", "3"))
    assert node_cores(root) == {0: {0, 1, 2, 3, 4, 5}, 1: {6, 7, 8, 9}}
    assert split("0-7", 2, [0, 1], root=root) == ["0-5", "6-7"]
    assert split("0-7", 2, root=root) == ["0-3,6", "4-5,7"]


def test_the_node_of_a_gpu(tmp_path):
    root = fake_sys(tmp_path, gpus={"0000:3b:00.0": "1", "0000:5e:00.0": "-1"})
    assert gpu_node("0000:3B:00.0", root) == 1
    assert [gpu_node(pci_id, root) for pci_id in ("0000:5E:00.0", "0000:00:00.0", "", "\0", "../..")] == [None] * 5


def test_lists():
    assert parse_list(" 0-3,8, 10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_list("1,x,3,2-,5") == {1, 3, 5}
    assert format_list({11, 0, 1, 2, 3, 8, 10}) == "0-3,8,10-11"
    assert format_list(set()) == ""


@pytest.mark.parametrize("seed", range(50))
def test_any_machine_is_split_evenly_and_whole(tmp_path, seed):
    pick = random.Random(seed)
    nodes, per_node, threads = pick.choice([1, 2, 4]), pick.randint(1, 6), pick.choice([1, 2])
    half = nodes * per_node
    cores = [[core + half * thread for thread in range(threads)] for core in range(half)]
    root = fake_sys(
        tmp_path,
        nodes={
            node: ",".join(str(core) for whole in cores[node * per_node : (node + 1) * per_node] for core in whole)
            for node in range(nodes)
        },
        online=f"0-{half * threads - 1}",
        siblings=tuple(",".join(map(str, whole)) for whole in cores),
    )
    ranks = pick.randint(2, 8)
    gpu_nodes = pick.choice([(), [pick.randrange(nodes) for _ in range(ranks)]])
    shares = [cores_of_rank(set(range(half * threads)), rank, ranks, gpu_nodes, root=root) for rank in range(ranks)]
    places = node_cores(root)
    for group in [range(ranks)] if not gpu_nodes else [[r for r in range(ranks) if gpu_nodes[r] == n] for n in places]:
        whole = [sum(core < half for core in shares[rank]) for rank in group]
        assert not whole or max(whole) - min(whole) <= 1
        given = [core for rank in group for core in shares[rank]]
        room = set.union(*map(set, places.values())) if not gpu_nodes else places[gpu_nodes[group[0]]] if group else ()
        if group and len(room) // threads >= len(group):
            assert sorted(given) == sorted(room)  # all of them, each once
        assert set(given) <= set(room)
    for share in shares:
        assert share
        assert all(core % half + half * thread in share for core in share for thread in range(threads))

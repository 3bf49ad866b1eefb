"""The data-flow graph against bytes counted tensor by tensor, and what its placements show."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zofftk.cli import main
from zofftk.dataflow.assumptions import GRADIENTS, MASTERS, OPTIMIZERS, PAPER, STATES, Assumptions
from zofftk.dataflow.drawing import CPU_COLOUR, CUT_COLOUR, Panel, draw_graph, panels_of, write_drawing
from zofftk.dataflow.graph import Compute, build_graph, fuse
from zofftk.dataflow.optimum import Optimum
from zofftk.dataflow.placements import Placements
from zofftk.dataflow.record import record
from zofftk.dataflow.table import table_1
from zofftk.errors import InputError

OFFLOADED = ("g16", "update", "p32", "m32", "v32", "float2half")
UPDATE = OFFLOADED[1:]
BYTES = {"8bit": 1, "bf16": 2, "fp16": 2, "fp32": 4}
without_split = st.builds(
    Assumptions,
    gradients=st.sampled_from(GRADIENTS),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    states=st.sampled_from(STATES),
    master=st.sampled_from(MASTERS),
)


def tensors_of(assumptions: Assumptions) -> dict[str, tuple[Fraction, list[str]]]:
    """Name: bytes per parameter, and who reads or writes it in an iteration, each once."""
    tensors: dict[str, tuple[Fraction, list[str]]] = {}
    shares = {"": Fraction(1)}
    if assumptions.split is not None:
        shares = {".part": Fraction(assumptions.split), ".rest": 1 - Fraction(assumptions.split)}
    moments = {"adam": ["m", "v"], "lion": ["m"], "sgd-momentum": ["m"], "sgd": []}[assumptions.optimizer]
    for end, share in shares.items():
        grad, state = BYTES[assumptions.gradients], BYTES[assumptions.states]
        has_master = assumptions.master == "fp32"
        writers = [f"float2half{end}"] if has_master else [f"update{end}"] * 2
        tensors[f"p16{end}"] = (2 * share, ["FWD", "BWD", *writers])
        tensors[f"g{8 * grad}{end}"] = (grad * share, ["BWD", f"update{end}"])
        if has_master:
            tensors[f"p32{end}"] = (4 * share, [f"update{end}"] * 2 + [f"float2half{end}"])
        for moment in moments:
            tensors[f"{moment}{8 * state}{end}"] = (state * share, [f"update{end}"] * 2)
    return tensors


def link_bytes(tensors: dict[str, tuple[Fraction, list[str]]], on_cpu: set[str]) -> Fraction:
    return sum(
        (width for name, (width, users) in tensors.items() for user in users if (user in on_cpu) != (name in on_cpu)),
        Fraction(0),
    )


def held_bytes(tensors: dict[str, tuple[Fraction, list[str]]], on_cpu: set[str], *, cpu: bool) -> Fraction:
    return sum((width for name, (width, _) in tensors.items() if (name in on_cpu) == cpu), Fraction(0))


def compute_on(on_cpu: set[str]) -> Compute:
    if on_cpu & {"FWD", "BWD"}:
        return Compute.MB
    return Compute.M if any(name.startswith(("update", "float2half")) for name in on_cpu) else Compute.NONE


@given(without_split, st.none() | st.sampled_from([Fraction(1, 3), Fraction(1, 2), Fraction(7, 1000)]), st.data())
@settings(max_examples=40, deadline=None)
def test_any_placement_costs_what_its_tensors_move(assumed, split, data):
    assumptions = Assumptions(
        gradients=assumed.gradients,
        optimizer=assumed.optimizer,
        states=assumed.states,
        master=assumed.master,
        split=split,
    )
    placements = Placements(build_graph(assumptions))
    tensors = tensors_of(assumptions)
    users = {user for _, of_one in tensors.values() for user in of_one}
    assert set(placements.nodes) == {*tensors, *users, "activation16"}
    for _ in range(5):
        on_cpu = data.draw(st.sets(st.sampled_from(placements.nodes)))
        found = placements.find(on_cpu)
        assert set(found.on_cpu) == on_cpu
        assert found.link_bytes_per_param == link_bytes(tensors, on_cpu)
        assert found.cpu_bytes_per_param == held_bytes(tensors, on_cpu, cpu=True)
        assert found.gpu_bytes_per_param == held_bytes(tensors, on_cpu, cpu=False)
        assert found.cpu_compute == compute_on(on_cpu)
        sides = {name in on_cpu for name in ("FWD", "activation16", "BWD")}
        assert found.cuts_activations == (len(sides) == 2)


def in_scope(assumptions: Assumptions) -> dict[frozenset[str], tuple[Fraction, Fraction]]:
    """Link and GPU bytes of everything that leaves forward, backward and activations on the GPU, one by one."""
    tensors = tensors_of(assumptions)
    users = {user for _, of_one in tensors.values() for user in of_one} - {"FWD", "BWD"}
    free = sorted({*tensors, *users})
    subsets = (set(c) for size in range(len(free) + 1) for c in itertools.combinations(free, size))
    return {frozenset(on): (link_bytes(tensors, on), held_bytes(tensors, on, cpu=False)) for on in subsets}


@given(without_split)
@settings(max_examples=15, deadline=None)
def test_the_best_are_those_of_a_search_one_by_one(assumptions):
    costs = in_scope(assumptions)
    optimum = Optimum(assumptions)
    assert int(optimum.placements.in_scope.sum()) == len(costs)
    least = min(link for on_cpu, (link, _) in costs.items() if on_cpu)
    cheapest = {on_cpu for on_cpu, (link, _) in costs.items() if on_cpu and link == least}
    assert {frozenset(each.on_cpu) for each in optimum.least_traffic} == cheapest
    smallest = min(costs[on_cpu][1] for on_cpu in cheapest)
    assert {frozenset(each.on_cpu) for each in optimum.best} == {on for on in cheapest if costs[on][1] == smallest}
    ours = frozenset(optimum.offload.on_cpu)
    rivals = {
        on
        for on, (link, gpu) in costs.items()
        if on != ours and link <= costs[ours][0] and gpu <= costs[ours][1] and compute_on(set(on)) <= Compute.M
    }
    assert {frozenset(each.on_cpu) for each in optimum.rivals} == rivals
    beaten = {
        on: any(
            other[0] <= costs[on][0] and other[1] <= costs[on][1] and other != costs[on] for other in costs.values()
        )
        for on in costs
    }
    assert {frozenset(each.on_cpu) for each in optimum.frontier} == {on for on in costs if not beaten[on]}


@given(without_split)
@settings(max_examples=15, deadline=None)
def test_the_least_traffic_is_the_minimum_cut(assumptions):
    graph = build_graph(assumptions)
    assert nx.is_strongly_connected(graph)  # every node lies on a cycle
    cut = nx.Graph()
    for source, target, flow in graph.edges(data=True):
        weight = 1000 if flow["activations"] else int(flow["bytes_per_param"])
        before = cut.edges[source, target]["weight"] if cut.has_edge(source, target) else 0
        cut.add_edge(source, target, weight=before + weight)
    # An undirected cut may have forward and backward on either side, which changes no traffic.
    assert nx.stoer_wagner(cut)[0] == Optimum(assumptions).least_traffic[0].link_bytes_per_param


def test_the_paper_s_graph():
    graph = build_graph(PAPER)
    assert {(source, target): flow["bytes_per_param"] for source, target, flow in graph.edges(data=True)} == {
        ("FWD", "activation16"): 0,
        ("activation16", "BWD"): 0,
        ("p16", "FWD"): 2,
        ("p16", "BWD"): 2,
        ("BWD", "g16"): 2,
        ("g16", "update"): 2,
        ("p32", "update"): 4,
        ("m32", "update"): 4,
        ("v32", "update"): 4,
        ("update", "p32"): 4,
        ("update", "m32"): 4,
        ("update", "v32"): 4,
        ("p32", "float2half"): 4,
        ("float2half", "p16"): 2,
    }
    compute = {name: each.label for name, each in graph.nodes(data="compute") if each}
    assert compute == {"FWD": "O(MB)", "BWD": "O(MB)", "update": "O(M)", "float2half": "O(M)"}
    fused = fuse(graph)
    assert {(source, target): flow["bytes_per_param"] for source, target, flow in fused.edges(data=True)} == {
        ("p16", "FWD-BWD"): 4,
        ("FWD-BWD", "g16"): 2,
        ("g16", "Update"): 2,
        ("Update", "p16"): 2,
    }
    assert fused.nodes["Update"]["bytes_per_param"] == 12
    assert fused.nodes["FWD-BWD"]["compute"] == Compute.MB


def test_the_paper_s_claims():
    optimum = Optimum(PAPER)
    assert (len(optimum.placements), len(optimum.fused_placements)) == (1024, 16)
    assert [(each.on_cpu, each.link_bytes_per_param) for each in optimum.least_traffic] == [
        (("g16",), 4),
        (UPDATE, 4),
        (OFFLOADED, 4),
    ]
    assert optimum.best == (optimum.offload,)
    assert optimum.offload.on_cpu == OFFLOADED
    assert (optimum.everything_on_gpu.gpu_bytes_per_param, optimum.offload.gpu_bytes_per_param) == (16, 2)
    assert optimum.rivals == ()
    assert optimum.divided_update_link_bytes_per_param == 6
    assert optimum.parameters_on_cpu_link_bytes_per_param == 6
    assert optimum.super_nodes_keep_the_least
    assert optimum.layer_to_layer.link_bytes_per_param == 28
    assert optimum.by_super_node(optimum.offload.on_cpu) == ("g16", "Update")
    assert optimum.by_super_node(("p16", "p32", "update")) == ("p16", "p32", "update")


def test_without_the_limit_on_cpu_compute_the_sides_may_be_swapped():
    placements = Optimum(PAPER).placements
    uncut = placements.nontrivial & ~placements.cuts_activations
    assert placements.link[uncut].min() == 4 * placements.scale
    swapped = placements.select(uncut & (placements.link == 4 * placements.scale))
    assert len(swapped) == 6
    assert [each.cpu_compute.label for each in swapped].count("O(MB)") == 3


def test_table_1_comes_out_of_the_placements():
    rows = table_1()
    assert [(row.places, row.gpu_bytes_per_param, round(float(row.reduction), 2)) for row in rows] == [
        (("gpu", "gpu", "gpu", "gpu"), 16, 1.0),
        (("gpu", "gpu", "cpu", "gpu"), 14, 1.14),
        (("gpu", "gpu", "gpu", "cpu"), 4, 4.0),
        (("gpu", "gpu", "cpu", "cpu"), 2, 8.0),
    ]
    assert [row.link_bytes_per_param for row in rows] == [0, 4, 4, 4]
    assert [row.misprinted for row in rows] == [False, False, False, True]
    # What the paper prints as reductions are those of the computed bytes, the misprinted row included.
    assert [row.printed_reduction for row in rows] == [f"{float(row.reduction):.3g}x" for row in rows]


@pytest.mark.parametrize(
    ("changed", "best", "link", "gpu"),
    [
        ({"gradients": "fp32"}, [("g32", *UPDATE)], 6, 2),
        ({"states": "bf16"}, [("g16", "update", "p32", "m16", "v16", "float2half")], 4, 2),
        ({"states": "8bit"}, [("m8",), ("v8",)], 2, 9),
        ({"optimizer": "sgd"}, [("g16", "update", "p32", "float2half")], 4, 2),
        ({"optimizer": "lion"}, [("g16", "update", "p32", "m32", "float2half")], 4, 2),
        ({"master": "none"}, [("g16",)], 4, 10),
        ({"split": 0.25}, [tuple(f"{name}.part" for name in OFFLOADED)], 1, 12.5),
        (
            {"split": Fraction(1, 2)},
            [tuple(f"{name}.{part}" for name in OFFLOADED) for part in ("part", "rest")],
            2,
            9,
        ),
    ],
    ids=str,
)
def test_what_wins_under_other_assumptions(changed, best, link, gpu):
    optimum = Optimum(Assumptions(**changed))
    assert [each.on_cpu for each in optimum.best] == best
    assert {(each.link_bytes_per_param, each.gpu_bytes_per_param) for each in optimum.best} == {(link, gpu)}


def test_without_master_parameters_the_offload_has_a_rival_that_empties_the_gpu():
    optimum = Optimum(Assumptions(master="none"))
    assert (optimum.offload.link_bytes_per_param, optimum.offload.gpu_bytes_per_param) == (6, 2)
    emptied = [each for each in optimum.rivals if each.gpu_bytes_per_param == 0]
    assert [(each.on_cpu, each.link_bytes_per_param) for each in emptied] == [
        (("p16", "g16", "update", "m32", "v32"), 6)
    ]


def test_super_nodes_lose_a_minimum_where_a_state_is_narrow():
    assert not Optimum(Assumptions(states="8bit")).super_nodes_keep_the_least
    assert Optimum(Assumptions(states="8bit")).divided_update_link_bytes_per_param == 2


def test_a_split_moves_along_the_line_between_all_and_nothing():
    frontier = Optimum(Assumptions(split=Fraction(3, 10))).frontier
    points = [(float(each.link_bytes_per_param), float(each.gpu_bytes_per_param)) for each in frontier]
    assert points == [(0, 16), (1.2, 11.8), (1.8, 11.2), (2.8, 6.2), (4, 2), (4.6, 1.4), (5.4, 0.6), (6, 0)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gradients": "8bit"}, "gradients: expected one of fp16, bf16, fp32, got 8bit"),
        ({"optimizer": "adagrad"}, "optimizer: expected one of adam, lion, sgd-momentum, sgd, got adagrad"),
        ({"states": "int4"}, "states: expected one of fp32, bf16, fp16, 8bit, got int4"),
        ({"master": None}, "master: expected one of fp32, none, got None"),
        ({"split": 0.0}, "split: expected a number from 0.000001 to 0.999999, got 0"),
        ({"split": 1}, "split: expected a number from 0.000001 to 0.999999, got 1"),
        ({"split": float("nan")}, "split: expected a number from 0.000001 to 0.999999, got nan"),
    ],
    ids=str,
)
def test_assumptions_are_checked(changed, message):
    with pytest.raises(InputError) as caught:
        Assumptions(**changed)
    assert str(caught.value) == message


def test_a_node_that_is_not_there_is_named():
    with pytest.raises(InputError, match="expected nodes out of FWD, .*, got m8"):
        Optimum(PAPER).placements.find(["g16", "m8"])


def axes_of(panel: Panel):
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    draw_graph(axes, panel)
    return axes


def test_the_drawing_marks_both_sides_and_the_cut():
    from matplotlib.colors import to_hex
    from matplotlib.patches import FancyArrowPatch

    whole, fused = panels_of(Optimum(PAPER), OFFLOADED)
    for panel, nodes, edges, on_cpu in ((whole, 10, 14, 6), (fused, 4, 4, 2)):
        axes = axes_of(panel)
        arrows = [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)]
        shapes = [patch for patch in axes.patches if not isinstance(patch, FancyArrowPatch)]
        assert (len(shapes), len(arrows)) == (nodes, edges)
        assert [to_hex(patch.get_facecolor()) for patch in shapes].count(CPU_COLOUR) == on_cpu
        assert [to_hex(arrow.get_edgecolor()) for arrow in arrows].count(CUT_COLOUR) == 2
        assert "4M bytes cross the link" in axes.get_title()
        assert len({text.get_position() for text in axes.texts}) == nodes + edges


def test_a_divided_super_node_is_drawn_in_the_whole_graph_only():
    assert len(panels_of(Optimum(PAPER), ("m32",))) == 1
    assert len(panels_of(Optimum(PAPER), ())) == 2


@pytest.mark.parametrize(("kind", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_drawing_has_the_same_bytes_each_time(tmp_path, kind, start):
    optimum = Optimum(PAPER)
    files = [tmp_path / f"{name}.{kind}" for name in ("one", "two")]
    for file in files:
        write_drawing(file, panels_of(optimum, optimum.offload.on_cpu))
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes().startswith(start)
    assert b"<dc:date>" not in files[0].read_bytes()


@pytest.mark.parametrize("changed", [{"split": 0.3}, {"master": "none", "optimizer": "sgd"}], ids=str)
def test_no_two_nodes_are_drawn_over_each_other(changed):
    for panel in panels_of(Optimum(Assumptions(**changed)), ()):
        assert len({text.get_position() for text in axes_of(panel).texts}) == len(panel.graph) + panel.graph.size()


def test_the_record_is_plain_data():
    plain = json.loads(json.dumps(record(Optimum(PAPER), all_placements=True)))
    assert (len(plain["placements"]), len(plain["super_node_placements"])) == (1024, 16)
    assert plain["zero_offload"] == {
        "on_cpu": list(OFFLOADED),
        "cpu_compute": "O(M)",
        "link_bytes_per_param": 4,
        "gpu_bytes_per_param": 2,
        "cpu_bytes_per_param": 14,
        "cuts_activations": False,
    }
    assert plain["best"] == [plain["zero_offload"]]
    assert plain["zero_offload"] in plain["placements"]
    assert plain["table_1"][3]["misprinted"]
    held = {node["name"]: node["bytes_per_param"] for node in plain["graph"]["nodes"]}
    assert sum(held.values()) == 16
    assert record(Optimum(Assumptions(states="bf16")))["table_1"] is None
    assert record(Optimum(Assumptions(split=Fraction(1, 4))))["assumptions"]["split"] == 0.25


def shown(capsys, monkeypatch, *arguments: str) -> str:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["dataflow", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def test_the_command_prints_table_1_and_its_misprint(capsys, monkeypatch):
    text = shown(capsys, monkeypatch)
    cells = [line.replace("│", " ").split() for line in text.splitlines()]
    assert ["gpu", "gpu", "cpu", "gpu", "4M", "14M", "1.14x"] in cells
    assert ["gpu", "gpu", "cpu", "cpu", "4M", "2M", "(printed:", "4M)", "8x"] in cells
    assert text.count("Misprint: ") == 1
    assert "Least traffic: 4M bytes an iteration, reached by 3." in text
    assert "16M -> 2M, by g16 and Update on the CPU, and no other." in text
    assert "moves 28M, 7x as much" in text


def test_the_command_shows_another_winner_and_what_was_asked(capsys, monkeypatch):
    text = shown(capsys, monkeypatch, "--master", "none", "--on-cpu", "FWD", "p16")
    assert "Table 1" not in text
    assert "By traffic another placement wins." in text
    cells = [line.replace("│", " ").split() for line in text.splitlines()]
    assert ["FWD", "and", "p16", "O(MB)", "6M", "+", "activations", "10M", "2M", "1.2x"] in cells


def test_a_long_list_is_cut_short(capsys, monkeypatch):
    text = shown(capsys, monkeypatch, "--split", "1/2", "--states", "8bit", "--master", "none")
    optimum = Optimum(Assumptions(split=0.5, states="8bit", master="none"))
    assert len(optimum.frontier) > 8
    assert f"and {len(optimum.frontier) - 8} more" in text


def test_the_command_writes_for_programs(capsys, tmp_path):
    assert main(["dataflow", "--json", "-", "--on-cpu", "m32"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["as_asked"]["link_bytes_per_param"] == 8
    assert "placements" not in printed
    files = [str(tmp_path / name) for name in ("all.json", "cut.svg")]
    assert main(["dataflow", "--json", files[0], "--all-placements", "--draw", files[1], "--optimizer", "sgd"]) == 0
    written = json.loads((tmp_path / "all.json").read_text())
    assert written["assumptions"]["optimizer"] == "sgd"
    assert len(written["placements"]) == written["number_of_placements"] == 256
    assert (tmp_path / "cut.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--optimizer", "adagrad"], ["--optimizer", "adagrad", "adam"]),
        (["--split", "half"], ["--split", "0.25", "half"]),
        (["--split", "1/0"], ["--split", "1/0"]),
        (["--split", "2"], ["split", "0.999999", "got 2"]),
        (["--on-cpu", "m8"], ["--on-cpu", "m32", "got m8"]),
        (["--draw", "cut.pdf"], ["--draw", ".svg or .png", "cut.pdf"]),
        (["--draw", "folder.svg"], ["--draw", "folder"]),
        (["--json", "."], ["--json", "folder"]),
        (["--json", "x.svg", "--draw", "./x.svg"], ["--json", "another file than --draw"]),
        (["--all-placements"], ["--all-placements", "--json"]),
    ],
)
def test_wrong_arguments_get_one_line(capsys, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.svg").mkdir()
    try:
        code = main(["dataflow", *arguments])
    except SystemExit as stopped:
        code = stopped.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith("zofftk: error: ")
    assert printed.err.count("\n") == 1
    for word in words:
        assert word in printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["folder.svg"]


def test_nothing_heavy_is_imported_before_it_is_needed(tmp_path):
    code = """if True:
        import sys
        from zofftk.cli import main
        heavy = {"torch", "networkx", "matplotlib", "numpy"}
        try:
            main(["dataflow", "--help"])
        except SystemExit:
            print(sorted(heavy & set(sys.modules)), file=sys.stderr)
        main(["dataflow"])
        print(sorted(heavy & set(sys.modules)), file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr.splitlines() == ["[]", "['networkx', 'numpy']"]


def test_the_page_s_code_runs_and_its_tables_hold():
    page = (Path(__file__).parent.parent / "docs" / "dataflow.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "docs/dataflow.md", "exec"), {})
    rows = re.findall(r"^\| (none|`--.*?`) \|.*\| (\S+)M \| (\S+)M of (\S+)M \|$", page, re.MULTILINE)
    assert len(rows) == 7
    for option, *numbers in rows:
        name, value = option.strip("`-").split() if option != "none" else ("states", "fp32")
        optimum = Optimum(Assumptions(**{name: float(value) if name == "split" else value}))
        best, before = optimum.best[0], optimum.everything_on_gpu.gpu_bytes_per_param
        assert [float(number) for number in numbers] == [best.link_bytes_per_param, best.gpu_bytes_per_param, before]
    assert Optimum(PAPER).placements.find(["g16", "update", "p32", "m32", "v32"]).link_bytes_per_param == 6

"""A /sys with the files that tell of cores."""

from __future__ import annotations

from pathlib import Path


def fake_sys(root: Path, *, nodes: dict[int, str] | None = None, online: str = "", siblings: tuple[str, ...] = (),
             gpus: dict[str, str] | None = None, isolated: str = "") -> Path:  # fmt: skip
    """`siblings` are lists of the cores that are one, `gpus` the text of `numa_node` by PCI id."""
    cpu = root / "devices/system/cpu"
    files = {root / f"devices/system/node/node{node}/cpulist": text for node, text in (nodes or {}).items()}
    if online:
        files[cpu / "online"] = online
    if isolated:
        files[cpu / "isolated"] = isolated
    for text in siblings:
        for core in text.split(","):
            files[cpu / f"cpu{core}/topology/thread_siblings_list"] = text
    files |= {root / f"bus/pci/devices/{pci_id}/numa_node": text for pci_id, text in (gpus or {}).items()}
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root

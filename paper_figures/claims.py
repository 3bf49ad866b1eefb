"""The claims of the paper's abstract, evaluation and conclusions, each with what the records say of it."""

from __future__ import annotations

from dataclasses import dataclass

from paper_figures import judges
from paper_figures.evidence import UNTESTABLE, Evidence, Judge, Judgement
from paper_figures.records import MissingRecordError, Records

NO_RECORD = "no record yet"


@dataclass(frozen=True)
class Claim:
    """`items` are those whose records it is judged by; `caution` what a reader should know."""

    text: str
    items: tuple[str, ...]
    judge: Judge
    caution: str = ""


@dataclass(frozen=True)
class Verdict:
    claim: Claim
    verdict: str
    number: str
    how: str


CLAIMS = (
    Claim(
        "The placement is the only optimum: 4M bytes over the link, 8x less GPU memory",
        ("table1",),
        judges.unique_optimum,
        "exact, by trying every placement; the paper's last row has a misprint",
    ),
    Claim("13 billion parameters on one GPU, over 9x what PyTorch trains", ("fig7",), judges.one_gpu_size),
    Claim(
        "70 billion on a node of 16 GPUs: 50x PyTorch, 4.5x Megatron, 7.8x ZeRO-2, 4.2x L2L",
        ("fig7",),
        judges.node_size,
        "host memory is the limit; the printed bars give 4.7x and 8.8x",
    ),
    Claim("7x less traffic than L2L", ("table1",), judges.traffic, "by definition of both placements"),
    Claim(
        "40 TFLOPS on one GPU at 10 billion parameters, 30 for PyTorch at 1.4",
        ("fig8",),
        judges.headline,
        "no figure of the paper shows the 30: PyTorch has 24 in Fig. 8 and 27 in Fig. 10; the simulation is fitted on "
        "the bar at 10 B",
    ),
    Claim(
        "14 % faster than L2L on average, up to 22 %",
        ("fig8",),
        judges.against_l2l,
        "at 12 and 13 B, where the most is, L2L is 30 % slower here than in the paper",
    ),
    Claim(
        "23 % faster than SwapAdvisor on average, up to 37 %",
        ("fig8",),
        judges.against_swap_advisor,
        "its plan comes of a search that the paper does not describe, and what is assumed of it was chosen knowing its "
        "bars: no prediction",
    ),
    Claim(
        "On 16 GPUs up to 1.33x PyTorch, 1.11x ZeRO-2 and 1.64x Megatron",
        ("fig10",),
        judges.on_a_node,
        "ZeRO-2's bar at 8 B and Megatron's were fitted; most of Megatron is at 15 B, where it is 41 % slower here "
        "than in the paper",
    ),
    Claim(
        "Over 30 TFLOPS per GPU from 1 to 128 GPUs, nearly linear",
        ("fig11",),
        judges.scaling,
        "the paper's own is 90 % at 128; the bars at 16 and 128 were fitted",
    ),
    Claim(
        "ZeRO-2 runs out of memory up to 16 GPUs, is behind at 32 and ahead at 64 and 128",
        ("fig11",),
        judges.crossover,
        "by less than in the paper, where it is 27 % ahead at 128; ZeRO-Offload at 128 was fitted",
    ),
    Claim(
        "CPU-Adam is over 5x as fast as PyTorch's Adam on the CPU",
        ("table4",),
        judges.cpu_adam,
        "torch has had fused loops since; against these the gain is smaller",
    ),
    Claim(
        "CPU-Adam is within 1.6x to 2.8x of Adam on the GPU",
        (),
        lambda evidence: Judgement(UNTESTABLE, "it needs a GPU; the paper's is read off its Table 4"),
    ),
    Claim(
        "The delayed update makes small batches 1.12x to 1.59x as fast",
        ("throughput_small", "fig9"),
        judges.delayed_speed,
        "the paper's figure has 1.10x to 1.24x; the emulated device has the profile before its calibration",
    ),
    Claim(
        "The delayed update ends at the same loss",
        ("fig12", "delay_rates"),
        judges.delayed_loss,
        "small models; a later study (arXiv 2606.30634) sees AdamW lose under one-step delay",
    ),
    Claim(
        "The delayed update ends at the same F1 after fine-tuning",
        ("fig13",),
        judges.delayed_f1,
        "another model and task",
    ),
    Claim("Without the delay, offloading changes no loss", ("fig12",), judges.exact, "bit by bit"),
    Claim(
        "Step by step: PyTorch 16 % ahead of offload with torch's Adam at small batches, CPU-Adam adds up to 10 %, "
        "the delay 7 %, and large batches reach 39 % over PyTorch",
        ("fig14",),
        judges.breakdown,
        "the number of micro-batches is not stated",
    ),
    Claim(
        "It needs no change of the model",
        (),
        lambda evidence: Judgement("holds", "one line, the optimizer's; the README's programs are run by the tests"),
    ),
    Claim(
        "These speeds and sizes on real V100s",
        (),
        lambda evidence: Judgement(UNTESTABLE, "no GPU at hand: the engine's own schedule is simulated instead"),
    ),
)


def judge_all(records: Records) -> list[Verdict]:
    """A claim whose record is missing says which command makes it."""
    evidence, verdicts = Evidence(records), []
    for claim in CLAIMS:
        try:
            judgement = claim.judge(evidence)
            verdicts.append(Verdict(claim, judgement.verdict, judgement.number, evidence.kinds(claim.items)))
        except MissingRecordError as missing:
            verdicts.append(Verdict(claim, NO_RECORD, f"`python -m experiments run {missing.item}`", ""))
        except (KeyError, ValueError) as error:  # a record of quick settings, or of another form
            verdicts.append(Verdict(claim, NO_RECORD, f"the record lacks {error}", ""))
    return verdicts
